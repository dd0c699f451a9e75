"""Traces: sections are found by name, and the words of kinds and phases stay what other files hold."""

from __future__ import annotations

import pytest

from memtrain.trace.event import DEVICE, HOST, MANAGED, Event, Kind, Memory, Phase, Place, Trace

EVENTS = tuple(Event(number, 8, Kind.WEIGHT, Phase.LOAD, "empty") for number in range(6))
TRACE = Trace(EVENTS, marks=(("load", 0), ("step 1", 2), ("evaluate", 3), ("step 1", 4)))


def test_a_section_reaches_to_the_next_mark() -> None:
    assert TRACE.section("load") == (0, 2)
    assert TRACE.section("evaluate") == (3, 4)


def test_the_last_section_of_a_name_is_meant_and_the_last_of_all_reaches_to_the_end() -> None:
    assert TRACE.section("step 1") == (4, 6)


def test_a_section_without_events_is_empty() -> None:
    assert Trace(EVENTS, marks=(("load", 0), ("save", 6))).section("save") == (6, 6)


def test_a_section_that_is_not_there_is_a_key_error_with_its_name() -> None:
    with pytest.raises(KeyError, match=r"^'step 2'$"):
        TRACE.section("step 2")


def test_an_event_lies_on_the_device_unless_told() -> None:
    assert EVENTS[0].place == DEVICE == Place(Memory.DEVICE, 0)


def test_the_places_are_one_of_each_memory() -> None:
    assert [str(place.memory) for place in (DEVICE, HOST, MANAGED)] == [str(memory) for memory in Memory]
    assert [str(memory) for memory in Memory] == ["device", "host", "managed"]


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        EVENTS[0].bytes = 9  # type: ignore[misc]


def test_kinds_stand_in_their_order_of_precedence() -> None:
    assert [str(kind) for kind in Kind] == [
        "weight",
        "gradient",
        "optimizer state",
        "input",
        "logits",
        "saved activation",
        "workspace",
        "temporary",
    ]


def test_phases_stand_in_the_order_of_a_run() -> None:
    assert [str(phase) for phase in Phase] == [
        "load",
        "forward",
        "recompute",
        "backward",
        "first update",
        "update",
        "evaluate",
        "save",
    ]
