"""Measuring on a processor: a trace from the profiler's allocator events.

The profiler reports every allocation and free of torch's CPU allocator with its address, kernel scratch memory included.
It shares nothing with the recorder that predicted (rule 9). What was allocated before a window opened it cannot know, so
a window begins with the tensors that are known to be there: weights, gradients and optimizer state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from memtrain.memory.timeline import MemoryTimeline
from memtrain.models.quantize import scales
from memtrain.trace.event import Event, Kind, Phase, Trace

_UPDATE = "memtrain::update"


@dataclass(slots=True)
class _Allocation:
    """One allocator event: a birth or a death at an address."""

    address: int
    bytes: int
    phase: Phase
    operator: str


class MemoryProfiler:
    """Measures windows of a run. Each window gives a trace that starts with what was live before it.

    Args:
        held: the tensors known to be live, by kind; asked at the start and at the end of each window.

    Attributes:
        peak_bytes: peak of the live bytes over all windows so far.
    """

    def __init__(self, held: Callable[[], Iterator[tuple[Kind, Tensor]]]) -> None:
        self.held = held
        self._windows: list[tuple[str, int, list[Event]]] = []  # name, storages held before it, events
        self._numbers = 0
        self.peak_bytes = 0

    @contextmanager
    def window(self, name: str, phase: Phase) -> Iterator[None]:
        """Measure what happens inside, as a section ``name``.

        Args:
            phase: of everything that is neither backward nor update.
        """
        # Kineto prints a line at each start and stop unless told not to, before its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        before = _addresses(self.held())
        gradients: list[dict[int, int]] = []

        def note_gradients(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            gradients.append({address: size for address, (_, size) in _addresses((Kind.GRADIENT, g) for g in found).items()})

        hook = register_optimizer_step_pre_hook(note_gradients)
        try:
            # acc_events only keeps older torch from warning that it is not set; there is one cycle.
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
                yield
        finally:
            hook.remove()
        after = _addresses(self.held())
        happened = _flatten(profiler.profiler.kineto_results.experimental_event_tree(), phase)
        events = self._events(before, happened, after, gradients, phase)
        self._windows.append((name, len(before), events))
        self.peak_bytes = max(self.peak_bytes, MemoryTimeline(Trace(tuple(events))).peak_bytes)

    def in_update(self, update: Callable[[], Any]) -> Callable[[], Any]:
        """``update``, marked so that its allocations count as the update's."""

        def marked() -> Any:
            with record_function(_UPDATE):
                return update()

        return marked

    def traces(self) -> dict[str, Trace]:
        """A trace per window, in order; the last of those with one name."""
        return {name: Trace(tuple(events), marks=(("held", 0), (name, held))) for name, held, events in self._windows}

    def _events(
        self,
        before: dict[int, tuple[Kind, int]],
        happened: list[_Allocation | str],
        after: dict[int, tuple[Kind, int]],
        gradients: list[dict[int, int]],
        phase: Phase,
    ) -> list[Event]:
        """Storages from addresses, and their kinds from which tensor has the address at a known moment."""
        numbers: dict[int, int] = {}
        kinds: dict[int, Kind] = {}
        raw: list[tuple[int, int, Phase, str]] = []
        for address, (kind, size) in before.items():
            numbers[address] = self._number()
            kinds[numbers[address]] = kind
            raw.append((numbers[address], size, phase, "given"))
        updates = iter(gradients)
        for item in happened:
            if isinstance(item, str):
                for address in next(updates, {}):
                    if address in numbers:
                        kinds.setdefault(numbers[address], Kind.GRADIENT)
            elif item.bytes > 0:
                numbers[item.address] = self._number()
                raw.append((numbers[item.address], item.bytes, item.phase, item.operator))
            elif item.address in numbers:
                raw.append((numbers.pop(item.address), item.bytes, item.phase, "free"))
        for address, (kind, _) in after.items():
            if address in numbers:
                kinds.setdefault(numbers[address], kind)
        return [
            Event(storage, size, kinds.get(storage, Kind.TEMPORARY), when, operator) for storage, size, when, operator in raw
        ]

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


def held_by(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, buckets: Sequence[Tensor] = ()
) -> Iterator[tuple[Kind, Tensor]]:
    """The tensors that live between steps; ``buckets`` are there for gradients."""
    for tensor in (*model.parameters(), *model.buffers(), *(scale for _, scale in scales(model))):
        yield Kind.WEIGHT, tensor
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield Kind.GRADIENT, parameter.grad
    for bucket in buckets:
        yield Kind.GRADIENT, bucket
    if optimizer is not None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    yield Kind.OPTIMIZER_STATE, value


def held_bytes(held: Iterator[tuple[Kind, Tensor]]) -> int:
    """Bytes of tensors, shared storages once."""
    return sum(size for _, size in _addresses(held).values())


def _addresses(tensors: Iterator[tuple[Kind, Tensor]]) -> dict[int, tuple[Kind, int]]:
    found: dict[int, tuple[Kind, int]] = {}
    for kind, tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), (kind, storage.nbytes()))
    return found


def _flatten(tree: Any, phase: Phase) -> list[_Allocation | str]:
    """The allocator events in order of time, with a string where an optimizer begins to update."""
    timed: list[tuple[int, int, _Allocation | str]] = []
    pending = [(node, phase, "") for node in tree]
    while pending:
        node, inherited, operator = pending.pop()
        fields = node.extra_fields
        if node.name == "[memory]":
            timed.append((node.start_time_ns, len(timed), _Allocation(fields.ptr, fields.alloc_size, inherited, operator)))
            continue
        if node.name.startswith("Optimizer.step#"):
            inherited = Phase.UPDATE
            timed.append((node.start_time_ns, len(timed), node.name))
        elif node.name == _UPDATE:
            inherited = Phase.UPDATE
        elif node.name.startswith("autograd::engine::evaluate_function"):
            inherited = Phase.BACKWARD
        elif node.name.startswith("aten::"):
            operator = node.name.removeprefix("aten::")
        # Children are visited in order, so that events of one nanosecond stay in order.
        pending.extend((child, inherited, operator) for child in reversed(node.children))
    timed.sort(key=lambda entry: entry[:2])
    return [item for _, _, item in timed]
