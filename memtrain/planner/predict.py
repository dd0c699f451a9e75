"""Traces of plans, each simulated once and, between micro-batch sizes, inferred."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from memtrain.device import Device
from memtrain.job import Job
from memtrain.memory.extend import NotAlike, extend
from memtrain.models.blocks import blocks
from memtrain.models.build import ModelSource
from memtrain.plan import ChunkedLogits, Plan, PlanRefused, check, micro_batch_sizes
from memtrain.planner.cost import CostModel
from memtrain.trace.event import Phase, Trace, Work
from memtrain.trace.simulate import RowShapes, dataless_model, simulate


class Predictor:
    """Predicts what plans of one job do to memory.

    Args:
        source: the model.
        rows: shape and type of each tensor of one row.
        evaluation_rows: number of rows that the run evaluates on.
    """

    def __init__(self, job: Job, source: ModelSource, rows: RowShapes, device: Device, *, evaluation_rows: int = 0) -> None:
        self.job, self.device = job, device
        self._source, self._rows, self._evaluation_rows = source, rows, evaluation_rows
        self._simulated: dict[Plan, Trace] = {}
        self.model = dataless_model(source)
        self.blocks = len(blocks(self.model))
        self._parameters = [parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad]

    def trace(self, plan: Plan) -> Trace:
        """The trace of a plan, simulated whole.

        Raises:
            PlanRefused: the plan does not suit the job or the model.
            ValueError: the model returns no loss, or does not run without data.
        """
        if plan not in self._simulated:
            check(plan, self.job)
            try:
                self._simulated[plan] = simulate(
                    self.job,
                    plan,
                    dataless_model(self._source),
                    self._rows,
                    self.device,
                    evaluation_rows=self._evaluation_rows,
                )
            except (RuntimeError, TypeError, NotImplementedError) as error:
                raise ValueError(
                    f"{self._source.name} does not run without data ({type(error).__name__}: {str(error).splitlines()[0]}): "
                    f"take what looks at values or at the device out of its forward, and give it freshly built."
                ) from error
        return self._simulated[plan]

    def inferred(self, plan: Plan) -> Trace:
        """The trace of a plan, inferred from two smaller micro-batches where there are two that do the same.

        Raises:
            PlanRefused: the plan does not suit the job or the model.
        """
        if plan in self._simulated:
            return self._simulated[plan]
        # A micro-batch of one row takes slightly other operators (what is contiguous differs), and the whole batch at
        # once accumulates nothing; between these all sizes are alike.
        alike = [size for size in sorted(micro_batch_sizes(self.job)) if 1 < size < self.job.global_batch_size]
        # The number of chunks changes with the micro-batch, and few rows to evaluate on make smaller batches there.
        chunked = isinstance(plan.loss, ChunkedLogits)
        evaluates_whole = not self._evaluation_rows or 2 * plan.micro_batch_size <= self._evaluation_rows
        if plan.micro_batch_size not in alike[2:] or chunked or not evaluates_whole:
            return self.trace(plan)
        small, large = (replace(plan, micro_batch_size=size) for size in alike[:2])
        try:
            return extend(self.trace(small), alike[0], self.trace(large), alike[1], plan.micro_batch_size)
        except NotAlike:
            return self.trace(plan)

    def cost_model(self, plain: Callable[[int], Plan]) -> CostModel:
        """The cost model of the job, from the plan that ``plain`` gives for two micro-batch sizes."""
        sizes = sorted(micro_batch_sizes(self.job))
        small, large = sizes[0], sizes[min(1, len(sizes) - 1)]
        try:
            work = self._work_per_micro_batch(plain(small)), self._work_per_micro_batch(plain(large))
        except PlanRefused:
            # A model that ties its numbers to the micro-batch runs with the whole batch only.
            small = large = sizes[-1]
            work = self._work_per_micro_batch(plain(small)), self._work_per_micro_batch(plain(large))
        return CostModel(
            job=self.job,
            device=self.device,
            small=work[0],
            small_size=small,
            large=work[1],
            large_size=large,
            tokens_per_row=math.prod(self._rows["labels"][0]) if "labels" in self._rows else 1,
            blocks=self.blocks,
            parameters=len(self._parameters),
            parameter_bytes=sum(self._parameters),
        )

    def _work_per_micro_batch(self, plan: Plan) -> dict[Phase, Work]:
        trace = self.trace(plan)
        # As simulated: at most two steps, each of two micro-batches or of the only one.
        runs = min(2, self.job.steps) * min(2, self.job.global_batch_size // plan.micro_batch_size)
        found = {phase: trace.work.get(phase, Work()) for phase in (Phase.FORWARD, Phase.BACKWARD)}
        return {phase: Work(work.flops / runs, work.bytes / runs, work.operators / runs) for phase, work in found.items()}
