"""The course of a training run: its steps, evaluations and checkpoints, and what it does when something goes wrong.

A run that resumes, and one that goes back to a checkpoint after running out of memory, take the same way: a checkpoint is put
into a prepared run, and the steps after it are taken again with the same rows.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

from memtrain import distributed, machine
from memtrain.data.batches import Batches
from memtrain.device import Cuda
from memtrain.distributed import Setback
from memtrain.keeper import Keeper
from memtrain.leaks import LeakWatch
from memtrain.loop import Loop
from memtrain.metrics import RunFolder, RunLog
from memtrain.not_finite import NotFiniteStep, weight_not_finite
from memtrain.out_of_memory import OutOfMemory, attempt
from memtrain.planner.choice import NoPlanFits, Side
from memtrain.recovery import Changes
from memtrain.report.out_of_memory import nothing_left, recovery_lines, requested_bytes
from memtrain.report.tell import Tell
from memtrain.report.terminal import TrainingProgress
from memtrain.resume import Start
from memtrain.session import Session
from memtrain.signals import Requests
from memtrain.state import remember
from memtrain.trace.event import Phase
from memtrain.watchdog import Watchdog

T = TypeVar("T")

# What memory may grow by between step 3 and any later one. Beside tensors the C heap of a processor holds what libraries keep
# for themselves and the rows of the log; a card's allocator holds tensors alone.
_CARD_GROWTH_BYTES, _HEAP_GROWTH_BYTES = 2**20, 2**24


class Stopped(Exception):
    """A signal has asked the run to stop, and it is between two micro-batches or two batches of an evaluation.

    Attributes:
        by: the signal.
    """

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by.name)
        self.by = by


class _Phase(StrEnum):
    """What a run does, as a person is told where memory ran out."""

    REHEARSAL = "the rehearsal of a step"
    STEP = "forward and backward"
    UPDATE = "the update"
    EVALUATION = "evaluation"


@dataclass(frozen=True)
class _Where:
    """How far a process had come when memory ran out in one of them.

    Attributes:
        done: steps taken.
        changed: whether a weight may have been changed since.
    """

    phase: _Phase
    done: int
    changed: bool


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a run talks to.

    Attributes:
        log: the rows of metrics so far.
        folder: where plan and prediction go when they change; None for nowhere.
        keeper: its checkpoints.
        requests: what signals ask for.
        watchdog: tells of a step that takes too long.
        tell: takes a sentence for the person who reads.
        bar: shows how far it is.
    """

    log: RunLog
    folder: RunFolder | None
    keeper: Keeper
    requests: Requests
    watchdog: Watchdog
    tell: Tell
    bar: TrainingProgress


class Training:
    """One run, from its start or from a checkpoint to its last step."""

    def __init__(self, session: Session, batches: Batches, around: Around, *, evaluate_every: int | None) -> None:
        self._session = session
        self._batches = batches
        self._around = around
        self._evaluate_every = evaluate_every
        self._steps = session.given.job.steps
        self._done = 0
        self._speed = 0.0
        self._saves_now = False
        device = session.given.device
        self._leaks = LeakWatch(
            # A copy that is being written is memory of its own.
            lambda: None if around.keeper.is_writing else machine.used_bytes(device),
            _CARD_GROWTH_BYTES if isinstance(device, Cuda) else _HEAP_GROWTH_BYTES,
        )
        self._loop: Loop | None = None

    @property
    def loop(self) -> Loop:
        """The steps under the plan in force."""
        assert self._loop is not None
        return self._loop

    def run(self, start: Start) -> None:
        """Take all steps that are left.

        Raises:
            Stopped: a signal came; what could be saved is saved.
            ValueError: the loss is not finite, or memory ran out and nothing is left to give.
        """
        try:
            self._begin(start)
            while True:
                self._evaluate_if_due()
                self._agree()
                self._save_if_due()
                if self._done == self._steps:
                    return
                self._advance()
        except (Stopped, NotFiniteStep) as stopped:
            if not (isinstance(stopped, NotFiniteStep) and stopped.updated):
                self._save()
            raise

    # ------------------------------------------------------------------ beginning

    def _begin(self, start: Start) -> None:
        around = self._around
        self._done = 0 if start.checkpoint is None else start.checkpoint.step
        around.log.cut_back(-1 if start.checkpoint is None else self._done)
        self._loop = self._session.begin(self._batches, self._done, ask=self._ask, tell=around.tell)
        if start.checkpoint is None:
            self._rehearse()
        else:
            around.keeper.restore(start.checkpoint, self.loop.run, self.loop.plan)

    def _rehearse(self) -> None:
        """Take the memory of a step, and of one beside the optimizer's state, before a weight changes (rule 7)."""
        while True:
            put_back = remember(self.loop.run)
            with self._around.watchdog.watching("step", "the rehearsal of step 1"):
                outcome = self._tried(_Phase.REHEARSAL, self.loop.rehearse)
            # At a learning rate of 0 no weight has changed; the rest goes.
            self.loop.run.optimizer.state.clear()
            put_back()
            machine.release_cached(self._session.given.device)
            if not isinstance(outcome, Setback) or not self._recovers(outcome):
                return

    # ------------------------------------------------------------------ steps

    def _advance(self) -> None:
        """The next step; or back to the last checkpoint, where memory ran out after a weight had changed."""
        step = self._done
        row = self._taken(step)
        if row is None:
            return
        self._done = step + 1
        self._around.log.add(row)
        self._show(row)
        if grown := self._leaks.after(self._done):
            self._around.tell(grown)

    def _show(self, row: Mapping[str, float]) -> None:
        bar, meter, step = self._around.bar, self._session.meter, int(row["step"])
        # The profiler slows the steps that it watches: the speed shown is that of the last one it did not.
        if not self._speed or not self.loop.watches(step - 1):
            self._speed = row[f"{self.loop.counts}_per_second"]
        # Every weight and its state is asked for its size, for nobody where nothing is shown.
        held = 0 if bar.console.quiet else meter.held_bytes()
        bar.update(step, loss=row["loss"], per_second=self._speed, memory_bytes=held, peak_bytes=meter.peak_bytes)

    def _taken(self, step: int) -> dict[str, float] | None:
        while True:
            loop = self.loop
            put_back, changes = remember(loop.run), Changes(loop.run, loop.plan)
            take = partial(replace(loop, run=changes.noting()).step, step)
            try:
                with self._around.watchdog.watching("step", f"step {step + 1}"):
                    outcome = self._tried(_Phase.STEP, take, changes)
            except (Stopped, NotFiniteStep):
                put_back()
                raise
            if not isinstance(outcome, Setback):
                return outcome
            put_back()
            if not self._recovers(outcome):
                return None

    # ------------------------------------------------------------------ out of memory

    def _tried(self, phase: _Phase, work: Callable[[], T], changes: Changes | None = None) -> T | Setback[_Where]:
        """What ``work`` returns, or that memory ran out, in this process or another."""

        def where() -> _Where:
            # Which updates were made is known to nobody once one has begun (rule 8).
            changed = changes is not None and changes.begun
            return _Where(_Phase.UPDATE if changed else phase, self._done, changed)

        return distributed.together(work, where)

    def _recovers(self, setback: Setback[_Where]) -> bool:
        """Make room after memory ran out.

        Returns:
            Whether the same can be tried again; if not, the run has gone back to its last checkpoint.
        """
        memory, failed = next((memory, where) for memory, where in zip(setback.ran_out, setback.facts, strict=True) if memory)
        machine.release_cached(self._session.given.device)
        if failed.phase is _Phase.EVALUATION:
            self._evaluate_fewer(memory)
        else:
            self._make_smaller(memory, failed)
        # Processes that are not where the others are have taken part in an update that one of them has not made.
        if len(set(setback.facts)) == 1 and not failed.changed:
            if failed.phase is not _Phase.EVALUATION or len(setback.facts) > 1:
                self._loop = self._session.go_on(self.loop, self._done)
            return True
        self._go_back()
        return False

    def _make_smaller(self, memory: OutOfMemory, failed: _Where) -> None:
        """Take the next smaller plan into force, or end with what there is to know."""
        session, around = self._session, self._around
        before, measured = session.choice, self._measured()
        assert before is not None
        held = 0 if measured is None else measured.total_device_bytes + (requested_bytes(memory.said) or 0)
        (needed,) = distributed.agree([held])
        step = None if failed.phase is _Phase.REHEARSAL else failed.done + 1
        try:
            smaller = session.plan_smaller(needed or None)
        except NoPlanFits:
            ways = tuple(session.ways_out())
            report = nothing_left(before, said=memory.said, phase=failed.phase, step=step, measured=measured, ways_out=ways)
            raise ValueError(report) from None
        for line in recovery_lines(before, smaller, said=memory.said, phase=failed.phase, step=step, measured=measured):
            around.tell(line)
        if around.folder is not None:
            # The disk may be full; the plan is in the next checkpoint, too.
            with suppress(ValueError):
                smaller.write(around.folder)
        self._leaks.rebase()

    def _measured(self) -> Side | None:
        """What was measured until now, with what failed where that is known; None before anything was."""
        self._session.meter.note_failure()
        return self._session.meter.side(0.0) if self._session.meter.peak_bytes else None

    def _evaluate_fewer(self, memory: OutOfMemory) -> None:
        """Halve the batches of evaluations; training keeps its micro-batch."""
        size = self.loop.evaluation_batch_size
        if size == 1:
            raise ValueError(
                f"memory ran out in the evaluation after step {self._done} with one row at a time ({memory.said}): leave eval_data "
                f"out, or give shorter rows."
            )
        self._loop = replace(self.loop, evaluation_batch_size=size // 2)
        self._around.tell(f"Memory ran out in evaluation: it goes on in batches of {size // 2} instead of {size} rows.")

    def _go_back(self) -> None:
        """Put the last checkpoint into a run under the plan in force, or begin again where the model can be had again."""
        session, around = self._session, self._around
        last = around.keeper.last()
        if last is None and not session.loads_again:
            raise ValueError(
                f"memory ran out in the update of step {self._done + 1}, after weights had changed and before the first checkpoint: "
                f"begin again with the module as it was, and with checkpoint_every smaller."
            )
        around.tell(f"Weights had changed, so the run goes back to {'its beginning' if last is None else f'step {last.step}'}.")
        self._loop = None
        if last is None:
            session.forget_model()
        else:
            session.end()
        self._begin(Start(last))

    # ------------------------------------------------------------------ evaluating, saving, stopping

    def _evaluate_if_due(self) -> None:
        log, given = self._around.log, self._session.given
        if given.eval_rows is None or any(step == self._done for step, _ in log.evaluations):
            return
        every = self._evaluate_every
        if self._done in (0, self._steps) or (every is not None and self._done % every == 0):
            done = self._done
            with self._around.watchdog.watching("evaluation", f"the evaluation after step {done}"):
                loss = self._evaluated(lambda: self.loop.evaluate())
            if loss is not None:
                log.add({"step": done, "eval_loss": loss})

    def _evaluated(self, work: Callable[[], T]) -> T | None:
        """What an evaluation gives, in smaller batches where memory runs out; None where the run has gone back."""
        while True:
            outcome = self._tried(_Phase.EVALUATION, work)
            if not isinstance(outcome, Setback):
                return outcome
            if not self._recovers(outcome):
                return None

    def _save_if_due(self) -> None:
        if self._around.keeper.is_due(self._done, self._steps) or self._saves_now:
            self._saves_now = False
            self._save()

    def _save(self) -> None:
        around, loop = self._around, self._loop
        # Before the first step there is nothing that is not there already.
        if loop is None or not self._done:
            return
        if path := weight_not_finite(loop.run.model):
            raise ValueError(
                f"{path} is not finite after step {self._done}, which is not saved: lower the learning rate, or set max_grad_norm, "
                f"with which a gradient that is not finite changes no weight."
            )
        with around.watchdog.watching("checkpoint", f"the checkpoint of step {self._done}"):
            around.log.sync()
            tokens = self._done * loop.job.global_batch_size * (loop.row_tokens or 1)
            around.keeper.save(self._done, loop.run, loop.plan, around.log.evaluations, tokens)

    def _ask(self) -> None:
        """Between two micro-batches or batches of an evaluation; several processes stop between two steps alone."""
        if self._session.given.processes.ranks == 1 and self._around.requests.stop is not None:
            raise Stopped(self._around.requests.stop)

    def _agree(self) -> None:
        """Stop, or save, where any of the processes was told to."""
        requests = self._around.requests
        stop, saves = distributed.agree([requests.stop or 0, requests.takes_save()])
        self._saves_now = bool(saves)
        if stop:
            raise Stopped(signal.Signals(stop))

    # ------------------------------------------------------------------ the end

    def measure_the_end(self, save: Callable[[], None] | None) -> None:
        """Measure evaluation and saving beside the optimizer's state; ``save`` writes the model."""
        session = self._session
        if session.given.eval_rows is not None:
            self._evaluated(lambda: self.loop.measure_evaluation())
        if save is None:
            return
        with session.meter.window("save", Phase.SAVE):
            failure = attempt(save)
        if isinstance(failure, OutOfMemory):
            # Nothing needs the optimizer's state any more.
            self._around.tell("Memory ran out in saving the model: it is saved again without the optimizer's state.")
            session.end()
            machine.release_cached(session.given.device)
            save()
