"""What a plan takes of device and host: the numbers that are compared with the budget and, later, with the measurement.

Three numbers of the device, each with one name everywhere. *Allocated* is what tensors and kernel workspaces hold.
*Reserved* is what torch's caching allocator has taken from the device to serve them; freed blocks stay in it. *Total* is
what the device has to have: reserved, the CUDA context, and the pages of managed memory at work. A processor has no such
allocator and no context, so the three are one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memtrain.device import Cuda, Device
from memtrain.job import Budget
from memtrain.memory.allocator_config import AllocatorConfig
from memtrain.memory.replay import replay
from memtrain.memory.timeline import MemoryTimeline, Owner
from memtrain.trace.event import DEVICE, HOST, MANAGED, Kind, Phase, Trace


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on the device and, beside a card, on the host.

    Attributes:
        peak_allocated_bytes: peak of the bytes that tensors and kernel workspaces hold, in blocks of the allocator.
        peak_reserved_bytes: peak of the bytes that the allocator holds of the device.
        total_device_bytes: peak_reserved_bytes, the context and the managed memory at work.
        host_bytes: peak of the host's memory, managed memory included; 0 on a processor, whose memory is the device's.
        by_kind: bytes of each kind at the allocated peak; they sum to it.
        by_phase: allocated peak within each phase of the run.
        host_by_kind: bytes of each kind at the peak of the host.
        peak_phase, peak_module, peak_operator: where the allocated peak is reached.
        owners: who holds it, largest first.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    total_device_bytes: int
    host_bytes: int = 0
    by_kind: dict[Kind, int]
    by_phase: dict[Phase, int]
    host_by_kind: dict[Kind, int] = field(default_factory=dict)
    peak_phase: Phase
    peak_module: str
    peak_operator: str
    owners: tuple[Owner, ...] = ()

    def fits(self, budget: Budget) -> bool:
        """Whether both peaks stay within the budget."""
        return not self.missing_bytes(budget) and not self.missing_host_bytes(budget)

    def missing_bytes(self, budget: Budget) -> int:
        """Bytes by which the device's total exceeds the budget; 0 where it fits."""
        return max(0, self.total_device_bytes - budget.device_bytes)

    def missing_host_bytes(self, budget: Budget) -> int:
        """Bytes by which the host's exceed the budget; 0 where they fit or nothing bounds them."""
        return 0 if budget.host_bytes is None else max(0, self.host_bytes - budget.host_bytes)

    def to_dict(self) -> dict[str, Any]:
        """The footprint as plain data, for JSON."""
        return {
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "total_device_bytes": self.total_device_bytes,
            "host_bytes": self.host_bytes,
            "peak_phase": str(self.peak_phase),
            "peak_module": self.peak_module,
            "peak_operator": self.peak_operator,
            "by_kind": {str(kind): size for kind, size in self.by_kind.items()},
            "by_phase": {str(phase): size for phase, size in self.by_phase.items()},
            "host_by_kind": {str(kind): size for kind, size in self.host_by_kind.items()},
            "owners": [
                {
                    "bytes": owner.bytes,
                    "kind": str(owner.kind),
                    "phase": str(owner.phase),
                    "module": owner.module,
                    "operator": owner.operator,
                    "storages": owner.storages,
                }
                for owner in self.owners
            ],
        }


def footprint(
    trace: Trace, device: Device | None = None, allocator: AllocatorConfig | None = None, *, owners: int = 10
) -> Footprint:
    """The footprint of a trace, with its ``owners`` largest owners.

    Args:
        device: a card replays its allocator, and the bytes are those of its blocks; without one they are the trace's.
        allocator: how the card's allocator is set; torch's defaults by default.

    Raises:
        ValueError: the trace allocates nothing.
    """
    reserved: int | None = None
    beside = 0
    if isinstance(device, Cuda):
        replayed = replay(trace, allocator or AllocatorConfig())
        trace, reserved = replayed.trace, replayed.peak_reserved_bytes
        beside = device.context_bytes + _managed_at_work(trace)
    timeline = MemoryTimeline(trace)
    if not timeline.totals:
        raise ValueError("the trace holds no allocation on the device, so it has no footprint.")
    host = MemoryTimeline(Trace(tuple(event._replace(place=HOST) for event in trace.events if event.place is not DEVICE)), HOST)
    peak = timeline.peak_event
    by_phase = timeline.peak_by_phase()
    if trace.marks and trace.marks[-1][0] == Phase.SAVE:
        # Saving copies tensors to the file one by one and may allocate nothing at all, which leaves no event.
        by_phase.setdefault(Phase.SAVE, timeline.totals[-1])
    if reserved is None:
        reserved = timeline.peak_bytes
    return Footprint(
        peak_allocated_bytes=timeline.peak_bytes,
        peak_reserved_bytes=reserved,
        total_device_bytes=reserved + beside,
        host_bytes=host.peak_bytes,
        by_kind=timeline.by_kind(),
        by_phase=by_phase,
        host_by_kind=host.by_kind() if host.totals else {},
        peak_phase=peak.phase,
        peak_module=peak.module,
        peak_operator=peak.operator,
        owners=tuple(timeline.owners()[:owners]),
    )


def _managed_at_work(trace: Trace) -> int:
    """Managed memory that must be on the card at once: what an update of one module touches."""
    held: dict[str, int] = {}
    for event in trace.events:
        if event.place == MANAGED and event.bytes > 0:
            held[event.module] = held.get(event.module, 0) + event.bytes
    return max(held.values(), default=0)
