"""What the planner decided and how it turned out, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memtrain.device import Cpu, Device
from memtrain.job import Budget, Job
from memtrain.memory.footprint import Footprint
from memtrain.metrics import RunFolder
from memtrain.plan import Plan, to_dict
from memtrain.trace.event import Trace


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A plan that is faster than the chosen one but was not chosen.

    Attributes:
        plan: the plan.
        reason: one sentence.
        total_device_bytes: what it would take of the device, or None where the plan was refused.
        is_bound: whether that is only what it takes at the least, found without simulating it.
    """

    plan: Plan
    reason: str
    total_device_bytes: int | None = None
    is_bound: bool = False


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The fastest plan that fits.

    Attributes:
        job, budget, device: what was asked.
        given: the fields of the plan that were fixed.
        allocator: how a card's allocator was set, in the words of PYTORCH_ALLOC_CONF; empty for torch's defaults.
        plan: the choice.
        resumed_step: the step of the checkpoint whose plan it is; None where it was chosen.
        footprint: its predicted bytes.
        trace: the simulated run behind the footprint.
        step_seconds: predicted seconds per optimizer step.
        rejected: the plans before it, fastest first.
        planning_seconds: time the choice took.
    """

    job: Job
    budget: Budget
    device: Device
    given: tuple[str, ...] = ()
    allocator: str = ""
    plan: Plan
    resumed_step: int | None = None
    footprint: Footprint
    trace: Trace
    step_seconds: float
    rejected: tuple[Rejected, ...]
    planning_seconds: float

    def write(self, folder: RunFolder) -> None:
        """Write ``plan.yaml`` and ``prediction.json``."""
        folder.write_yaml("plan.yaml", to_dict(self.plan))
        folder.write_json("prediction.json", self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data, for ``prediction.json``."""
        return {
            **self.footprint.to_dict(),
            "budget_bytes": self.budget.device_bytes,
            "host_budget_bytes": self.budget.host_bytes,
            "step_seconds": self.step_seconds,
            "plan": to_dict(self.plan),
            "device": self.device.name,
            "threads": self.device.threads if isinstance(self.device, Cpu) else None,
            "allocator": self.allocator,
            "assumed": list(self.trace.assumed),
            "rejected": [
                {
                    "plan": to_dict(other.plan),
                    "reason": other.reason,
                    "total_device_bytes": other.total_device_bytes,
                    "is_bound": other.is_bound,
                }
                for other in self.rejected
            ],
        }


class NoPlanFits(ValueError):
    """No plan of the job fits the budget; the message names the smallest plan and the missing bytes."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison, predicted or measured.

    Attributes:
        peak_allocated_bytes, peak_reserved_bytes, total_device_bytes: over the whole run, as in a Footprint.
        by_kind: bytes at the peak of weights, gradients, optimizer state, and of activations and temporaries together:
            a measurement cannot tell those last two apart. Empty where it tells no kinds at all, as a card's counters.
        by_phase: peak within each phase.
        step_seconds: seconds per optimizer step (measured: the median).
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    total_device_bytes: int
    by_kind: dict[str, int]
    by_phase: dict[str, int]
    step_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The side as plain data, for JSON."""
        return {
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "total_device_bytes": self.total_device_bytes,
            "by_kind": dict(self.by_kind),
            "by_phase": dict(self.by_phase),
            "step_seconds": self.step_seconds,
        }


@dataclass(frozen=True)
class Comparison:
    """Predicted beside measured."""

    predicted: Side
    measured: Side

    @property
    def peak_error(self) -> float:
        """(predicted - measured) / measured of the peak, as a fraction."""
        measured = self.measured.peak_allocated_bytes
        return (self.predicted.peak_allocated_bytes - measured) / measured

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data, for ``comparison.json``."""
        return {"predicted": self.predicted.to_dict(), "measured": self.measured.to_dict(), "peak_error": self.peak_error}
