"""The run that is simulated, done with data and recorded, and what of two such traces is compared.

A processor's real step and its simulation must do the same to memory, event by event: same bytes, same operators, same
order. The tests and ``benchmarks/architectures.py`` hold it by these functions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch

from memtrain.data.rows import Batch
from memtrain.job import Job
from memtrain.models.build import FromModule, ModelSource
from memtrain.models.load import load_model
from memtrain.plan import Plan
from memtrain.run import prepare
from memtrain.trace.event import DEVICE, Kind, Phase, Trace
from memtrain.trace.record import Recorder
from memtrain.trace.routing import Routing, choices
from memtrain.trace.simulate import RowShapes, record, vocabulary_of

# What one event is compared by: its bytes, negative for a free, and its operator, with the place where it is not the device.
Compared = tuple[int, str]


def shapes_of(batch: Batch) -> RowShapes:
    """Shape and type of each tensor of one row of a batch."""
    return {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in batch.items()}


class _RoutedRecorder(Recorder):
    """A recorder of a run in which the choices of a router fall as they are assumed to."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self._routing = routing

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if func is torch.ops.aten.topk.default and args[0].is_floating_point():
            chosen = out[1]
            per_token = chosen.shape[-1]
            value = choices(self._routing, chosen.numel() // per_token, per_token, args[0].shape[-1])
            chosen.copy_(value.view(chosen.shape))
        return out


def real_trace(
    job: Job, plan: Plan, source: ModelSource, rows: Batch, *, evaluation_rows: int = 0, routing: Routing | None = None
) -> Trace:
    """The trace of the run that :func:`memtrain.trace.simulate.simulate` does without data, with data on the processor.

    Args:
        source: the model; a module of the user's is trained.
        rows: the rows of one effective batch, stacked; ``job.global_batch_size`` of them.
        evaluation_rows: number of rows that the run evaluates on.
        routing: how the choices of a router are made to fall; as the weights have it without.

    Raises:
        ValueError: the plan does not suit the job or the model.
    """
    torch.manual_seed(job.seed)
    recorder = Recorder() if routing is None else _RoutedRecorder(routing)
    with recorder, recorder.phase(Phase.LOAD):
        if isinstance(source, FromModule):
            # It is there before anything of it is packed.
            for tensor in (*source.module.parameters(), *source.module.buffers()):
                recorder.track(tensor)
        model = load_model(source, job)
    recorder.watch(model, vocabulary_of(model))
    run = prepare(job, plan, model)

    def new_batch(count: int) -> Batch:
        # Filled, not stacked, so that the operator is the simulation's.
        return {name: torch.empty((count, *t.shape[1:]), dtype=t.dtype).copy_(t[:count]) for name, t in rows.items()}

    with recorder:
        record(run, recorder, new_batch, job, plan, evaluation_rows)
        return recorder.trace()


def events(trace: Trace, *, evaluation: bool = True) -> list[Compared]:
    """What is compared of a trace, from the first step on, with the evaluation after the steps or without it.

    Frees without an allocation between them have no order of their own (C++ frees the members of a hash map), and scratch
    inside a kernel is seen by no recorder.
    """
    # x[i] = 3 makes its scalar below dispatch on a processor and above it elsewhere.
    scalars = {event.storage for event in trace.events if event.operator == "scalar_tensor" and event.bytes <= 8}
    # Recomputation saves the generator's state, made below dispatch; the simulation counts it all the same.
    state_bytes = torch.get_rng_state().nbytes
    scalars |= {event.storage for event in trace.events if event.operator == "given" and event.bytes == state_bytes}
    ordered: list[Compared] = []
    frees: list[Compared] = []
    stop = len(trace.events) if evaluation else trace.section("evaluate")[0]
    for event in trace.events[trace.section("step 1")[0] : stop]:
        if event.kind is Kind.WORKSPACE or event.storage in scalars:
            continue
        here = "" if event.place == DEVICE else f" on the {event.place.memory}"
        if event.bytes < 0:
            frees.append((event.bytes, event.operator + here))
        else:
            ordered += [*sorted(frees), (event.bytes, event.operator + here)]
            frees = []
    return ordered + sorted(frees)


def lines(listed: Iterable[Compared]) -> list[str]:
    """Events as text, one a line."""
    return [f"{size:>10} {operator}" for size, operator in listed]


def differences(real: Iterable[Compared], simulated: Iterable[Compared]) -> list[str]:
    """The events that only one of the two has in its place: ``-`` the real trace's, ``+`` the simulated one's."""
    found = difflib.unified_diff(lines(real), lines(simulated), lineterm="", n=0)
    return [line for line in found if not line.startswith(("---", "+++", "@@"))]
