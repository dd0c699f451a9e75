"""The data-less run: the real ``Run.step`` on tensors without data, recorded.

Every tensor lives on torch's ``meta`` device: it has a shape, strides and a storage that can be watched, and no data. What
is substituted is in this file and in two beside it, completely: the kernel table (kernels.py), the values of small known
tensors (values.py), and ``_as_if_supported`` below for torch functions that ask for a device by name. Features, prepare
and the step do not know that they are simulated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.data.rows import Batch
from memtrain.device import Device
from memtrain.job import Job
from memtrain.models.build import FromModule, ModelSource
from memtrain.plan import Plan
from memtrain.run import Run, prepare
from memtrain.trace.event import Kind, Phase, Trace
from memtrain.trace.kernels import as_laid_out, kernels_of, scratch_bytes
from memtrain.trace.record import Recorder
from memtrain.trace.values import Values, lift

RowShapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class DatalessRecorder(Recorder):
    """A recorder that also runs the operators, without data."""

    def __init__(self, model: nn.Module, device: Device, vocabulary: int | None = None) -> None:
        super().__init__(model, vocabulary)
        self._device = device
        self._values = Values(lambda sentence: self.assumed.setdefault(sentence))

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        return as_laid_out(self._device, func, self._values.execute(func, args, kwargs), args)

    def scratch(self, func: Any, args: Any, kwargs: Any) -> int:
        return scratch_bytes(self._device, func, args, kwargs)


def dataless_model(source: ModelSource) -> nn.Module:
    """The model on data-less tensors: architecture, shapes and the values of small buffers, but no weights.

    A user's own module is copied without its data and stays untouched (rule 11).
    """
    if isinstance(source, FromModule):
        return _dataless_copy(source.module)
    with Values(lambda _: None).mode(), torch.device("meta"):
        model = source.build()
    for module in model.modules():
        # Some modules make a tensor by calls that ignore torch.device; their values are small and stay known.
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = lift(buffer)
    return model


def _dataless_copy(module: nn.Module) -> nn.Module:
    """A deep copy whose parameters and buffers are data-less; the originals are never read but for small buffers."""
    replaced: dict[int, Any] = {}
    for parameter in module.parameters():
        replaced[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in module.buffers():
        replaced[id(buffer)] = lift(buffer)
    return copy.deepcopy(module, replaced)


def simulate(
    job: Job,
    plan: Plan,
    model: nn.Module,
    rows: RowShapes,
    device: Device,
    *,
    evaluation_rows: int = 0,
) -> Trace:
    """Load, train two steps, evaluate and save, all on a data-less model; returns what that does to memory.

    Two optimizer steps of at most two micro-batches stand for all: the first update creates the optimizer state, the
    second step finds it there, and the second micro-batch finds gradients to add to.

    Args:
        model: from :func:`dataless_model`; it is changed, so it serves one simulation.
        rows: shape and type of each tensor of one row.
        evaluation_rows: number of rows that the run evaluates on.

    Raises:
        ValueError: the plan does not suit the job or the model.
    """
    with _as_if_supported(), kernels_of(device):
        run = prepare(job, plan, model)
        with DatalessRecorder(model, device, vocabulary_of(model)) as recorder, _random_states(recorder):
            return record(run, recorder, lambda count: dataless_batch(rows, count), job, plan, evaluation_rows)


def record(
    run: Run, recorder: Recorder, new_batch: Callable[[int], Batch], job: Job, plan: Plan, evaluation_rows: int
) -> Trace:
    """The run that stands for all: the same calls for data-less and for real tensors.

    Args:
        run: the prepared run.
        recorder: active, on the run's model.
        new_batch: makes a batch of so many rows.
    """
    run.update = recorder.inside(Phase.UPDATE, run.update)
    stepped = min(2, job.global_batch_size // plan.micro_batch_size)

    def batch_of(count: int) -> Batch:
        batch = new_batch(count)
        for tensor in batch.values():
            recorder.tag(tensor, Kind.INPUT)
        return batch

    recorder.mark("load")
    with recorder.phase(Phase.LOAD):
        recorder.track_weights()
    for number in range(1, min(2, job.steps) + 1):
        recorder.mark(f"step {number}")
        # The rows of a step wait together; those of the micro-batches that are not run are held as one.
        held = batch_of(job.global_batch_size - stepped * plan.micro_batch_size)
        run.step([batch_of(plan.micro_batch_size) for _ in range(stepped)])
        del held
    if evaluation_rows:
        recorder.mark("evaluate")
        starts = range(0, evaluation_rows, plan.micro_batch_size)[:2]
        with recorder.phase(Phase.EVALUATE):
            run.evaluate(batch_of(min(plan.micro_batch_size, evaluation_rows - start)) for start in starts)
    recorder.mark("save")
    return recorder.trace()


def dataless_batch(rows: RowShapes, count: int) -> dict[str, Tensor]:
    """A batch of ``count`` rows of the given shapes, without data."""
    return {name: torch.empty((count, *shape), dtype=dtype, device="meta") for name, (shape, dtype) in rows.items()}


def vocabulary_of(model: nn.Module) -> int | None:
    """Width of the logits of a transformers model, None for other models."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    return getattr(head, "out_features", None)


@contextmanager
def _random_states(recorder: Recorder) -> Iterator[None]:
    """Count the states of the processor's generator that recomputation saves: about 5 kB a block, made below dispatch."""
    get_rng_state = torch.get_rng_state
    fork_rng: Any = torch.random.fork_rng

    def counted() -> Tensor:
        state = get_rng_state()
        recorder.track(state)
        return state

    def forked(*args: Any, device_type: str = "cuda", **kwargs: Any) -> Any:
        # For data-less tensors fork_rng does nothing; "cuda" is what checkpointing passes where all tensors are on the host.
        return fork_rng(*args, device_type="cuda" if device_type == "meta" else device_type, **kwargs)

    torch.get_rng_state, torch.random.fork_rng = counted, forked
    try:
        yield
    finally:
        torch.get_rng_state, torch.random.fork_rng = get_rng_state, fork_rng


@contextmanager
def _as_if_supported() -> Iterator[None]:
    """Let torch's foreach and fused functions take data-less tensors for those of a device that has such kernels.

    They look a device up in lists of names, which do not hold ``meta``: without this, clipping refuses ``foreach`` and
    AdamW refuses ``fused``.
    """
    from torch.nn.utils import clip_grad
    from torch.optim import adam, adamw, optimizer
    from torch.utils import _foreach_utils as lists

    fused = lists._get_fused_kernels_supported_devices
    has_foreach = lists._device_has_foreach_support
    substitutes: dict[Any, Any] = {
        fused: lambda: [*fused(), "meta"],
        has_foreach: lambda device: device.type == "meta" or has_foreach(device),
    }
    replaced: list[tuple[Any, str, Any]] = []
    for module in (clip_grad, adam, adamw, optimizer, lists):
        for name, value in vars(module).copy().items():
            if callable(value) and value in substitutes:
                setattr(module, name, substitutes[value])
                replaced.append((module, name, value))
    try:
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
