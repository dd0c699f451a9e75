"""Live bytes over a trace: when the peak is, what it is made of and who holds it. Pure Python, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from memtrain.trace.event import DEVICE, Event, Kind, Phase, Place, Trace

_BLOCK_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Owner:
    """Bytes at the peak that one operator of one module (or of that module in every block) allocated in one phase."""

    bytes: int
    kind: Kind
    phase: Phase
    module: str
    operator: str
    storages: int


@dataclass(frozen=True)
class MemoryTimeline:
    """The live bytes of one place over the events of a trace."""

    trace: Trace
    place: Place = DEVICE

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events at this place."""
        return tuple(event for event in self.trace.events if event.place == self.place)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Live bytes after each event.

        Raises:
            ValueError: a storage is freed that is not live, or with another size than it was allocated with.
        """
        live: dict[int, int] = {}
        totals, total = [], 0
        for position, event in enumerate(self.events):
            if event.bytes < 0:
                if live.pop(event.storage, None) != -event.bytes:
                    raise ValueError(
                        f"event {position} frees {-event.bytes} bytes of storage {event.storage}, which is not live with that size."
                    )
            else:
                live[event.storage] = event.bytes
            total += event.bytes
            totals.append(total)
        return tuple(totals)

    @cached_property
    def peak_position(self) -> int:
        """Position of the first event after which the live bytes are at their peak; -1 where nothing was allocated."""
        return max(range(len(self.totals)), key=self.totals.__getitem__) if self.totals else -1

    @property
    def peak_bytes(self) -> int:
        """Peak of the live bytes."""
        return self.totals[self.peak_position] if self.totals else 0

    @property
    def peak_event(self) -> Event:
        """The allocation that reaches the peak."""
        return self.events[self.peak_position]

    def live_at(self, position: int) -> list[Event]:
        """The allocations that are live after the event at ``position``."""
        live: dict[int, Event] = {}
        for event in self.events[: position + 1]:
            if event.bytes < 0:
                del live[event.storage]
            else:
                live[event.storage] = event
        return list(live.values())

    def by_kind(self, position: int | None = None) -> dict[Kind, int]:
        """Live bytes of each kind after the event at ``position`` (the peak by default); kinds of zero bytes left out."""
        sums: dict[Kind, int] = {}
        for event in self.live_at(self.peak_position if position is None else position):
            sums[event.kind] = sums.get(event.kind, 0) + event.bytes
        return {kind: sums[kind] for kind in Kind if sums.get(kind)}

    def owners(self) -> list[Owner]:
        """Who holds the peak, largest first; the same module of every block is one owner, ``model.layers.*.mlp``."""
        groups: dict[tuple[Kind, Phase, str, str], list[Event]] = {}
        for event in self.live_at(self.peak_position):
            family = _BLOCK_NUMBER.sub(".*", event.module)
            groups.setdefault((event.kind, event.phase, family, event.operator), []).append(event)
        owners = []
        for (kind, phase, family, operator), members in groups.items():
            paths = {event.module for event in members}
            module = paths.pop() if len(paths) == 1 else family
            owners.append(Owner(sum(event.bytes for event in members), kind, phase, module, operator, len(members)))
        return sorted(owners, key=lambda owner: -owner.bytes)

    def peak_by_phase(self) -> dict[Phase, int]:
        """Peak of the live bytes within each phase, in the order in which the phases first occur.

        A phase may allocate at other places only; what is live meanwhile is its peak here.
        """
        peaks: dict[Phase, int] = {}
        totals = iter(self.totals)
        total = 0
        for event in self.trace.events:
            if event.place == self.place:
                total = next(totals)
            peaks[event.phase] = max(peaks.get(event.phase, 0), total)
        return peaks

    def curves(self) -> Iterator[tuple[Event, dict[Kind, int]]]:
        """Each event with the live bytes of every kind after it; the dictionary is reused, so copy what is kept."""
        sums = dict.fromkeys(Kind, 0)
        for event in self.events:
            sums[event.kind] += event.bytes
            yield event, sums
