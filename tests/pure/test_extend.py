"""Traces of two micro-batch sizes give the third, exactly, or are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.memory.extend import NotAlike, extend
from memtrain.trace.event import DEVICE, HOST, MANAGED, Event, Kind, Phase, Place, Trace, Work


class Storage(NamedTuple):
    """A storage of ``fixed + per_row × micro-batch`` bytes, allocated in one phase and freed in another or never."""

    fixed: int
    per_row: int
    kind: Kind
    born: Phase
    freed: Phase | None
    module: str
    place: Place = DEVICE


storages = st.builds(
    Storage,
    fixed=st.integers(0, 100),
    per_row=st.integers(0, 50),
    kind=st.sampled_from(Kind),
    born=st.sampled_from(list(Phase)[:3]),
    freed=st.sampled_from([None, *list(Phase)[3:]]),
    module=st.sampled_from(["layers.0", "layers.1"]),
    place=st.sampled_from([DEVICE, HOST, MANAGED]),
).filter(lambda storage: storage.fixed + storage.per_row > 0)


def trace_at(size: int, described: Sequence[Storage], first_number: int = 0) -> Trace:
    """The trace at a micro-batch size, without storages of no bytes."""
    events: list[Event] = []
    marks = []
    for phase in Phase:
        marks.append((str(phase), len(events)))
        for number, storage in enumerate(described, first_number):
            held = storage.fixed + storage.per_row * size
            if held and phase is storage.born:
                events.append(Event(number, held, storage.kind, phase, "mm", storage.module, storage.place))
            if held and phase is storage.freed:
                events.append(Event(number, -held, storage.kind, phase, "free", storage.module, storage.place))
    return Trace(tuple(events), work={Phase.FORWARD: Work(1.0, 2.0, 3.0)}, assumed=("one",), marks=tuple(marks))


@given(
    described=st.lists(storages, max_size=12),
    sizes=st.lists(st.integers(1, 64), min_size=3, max_size=3, unique=True),
    first_number=st.integers(0, 5),
)
def test_an_extended_trace_is_the_trace_of_that_size(described: list[Storage], sizes: list[int], first_number: int) -> None:
    first, second, size = sizes
    extended = extend(trace_at(first, described), first, trace_at(second, described, first_number), second, size)
    assert extended == replace(trace_at(size, described), work={})


def test_a_storage_of_no_bytes_at_the_size_vanishes_and_the_marks_move_up() -> None:
    described = [
        Storage(8, 0, Kind.WEIGHT, Phase.LOAD, None, "head"),
        Storage(-4, 4, Kind.TEMPORARY, Phase.LOAD, Phase.BACKWARD, "head"),
        Storage(0, 2, Kind.LOGITS, Phase.FORWARD, Phase.BACKWARD, "head"),
    ]
    extended = extend(trace_at(2, described), 2, trace_at(3, described), 3, 1)
    assert [event.bytes for event in extended.events] == [8, 2, -2]
    assert extended == replace(trace_at(1, described), work={})


ONE = Storage(8, 4, Kind.SAVED_ACTIVATION, Phase.FORWARD, Phase.BACKWARD, "layers.0")
TWO = Storage(8, 4, Kind.SAVED_ACTIVATION, Phase.FORWARD, Phase.BACKWARD, "layers.1")


def test_traces_of_different_length_are_refused_with_both_lengths() -> None:
    with pytest.raises(NotAlike, match=r"^4 events at micro-batch 2, 2 at 3\.$"):
        extend(trace_at(2, [ONE, TWO]), 2, trace_at(3, [ONE]), 3, 4)


@pytest.mark.parametrize(
    "difference",
    [
        {"operator": "add"},
        {"module": "layers.1"},
        {"phase": Phase.RECOMPUTE},
        {"kind": Kind.LOGITS},
        {"place": HOST},
        {"stream": 1},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_traces_of_different_operations_are_refused_with_the_first_that_differs(difference: dict[str, Any]) -> None:
    first, second = trace_at(2, [ONE]), trace_at(3, [ONE])
    changed = second.events[0]._replace(**difference)
    message = rf"^mm of layers\.0 at micro-batch 2 meets {changed.operator} of {changed.module}\.$"
    with pytest.raises(NotAlike, match=message):
        extend(first, 2, replace(second, events=(changed, *second.events[1:])), 3, 4)


def test_traces_that_free_other_storages_are_refused() -> None:
    twice = [ONE, ONE]
    allocated, (freed, other) = trace_at(3, twice).events[:2], trace_at(3, twice).events[2:]
    swapped = replace(trace_at(3, twice), events=(*allocated, other, freed))
    with pytest.raises(NotAlike, match=r"^free of layers\.0 at micro-batch 2 meets free of layers\.0\.$"):
        extend(trace_at(2, twice), 2, swapped, 3, 4)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_storage_that_is_not_affine_in_whole_bytes_is_refused(size: int) -> None:
    first, second = trace_at(2, [ONE]), trace_at(4, [ONE])
    born = second.events[0]._replace(bytes=25)
    with pytest.raises(NotAlike, match=r"^mm takes 16 and 25 bytes, which is not affine in the micro-batch\.$"):
        extend(first, 2, replace(second, events=(born, *second.events[1:])), 4, size)


def test_a_storage_that_would_be_smaller_than_nothing_is_refused() -> None:
    shrinking = [Storage(-8, 4, Kind.TEMPORARY, Phase.FORWARD, Phase.BACKWARD, "head")]
    with pytest.raises(NotAlike, match=r"^mm takes 4 and 8 bytes, which is not affine in the micro-batch\.$"):
        extend(trace_at(3, shrinking), 3, trace_at(4, shrinking), 4, 1)


def test_a_refusal_is_a_value_error() -> None:
    assert issubclass(NotAlike, ValueError)
