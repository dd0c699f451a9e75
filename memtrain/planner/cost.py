"""Seconds per optimizer step, from what the operators compute and move.

A phase takes the longer of its arithmetic and its memory traffic (the roofline model, Williams et al. 2009,
doi 10.1145/1498765.1498785), plus a fixed time per operator. The work of the plainest plan is measured at two micro-batch
sizes, between which it is affine; what a policy adds to it is counted. Copies between host and card take their bytes at the
rate of the link, and nothing overlaps them. That ranks plans; it is not a stopwatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memtrain.device import Cuda, Device
from memtrain.job import Adafactor, Adam, AdamW, Job, Lion, Muon, Optimizer, Sgd
from memtrain.plan import (
    Activations,
    ChunkedLogits,
    DuringBackward,
    EightBit,
    Foreach,
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
from memtrain.precision import product_type
from memtrain.trace.event import Phase, Work

# Passes over the parameters that an update makes, an operand or a result of an elementwise kernel being one: (fused, foreach).
_PASSES: dict[type[Optimizer], tuple[int, int]] = {
    # Fused reads weight, gradient and two moments and writes three of them; foreach runs about twelve kernels of two to three
    # operands each (torch/optim/adam.py, _multi_tensor_adam).
    AdamW: (7, 30),
    Adam: (7, 30),
    # Fused reads weight, gradient and momentum and writes two of them; foreach scales the momentum, adds the gradient to it,
    # adds it to the weight and the weight to the gradient (torch/optim/sgd.py, _multi_tensor_sgd).
    Sgd: (5, 11),
    # Norms of weight, rows, columns and step 4, the estimate written 1, divided, bounded and its root taken 6, times the
    # gradient 3, decay 2, the step 3 (torch/optim/_adafactor.py, _single_tensor_adafactor).
    Adafactor: (19, 19),
    # Mixture 3, sign 2, decay 2, the step 3, momentum 3 (features/lion.py).
    Lion: (13, 13),
    # Momentum 3 and Nesterov's mixture 3; a copy in 16 bits, whose operands count a half: 1.5, its norm and scaling 1.5; five
    # iterations, of which the first product reads it twice and the third reads it twice and writes it: 5 × 2.5; decay 2, the
    # step 2.5. The products of n × n in between are at most as large and left out (torch/optim/_muon.py).
    Muon: (26, 26),
}
# The products of Muon's five iterations on an n × m matrix, n the shorter: two of n × n × m and one of n × n × n, at most 6 n
# operations an element. What n is, is not known here: the root of a matrix' elements stands for it. They run in bfloat16.
_MUON_FLOPS_PER_ROOT = 5 * 6
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
# gloo between two processes of one machine sends 1.4e9 bytes a second where the description says 8e9 for reading or writing
# (a ring of 25 MiB buckets, two cores).
_LOOPBACK_PASSES = 6
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
        attention_share, mlp_share: parts of the blocks' parameters, for that of their work: most of it is products with these.
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
    attention_share: float = 1.0
    mlp_share: float = 1.0

    def step_seconds(self, plan: Plan) -> float:
        """Predicted seconds per optimizer step."""
        forward = self._work(Phase.FORWARD, plan.micro_batch_size)
        seconds = self._seconds(forward) + self._seconds(self._work(Phase.BACKWARD, plan.micro_batch_size))
        seconds += self._recomputed_seconds(plan.activations, forward)
        if isinstance(plan.loss, ChunkedLogits):
            chunks = -(-plan.micro_batch_size * self.tokens_per_row // plan.loss.chunk_tokens)
            seconds += chunks * _OPERATORS_PER_CHUNK * self.device.operator_seconds
        micro_batches = plan.accumulation(self.job.global_batch_size)
        return micro_batches * seconds + self._communication_seconds(plan) + self._update_seconds(plan)

    def _communication_seconds(self, plan: Plan) -> float:
        """Adding the gradients up over all processes once a step: a ring sends each byte 2 (n - 1) / n times.

        Between cards at the rate of the link to the host, which is the least that they have; no overlap with backward.
        Source of the ring: Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002.
        """
        device, sent = self.device, 2 * (plan.ranks - 1) / plan.ranks * self.parameter_bytes
        if isinstance(device, Cuda):
            return sent / device.link_bytes_per_second
        return _LOOPBACK_PASSES * sent / device.bytes_per_second

    def _recomputed_seconds(self, activations: Activations, forward: Work) -> float:
        """What is run again of one micro-batch's forward, which as a whole stands for its blocks: embedding, head and loss too."""
        blocks = max(1, self.blocks)
        match activations:
            case Keep():
                return 0.0
            case Recompute():
                share = self.blocks // activations.every / blocks
            case RecomputeFirst():
                share = min(activations.blocks, blocks) / blocks
            case RecomputeSelective():
                # At the most: the results of products are kept, and of all traffic theirs is not told apart.
                return self._seconds(replace(forward, flops=0.0))
            case RecomputeAttention():
                share = self.attention_share
            case RecomputeMlp():
                share = self.mlp_share
        return self._seconds(forward) * share

    def _update_seconds(self, plan: Plan) -> float:
        state, device = plan.optimizer_state, self.device
        wide = self.job.updates_in_fp32
        size = max(self.parameter_bytes, 4 * self.elements) if wide else self.parameter_bytes
        fused, foreach = _PASSES[type(self.job.optimizer)]
        one_by_one = wide or isinstance(plan.update, DuringBackward) or not isinstance(state, OnDevice)
        seconds = (self.parameters if one_by_one else 1) * device.operator_seconds
        if isinstance(device, Cuda) and isinstance(state, OnHost):
            micro_batches = self.job.global_batch_size // plan.micro_batch_size
            # The host's arithmetic is not described, so Muon's products are left out here.
            passes = fused + _ADD_PASSES * (micro_batches - 1) + _CLIP_PASSES * (self.job.max_grad_norm is not None)
            # Each gradient goes to the host, each weight there and back.
            return (
                seconds
                + (micro_batches + 2) * self.parameter_bytes / device.link_bytes_per_second
                + passes * size / device.host_bytes_per_second
            )
        count = 1 if isinstance(self.job.optimizer, Lion) else 2
        moments = count * (self.elements if isinstance(state, EightBit | PagedEightBit) else 4 * self.elements)
        if isinstance(device, Cuda) and isinstance(state, Paged | PagedEightBit):
            # At worst every page comes and goes.
            seconds += 2 * moments / device.link_bytes_per_second
        if isinstance(state, EightBit | PagedEightBit):
            passes = _EIGHT_BIT_PASSES if isinstance(device, Cuda) else _EIGHT_BIT_PASSES_ON_A_PROCESSOR
            return seconds + (passes * size + 2 * moments) / device.bytes_per_second
        if isinstance(self.job.optimizer, Muon):
            root = (self.elements / self.parameters) ** 0.5
            seconds += _MUON_FLOPS_PER_ROOT * root * self.elements / (self._reached * device.flops("bfloat16"))
        passes = foreach if isinstance(plan.optimizer_kernel, Foreach) else fused
        return seconds + passes * size / device.bytes_per_second

    def _work(self, phase: Phase, size: int) -> Work:
        """Work of one micro-batch of ``size`` rows, on the line through the two measured sizes."""
        small, large = self.small[phase], self.large[phase]
        share = (size - self.small_size) / (self.large_size - self.small_size) if self.large_size > self.small_size else 0.0

        def at(low: float, high: float) -> float:
            return max(0.0, low + share * (high - low))

        return Work(at(small.flops, large.flops), at(small.bytes, large.bytes), at(small.operators, large.operators))

    @property
    def _reached(self) -> float:
        return _CARD_EFFICIENCY if isinstance(self.device, Cuda) else 1.0

    def _seconds(self, work: Work) -> float:
        arithmetic = work.flops / (self._reached * self.device.flops(product_type(self.job.precision)))
        traffic = work.bytes / self.device.bytes_per_second
        return max(arithmetic, traffic) + work.operators * self.device.operator_seconds
