"""The plans that a job admits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

from memtrain.check import micro_batch_sizes
from memtrain.device import Cuda, Device
from memtrain.job import Approximation, Job
from memtrain.plan import (
    POLICIES,
    Activations,
    AfterBackward,
    ChunkedLogits,
    DuringBackward,
    EightBit,
    Fused,
    Keep,
    ModelDefault,
    OnDevice,
    OnHost,
    OptimizerState,
    Paged,
    PagedEightBit,
    Plan,
    Recompute,
    RecomputeAttention,
    RecomputeFirst,
    RecomputeMlp,
    RecomputeSelective,
    Single,
    WholeLogits,
    ranks_of,
)


def candidates(
    job: Job, blocks: int, constraints: Mapping[str, Any], device: Device, parts: Collection[str] = ()
) -> Iterator[Plan]:
    """Every plan worth considering, those that ``check`` or ``prepare`` will refuse included, so that they get a reason.

    Args:
        blocks: repeated blocks of the model.
        constraints: plan fields that are fixed: ``micro_batch_size`` as a number, the others as policies.
        parts: which parts of the blocks can be told: ``"attention"``, ``"mlp"``.

    One block in k is a candidate only where asked for: as many of the first take no longer and free no less. So are foreach
    updates: fused ones are faster and hold no temporaries. Optimizer state elsewhere than on the device is one only beside a
    card, and 8-bit state only where the job allows it.
    """
    choices: dict[str, tuple[Any, ...]] = {
        "micro_batch_size": micro_batch_sizes(job, ranks_of(constraints)),
        "activations": (Keep(), *_recomputations(blocks, parts)),
        "loss": (WholeLogits(), ChunkedLogits()),
        "update": (AfterBackward(), DuringBackward()),
        "optimizer_kernel": (Fused(),),
        "optimizer_state": tuple(_states(job, device)),
        "attention": (ModelDefault(),),
        "sharding": (Single(),),
    }
    assert choices.keys() == {"micro_batch_size", *POLICIES}
    choices.update({field: (fixed,) for field, fixed in constraints.items()})
    for values in product(*choices.values()):
        yield Plan(**dict(zip(choices, values, strict=True)))


def _states(job: Job, device: Device) -> Iterator[OptimizerState]:
    yield OnDevice()
    beside_a_card, eight_bit = isinstance(device, Cuda), Approximation.EIGHT_BIT_STATE in job.allow
    if beside_a_card:
        yield OnHost()
        if job.trained_type == "float32":
            yield Paged()
    if eight_bit:
        yield EightBit()
        if beside_a_card:
            yield PagedEightBit()


def _recomputations(blocks: int, parts: Collection[str]) -> Iterator[Activations]:
    """All blocks, some of the first, and what can be recomputed of all of them."""
    if blocks:
        yield Recompute()
        # In eighths of a deep model: each number that just misses the budget is simulated.
        step = max(1, blocks // 8)
        yield from map(RecomputeFirst, range(step, blocks, step))
        yield RecomputeSelective()
    if "attention" in parts:
        yield RecomputeAttention()
    if "mlp" in parts:
        yield RecomputeMlp()
