"""A training run step by step: the rows of a step, its learning rate, what is logged of it, and what is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from memtrain.data.batches import StepBatches, evaluation_batches
from memtrain.data.rows import Batch, Rows
from memtrain.job import Job
from memtrain.measure import Meter
from memtrain.recovery import step_until_finite
from memtrain.run import Run, StepResult
from memtrain.schedule import learning_rate
from memtrain.trace.event import Phase


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The steps of one run.

    Attributes:
        job: its schedule and its number of steps.
        run: the prepared run.
        batches: the rows of each step.
        eval_rows: what is evaluated on, None for nothing.
        row_tokens: tokens of a row, None where rows are no text.
        micro_batch_size: rows in one forward and backward.
        meter: measures the first two steps and the last.
        device: the torch device that batches go to.
    """

    job: Job
    run: Run
    batches: StepBatches
    eval_rows: Rows | None
    row_tokens: int | None
    micro_batch_size: int
    meter: Meter
    device: str

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
        for group in run.optimizer.param_groups:
            group["lr"] = rate
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

    def watches(self, step: int) -> bool:
        """Whether a step (from 0) is measured: the first two stand for all, the last shows that they did."""
        return step < 2 or step == self.job.steps - 1

    def evaluate(self) -> float:
        """The mean loss over the counted items of the rows to evaluate on."""
        return self.run.evaluate(self._evaluation_batches()).item()

    def measure_evaluation(self) -> None:
        """Measure evaluation beside the optimizer state, over the two batches that stand for all."""
        with self.meter.window("evaluate", Phase.EVALUATE):
            self.run.evaluate(islice(self._evaluation_batches(), 2))

    def _taken(self, run: Run, step: int) -> tuple[StepResult, int]:
        def micro_batches() -> list[Batch]:
            return list(self._on_device(self.batches.micro_batches(step, self.micro_batch_size, **self._share())))

        return step_until_finite(run, micro_batches, step + 1, self.batches.indices(step))

    def _evaluation_batches(self) -> Iterator[Batch]:
        assert self.eval_rows is not None
        return self._on_device(evaluation_batches(self.eval_rows, self.micro_batch_size, **self._share()))

    def _share(self) -> dict[str, int]:
        return {"rank": self.run.sharded.rank, "ranks": self.run.sharded.ranks}

    def _on_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield {name: tensor.to(self.device) for name, tensor in batch.items()}
