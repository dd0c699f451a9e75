"""Traces of plans, each simulated once and, between micro-batch sizes, inferred."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import get_args

import torch
from torch import nn

from memtrain.check import PlanRefused, check, micro_batch_sizes
from memtrain.device import Cuda, Device
from memtrain.features.recompute import PRODUCTS, WritesInPlace
from memtrain.job import Adafactor, Adam, AdamW, Job, Lion, Muon, Optimizer, Sgd
from memtrain.memory.allocator_config import AllocatorConfig
from memtrain.memory.extend import NotAlike, extend
from memtrain.memory.footprint import Footprint, footprint
from memtrain.memory.timeline import MemoryTimeline
from memtrain.models.blocks import Part, blocks, parts
from memtrain.models.build import ModelSource
from memtrain.models.quantize import scales
from memtrain.plan import (
    Activations,
    ChunkedLogits,
    DuringBackward,
    EightBit,
    Keep,
    OnDevice,
    OnHost,
    Paged,
    PagedEightBit,
    Plan,
    Recompute,
    RecomputeAttention,
    RecomputeFirst,
    RecomputeMlp,
    RecomputeSelective,
)
from memtrain.planner.cost import CostModel
from memtrain.planner.remedies import cheaper
from memtrain.precision import Bf16, Bf16Master, Rounding
from memtrain.trace.event import Kind, Phase, Trace, Work
from memtrain.trace.simulate import RowShapes, dataless_model_of, simulate

# bitsandbytes pages the state of tensors of so many elements (optim/optimizer.py, get_state_buffer), and keeps the 8-bit state
# of embeddings in 32 bits, so what it pages is this or more.
_LEAST_PAGED_ELEMENTS = 100_000


def _moments(optimizer: Optimizer) -> int:
    """Values of state that a rule keeps for each weight at the least."""
    match optimizer:
        case AdamW() | Adam():
            return 2
        case Lion() | Muon():
            return 1
        case Sgd():
            return 1 if optimizer.momentum else 0
        case Adafactor():
            return 0


class Predictor:
    """Predicts what plans of one job do to memory.

    Args:
        source: the model.
        rows: shape and type of each tensor of one row.
        evaluation_rows: number of rows that the run evaluates on.
        evaluation_shapes: of each tensor of one of these, where they are others than ``rows``.
        allocator: how a card's allocator is set, in the words of PYTORCH_ALLOC_CONF; empty for the defaults of this torch.

    Raises:
        ValueError: ``allocator`` has a setting that torch does not know, or that is not simulated.
    """

    def __init__(
        self,
        job: Job,
        source: ModelSource,
        rows: RowShapes,
        device: Device,
        *,
        evaluation_rows: int = 0,
        evaluation_shapes: RowShapes | None = None,
        allocator: str = "",
    ) -> None:
        self.job, self.device, self.source, self.rows = job, device, source, rows
        self._evaluation_rows, self._evaluation_shapes = evaluation_rows, evaluation_shapes
        # A processor has no such allocator, so a setting for it says nothing.
        self.allocator = allocator if isinstance(device, Cuda) else ""
        try:
            self._allocator_config = AllocatorConfig.of(self.allocator, torch.__version__)
        except ValueError as error:
            raise ValueError(f"PYTORCH_ALLOC_CONF is {self.allocator!r}: {error}") from error
        self._simulated: dict[Plan, Trace] = {}
        self._inferred: dict[Plan, Trace] = {}
        self._recomputed_by: dict[Activations, Set[str]] = {}
        self._refused: dict[Activations, str] = {}
        self._peaks: dict[Plan, tuple[int, Mapping[tuple[str, str], int]]] = {}
        self.model = dataless_model_of(job, source)
        found = blocks(self.model)
        self._blocks = list(found)
        self.blocks = len(found)
        self._parts = _parts(found)
        self.parts = {
            part: _elements(there.values()) / max(1, _elements(found.values())) for part, there in self._parts.items()
        }
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.weight_bytes = sum(one.nbytes for one in (*self.model.parameters(), *(scale for _, scale in scales(self.model))))

    def cheaper_jobs(self, plan: Plan) -> Iterator[tuple[str, Predictor, Plan]]:
        """Changes of the job that people make when nothing fits: what each is called, its predictor and its plan."""
        for change, job, source, rows, changed in cheaper(self.job, self.source, self.rows, plan, self.device):
            other = Predictor(
                job,
                source,
                rows,
                self.device,
                evaluation_rows=self._evaluation_rows,
                # Shorter rows are meant for both.
                evaluation_shapes=self._evaluation_shapes if rows is self.rows else None,
                allocator=self.allocator,
            )
            yield change, other, changed

    def footprint(self, trace: Trace) -> Footprint:
        """The footprint of a trace on the device."""
        return footprint(trace, self.device, self._allocator_config)

    def least_bytes(self, plan: Plan) -> int:
        """Bytes that a plan allocates on the device at the least, from what is known without simulating it.

        Weights, gradients and state lie beside each other in the update. Where a plan has been simulated that differs only
        in keeping the activations of more blocks, its peak without what the further recomputed ones keep is a bound; where
        one has been that recomputes every block, its whole peak is.
        """
        bounds = [self._held_in_update(plan)]
        again = self._recomputed(plan.activations)
        # What selective recomputation keeps for sure; attention kernels that drop are run again.
        kept = PRODUCTS if isinstance(plan.activations, RecomputeSelective) else ()
        for fewer in self._recomputing_fewer(plan):
            peak, saved = self._peak(fewer)
            freed = again - self._recomputed(fewer.activations)
            bounds.append(
                peak - sum(size for (path, operator), size in saved.items() if path in freed and operator not in kept)
            )
        # Of a single block one part may be gone when the other comes, and of a block that is recomputed whole both are there.
        smaller = isinstance(plan.activations, RecomputeAttention | RecomputeMlp) and self.blocks == 1
        if not smaller and (leanest := replace(plan, activations=Recompute())) in self._simulated:
            bounds.append(self._peak(leanest)[0] - self._generator_states(leanest))
        return max(bounds)

    def _recomputed(self, activations: Activations) -> Set[str]:
        """The modules that are recomputed, by path."""
        if activations not in self._recomputed_by:
            self._recomputed_by[activations] = frozenset(self._below(self._tops(activations)))
        return self._recomputed_by[activations]

    def _tops(self, activations: Activations) -> Iterable[str]:
        match activations:
            case Keep():
                return ()
            case Recompute():
                return self._blocks[activations.every - 1 :: activations.every]
            case RecomputeFirst():
                return self._blocks[: activations.blocks]
            case RecomputeSelective():
                return self._blocks
            case RecomputeAttention():
                return self._parts.get("attention", ())
            case RecomputeMlp():
                return self._parts.get("mlp", ())

    def _below(self, tops: Iterable[str]) -> Iterator[str]:
        for top in tops:
            yield from (path for path, _ in self.model.get_submodule(top).named_modules(prefix=top))

    def _recomputing_fewer(self, plan: Plan) -> Iterator[Plan]:
        """Plans whose trace is known and that differ in recomputing a part of what ``plan`` does: the most blocks, and nothing."""
        first = plan.activations.blocks if isinstance(plan.activations, RecomputeFirst) else 1
        most = next((n for n in range(first - 1, 0, -1) if self._knows(replace(plan, activations=RecomputeFirst(n)))), None)
        if most is not None:
            yield replace(plan, activations=RecomputeFirst(most))
        kept = replace(plan, activations=Keep())
        if kept != plan and self._knows(kept):
            yield kept

    def _knows(self, plan: Plan) -> bool:
        return plan in self._simulated or plan in self._inferred

    def _peak(self, plan: Plan) -> tuple[int, Mapping[tuple[str, str], int]]:
        """The peak of a plan whose trace is known, and what is saved at it, by module and operator."""
        if plan not in self._peaks:
            timeline = MemoryTimeline(self._simulated.get(plan) or self._inferred[plan])
            saved: dict[tuple[str, str], int] = {}
            for event in timeline.live_at(timeline.peak_position):
                # What a block makes as wide as the vocabulary is told as logits.
                if event.kind in (Kind.SAVED_ACTIVATION, Kind.LOGITS):
                    key = event.module, event.operator
                    saved[key] = saved.get(key, 0) + event.bytes
            self._peaks[plan] = timeline.peak_bytes, saved
        return self._peaks[plan]

    def _generator_states(self, plan: Plan) -> int:
        """Bytes at a simulated plan's peak that only recomputation holds: states of the processor's generator."""
        timeline = MemoryTimeline(self._simulated[plan])
        live = timeline.live_at(timeline.peak_position)
        return sum(
            event.bytes for event in live if event.operator == "given" and event.kind in (Kind.SAVED_ACTIVATION, Kind.TEMPORARY)
        )

    def _updated(self) -> list[nn.Parameter]:
        """The weights that get a gradient, as far as a simulation has shown it; none before the first."""
        if not self._simulated:
            return []
        updated = next(iter(self._simulated.values())).updated
        return [parameter for path, parameter in self.model.named_parameters() if path in updated]

    def least_host_bytes(self, plan: Plan) -> int:
        """Bytes that a plan takes of a card's host at the least."""
        updated = self._updated()
        trained = sum(parameter.nbytes for parameter in updated)
        if isinstance(plan.optimizer_state, OnHost):
            # In a first update each gradient goes as its moments come; later ones find the moments there.
            gradients_beside = not isinstance(plan.update, DuringBackward) and self.job.steps > 1
            return (trained if gradients_beside else 0) + self._state_of(updated)
        # The library keeps small state on the card.
        large = sum(parameter.numel() for parameter in updated if parameter.numel() >= _LEAST_PAGED_ELEMENTS)
        moments = _moments(self.job.optimizer) * large
        return {Paged: 4 * moments, PagedEightBit: moments}.get(type(plan.optimizer_state), 0)

    def _held_in_update(self, plan: Plan) -> int:
        updated = self._updated()
        trained = sum(parameter.nbytes for parameter in updated)
        gradients = 0 if isinstance(plan.update, DuringBackward) or isinstance(plan.optimizer_state, OnHost) else trained
        elements = sum(parameter.numel() for parameter in updated)
        # bitsandbytes keeps small tensors in more bits and adds scales: a byte per moment is the least.
        eight_bit = _moments(self.job.optimizer) * elements
        state = {OnDevice: self._state_of(updated), EightBit: eight_bit}.get(type(plan.optimizer_state), 0)
        return self.weight_bytes + gradients + state

    def _state_of(self, updated: Iterable[nn.Parameter]) -> int:
        """Bytes of whole optimizer state at the least, the copies of weights that an update in fp32 keeps included."""
        moments = _moments(self.job.optimizer)
        match self.job.precision:
            case Bf16Master():
                in_16_bits = 4 * moments + 4
            case Bf16(rounding=Rounding.COMPENSATED):
                in_16_bits = 2 * moments + 2
            case _:
                in_16_bits = 2 * moments
        return sum(
            parameter.numel() * (in_16_bits if parameter.dtype is torch.bfloat16 else parameter.itemsize * moments)
            for parameter in updated
        )

    def trace(self, plan: Plan) -> Trace:
        """The trace of a plan, simulated whole.

        Raises:
            PlanRefused: the plan does not suit the job or the model.
            ValueError: the model returns no loss, or does not run without data.
        """
        if plan not in self._simulated:
            check(plan, self.job, self.device)
            if reason := self._refused.get(plan.activations):
                raise PlanRefused(reason)
            try:
                self._simulated[plan] = simulate(
                    self.job,
                    plan,
                    self.source,
                    self.rows,
                    self.device,
                    evaluation_rows=self._evaluation_rows,
                    evaluation_shapes=self._evaluation_shapes,
                )
            except WritesInPlace as refusal:
                self._refused[plan.activations] = str(refusal)
                raise PlanRefused(str(refusal)) from refusal
            except (RuntimeError, TypeError, NotImplementedError, LookupError, AttributeError) as error:
                first = (str(error).splitlines() or ["without a word"])[0]
                raise ValueError(
                    f"{self.source.name} does not run without data ({type(error).__name__}: {first}): "
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
        if plan in self._inferred:
            return self._inferred[plan]
        # A micro-batch of one row takes slightly other operators (what is contiguous differs), and the whole batch at
        # once accumulates nothing; between these all sizes are alike.
        rows = self.job.global_batch_size // plan.ranks
        alike = [size for size in sorted(micro_batch_sizes(self.job, plan.ranks)) if 1 < size < rows]
        # The number of chunks changes with the micro-batch, and few rows to evaluate on make smaller batches there.
        chunked = isinstance(plan.loss, ChunkedLogits)
        evaluates_whole = not self._evaluation_rows or 2 * plan.micro_batch_size * plan.ranks <= self._evaluation_rows
        if plan.micro_batch_size not in alike[2:] or chunked or not evaluates_whole:
            return self.trace(plan)
        small, large = (replace(plan, micro_batch_size=size) for size in alike[:2])
        try:
            found = extend(self.trace(small), alike[0], self.trace(large), alike[1], plan.micro_batch_size)
        except NotAlike:
            return self.trace(plan)
        self._inferred[plan] = found
        return found

    def cost_model(self, plain: Callable[[int], Plan], sizes: Sequence[int]) -> CostModel:
        """The cost model of the job, from the plan that ``plain`` gives for the first two of ``sizes``, in rising order."""
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
            tokens_per_row=math.prod(self.rows["labels"][0]) if "labels" in self.rows else 1,
            blocks=self.blocks,
            parameters=len(self._trained),
            parameter_bytes=sum(parameter.nbytes for parameter in self._trained),
            elements=sum(parameter.numel() for parameter in self._trained),
            attention_share=self.parts.get("attention", 1.0),
            mlp_share=self.parts.get("mlp", 1.0),
        )

    def _work_per_micro_batch(self, plan: Plan) -> dict[Phase, Work]:
        trace = self.trace(plan)
        # Only the first step is counted, of one micro-batch unless it is the last step as well.
        runs = 1 if self.job.steps > 1 else min(2, plan.accumulation(self.job.global_batch_size))
        found = {phase: trace.work.get(phase, Work()) for phase in (Phase.FORWARD, Phase.BACKWARD)}
        return {phase: Work(work.flops / runs, work.bytes / runs, work.operators / runs) for phase, work in found.items()}


def _parts(found: Mapping[str, nn.Module]) -> dict[Part, dict[str, nn.Module]]:
    """The parts that can be told in the blocks."""
    told: dict[Part, dict[str, nn.Module]] = {}
    for part in get_args(Part):
        with suppress(ValueError):
            told[part] = parts(found, part)
    return told


def _elements(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
