"""The laws of a timeline, held over random lives of storages, and its answers for one made by hand (G7)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.memory.timeline import MemoryTimeline, Owner
from memtrain.trace.event import DEVICE, HOST, MANAGED, Event, Kind, Phase, Place, Trace

PLACES = (DEVICE, HOST, MANAGED)
MODULES = ["", "head", "layers.0.mlp", "layers.1.mlp", "layers.1.norm"]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Storages that are allocated and freed in any order, at two places; each is freed at most once, some never."""
    events: list[Event] = []
    live: list[Event] = []
    for frees in draw(st.lists(st.booleans(), max_size=40)):
        phase = draw(st.sampled_from(Phase))
        if frees and live:
            born = live.pop(draw(st.integers(0, len(live) - 1)))
            events.append(Event(born.storage, -born.bytes, born.kind, phase, "free", born.module, born.place))
        else:
            born = Event(
                storage=len(events),
                bytes=draw(st.integers(1, 1000)),
                kind=draw(st.sampled_from(Kind)),
                phase=phase,
                operator=draw(st.sampled_from(["mm", "add"])),
                module=draw(st.sampled_from(MODULES)),
                place=draw(st.sampled_from(PLACES)),
            )
            events.append(born)
            live.append(born)
    return Trace(tuple(events))


timelines = st.builds(MemoryTimeline, traces(), st.sampled_from(PLACES))


@given(timeline=timelines)
def test_live_bytes_are_never_below_zero(timeline: MemoryTimeline) -> None:
    assert all(total >= 0 for total in timeline.totals)
    assert timeline.peak_bytes == max(timeline.totals, default=0)


@given(timeline=timelines)
def test_kinds_sum_to_the_total_at_every_event(timeline: MemoryTimeline) -> None:
    curves = [dict(sums) for _, sums in timeline.curves()]
    assert [sum(sums.values()) for sums in curves] == list(timeline.totals)
    for position, sums in enumerate(curves):
        assert timeline.by_kind(position) == {kind: size for kind, size in sums.items() if size}


@given(timeline=timelines)
def test_the_kinds_and_the_owners_at_the_peak_sum_to_it(timeline: MemoryTimeline) -> None:
    assert sum(timeline.by_kind().values()) == timeline.peak_bytes
    owners = timeline.owners()
    assert sum(owner.bytes for owner in owners) == timeline.peak_bytes
    assert sum(owner.storages for owner in owners) == len(timeline.live_at(timeline.peak_position))
    assert [owner.bytes for owner in owners] == sorted((owner.bytes for owner in owners), reverse=True)


@given(timeline=timelines)
def test_the_peak_is_the_highest_peak_of_a_phase(timeline: MemoryTimeline) -> None:
    peaks = timeline.peak_by_phase()
    assert max(peaks.values(), default=0) == timeline.peak_bytes
    assert list(peaks) == list(dict.fromkeys(event.phase for event in timeline.trace.events))


def test_a_phase_that_allocates_elsewhere_only_has_what_is_live_meanwhile() -> None:
    state = event(7, 40, Kind.OPTIMIZER_STATE, Phase.FIRST_UPDATE, place=HOST)
    trace = replace(BY_HAND.trace, events=(*BY_HAND.trace.events, state))
    assert MemoryTimeline(trace).peak_by_phase()[Phase.FIRST_UPDATE] == 235
    assert MemoryTimeline(trace, HOST).peak_by_phase() == {
        Phase.LOAD: 7,
        Phase.FORWARD: 7,
        Phase.BACKWARD: 7,
        Phase.FIRST_UPDATE: 47,
    }


@given(trace=traces())
def test_nothing_is_live_once_everything_is_freed(trace: Trace) -> None:
    end = len(trace.events)
    live = [born for place in PLACES for born in MemoryTimeline(trace, place).live_at(end)]
    frees = [born._replace(bytes=-born.bytes, phase=Phase.SAVE, operator="free") for born in live]
    for place in PLACES:
        emptied = MemoryTimeline(Trace((*trace.events, *frees)), place)
        assert emptied.totals[-1:] in ((), (0,))
        assert emptied.live_at(len(emptied.events)) == []


@given(trace=traces())
def test_every_event_is_at_one_of_the_places(trace: Trace) -> None:
    apart = [MemoryTimeline(trace, place).events for place in PLACES]
    assert {event for events in apart for event in events} == {*trace.events}
    assert sum(map(len, apart)) == len(trace.events)


@given(trace=traces(), position=st.integers(0, 40))
def test_a_second_free_is_an_error_wherever_it_happens(trace: Trace, position: int) -> None:
    born = Event(1000, 8, Kind.TEMPORARY, Phase.FORWARD, "mm")
    freed = Event(1000, -8, Kind.TEMPORARY, Phase.FORWARD, "free")
    events = [*trace.events[:position], born, freed, *trace.events[position:], freed]
    with pytest.raises(ValueError, match="frees 8 bytes of storage 1000, which is not live"):
        MemoryTimeline(Trace(tuple(events))).totals  # noqa: B018


def test_freeing_what_was_never_allocated_names_the_event_and_the_storage() -> None:
    events = (Event(1, 8, Kind.WEIGHT, Phase.LOAD, "empty"), Event(2, -8, Kind.WEIGHT, Phase.LOAD, "free"))
    with pytest.raises(ValueError, match=r"^event 1 frees 8 bytes of storage 2, which is not live with that size\.$"):
        MemoryTimeline(Trace(events)).totals  # noqa: B018


def test_freeing_more_than_was_allocated_is_an_error() -> None:
    events = (Event(1, 8, Kind.WEIGHT, Phase.LOAD, "empty"), Event(1, -9, Kind.WEIGHT, Phase.LOAD, "free"))
    with pytest.raises(ValueError, match=r"^event 1 frees 9 bytes of storage 1, which is not live with that size\.$"):
        MemoryTimeline(Trace(events)).totals  # noqa: B018


def event(storage: int, size: int, kind: Kind, phase: Phase, module: str = "", place: Place = DEVICE) -> Event:
    return Event(storage, size, kind, phase, "free" if size < 0 else "mm", module, place)


BY_HAND = MemoryTimeline(
    Trace(
        (
            event(0, 100, Kind.WEIGHT, Phase.LOAD),
            event(1, 7, Kind.INPUT, Phase.LOAD, place=HOST),
            event(2, 30, Kind.SAVED_ACTIVATION, Phase.FORWARD, "layers.0.mlp"),
            event(3, 30, Kind.SAVED_ACTIVATION, Phase.FORWARD, "layers.1.mlp"),
            event(4, 25, Kind.SAVED_ACTIVATION, Phase.FORWARD, "layers.1.norm"),
            event(5, 50, Kind.TEMPORARY, Phase.BACKWARD, "head"),
            event(5, -50, Kind.TEMPORARY, Phase.BACKWARD, "head"),
            event(3, -30, Kind.SAVED_ACTIVATION, Phase.BACKWARD, "layers.1.mlp"),
            event(6, 80, Kind.GRADIENT, Phase.BACKWARD, "head"),
        )
    )
)


def test_the_numbers_of_a_timeline_made_by_hand() -> None:
    assert BY_HAND.totals == (100, 130, 160, 185, 235, 185, 155, 235)
    assert BY_HAND.peak_bytes == 235
    assert BY_HAND.by_kind() == {Kind.WEIGHT: 100, Kind.SAVED_ACTIVATION: 85, Kind.TEMPORARY: 50}
    assert BY_HAND.by_kind(0) == {Kind.WEIGHT: 100}
    assert BY_HAND.peak_by_phase() == {Phase.LOAD: 100, Phase.FORWARD: 185, Phase.BACKWARD: 235}


def test_of_two_equal_peaks_the_first_counts() -> None:
    assert BY_HAND.peak_position == 4
    assert BY_HAND.peak_event == event(5, 50, Kind.TEMPORARY, Phase.BACKWARD, "head")


def test_the_same_module_of_every_block_is_one_owner() -> None:
    assert BY_HAND.owners() == [
        Owner(100, Kind.WEIGHT, Phase.LOAD, "", "mm", 1),
        Owner(60, Kind.SAVED_ACTIVATION, Phase.FORWARD, "layers.*.mlp", "mm", 2),
        Owner(50, Kind.TEMPORARY, Phase.BACKWARD, "head", "mm", 1),
        Owner(25, Kind.SAVED_ACTIVATION, Phase.FORWARD, "layers.1.norm", "mm", 1),
    ]


def test_a_number_inside_a_name_is_not_a_block_number() -> None:
    events = (event(0, 1, Kind.WEIGHT, Phase.LOAD, "conv1.a"), event(1, 1, Kind.WEIGHT, Phase.LOAD, "conv2.a"))
    assert [owner.module for owner in MemoryTimeline(Trace(events)).owners()] == ["conv1.a", "conv2.a"]


def test_a_place_without_events_has_no_peak() -> None:
    empty = MemoryTimeline(Trace(()))
    assert (empty.peak_position, empty.peak_bytes, empty.owners(), empty.by_kind(), empty.peak_by_phase()) == (
        -1,
        0,
        [],
        {},
        {},
    )
