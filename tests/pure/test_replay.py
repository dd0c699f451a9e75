"""A trace through the allocator, in numbers worked out by hand and in laws over random traces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.memory.allocator import OutOfMemory
from memtrain.memory.allocator_config import AllocatorConfig, TieBreak
from memtrain.memory.replay import Replay, replay
from memtrain.memory.timeline import MemoryTimeline
from memtrain.trace.event import DEVICE, HOST, Event, Kind, Memory, Phase, Place, Trace

MIB = 1 << 20
PLAIN = AllocatorConfig()


def event(storage: int, size: int, place: Place = DEVICE, stream: int = 0) -> Event:
    return Event(storage, size, Kind.WEIGHT, Phase.LOAD, "free" if size < 0 else "mm", "head", place, stream)


def test_a_trace_made_by_hand() -> None:
    events = (
        event(0, 100),
        event(1, 3 * MIB + 1),
        event(2, 77, HOST),
        event(3, 19 * MIB),
        event(1, -3 * MIB - 1),
        event(2, -77, HOST),
        event(4, 4 * MIB),
    )
    found = replay(Trace(events, marks=(("load", 0),), assumed=("a",)), PLAIN)
    assert found == Replay(
        trace=Trace(
            (
                event(0, 512),
                event(1, 3 * MIB + 512),
                event(2, 77, HOST),
                event(3, 20 * MIB),  # its segment has 1 MiB left, which is not split off
                event(1, -3 * MIB - 512),
                event(2, -77, HOST),
                event(4, 4 * MIB),
            ),
            marks=(("load", 0),),
            assumed=("a",),
        ),
        reserved=(2 * MIB, 22 * MIB, 42 * MIB, 42 * MIB, 42 * MIB),
        peak_reserved_bytes=42 * MIB,
        num_alloc_retries=0,
    )
    timeline = MemoryTimeline(found.trace)
    assert timeline.peak_bytes == 24 * MIB + 512
    assert len(timeline.totals) == len(found.reserved)


def test_streams_have_blocks_of_their_own() -> None:
    events = (event(0, 30 * MIB, stream=1), event(0, -30 * MIB, stream=1), event(1, 30 * MIB, stream=2))
    assert replay(Trace(events), PLAIN).reserved == (30 * MIB, 30 * MIB, 60 * MIB)


def test_other_devices_are_not_replayed() -> None:
    other = Place(Memory.DEVICE, 1)
    events = (event(0, 100, other), event(0, -100, other))
    assert replay(Trace(events), PLAIN) == Replay(Trace(events), (), 0, 0)


def test_a_full_device_is_emptied_and_the_retries_are_counted() -> None:
    events = (event(0, 60 * MIB), event(0, -60 * MIB), event(1, 80 * MIB))
    found = replay(Trace(events), PLAIN, capacity_bytes=100 * MIB)
    assert (found.reserved, found.peak_reserved_bytes, found.num_alloc_retries) == ((60 * MIB, 60 * MIB, 80 * MIB), 80 * MIB, 1)


def test_what_does_not_fit_is_out_of_memory() -> None:
    with pytest.raises(OutOfMemory, match=r"^an allocation of 80\.0 MiB finds no room: 60\.0 MiB are allocated"):
        replay(Trace((event(0, 60 * MIB), event(1, 80 * MIB))), PLAIN, capacity_bytes=100 * MIB)


@pytest.mark.parametrize(("freed", "size"), [(1, -100), (0, -99)])
def test_a_free_of_what_is_not_live_is_an_error(freed: int, size: int) -> None:
    message = rf"^event 1 frees {-size} bytes of storage {freed}, which is not live with that size\.$"
    with pytest.raises(ValueError, match=message):
        replay(Trace((event(0, 100), event(freed, size))), PLAIN)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Storages that are allocated and freed in any order; all are freed in the end."""
    events: list[Event] = []
    live: list[Event] = []
    sizes = st.sampled_from([1, 513, MIB, MIB + 1, 7 * MIB, 10 * MIB, 33 * MIB])
    for frees in draw(st.lists(st.booleans(), max_size=40)):
        if frees and live:
            born = live.pop(draw(st.integers(0, len(live) - 1)))
            events.append(event(born.storage, -born.bytes, born.place, born.stream))
        else:
            place = draw(st.sampled_from([DEVICE, DEVICE, HOST]))
            live.append(event(len(events), draw(sizes), place, draw(st.integers(0, 1))))
            events.append(live[-1])
    return Trace((*events, *(event(born.storage, -born.bytes, born.place, born.stream) for born in live)))


configs = st.builds(AllocatorConfig, expandable_segments=st.booleans(), tie_break=st.sampled_from(TieBreak))


@given(trace=traces(), config=configs)
def test_blocks_are_at_least_what_was_asked_for_and_are_reserved(trace: Trace, config: AllocatorConfig) -> None:
    found = replay(trace, config)
    asked, got = MemoryTimeline(trace), MemoryTimeline(found.trace)
    assert [event.storage for event in found.trace.events] == [event.storage for event in trace.events]
    assert MemoryTimeline(found.trace, HOST).totals == MemoryTimeline(trace, HOST).totals
    for least, block, held in zip(asked.totals, got.totals, found.reserved, strict=True):
        assert least <= block <= held
    assert found.peak_reserved_bytes == max(found.reserved, default=0) >= got.peak_bytes
    assert got.totals[-1:] in ((), (0,))


@given(trace=traces(), config=configs)
def test_without_a_limit_nothing_is_released(trace: Trace, config: AllocatorConfig) -> None:
    found = replay(trace, config)
    assert list(found.reserved) == sorted(found.reserved)
    assert found.num_alloc_retries == 0


@given(trace=traces(), config=configs)
def test_the_peak_is_enough(trace: Trace, config: AllocatorConfig) -> None:
    found = replay(trace, config)
    assert replay(trace, config, capacity_bytes=found.peak_reserved_bytes) == found
