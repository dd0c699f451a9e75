"""Changes of a job that people make when nothing fits. They train something else, so they are named and never made."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from memtrain.check import suits
from memtrain.device import Cuda, Device
from memtrain.job import Approximation, Job
from memtrain.models.build import FromModule, ModelSource, weight_dtype
from memtrain.plan import EightBit, Fused, OnDevice, OnHost, OptimizerState, Paged, PagedEightBit, Plan
from memtrain.precision import Bf16, Fp32
from memtrain.trace.simulate import RowShapes, dataless_model

# The rank and target of adapters that peft's guides start from.
_LORA_RANK = 16

Changed = tuple[str, Job, ModelSource, RowShapes, Plan]


def cheaper(job: Job, source: ModelSource, rows: RowShapes, plan: Plan, device: Device) -> Iterator[Changed]:
    """Shorter rows, 8-bit state and adapters, where the job has none of them: (what it is called, job, model, rows, plan).

    Only for language models, whose rows have a length.
    """
    if "input_ids" not in rows:
        return
    if isinstance(job.precision, Fp32) and not isinstance(source, FromModule) and suits(Bf16(), device):
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
    if (adapted := _with_adapters(source, job)) is not None:
        # The state of adapters is small, wherever it lies.
        small = replace(plan, optimizer_state=OnDevice(), optimizer_kernel=Fused())
        yield f"LoRA adapters of rank {_LORA_RANK} (a module of your own with peft)", job, FromModule(adapted), rows, small


def _in_16_bits(plan: Plan) -> OptimizerState:
    """State that bf16 allows: paged state has 32 bits."""
    return OnHost() if isinstance(plan.optimizer_state, Paged) else plan.optimizer_state


def _with_adapters(source: ModelSource, job: Job) -> nn.Module | None:
    """The model without data, frozen but for adapters on its linear layers; None for a module of the user's."""
    if isinstance(source, FromModule):
        return None
    with _quietly():
        from peft import LoraConfig, inject_adapter_in_model

        model = dataless_model(source, weight_dtype(job.precision))
        adapted: nn.Module = inject_adapter_in_model(LoraConfig(r=_LORA_RANK, target_modules="all-linear"), model)
    return adapted


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what peft and bitsandbytes say to their developers when they are loaded."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
