"""The footprint of a trace made by hand, and how it meets a budget."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.device import Cpu, Cuda
from memtrain.job import Budget, Limit
from memtrain.memory.allocator_config import AllocatorConfig
from memtrain.memory.footprint import Footprint, footprint
from memtrain.memory.timeline import Owner
from memtrain.trace.event import HOST, MANAGED, Event, Kind, Phase, Place, Trace

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
        peak_reserved_bytes=200,
        total_device_bytes=200,
        host_bytes=999,
        by_kind={Kind.WEIGHT: 100, Kind.GRADIENT: 60, Kind.SAVED_ACTIVATION: 40},
        by_phase={Phase.LOAD: 100, Phase.FORWARD: 140, Phase.BACKWARD: 200, Phase.UPDATE: 100},
        host_by_kind={Kind.INPUT: 999},
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
        "peak_reserved_bytes": 200,
        "total_device_bytes": 200,
        "host_bytes": 999,
        "peak_phase": "backward",
        "peak_module": "layers.0.mlp",
        "peak_operator": "mm_backward",
        "by_kind": {"weight": 100, "gradient": 60, "saved activation": 40},
        "by_phase": {"load": 100, "forward": 140, "backward": 200, "update": 100},
        "host_by_kind": {"input": 999},
        "owners": [
            {"bytes": 100, "kind": "weight", "phase": "load", "module": "embedding", "operator": "empty", "storages": 1}
        ],
    }


# ---------------------------------------------------------------------------------------------- a card

MIB = 1 << 20
CARD = Cuda(
    name="card",
    compute_capability=(8, 0),
    multiprocessors=1,
    usable_bytes=64 * MIB,
    context_bytes=3 * MIB,
    flops_per_second={"float32": 1.0},
    bytes_per_second=1.0,
    operator_seconds=1.0,
    link_bytes_per_second=1.0,
    host_bytes_per_second=1.0,
)


def state(storage: int, size: int, module: str, place: Place) -> Event:
    return Event(storage, size, Kind.OPTIMIZER_STATE, Phase.FIRST_UPDATE, "empty", module, place)


BESIDE_A_CARD = Trace(
    (
        Event(0, 100, Kind.WEIGHT, Phase.LOAD, "empty", "head"),
        # More than a small block: of a segment of 20 MiB.
        Event(1, 3 * MIB, Kind.SAVED_ACTIVATION, Phase.FORWARD, "mm", "head"),
        Event(1, -3 * MIB, Kind.SAVED_ACTIVATION, Phase.BACKWARD, "free", "head"),
        Event(2, 513, Kind.GRADIENT, Phase.BACKWARD, "mm", "head"),
        Event(3, 700, Kind.GRADIENT, Phase.BACKWARD, "empty_like", "head", HOST),
        state(4, 5000, "layers.0", MANAGED),
        state(5, 7000, "layers.0", MANAGED),
        state(6, 9000, "layers.1", MANAGED),
        Event(3, -700, Kind.GRADIENT, Phase.FIRST_UPDATE, "free", "head", HOST),
        state(7, 300, "head", HOST),
    )
)


def test_a_card_holds_blocks_of_512_bytes_in_segments_beside_its_context_and_the_managed_memory_at_work() -> None:
    found = footprint(BESIDE_A_CARD, CARD)
    assert found.peak_allocated_bytes == 3 * MIB + 512
    assert found.by_kind == {Kind.WEIGHT: 512, Kind.SAVED_ACTIVATION: 3 * MIB}
    assert found.by_phase == {Phase.LOAD: 512, Phase.FORWARD: 3 * MIB + 512, Phase.BACKWARD: 1536, Phase.FIRST_UPDATE: 1536}
    # A segment of 2 MiB for small blocks and one of 20 MiB; what is freed stays reserved.
    assert found.peak_reserved_bytes == 22 * MIB
    # The context, and the state of the module that has most of it.
    assert found.total_device_bytes == 22 * MIB + 3 * MIB + 12_000
    assert [(owner.bytes, owner.operator) for owner in found.owners] == [(3 * MIB, "mm"), (512, "empty")]


def test_what_the_host_holds_is_its_own_and_managed_memory_byte_by_byte() -> None:
    found = footprint(BESIDE_A_CARD, CARD)
    # The gradient's copy is gone when the last state is made.
    assert found.host_bytes == 700 + 5000 + 7000 + 9000
    assert found.host_by_kind == {Kind.GRADIENT: 700, Kind.OPTIMIZER_STATE: 21_000}


@pytest.mark.parametrize(
    "device", [None, Cpu(name="cpu", threads=1, flops_per_second=1, bytes_per_second=1, operator_seconds=1)]
)
def test_without_a_card_allocated_reserved_and_total_are_the_traces_bytes(device: Cpu | None) -> None:
    found = footprint(BESIDE_A_CARD, device)
    assert found.peak_allocated_bytes == found.peak_reserved_bytes == found.total_device_bytes == 3 * MIB + 100


def test_the_allocators_settings_decide_what_is_reserved() -> None:
    found = footprint(BESIDE_A_CARD, CARD, AllocatorConfig(expandable_segments=True))
    # Segments that grow: pages of 2 MiB for small blocks, and one of 20 MiB for the large block.
    assert found.peak_reserved_bytes == 22 * MIB
    divided = footprint(BESIDE_A_CARD, CARD, AllocatorConfig(large_segment_bytes=24 * MIB))
    assert divided.peak_reserved_bytes == 26 * MIB
    assert divided.peak_allocated_bytes == found.peak_allocated_bytes == 3 * MIB + 512


TOTAL, ON_HOST = 25 * MIB + 12_000, 21_700


@pytest.mark.parametrize(("device", "missing"), [(TOTAL, 0), (TOTAL - 1, 1), (TOTAL - 5000, 5000)])
@pytest.mark.parametrize(("host", "host_missing"), [(None, 0), (ON_HOST, 0), (ON_HOST - 1, 1), (1, ON_HOST - 1)])
def test_a_footprint_fits_where_it_fits_on_both_sides(device: int, missing: int, host: int | None, host_missing: int) -> None:
    limits = () if host is None else (Limit("installed", host + 7), Limit("asked for", host))
    asked = Budget(limits=(Limit("asked for", device),), host_limits=limits)
    found = footprint(BESIDE_A_CARD, CARD)
    assert (found.missing_bytes(asked), found.missing_host_bytes(asked)) == (missing, host_missing)
    assert found.fits(asked) is (missing == host_missing == 0)


def test_the_headroom_is_kept_on_the_device_only() -> None:
    asked = Budget(limits=(Limit("asked for", TOTAL),), headroom_bytes=10, host_limits=(Limit("asked for", ON_HOST),))
    found = footprint(BESIDE_A_CARD, CARD)
    assert (found.missing_bytes(asked), found.missing_host_bytes(asked)) == (10, 0)
