"""The footprint of a trace made by hand, and how it meets a budget."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.job import Budget, Limit
from memtrain.memory.footprint import Footprint, footprint
from memtrain.memory.timeline import Owner
from memtrain.trace.event import HOST, Event, Kind, Phase, Trace

EVENTS = (
    Event(0, 100, Kind.WEIGHT, Phase.LOAD, "empty", "embedding"),
    Event(1, 40, Kind.SAVED_ACTIVATION, Phase.FORWARD, "mm", "layers.0.mlp"),
    Event(2, 999, Kind.INPUT, Phase.FORWARD, "copy", place=HOST),
    Event(3, 60, Kind.GRADIENT, Phase.BACKWARD, "mm_backward", "layers.0.mlp"),
    Event(1, -40, Kind.SAVED_ACTIVATION, Phase.BACKWARD, "free", "layers.0.mlp"),
    Event(3, -60, Kind.GRADIENT, Phase.UPDATE, "free", "layers.0.mlp"),
)


def budget(size: int) -> Budget:
    return Budget(limits=(Limit("asked for", size),))


def test_a_footprint_says_how_much_where_and_whose() -> None:
    assert footprint(Trace(EVENTS)) == Footprint(
        peak_allocated_bytes=200,
        by_kind={Kind.WEIGHT: 100, Kind.GRADIENT: 60, Kind.SAVED_ACTIVATION: 40},
        by_phase={Phase.LOAD: 100, Phase.FORWARD: 140, Phase.BACKWARD: 200, Phase.UPDATE: 100},
        peak_phase=Phase.BACKWARD,
        peak_module="layers.0.mlp",
        peak_operator="mm_backward",
        owners=(
            Owner(100, Kind.WEIGHT, Phase.LOAD, "embedding", "empty", 1),
            Owner(60, Kind.GRADIENT, Phase.BACKWARD, "layers.0.mlp", "mm_backward", 1),
            Owner(40, Kind.SAVED_ACTIVATION, Phase.FORWARD, "layers.0.mlp", "mm", 1),
        ),
    )


def test_only_the_largest_owners_are_kept() -> None:
    assert [owner.bytes for owner in footprint(Trace(EVENTS), owners=2).owners] == [100, 60]


def test_saving_without_an_allocation_takes_what_was_live_before_it() -> None:
    trace = Trace(EVENTS, marks=(("load", 0), ("save", len(EVENTS))))
    assert footprint(trace).by_phase[Phase.SAVE] == 100


def test_saving_with_an_allocation_keeps_its_own_peak() -> None:
    copy = Event(4, 30, Kind.TEMPORARY, Phase.SAVE, "copy")
    freed = Event(4, -30, Kind.TEMPORARY, Phase.SAVE, "free")
    trace = Trace((*EVENTS, copy, freed), marks=(("save", len(EVENTS)),))
    assert footprint(trace).by_phase[Phase.SAVE] == 130


def test_a_run_that_does_not_save_has_no_such_phase() -> None:
    assert Phase.SAVE not in footprint(Trace(EVENTS, marks=(("load", 0),))).by_phase


@pytest.mark.parametrize("events", [(), EVENTS[2:3]])
def test_a_trace_without_an_allocation_on_the_device_has_no_footprint(events: tuple[Event, ...]) -> None:
    with pytest.raises(ValueError, match=r"^the trace holds no allocation on the device, so it has no footprint\.$"):
        footprint(Trace(events))


@pytest.mark.parametrize(("size", "fits", "missing"), [(199, False, 1), (200, True, 0), (201, True, 0), (50, False, 150)])
def test_a_peak_may_reach_the_budget_and_not_one_byte_more(size: int, fits: bool, missing: int) -> None:
    found = footprint(Trace(EVENTS))
    assert found.fits(budget(size)) is fits
    assert found.missing_bytes(budget(size)) == missing


@given(size=st.integers(1, 400))
def test_a_footprint_fits_exactly_where_no_byte_is_missing(size: int) -> None:
    found = footprint(Trace(EVENTS))
    assert found.fits(budget(size)) == (found.missing_bytes(budget(size)) == 0)
    assert found.fits(budget(size + found.missing_bytes(budget(size))))


def test_a_written_footprint_is_plain_data_that_json_reads_back() -> None:
    written = footprint(Trace(EVENTS), owners=1).to_dict()
    assert json.loads(json.dumps(written)) == written
    assert written == {
        "peak_allocated_bytes": 200,
        "peak_phase": "backward",
        "peak_module": "layers.0.mlp",
        "peak_operator": "mm_backward",
        "by_kind": {"weight": 100, "gradient": 60, "saved activation": 40},
        "by_phase": {"load": 100, "forward": 140, "backward": 200, "update": 100},
        "owners": [
            {"bytes": 100, "kind": "weight", "phase": "load", "module": "embedding", "operator": "empty", "storages": 1}
        ],
    }
