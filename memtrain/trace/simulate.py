"""The data-less run: the real ``Run.step`` on tensors without data, recorded.

Every tensor lives on torch's ``meta`` device: it has a shape, strides and a storage that can be watched, and no data. What
is substituted is in this file and in those beside it, completely: the kernel table (kernels.py), the values of small known
tensors (values.py), and the support lists (supported.py) of torch functions that ask for a device by name. Features, prepare
and the step do not know that they are simulated.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.data.rows import Batch
from memtrain.device import Cuda, Device
from memtrain.job import Job
from memtrain.models.build import FromModule, ModelSource, bytes_on
from memtrain.models.load import build_model
from memtrain.models.quantize import move_unpacked_, scales
from memtrain.models.save import largest_shard
from memtrain.place import placed
from memtrain.plan import Plan
from memtrain.run import Run, prepare
from memtrain.trace.attention_cuda import collect_why_math
from memtrain.trace.event import DEVICE, HOST, Kind, Phase, Place, Trace
from memtrain.trace.kernels import as_laid_out, has_scratch, kernels_of, scratch_bytes, unknown_scratch
from memtrain.trace.kernels_bitsandbytes import NO_OUTLIERS, SPLIT_BY_SIZE, outliers_unknown, packed_without_data, products_of
from memtrain.trace.kernels_cuda import cublas_workspace_bytes, uses_cublas
from memtrain.trace.layouts import tensors_in
from memtrain.trace.managed import paged_state
from memtrain.trace.processes import processes_of
from memtrain.trace.record import Recorder
from memtrain.trace.routing import Routing, larger
from memtrain.trace.supported import as_if_supported
from memtrain.trace.values import Values, lift

# By identity, since an operator's hash is computed in Python.
_PRODUCTS = {id(getattr(torch.ops.aten, name).default) for name in ("mm", "addmm", "bmm", "baddbmm")}

RowShapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class DatalessRecorder(Recorder):
    """A recorder that also runs the operators, without data, as ``device`` would."""

    def __init__(
        self,
        device: Device,
        model: nn.Module | None = None,
        vocabulary: int | None = None,
        routing: Routing | None = None,
    ) -> None:
        super().__init__(model, vocabulary)
        self._device = device
        self._values = Values(lambda sentence: self.assumed.setdefault(sentence), routing, self._decides_on_update)
        # cuBLAS keeps one workspace for each thread that calls it: the caller's and autograd's.
        self._threads_with_workspace: set[bool] = set()
        # Operators whose kernel allocates nothing inside itself, by identity.
        self._plain: set[int] = set()
        self._splits: dict[int, bool] = {}

    @property
    def followed_routing(self) -> bool:
        """Whether anything depended on the choices of a router."""
        return self._values.followed_routing

    def _decides_on_update(self) -> bool:
        """Whether an update has begun, and no optimizer is at work in it."""
        return self._forced in (Phase.FIRST_UPDATE, Phase.UPDATE) and not self._updating

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._values.is_plain_view(func, args, kwargs):
            return func(*args)
        if id(func) in _PRODUCTS:
            self._check_types(args)
        elif self._splits_by_size(func) and (made := outliers_unknown(func, args, kwargs)) is not None:
            self.assumed.setdefault(NO_OUTLIERS)
            return made
        return as_laid_out(self._device, func, self._values.execute(func, args, kwargs), args)

    def _splits_by_size(self, func: Any) -> bool:
        """Whether it is one of the operators of 8-bit products; by identity, since a name is made anew each time."""
        known = self._splits.get(id(func))
        if known is None:
            known = self._splits[id(func)] = func.name() in SPLIT_BY_SIZE
        return known

    def _check_types(self, args: Any) -> None:
        """Data-less products take factors of different types, and no kernel does."""
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors_in(args)}
        if len(dtypes) > 1:
            raise ValueError(
                f"{self._here() or 'the model'} multiplies {' and '.join(sorted(dtypes))}, and a product takes one type: "
                f"give the rows in the type of the weights, or cast them in forward."
            )

    def place_of_given(self, tensor: Tensor) -> Place:
        # Beside a card a tensor with data is the host's: a step count, a state of the generator.
        return HOST if isinstance(self._device, Cuda) and not tensor.is_meta else DEVICE

    def inside_kernel(self, func: Any, args: Any, kwargs: Any) -> None:
        if id(func) in self._plain:
            return
        if (unknown := unknown_scratch(self._device, func, args)) is not None:
            self.assumed.setdefault(unknown)
        card = self._device if isinstance(self._device, Cuda) and uses_cublas(func) else None
        if card is None and not has_scratch(self._device, func):
            self._plain.add(id(func))
            return
        scratch = scratch_bytes(self._device, func, args, kwargs)
        if scratch:
            self.workspace(scratch, func)
        if card is not None:
            in_autograd = torch._C._current_autograd_node() is not None
            if in_autograd not in self._threads_with_workspace:
                self._threads_with_workspace.add(in_autograd)
                self.workspace(cublas_workspace_bytes(card), func, kept=True)


def dataless_model(source: ModelSource, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model on data-less tensors: architecture, shapes and the values of small buffers, but no weights.

    A user's own module is copied without its data and stays untouched (rule 11).
    """
    with Values(lambda _: None).mode():
        return _built(source, lambda copied: copied.build(dtype))


def dataless_model_of(job: Job, source: ModelSource) -> nn.Module:
    """The model that a job trains, on data-less tensors: packed and with adapters where the job says so.

    Raises:
        ValueError: the model cannot be packed, or no adapters can be added.
    """
    with Values(lambda _: None).mode():
        return _built(source, lambda copied: build_model(copied, job))


def _built(source: ModelSource, build: Callable[[ModelSource], nn.Module]) -> nn.Module:
    """The data-less model, made under a mode that runs operators without data."""
    if isinstance(source, FromModule):
        source = FromModule(_dataless_copy(source.module))
    with torch.device("meta"):
        model = build(source)
    _lift_buffers_(model)
    return model


def _lift_buffers_(model: nn.Module) -> None:
    """Some modules make a tensor by calls that ignore torch.device; their values are small and stay known."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = lift(buffer)


def _dataless_copy(module: nn.Module) -> nn.Module:
    """A deep copy whose parameters and buffers are data-less; the originals are never read but for small buffers."""
    replaced = packed_without_data(module)
    for parameter in module.parameters():
        if id(parameter) in replaced:
            continue
        replaced[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in module.buffers():
        replaced[id(buffer)] = lift(buffer)
    return copy.deepcopy(module, replaced)


def simulate(
    job: Job,
    plan: Plan,
    source: ModelSource,
    rows: RowShapes,
    device: Device,
    *,
    evaluation_rows: int = 0,
    evaluation_shapes: RowShapes | None = None,
    routing: Routing | None = None,
) -> Trace:
    """Load, train two steps, evaluate and save, all without data; returns what that does to memory.

    Two optimizer steps stand for all: the first update creates the optimizer state, the second step finds it there, and
    its second micro-batch finds gradients to add to.

    Args:
        source: the model; a module of the user's is copied.
        rows: shape and type of each tensor of one row.
        evaluation_rows: number of rows that the run evaluates on.
        evaluation_shapes: of these rows, where they are others than ``rows``.
        routing: how the choices of a router fall; by default, where they matter, the assumption that takes more.

    Raises:
        ValueError: the plan does not suit the job or the model.
    """

    def simulated(assumed: Routing) -> tuple[Trace, bool]:
        return _simulated(job, plan, source, rows, device, evaluation_rows, evaluation_shapes or rows, assumed)

    return larger(simulated, device) if routing is None else simulated(routing)[0]


def _simulated(
    job: Job,
    plan: Plan,
    source: ModelSource,
    rows: RowShapes,
    device: Device,
    evaluation_rows: int,
    evaluation_shapes: RowShapes,
    routing: Routing,
) -> tuple[Trace, bool]:
    """The trace under one assumption, and whether anything depended on it."""
    recorder = DatalessRecorder(device, routing=routing)
    with as_if_supported(), kernels_of(device), collect_why_math() as why_math, _without_collector():
        recorder.mark("load")
        with recorder, recorder.phase(Phase.LOAD):
            model = _loaded(source, job, device)
        recorder.watch(model, vocabulary_of(model))
        with processes_of(plan.ranks):
            run = prepare(job, plan, model)
        with (
            ExitStack() as released,
            paged_state(),
            processes_of(plan.ranks),
            products_of(device),
            recorder,
            _random_states(recorder),
        ):
            # What it sets of the process, such as TF32, is given back; what it frees is no part of the trace.
            released.callback(run.release)
            evaluated = partial(dataless_batch, evaluation_shapes)
            record(run, recorder, partial(dataless_batch, rows), job, plan, evaluation_rows, evaluated)
            if isinstance(device, Cuda):
                # What is written to a file is on the host first.
                with recorder.phase(Phase.SAVE), recorder.held(largest_shard(model), "save", HOST):
                    pass
            trace = recorder.trace()
    return replace(trace, why_math=tuple(why_math)), recorder.followed_routing


def _loaded(source: ModelSource, job: Job, device: Device) -> nn.Module:
    """The model as it is loaded: beside a card first on the host, and then tensor by tensor on the card.

    Layers that are packed are packed on the card. A module that is on the card already is there.
    """
    if not isinstance(device, Cuda) or bytes_on(source, device.kind):
        return _built(source, lambda copied: build_model(copied, job))
    with placed(HOST):
        model = _built(source, lambda copied: build_model(copied, job, card="meta"))
    return move_unpacked_(model, "meta")


def record(
    run: Run,
    recorder: Recorder,
    new_batch: Callable[[int], Batch],
    job: Job,
    plan: Plan,
    evaluation_rows: int,
    evaluation_batch: Callable[[int], Batch] | None = None,
) -> None:
    """The run that stands for all: the same calls for data-less and for real tensors.

    Args:
        run: the prepared run.
        recorder: active, on the run's model.
        new_batch: makes a batch of so many rows.
        evaluation_batch: the same of rows to evaluate on, where they are others.
    """
    run.update = recorder.inside(Phase.UPDATE, run.update)
    micro_batches = plan.accumulation(job.global_batch_size)
    # Of several processes the first has the most rows to evaluate on.
    rows_here = -(-evaluation_rows // plan.ranks)

    def batch_of(count: int, make: Callable[[int], Batch] = new_batch) -> Batch:
        batch = make(count)
        for tensor in batch.values():
            recorder.tag(tensor, Kind.INPUT)
        return batch

    def evaluate() -> None:
        starts = range(0, rows_here, plan.micro_batch_size)[:2]
        if starts:
            recorder.mark("evaluate")
            with recorder.phase(Phase.EVALUATE):
                make = evaluation_batch or new_batch
                run.evaluate(batch_of(min(plan.micro_batch_size, rows_here - start), make) for start in starts)

    with recorder.phase(Phase.LOAD):
        recorder.track_weights()
        for path, tensor in scales(run.model):
            recorder.track(tensor, Kind.WEIGHT, path)
    # Before training and after it, as a run does: what an allocator keeps depends on what came before.
    evaluate()
    steps = min(2, job.steps)
    for number in range(1, steps + 1):
        recorder.mark(f"step {number}")
        # An update is the same after any number of micro-batches, so only the last step accumulates.
        count = min(2 if number == steps else 1, micro_batches)
        # The rows of a step wait together; those of the micro-batches that are not run are held as one.
        held = batch_of((micro_batches - count) * plan.micro_batch_size)
        run.step([batch_of(plan.micro_batch_size) for _ in range(count)])
        track_state(recorder, run)
        recorder.first_step_done()
        del held
    evaluate()
    recorder.mark("save")


def track_state(recorder: Recorder, run: Run) -> None:
    """Count all state of the optimizer, also what an update put there after the optimizer's own step."""
    paths: dict[Tensor, str] = {parameter: path for path, parameter in run.model.named_parameters()}
    for parameter, state in run.optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor):
                recorder.track(value, Kind.OPTIMIZER_STATE, paths.get(parameter, "").rpartition(".")[0])


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
def _without_collector() -> Iterator[None]:
    """Free by reference counts alone: when the collector runs is chance, and a prediction is none.

    What only the collector would free counts until the end, which is the most that it can be.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
