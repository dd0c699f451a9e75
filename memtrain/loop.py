"""A training run step by step: the rows of a step, its learning rate, what is logged of it, and what is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from memtrain.data.batches import StepBatches, evaluation_batches
from memtrain.data.rows import Batch, Rows
from memtrain.job import Job
from memtrain.measure import Meter
from memtrain.plan import Plan
from memtrain.recovery import step_until_finite
from memtrain.run import Run, StepResult
from memtrain.schedule import learning_rate
from memtrain.trace.event import Phase


class _Asking(list[Batch]):
    """Micro-batches that ask before each is taken whether to go on, so that a long step can be broken off between two."""

    def __init__(self, batches: Iterable[Batch], ask: Callable[[], None]) -> None:
        super().__init__(batches)
        self._ask = ask

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            self._ask()
            yield batch


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The steps of one run.

    Attributes:
        job: its schedule and its number of steps.
        run: the prepared run.
        batches: the rows of each step.
        eval_rows: what is evaluated on, None for nothing.
        row_tokens: tokens of a row, None where rows are no text.
        plan: what the run was made by; its micro-batches are the rows of one forward and backward.
        evaluation_batch_size: rows in one forward of an evaluation.
        meter: measures the first two steps and the last.
        device: the torch device that batches go to.
        first: the step (from 0) that this run begins with.
        ask: called before each micro-batch and each batch of an evaluation; what it raises breaks them off.
    """

    job: Job
    run: Run
    batches: StepBatches
    eval_rows: Rows | None
    row_tokens: int | None
    plan: Plan
    evaluation_batch_size: int
    meter: Meter
    device: str
    first: int = 0
    ask: Callable[[], None] = lambda: None

    @property
    def counts(self) -> str:
        """What the speed of a step is given in."""
        return "rows" if self.row_tokens is None else "tokens"

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step, from 0, and what is logged about it.

        Raises:
            ValueError: the loss is not a finite number; the weights were updated with it.
        """
        run, rate = self.run, learning_rate(self.job, step)
        self._set_rate(rate)
        started = time.perf_counter()
        if self.watches(step):
            with self.meter.window(f"step {step + 1}", Phase.FORWARD):
                result, overflows = self._taken(replace(run, update=self.meter.in_update(run.update)), step)
        else:
            result, overflows = self._taken(run, step)
        loss = result.loss.item()
        seconds = time.perf_counter() - started
        counted = self.job.global_batch_size * (self.row_tokens or 1)
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of step {step + 1} is {loss} and has spoilt the weights: "
                f"lower the learning rate of {rate:g}, or look at rows {self.batches.indices(step)}."
            )
        row = {
            "step": step + 1,
            "loss": loss,
            f"{self.counts}_per_second": counted / seconds,
            "learning_rate": rate,
            "step_seconds": seconds,
        }
        if result.grad_norm is not None:
            row["grad_norm"] = result.grad_norm.item()
        if run.scaler.is_enabled():
            row |= {"loss_scale": run.scaler.get_scale(), "overflows": overflows}
        return row

    def rehearse(self) -> None:
        """Two first steps at a learning rate of 0, which change no weight: what a step and the state beside it take (rule 7).

        The caller puts back what else they change.
        """
        self._set_rate(0.0)
        for _ in range(2):
            self.run.step(self._micro_batches(self.first))

    def watches(self, step: int) -> bool:
        """Whether a step (from 0) is measured: the first two stand for all, the last shows that they did."""
        return self.first <= step < self.first + 2 or step == self.job.steps - 1

    def evaluate(self) -> float:
        """The mean loss over the counted items of the rows to evaluate on."""
        return self.run.evaluate(self._evaluation_batches()).item()

    def measure_evaluation(self) -> None:
        """Measure evaluation beside the optimizer state, over the two batches that stand for all."""
        with self.meter.window("evaluate", Phase.EVALUATE):
            self.run.evaluate(islice(self._evaluation_batches(), 2))

    def _set_rate(self, rate: float) -> None:
        for group in self.run.optimizer.param_groups:
            group["lr"] = rate

    def _taken(self, run: Run, step: int) -> tuple[StepResult, int]:
        return step_until_finite(run, lambda: self._micro_batches(step), step + 1, self.batches.indices(step))

    def _micro_batches(self, step: int) -> list[Batch]:
        return _Asking(self._on_device(self.batches.micro_batches(step, self.plan.micro_batch_size, **self._share())), self.ask)

    def _evaluation_batches(self) -> Iterator[Batch]:
        assert self.eval_rows is not None
        for batch in self._on_device(evaluation_batches(self.eval_rows, self.evaluation_batch_size, **self._share())):
            self.ask()
            yield batch

    def _share(self) -> dict[str, int]:
        return {"rank": self.run.sharded.rank, "ranks": self.run.sharded.ranks}

    def _on_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield {name: tensor.to(self.device) for name, tensor in batch.items()}
