"""What a published run is in memtrain's words, and what is predicted of it.

Importing this loads neither torch nor transformers, so that the process which only hands out work starts at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrain.device import Device
    from memtrain.job import Job
    from memtrain.models.build import ModelSource
    from memtrain.plan import Plan
    from memtrain.trace.simulate import RowShapes


class NotExpressible(ValueError):
    """A record that cannot be told as a run of memtrain; the message says what stands in the way."""


@dataclass(frozen=True)
class PublishedRun:
    """Everything that ``simulate`` takes.

    Attributes:
        updates: False where forward and backward alone were measured.
        assumed: what the record does not say and was taken to be so, a sentence each.
    """

    job: Job
    plan: Plan
    source: ModelSource
    rows: RowShapes
    device: Device
    updates: bool = True
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """What the simulation of a record says; without bytes, why there is none.

    Attributes:
        id: of the record.
        allocated_bytes, reserved_bytes, total_bytes: peaks, as ``memtrain.memory.footprint`` names them.
        usable_bytes: of the card.
        peak_phase, peak_module: where the allocated peak is.
        by_kind: bytes of each kind there.
        assumed: what the record or the simulation had to take to be so.
        seconds: of the simulation and the allocator's replay.
        versions: of the libraries that it was made with.
        skipped: why the record cannot be told.
        failed: the error with which telling or simulating it ended.
    """

    id: str
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    total_bytes: int = 0
    usable_bytes: int = 0
    peak_phase: str = ""
    peak_module: str = ""
    by_kind: Mapping[str, int] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    skipped: str = ""
    failed: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data."""
        return asdict(self)

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Prediction:
        """The prediction that ``to_dict`` wrote."""
        return cls(**{**written, "assumed": tuple(written["assumed"])})
