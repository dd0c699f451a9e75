"""Seconds per optimizer step, from what the operators compute and move.

A phase takes the longer of its arithmetic and its memory traffic (the roofline model, Williams et al. 2009,
doi 10.1145/1498765.1498785), plus a fixed time per operator. The work of the plainest plan is measured at two micro-batch
sizes, between which it is affine; what a policy adds to it is counted. Copies between host and card take their bytes at the
rate of the link, and nothing overlaps them. That ranks plans; it is not a stopwatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memtrain.device import Cuda, Device
from memtrain.job import Bf16, Job
from memtrain.plan import (
    ChunkedLogits,
    DuringBackward,
    EightBit,
    Foreach,
    OnDevice,
    OnHost,
    Paged,
    PagedEightBit,
    Plan,
    Recompute,
)
from memtrain.trace.event import Phase, Work

# Passes over the parameters that AdamW makes: fused reads weight, gradient and two moments and writes three of them;
# foreach runs about twelve elementwise kernels of two to three operands each (torch/optim/adamw.py, _multi_tensor_adamw).
_FUSED_PASSES, _FOREACH_PASSES = 7, 30
# bitsandbytes' 8-bit update reads weight and gradient and writes the weight, and both moments take a byte each way.
_EIGHT_BIT_PASSES = 3
# On a processor the library unpacks state and weight into several copies: 19 ns per element on a core of 8e9 bytes a second,
# where torch's fused update takes 0.4 (measured with 4.2 million elements).
_EIGHT_BIT_PASSES_ON_A_PROCESSOR = 40
# What large products reach of a card's data sheet: Megatron-LM reports 0.4 to 0.57 of it for whole steps (arXiv 2104.04473).
_CARD_EFFICIENCY = 0.6
# What the host does with the gradients besides the update: add those of each further micro-batch (two operands and a
# result), and for clipping read them once and scale them (features/host_state.py).
_ADD_PASSES, _CLIP_PASSES = 3, 3
# Operators that the chunked loss runs per chunk (features/chunked_loss.py).
_OPERATORS_PER_CHUNK = 16


@dataclass(frozen=True)
class CostModel:
    """The cost of plans of one job.

    Attributes:
        small, large: work per phase of one micro-batch, at the two sizes.
        small_size, large_size: these sizes.
        tokens_per_row: rows of logits per row of the batch.
        blocks: repeated blocks of the model.
        parameters: number of parameter tensors that are updated.
        parameter_bytes: their bytes.
        elements: their elements.
    """

    job: Job
    device: Device
    small: Mapping[Phase, Work]
    small_size: int
    large: Mapping[Phase, Work]
    large_size: int
    tokens_per_row: int
    blocks: int
    parameters: int
    parameter_bytes: int
    elements: int

    def step_seconds(self, plan: Plan) -> float:
        """Predicted seconds per optimizer step."""
        forward = self._work(Phase.FORWARD, plan.micro_batch_size)
        seconds = self._seconds(forward) + self._seconds(self._work(Phase.BACKWARD, plan.micro_batch_size))
        if isinstance(plan.activations, Recompute):
            # The whole forward stands for its blocks: embedding, head and loss are a part of it that is not run again.
            seconds += self._seconds(forward) * (self.blocks // plan.activations.every) / max(1, self.blocks)
        if isinstance(plan.loss, ChunkedLogits):
            chunks = -(-plan.micro_batch_size * self.tokens_per_row // plan.loss.chunk_tokens)
            seconds += chunks * _OPERATORS_PER_CHUNK * self.device.operator_seconds
        micro_batches = self.job.global_batch_size // plan.micro_batch_size
        return micro_batches * seconds + self._update_seconds(plan)

    def _update_seconds(self, plan: Plan) -> float:
        state, device, size = plan.optimizer_state, self.device, self.parameter_bytes
        one_by_one = isinstance(plan.update, DuringBackward) or not isinstance(state, OnDevice)
        seconds = (self.parameters if one_by_one else 1) * device.operator_seconds
        if isinstance(device, Cuda) and isinstance(state, OnHost):
            micro_batches = self.job.global_batch_size // plan.micro_batch_size
            passes = _FUSED_PASSES + _ADD_PASSES * (micro_batches - 1) + _CLIP_PASSES * (self.job.max_grad_norm is not None)
            # Each gradient goes to the host, each weight there and back.
            return (
                seconds
                + (micro_batches + 2) * size / device.link_bytes_per_second
                + passes * size / device.host_bytes_per_second
            )
        moments = 2 * (self.elements if isinstance(state, EightBit | PagedEightBit) else 4 * self.elements)
        if isinstance(device, Cuda) and isinstance(state, Paged | PagedEightBit):
            # At worst every page comes and goes.
            seconds += 2 * moments / device.link_bytes_per_second
        if isinstance(state, EightBit | PagedEightBit):
            passes = _EIGHT_BIT_PASSES if isinstance(device, Cuda) else _EIGHT_BIT_PASSES_ON_A_PROCESSOR
            return seconds + (passes * size + 2 * moments) / device.bytes_per_second
        passes = _FOREACH_PASSES if isinstance(plan.optimizer_kernel, Foreach) else _FUSED_PASSES
        return seconds + passes * size / device.bytes_per_second

    def _work(self, phase: Phase, size: int) -> Work:
        """Work of one micro-batch of ``size`` rows, on the line through the two measured sizes."""
        small, large = self.small[phase], self.large[phase]
        share = (size - self.small_size) / (self.large_size - self.small_size) if self.large_size > self.small_size else 0.0

        def at(low: float, high: float) -> float:
            return max(0.0, low + share * (high - low))

        return Work(at(small.flops, large.flops), at(small.bytes, large.bytes), at(small.operators, large.operators))

    def _seconds(self, work: Work) -> float:
        dtype = "bfloat16" if isinstance(self.job.precision, Bf16) else "float32"
        reached = _CARD_EFFICIENCY if isinstance(self.device, Cuda) else 1.0
        arithmetic = work.flops / (reached * self.device.flops(dtype))
        traffic = work.bytes / self.device.bytes_per_second
        return max(arithmetic, traffic) + work.operators * self.device.operator_seconds
