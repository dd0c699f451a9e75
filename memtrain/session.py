"""What one Trainer trains: the model, the plan in force and the run that the plan makes of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from memtrain import distributed, machine
from memtrain.data.batches import Batches
from memtrain.data.rowset import RowSet, check_alike
from memtrain.device import Cpu, Cuda, Device
from memtrain.evaluation import Metrics
from memtrain.job import Budget, Job
from memtrain.loop import Loop
from memtrain.machine import Processes
from memtrain.measure import meter
from memtrain.models.build import FromModule, ModelSource
from memtrain.models.load import load_model
from memtrain.models.objective import check_suits
from memtrain.models.packed import check_packable, check_separates
from memtrain.models.quantize import move_unpacked_
from memtrain.models.save import no_progress_bars
from memtrain.models.tasks import task_of
from memtrain.plan import OnHost, Plan, ranks_of
from memtrain.planner.choice import Choice
from memtrain.planner.predict import Predictor
from memtrain.planner.search import choose
from memtrain.planner.smaller import next_smaller, ways_out
from memtrain.run import Run, prepare
from memtrain.state import carry_over_, persistent_buffers
from memtrain.trace.event import Kind, Phase
from memtrain.trace.profile import held_by


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a Trainer was given, checked.

    Attributes:
        job, source, device, budget: what is trained, on what, and within how much.
        rows, eval_rows: to train on, and to evaluate on if there are any.
        metrics: what is computed of an evaluation beside the loss.
        constraints: fields of the plan that are set.
        processes: which of several processes this one is.
    """

    job: Job
    source: ModelSource
    device: Device
    budget: Budget
    rows: RowSet
    eval_rows: RowSet | None
    metrics: Metrics | None = None
    constraints: Mapping[str, Any]
    processes: Processes


class Session:
    """The model, its plan and its run; each is made when it is first asked for."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.choice: Choice | None = None
        self.run: Run | None = None
        self._model: nn.Module | None = None
        self.tell: Callable[[str], object] = lambda _: None
        self.meter = meter(given.device, self._held)

    # ------------------------------------------------------------------ the plan

    @cached_property
    def _predictor(self) -> Predictor:
        """Of the first process, which plans for all."""
        given = self.given
        ranks = ranks_of(given.constraints)
        if given.eval_rows is not None and len(given.eval_rows) < ranks:
            raise ValueError(
                f"eval_data has {len(given.eval_rows)} rows for {ranks} processes, and each evaluates one or more: give more "
                f"rows, or start fewer processes."
            )
        predictor = Predictor(
            given.job,
            given.source,
            given.rows.shapes,
            given.device,
            evaluation_rows=0 if given.eval_rows is None else len(given.eval_rows),
            evaluation_shapes=None if given.eval_rows is None else given.eval_rows.shapes,
            allocator=machine.allocator_settings(),
        )
        if given.rows.packed:
            check_packable(predictor.model)
        check_suits(predictor.model, given.rows.alone, given.rows.what, given.job.loss)
        if given.eval_rows is not None:
            check_alike(given.eval_rows, given.rows)
            check_suits(predictor.model, given.eval_rows.alone, given.eval_rows.what, given.job.loss)
        return predictor

    def plan(self, constraints: Mapping[str, Any], resumed_step: int | None = None) -> Choice:
        """The fastest plan that fits, made by the first process for all; it is in force from now on.

        Args:
            resumed_step: of the checkpoint that the constraints come from, if they do.

        Raises:
            NoPlanFits: with the smallest plan and the missing bytes.
            ValueError: the model has no loss, or the constraints leave no plan.
        """
        chosen = self._by_first(lambda: choose(self._predictor, self.given.budget, constraints))
        self.choice = replace(chosen, resumed_step=resumed_step)
        return self.choice

    def plan_smaller(self, needed_bytes: int | None) -> Choice:
        """The next smaller plan than the one in force, which ran out of memory; it is in force from now on.

        Args:
            needed_bytes: what was held of the device, where that is known.

        Raises:
            NoPlanFits: there is none.
        """
        failed, constraints = self._chosen(), self.given.constraints
        self.choice = self._by_first(lambda: next_smaller(self._predictor, failed, constraints, needed_bytes))
        return self.choice

    def _by_first(self, work: Callable[[], Choice]) -> Choice:
        """The choice that the first process makes for all; a loss of the user's may be a function that cannot be sent."""

        def sendable() -> Choice:
            choice = work()
            return replace(choice, job=replace(choice.job, loss=None))

        return replace(distributed.from_first(sendable), job=self.given.job)

    def ways_out(self, needed_bytes: int | None) -> list[tuple[str, int, bool]]:
        """What would take less than the plan in force, where no smaller plan is left; as :func:`memtrain.planner.smaller.ways_out`."""
        return list(ways_out(self._predictor, self._chosen(), self.given.constraints, needed_bytes))

    @property
    def plan_in_force(self) -> Plan:
        """The plan that is followed."""
        return self._chosen().plan

    def _chosen(self) -> Choice:
        assert self.choice is not None, "nothing is planned yet"
        return self.choice

    # ------------------------------------------------------------------ the model

    @property
    def model(self) -> nn.Module:
        """The real model, loaded on first use; a module that was given is itself."""
        if self._model is None:
            from accelerate.utils import set_seed

            given = self.given
            machine.require(given.device)
            if isinstance(given.device, Cpu):
                # The prediction counts the scratch memory of so many threads.
                torch.set_num_threads(given.device.threads)
            set_seed(given.job.seed)
            # A module that is given is there already.
            loads = isinstance(given.device, Cuda) or not isinstance(given.source, FromModule)
            with self.meter.window("load", Phase.LOAD) if loads else nullcontext(), no_progress_bars():
                card = given.device.kind if isinstance(given.device, Cuda) else None
                self._model = load_model(given.source, given.job, card, self.tell)
                if card is not None:
                    move_unpacked_(self._model, card)
            distributed.differ_by_rank(given.job.seed, given.processes.rank)
        return self._model

    @property
    def loads_again(self) -> bool:
        """Whether the model can be had again as it was at first."""
        return not isinstance(self.given.source, FromModule)

    def forget_model(self) -> None:
        """Let the model be loaded anew when it is next asked for."""
        assert self.loads_again
        self.end()
        self._model = None

    # ------------------------------------------------------------------ the run

    def begin(
        self,
        batches: Batches,
        first: int = 0,
        *,
        ask: Callable[[], None] = lambda: None,
        tell: Callable[[str], object] = lambda _: None,
    ) -> Loop:
        """The steps of the plan in force, from step ``first`` (from 0) on; ``ask`` and ``tell`` are the Loop's."""
        distributed.require(self.plan_in_force.ranks)
        self.tell = tell
        model = self.model
        self.run = prepare(self.given.job, self.plan_in_force, model)
        if self.given.rows.packed:
            check_separates(self.run.model)
        return self._loop(self.run, batches, first, ask, tell)

    def go_on(self, loop: Loop, first: int) -> Loop:
        """The same steps under the plan in force, which has changed, with the optimizer's state as it is."""
        assert self.run is not None
        given, plan = self.given, self.plan_in_force
        self.run = carry_over_(
            self.run,
            lambda: prepare(given.job, plan, self.model),
            same_place=plan.optimizer_state == loop.plan.optimizer_state,
            state_on_host=isinstance(plan.optimizer_state, OnHost),
        )
        # What was measured is of another plan.
        self.meter = meter(given.device, self._held)
        made = self._loop(self.run, loop.batches, first, loop.ask, loop.tell)
        return replace(made, evaluation_batch_size=loop.evaluation_batch_size, health=loop.health)

    def end(self) -> None:
        """Give the model back as it was, but for its weights."""
        if self.run is not None:
            self.run.release()
            self.run = None

    def _loop(self, run: Run, batches: Batches, first: int, ask: Callable[[], None], tell: Callable[[str], object]) -> Loop:
        given, plan = self.given, self.plan_in_force
        return Loop(
            job=given.job,
            run=run,
            plan=plan,
            batches=batches,
            eval_rows=given.eval_rows,
            counts=given.rows.counts,
            metrics=given.metrics,
            learns_tokens=task_of(given.source).learns_tokens and given.job.loss is None,
            uneven=bool(given.rows.longest),
            evaluation_batch_size=plan.micro_batch_size,
            buffers=persistent_buffers(run.model),
            meter=self.meter,
            device=given.device.kind,
            first=first,
            ask=ask,
            tell=tell,
        )

    def _held(self) -> Iterator[tuple[Kind, Tensor]]:
        if self._model is None:
            return iter(())
        if self.run is None:
            return held_by(self._model, None)
        return held_by(self._model, self.run.optimizer, self.run.sharded.buckets())
