"""Changes of a job that people make when nothing fits. They train something else, so they are named and never made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memtrain.check import suits
from memtrain.device import Cuda, Device
from memtrain.job import Approximation, Job
from memtrain.method import Full, Lora, Nf4, Unquantized
from memtrain.models.build import FromModule, ModelSource
from memtrain.plan import EightBit, Fused, OnDevice, OnHost, OptimizerState, Paged, PagedEightBit, Plan
from memtrain.precision import Bf16
from memtrain.trace.simulate import RowShapes, dataless_model_of

Changed = tuple[str, Job, ModelSource, RowShapes, Plan]


def cheaper(job: Job, source: ModelSource, rows: RowShapes, plan: Plan, device: Device) -> Iterator[Changed]:
    """16 bits, shorter rows, 8-bit state, adapters and 4 bits below them, where the job has none of these.

    Each is (what it is called, job, model, rows, plan). Only for language models, whose rows have a length.
    """
    if "input_ids" not in rows:
        return
    if not isinstance(job.precision, Bf16) and not isinstance(source, FromModule) and suits(Bf16(), device):
        yield "precision bf16", replace(job, precision=Bf16()), source, rows, replace(plan, optimizer_state=_in_16_bits(plan))
    length = rows["input_ids"][0][0]
    if length >= 4:
        half = length // 2
        shorter = {name: (tuple(half if n == length else n for n in shape), dtype) for name, (shape, dtype) in rows.items()}
        yield f"rows of {half} tokens", job, source, shorter, plan
    eight_bit = Approximation.EIGHT_BIT_STATE
    if isinstance(device, Cuda) and eight_bit not in job.allow:
        allowed = replace(job, allow=job.allow | {eight_bit})
        for name, state in (("8-bit", EightBit()), ("paged 8-bit", PagedEightBit())):
            changed = replace(plan, optimizer_state=state, optimizer_kernel=Fused())
            yield f"{name} state (allow=[{eight_bit}])", allowed, source, rows, changed
    # The state of adapters is small, wherever it lies.
    small = replace(plan, optimizer_state=OnDevice(), optimizer_kernel=Fused())
    for change, fewer in _with_adapters(job, source):
        if _can_be_built(fewer, source):
            yield change, fewer, source, rows, small


def _with_adapters(job: Job, source: ModelSource) -> Iterator[tuple[str, Job]]:
    """Adapters, and below them the frozen weights in 4 bits, where the job has neither."""
    adapters = job.method if isinstance(job.method, Lora) else Lora()
    with_adapters = replace(job, method=adapters)
    if isinstance(job.method, Full):
        yield f"method lora (adapters of rank {adapters.rank})", with_adapters
    # A module that is given would lose its weights to their 4 bits.
    if isinstance(job.quantization, Unquantized) and not isinstance(source, FromModule):
        name = "quantization nf4" if isinstance(job.method, Lora) else "method lora with quantization nf4"
        yield name, replace(with_adapters, quantization=Nf4())


def _can_be_built(job: Job, source: ModelSource) -> bool:
    """Whether the model takes adapters, and its layers go into 4 bits."""
    try:
        dataless_model_of(job, source)
    except ValueError:
        return False
    return True


def _in_16_bits(plan: Plan) -> OptimizerState:
    """State that bf16 allows: paged state has 32 bits."""
    return OnHost() if isinstance(plan.optimizer_state, Paged) else plan.optimizer_state
