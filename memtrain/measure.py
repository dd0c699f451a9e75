"""Measuring a run, window by window: by torch's profiler on a processor, by its allocator's counters on a card.

Neither shares anything with the recorder that predicted (rule 9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from memtrain.device import Cuda, Device
from memtrain.planner.choice import Side
from memtrain.planner.compare import FORWARD_AND_BACKWARD, counted_side, side_of
from memtrain.trace.event import Kind, Phase, Trace
from memtrain.trace.profile import MemoryProfiler, held_bytes

Held = Callable[[], Iterator[tuple[Kind, Tensor]]]


class Meter(Protocol):
    """What the Trainer measures with.

    Attributes:
        peak_bytes: peak of the allocated bytes over all windows so far.
    """

    peak_bytes: int

    def window(self, name: str, phase: Phase) -> AbstractContextManager[None]:
        """Measure what happens inside, as a section ``name``; what is neither backward nor update is ``phase``."""
        ...

    def in_update(self, update: Callable[[], Any]) -> Callable[[], Any]:
        """``update``, told apart from what is before it."""
        ...

    def held_bytes(self) -> int:
        """Bytes allocated on the device now."""
        ...

    def side(self, step_seconds: float) -> Side:
        """What was measured so far; ``step_seconds`` is the median of a step."""
        ...

    def trace(self, name: str) -> Trace | None:
        """The trace of the last window of that name, where one is known."""
        ...

    def note_failure(self) -> None:
        """Count the peak of what has just failed, inside a window or not, where it can be told."""
        ...


def meter(device: Device, held: Held) -> Meter:
    """The meter of a device.

    Args:
        held: the tensors known to be live, by kind; asked at the start and at the end of each window.
    """
    return CardMeter(device) if isinstance(device, Cuda) else ProcessorMeter(held)


class ProcessorMeter(MemoryProfiler):
    """torch's profiler, which tells every allocation with its address."""

    def held_bytes(self) -> int:
        """Bytes of weights, gradients and state."""
        return held_bytes(self.held())

    def side(self, step_seconds: float) -> Side:
        """The windows, of which the highest counts."""
        return side_of(self.traces().values(), step_seconds)

    def trace(self, name: str) -> Trace | None:
        """The trace of the last window of that name."""
        return self.traces().get(name)

    def note_failure(self) -> None:
        """Nothing: a window that is broken off tells nothing."""


class CardMeter:
    """The counters of the card's caching allocator: exact peaks, and nothing about what they are made of."""

    def __init__(self, device: Cuda) -> None:
        self._context_bytes = device.context_bytes
        self._by_phase: dict[str, int] = {}
        self._reserved = 0
        self.peak_bytes = 0

    @contextmanager
    def window(self, name: str, phase: Phase) -> Iterator[None]:
        """Measure what happens inside as ``phase``; of a step only what :meth:`in_update` tells apart."""
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        # What is after an update is left of it, and no phase.
        if phase is not Phase.FORWARD:
            self._note(str(phase))

    def in_update(self, update: Callable[[], Any]) -> Callable[[], Any]:
        """``update``, measured by itself; what is before it are forward and backward, which have one peak."""

        def measured() -> Any:
            self._note(FORWARD_AND_BACKWARD)
            torch.cuda.reset_peak_memory_stats()
            result = update()
            self._note(str(Phase.UPDATE))
            return result

        return measured

    def held_bytes(self) -> int:
        """Bytes of all blocks that are handed out."""
        return torch.cuda.memory_allocated()

    def side(self, step_seconds: float) -> Side:
        """The highest of all windows; the context is the description's, which nothing inside the process can measure."""
        return counted_side(self._by_phase, self._reserved, self._reserved + self._context_bytes, step_seconds)

    def trace(self, name: str) -> Trace | None:
        """None: counters tell no events."""
        return None

    def note_failure(self) -> None:
        """The peak since the counters began anew."""
        self._note(FORWARD_AND_BACKWARD)

    def _note(self, phase: str) -> None:
        peak = torch.cuda.max_memory_allocated()
        self._by_phase[phase] = max(self._by_phase.get(phase, 0), peak)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        self.peak_bytes = max(self.peak_bytes, peak)
