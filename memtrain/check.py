"""Which plans go with a job and a device."""

from __future__ import annotations

from memtrain.device import Cpu, Cuda, Device
from memtrain.job import Adafactor, Adam, Approximation, Job, Lion, Muon, NotFinite, Sgd
from memtrain.plan import (
    ChunkedLogits,
    DuringBackward,
    EightBit,
    FlashAttention,
    Foreach,
    OnDevice,
    OnHost,
    Paged,
    PagedEightBit,
    Plan,
    policy_name,
)
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Bf16Master, Fp32, Precision, Rounding


class PlanRefused(ValueError):
    """A plan would not train what the job says, or cannot be applied to the model."""


def check(plan: Plan, job: Job, device: Device | None = None) -> None:
    """Refuse a plan that would not train what the job says, or that makes no sense on a device.

    Raises:
        PlanRefused: with the value, the rule and the remedy.
    """
    rows, ranks = job.global_batch_size, plan.ranks
    if rows % ranks:
        raise PlanRefused(
            f"global_batch_size {rows} cannot be shared equally by {ranks} processes: choose a multiple of {ranks}, "
            f"or another number of processes."
        )
    if rows % (plan.micro_batch_size * ranks):
        divided = f"the {rows // ranks} rows that each of {ranks} processes has" if ranks > 1 else f"global_batch_size {rows}"
        raise PlanRefused(
            f"micro_batch_size {plan.micro_batch_size} does not divide {divided}: "
            f"choose one of {', '.join(map(str, micro_batch_sizes(job, ranks)))}."
        )
    if isinstance(plan.update, DuringBackward):
        if job.max_grad_norm is not None:
            raise PlanRefused(
                f"an update during backward never has the whole gradient that max_grad_norm {job.max_grad_norm} bounds: "
                f"set max_grad_norm to null or update after backward."
            )
        if plan.accumulation(rows) > 1:
            raise PlanRefused(
                f"an update during backward needs the whole batch in one backward, and micro_batch_size "
                f"{plan.micro_batch_size} takes {plan.accumulation(rows)}: "
                f"set micro_batch_size to {rows // ranks} or update after backward."
            )
        if isinstance(job.precision, AutocastFp16):
            raise PlanRefused(
                "an update during backward changes weights before the whole gradient is known to be finite, which the loss scale "
                "of precision autocast_fp16 needs: set precision to autocast_bf16 or update after backward."
            )
        if job.on_not_finite == NotFinite.SKIP:
            raise PlanRefused(
                "an update during backward changes weights before the whole gradient is known to be finite, so that on_not_finite "
                "skip comes too late: set on_not_finite to stop or update after backward."
            )
        if ranks > 1:
            raise PlanRefused(
                f"an update during backward would come before the gradients of {ranks} processes are averaged: "
                f"update after backward, or train in one process."
            )
    if device is not None and (reason := unsuited(job.precision, device)) is not None:
        raise PlanRefused(reason)
    if job.loss is not None and isinstance(plan.loss, ChunkedLogits):
        raise PlanRefused("the loss is the job's own, and the chunked loss is that of the model: keep the whole logits.")
    _check_ranks(plan, job)
    _check_attention(plan, job, device)
    _check_optimizer(plan, job)
    _check_kernel(plan, job)
    _check_state(plan, job, device)


def suits(precision: Precision, device: Device) -> bool:
    """Whether a device computes in a precision."""
    return unsuited(precision, device) is None


def unsuited(precision: Precision, device: Device) -> str | None:
    """Why a device does not compute in a precision, None where it does.

    bfloat16 and TF32 came with compute capability 8.0 (CUDA C++ Programming Guide).
    """
    if isinstance(precision, Fp32) and precision.tf32 and isinstance(device, Cpu):
        return (
            f"precision fp32 with tf32 is for the matrix units of a card, and {device.name} is a processor: set tf32 to false."
        )
    if isinstance(device, Cpu) or device.compute_capability >= (8, 0):
        return None
    if isinstance(precision, Fp32) and precision.tf32:
        return f"tf32 needs a card of compute capability 8.0 or newer, and {device.name} is older: set tf32 to false."
    if isinstance(precision, AutocastBf16 | Bf16 | Bf16Master):
        return (
            f"precision {policy_name(type(precision))} needs a card with bfloat16 (compute capability 8.0 or newer), and "
            f"{device.name} has none: set precision to autocast_fp16 or fp32, or take another card."
        )
    return None


def _check_ranks(plan: Plan, job: Job) -> None:
    """What several processes would each compute otherwise."""
    if plan.ranks > 1 and isinstance(job.precision, Bf16) and job.precision.rounding is Rounding.STOCHASTIC:
        raise PlanRefused(
            f"precision bf16 with stochastic rounding draws other numbers in each of {plan.ranks} processes, so that their weights "
            f"would part: set rounding to compensated, or train in one process."
        )


def _check_attention(plan: Plan, job: Job, device: Device | None) -> None:
    """The flash-attn package runs in 16 bits, on cards of compute capability 8.0 or newer."""
    if not isinstance(plan.attention, FlashAttention):
        return
    if isinstance(device, Cpu):
        raise PlanRefused(f"attention flash_attention needs a card, and {device.name} is a processor: set attention to sdpa.")
    if isinstance(device, Cuda) and device.compute_capability < (8, 0):
        raise PlanRefused(
            f"attention flash_attention needs a card of compute capability 8.0 or newer, and {device.name} is older: "
            f"set attention to sdpa."
        )
    if isinstance(job.precision, Fp32):
        raise PlanRefused(
            "attention flash_attention computes in 16 bits, and precision fp32 in 32: "
            "set precision to autocast_bf16, or attention to sdpa."
        )


def _check_optimizer(plan: Plan, job: Job) -> None:
    rule, state = type(job.optimizer).__name__, plan.optimizer_state
    if isinstance(plan.optimizer_kernel, Foreach) and isinstance(job.optimizer, Adafactor | Lion | Muon):
        raise PlanRefused(
            f"optimizer {rule} is run weight by weight, and a foreach update takes all weights at once: "
            f"set optimizer_kernel to fused."
        )
    if isinstance(state, OnDevice | OnHost):
        return
    if isinstance(job.optimizer, Sgd | Adafactor | Muon):
        raise PlanRefused(
            f"optimizer state {state} is there for AdamW, Adam and Lion, and the optimizer is {rule}: "
            f"set optimizer_state to on_device or on_host, or take one of these."
        )
    if isinstance(job.optimizer, Adam) and job.optimizer.weight_decay:
        raise PlanRefused(
            f"optimizer state {state} is updated by bitsandbytes, which decays weights as AdamW does, and Adam's weight_decay "
            f"{job.optimizer.weight_decay} is a part of the gradient: set weight_decay to 0, or optimizer to adamw."
        )


def _check_kernel(plan: Plan, job: Job) -> None:
    if isinstance(plan.optimizer_kernel, Foreach) and job.updates_in_fp32:
        raise PlanRefused(
            f"precision {policy_name(type(job.precision))} updates in fp32 weight by weight, and a foreach update takes all weights "
            f"at once: set optimizer_kernel to fused."
        )


def _check_state(plan: Plan, job: Job, device: Device | None) -> None:
    state, name = plan.optimizer_state, policy_name(type(plan.optimizer_state))
    if isinstance(state, OnDevice):
        return
    if isinstance(state, OnHost) and isinstance(job.precision, AutocastFp16):
        raise PlanRefused(
            "the loss scale of precision autocast_fp16 looks for overflows in gradients on the device, and with optimizer state on "
            "the host they are there: set precision to autocast_bf16, or optimizer_state to on_device."
        )
    if isinstance(state, OnHost) and plan.ranks > 1:
        raise PlanRefused(
            f"optimizer state on the host takes each gradient before those of {plan.ranks} processes are averaged: "
            f"set optimizer_state to on_device, or train in one process."
        )
    if isinstance(device, Cpu) and not isinstance(state, EightBit):
        raise PlanRefused(
            f"optimizer state {state} frees nothing on a processor, whose memory is the host's: set optimizer_state to on_device."
        )
    if isinstance(plan.optimizer_kernel, Foreach):
        raise PlanRefused(
            f"optimizer state {state} is updated weight by weight, and a foreach update takes all weights at once: "
            f"set optimizer_kernel to fused."
        )
    if isinstance(state, EightBit | PagedEightBit) and Approximation.EIGHT_BIT_STATE not in job.allow:
        raise PlanRefused(
            f"optimizer_state {name} rounds the optimizer's state to 8 bits, which the job does not allow: "
            f"add {Approximation.EIGHT_BIT_STATE} to allow, or keep the state whole."
        )
    if not isinstance(state, OnHost) and job.updates_in_fp32:
        raise PlanRefused(
            f"optimizer state {state} is updated by bitsandbytes in the type of the weights, and precision "
            f"{policy_name(type(job.precision))} updates in fp32: set optimizer_state to on_device or on_host."
        )
    if isinstance(state, Paged) and job.trained_type == "bfloat16":
        raise PlanRefused(
            "paged state has 32 bits and what is trained has 16: "
            "set optimizer_state to on_host, or to paged_eight_bit where the job allows that."
        )


def micro_batch_sizes(job: Job, ranks: int = 1) -> tuple[int, ...]:
    """The divisors of the rows that each rank has of the global batch, largest first."""
    rows = job.global_batch_size // ranks
    return tuple(size for size in range(rows, 0, -1) if rows % size == 0)
