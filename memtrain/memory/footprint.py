"""What a plan takes of the device: the numbers that are compared with the budget and, later, with the measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memtrain.job import Budget
from memtrain.memory.timeline import MemoryTimeline, Owner
from memtrain.trace.event import Kind, Phase, Trace


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on the device.

    Attributes:
        peak_allocated_bytes: peak of the bytes that tensors and kernel workspaces hold.
        by_kind: bytes of each kind at that peak; they sum to it.
        by_phase: peak within each phase of the run.
        peak_phase, peak_module, peak_operator: where the peak is reached.
        owners: who holds the peak, largest first.
    """

    peak_allocated_bytes: int
    by_kind: dict[Kind, int]
    by_phase: dict[Phase, int]
    peak_phase: Phase
    peak_module: str
    peak_operator: str
    owners: tuple[Owner, ...] = ()

    def fits(self, budget: Budget) -> bool:
        """Whether the peak stays within the budget."""
        return self.peak_allocated_bytes <= budget.device_bytes

    def missing_bytes(self, budget: Budget) -> int:
        """Bytes by which the peak exceeds the budget; 0 where it fits."""
        return max(0, self.peak_allocated_bytes - budget.device_bytes)

    def to_dict(self) -> dict[str, Any]:
        """The footprint as plain data, for JSON."""
        return {
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_phase": str(self.peak_phase),
            "peak_module": self.peak_module,
            "peak_operator": self.peak_operator,
            "by_kind": {str(kind): size for kind, size in self.by_kind.items()},
            "by_phase": {str(phase): size for phase, size in self.by_phase.items()},
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


def footprint(trace: Trace, owners: int = 10) -> Footprint:
    """The footprint of a trace, with its ``owners`` largest owners.

    Raises:
        ValueError: the trace allocates nothing.
    """
    timeline = MemoryTimeline(trace)
    if not timeline.totals:
        raise ValueError("the trace holds no allocation on the device, so it has no footprint.")
    peak = timeline.peak_event
    by_phase = timeline.peak_by_phase()
    if trace.marks and trace.marks[-1][0] == Phase.SAVE:
        # Saving copies tensors to the file one by one and may allocate nothing at all, which leaves no event.
        by_phase.setdefault(Phase.SAVE, timeline.totals[-1])
    return Footprint(
        peak_allocated_bytes=timeline.peak_bytes,
        by_kind=timeline.by_kind(),
        by_phase=by_phase,
        peak_phase=peak.phase,
        peak_module=peak.module,
        peak_operator=peak.operator,
        owners=tuple(timeline.owners()[:owners]),
    )
