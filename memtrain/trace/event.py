"""What a training step does to memory: allocations and frees in order, each with who, when and what for.

Three producers write traces (a data-less run, a real run, a profiler or CUDA snapshot); everything after a trace is pure
Python without torch (rule 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a storage holds, in order of precedence: a storage that is several of these is the first (rule in decide_kinds)."""

    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "input"
    LOGITS = "logits"
    SAVED_ACTIVATION = "saved activation"
    WORKSPACE = "workspace"
    TEMPORARY = "temporary"


class Phase(StrEnum):
    """The part of a run in which something happens."""

    LOAD = "load"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    FIRST_UPDATE = "first update"
    UPDATE = "update"
    EVALUATE = "evaluate"
    SAVE = "save"


class Memory(StrEnum):
    """Which memory of the machine a storage lies in.

    Managed memory (cudaMallocManaged) belongs to host and card: it lies in the host's memory, and what a kernel touches
    is moved to the card for as long as there is room.
    """

    DEVICE = "device"
    HOST = "host"
    MANAGED = "managed"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a storage lies: a memory, and which device's."""

    memory: Memory
    index: int = 0


DEVICE = Place(Memory.DEVICE)
HOST = Place(Memory.HOST)
MANAGED = Place(Memory.MANAGED)


class Event(NamedTuple):
    """One allocation (``bytes`` above 0) or free (below 0).

    Attributes:
        storage: number of the storage, never reused within a trace; its free carries the same number.
        bytes: the storage's size, negative when it is freed.
        kind: what the storage holds; decided when the trace ends, the same in both of its events.
        phase: when this event happens.
        operator: the operator that allocated the storage, ``free`` for a free.
        module: path of the module that allocated the storage; in backward, of the module whose gradient is computed.
        place: where the storage lies.
        stream: number of the stream whose work allocated it.
    """

    storage: int
    bytes: int
    kind: Kind
    phase: Phase
    operator: str
    module: str = ""
    place: Place = DEVICE
    stream: int = 0


@dataclass(slots=True)
class Work:
    """What the operators of one phase compute and move.

    Attributes:
        flops: floating-point operations of matrix products and attention (a multiply-add is two).
        bytes: bytes of all operands and results.
        operators: number of operators dispatched.
    """

    flops: float = 0.0
    bytes: float = 0.0
    operators: float = 0.0


@dataclass(frozen=True)
class Trace:
    """Everything one run did to memory.

    Attributes:
        events: allocations and frees in order.
        work: what each phase computed, for the cost model.
        assumed: what a data-less run could not know and how it answered; printed with the prediction.
        updated: paths of the parameters that got a gradient.
        marks: named sections of the run ("load", "evaluate", "step 1", …) as (name, position of the first event).
        why_math: why no fused kernel took an attention, a sentence for each kind of call; of a data-less run on a card.
    """

    events: tuple[Event, ...]
    work: Mapping[Phase, Work] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    updated: frozenset[str] = frozenset()
    marks: tuple[tuple[str, int], ...] = ()
    why_math: tuple[str, ...] = ()

    def section(self, name: str) -> tuple[int, int]:
        """Positions of the first event of the last section called ``name`` and of the first event after it.

        Raises:
            KeyError: no section has that name.
        """
        starts = [position for position, (mark, _) in enumerate(self.marks) if mark == name]
        if not starts:
            raise KeyError(name)
        following = starts[-1] + 1
        stop = self.marks[following][1] if following < len(self.marks) else len(self.events)
        return self.marks[starts[-1]][1], stop
