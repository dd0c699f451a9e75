"""A training run step by step: the rows of a step, its learning rate, what is logged of it, and what is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice

from torch import Tensor

from memtrain.data.batches import Batches, evaluation_batches, evaluation_order
from memtrain.data.rows import Batch
from memtrain.data.rowset import RowSet
from memtrain.evaluation import Collected, Metrics
from memtrain.job import Job, NotFinite
from memtrain.measure import Meter
from memtrain.not_finite import Health, NotFiniteStep, what_happened, why_not_finite
from memtrain.plan import Plan
from memtrain.recovery import step_until_finite
from memtrain.run import Run, StepResult
from memtrain.schedule import learning_rate
from memtrain.state import remember
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


def perplexity(loss: float) -> float:
    """The number of equally likely tokens that a mean loss in nats per token stands for, exp(loss) (Jelinek et al., 1977)."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The steps of one run.

    Attributes:
        job: its schedule and its number of steps.
        run: the prepared run.
        batches: the rows of each step.
        eval_rows: what is evaluated on, None for nothing.
        plan: what the run was made by; its micro-batches are the rows of one forward and backward.
        evaluation_batch_size: rows in one forward of an evaluation.
        buffers: what a forward may change of the model.
        meter: measures the first two steps and the last.
        device: the torch device that batches go to.
        metrics: what is computed of an evaluation beside its loss.
        counts: what the speed of a step is given in, tokens or rows.
        learns_tokens: whether the loss is that of tokens, so that it has a perplexity.
        uneven: whether some steps are larger than others.
        first: the step (from 0) that this run begins with.
        tell: called with a sentence about a step that was left out.
        health: what is remembered of the last steps.
        ask: called before each micro-batch and each batch of an evaluation; what it raises breaks them off.
    """

    job: Job
    run: Run
    batches: Batches
    eval_rows: RowSet | None
    plan: Plan
    evaluation_batch_size: int
    buffers: Sequence[Tensor]
    meter: Meter
    device: str
    counts: str
    metrics: Metrics | None = None
    learns_tokens: bool = False
    uneven: bool = False
    first: int = 0
    tell: Callable[[str], object] = lambda _: None
    health: Health = field(default_factory=Health)
    ask: Callable[[], None] = lambda: None

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step, from 0, and what is logged about it.

        Raises:
            ValueError: the loss or the gradient is not finite, and the job does not say to skip such a step; the weights were
                updated with it; too many steps were skipped; or the loss scale has collapsed.
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
        tokens = self.batches.tokens(step)
        counted = len(self.batches.indices(step)) if tokens is None else tokens
        finite = result.updated and math.isfinite(loss)
        if not finite:
            self._not_finite(step, loss, result, overflows)
        row = {
            "step": step + 1,
            "epoch": round(self.batches.epoch(step + 1), 6),
            "loss": loss,
            f"{self.counts}_per_second": counted / seconds,
            "learning_rate": rate,
            "step_seconds": seconds,
        }
        if self.learns_tokens:
            row["perplexity"] = perplexity(loss)
        if result.grad_norm is not None:
            row["grad_norm"] = result.grad_norm.item()
        if run.scaler.is_enabled():
            row |= {"loss_scale": run.scaler.get_scale(), "overflows": overflows}
        if not result.updated:
            row["skipped"] = 1
        self.health.check(step + 1, finite=finite, updated=result.updated, scale=row.get("loss_scale"))
        return row

    def _not_finite(self, step: int, loss: float, result: StepResult, overflows: int) -> None:
        """Say of a step (from 0) what is not finite; the run ends with it unless the job says to skip such steps."""
        numbers = self.batches.indices(step)
        scale = self.run.scaler.get_scale() / 2**overflows if self.run.scaler.is_enabled() else None
        happened = what_happened(step + 1, loss, result, overflows, scale)
        if result.updated and result.grad_norm is None and scale is None:
            # Nobody has looked at the gradient.
            raise ValueError(
                f"{happened} and has spoilt the weights: lower the learning rate of {learning_rate(self.job, step):g}, or look at "
                f"rows {numbers}."
            )
        alone = zip(numbers, self._on_device(self.batches.micro_batches(step, 1)), strict=True)
        why = why_not_finite(self.run, alone, numbers)
        changed = "its gradient is finite and was applied" if result.updated else "no weight was changed"
        if self.job.on_not_finite == NotFinite.STOP:
            wider = "set precision to autocast_bf16, " if scale is not None else ""
            raise NotFiniteStep(f"{happened}; {changed}; {why}, {wider}or set on_not_finite to skip.", updated=result.updated)
        self.tell(f"{happened[0].upper()}{happened[1:]}; {changed}, and the run goes on; {why}.")

    def remember(self) -> Callable[[], None]:
        """What undoes a step that was broken off before it changed a weight."""
        return remember(self.run, self.buffers)

    def rehearse(self) -> None:
        """Two steps of the largest batches, or one where one is left, at a learning rate of 0, which change no weight (rule 7).

        They show what a step takes, and what one takes beside the optimizer's state. They are measured where no later step need
        be as large. The caller puts back what else they change.
        """
        self._set_rate(0.0)
        for number in range(1, 1 + min(2, self.job.steps - self.first)):
            with self.meter.window(f"step {number} of the rehearsal", Phase.FORWARD) if self.uneven else nullcontext():
                run = replace(self.run, update=self.meter.in_update(self.run.update)) if self.uneven else self.run
                # In fp16 an update is rehearsed at the scale at which there is one.
                step_until_finite(run, self._largest)

    def watches(self, step: int) -> bool:
        """Whether a step (from 0) is measured: the first two stand for all, the last shows that they did."""
        return self.first <= step < self.first + 2 or step == self.job.steps - 1

    def evaluate(self) -> dict[str, float]:
        """What is logged of the rows to evaluate on: the mean loss over their counted items, and metrics."""
        assert self.eval_rows is not None
        collected = None if self.metrics is None else Collected(self.metrics)
        see = None if collected is None else collected.see
        found = {"eval_loss": self.run.evaluate(self._evaluation_batches(), see).item()}
        if self.learns_tokens:
            found["eval_perplexity"] = perplexity(found["eval_loss"])
        if collected is not None:
            found |= collected.result(evaluation_order(self.eval_rows, **self._share()))
        return found

    def measure_evaluation(self) -> None:
        """Measure evaluation beside the optimizer state, over the two batches that stand for all."""
        with self.meter.window("evaluate", Phase.EVALUATE):
            self.run.evaluate(islice(self._evaluation_batches(), 2))

    def _set_rate(self, rate: float) -> None:
        for group in self.run.optimizer.param_groups:
            group["lr"] = rate

    def _taken(self, run: Run, step: int) -> tuple[StepResult, int]:
        return step_until_finite(run, lambda: self._micro_batches(step))

    def _largest(self) -> list[Batch]:
        return _Asking(self._on_device(self.batches.largest(self.plan.micro_batch_size, **self._share())), self.ask)

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
