"""Predicted beside measured: the same terms on both sides, and plain data to write."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from memtrain.device import Cpu, Cuda
from memtrain.job import Budget, Job, Limit
from memtrain.memory.footprint import footprint
from memtrain.plan import Plan, Recompute, to_dict
from memtrain.planner.choice import Choice, Comparison, NoPlanFits, Rejected, Side
from memtrain.planner.compare import FORWARD_AND_BACKWARD, compare, counted_side, side_of
from memtrain.trace.event import Event, Kind, Phase, Trace

MIB = 1 << 20
PREDICTED = Trace(
    (
        Event(0, 100, Kind.WEIGHT, Phase.LOAD, "empty"),
        Event(1, 20, Kind.SAVED_ACTIVATION, Phase.FORWARD, "mm"),
        Event(2, 50, Kind.TEMPORARY, Phase.RECOMPUTE, "mm"),
        Event(2, -50, Kind.TEMPORARY, Phase.RECOMPUTE, "free"),
        Event(3, 40, Kind.GRADIENT, Phase.BACKWARD, "mm_backward"),
        Event(1, -20, Kind.SAVED_ACTIVATION, Phase.BACKWARD, "free"),
        Event(4, 80, Kind.OPTIMIZER_STATE, Phase.UPDATE, "zeros"),
        Event(5, 10, Kind.WORKSPACE, Phase.UPDATE, "mm"),
    ),
    assumed=("an item() of a mask is 0",),
)


def choice() -> Choice:
    return Choice(
        job=Job(model="tiny", global_batch_size=4, steps=2),
        budget=Budget(limits=(Limit("asked for", 300),), headroom_bytes=50),
        device=Cpu(name="laptop", threads=2, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-5),
        plan=Plan(micro_batch_size=2, activations=Recompute()),
        footprint=footprint(PREDICTED),
        trace=PREDICTED,
        step_seconds=1.5,
        rejected=(Rejected(plan=Plan(micro_batch_size=4), reason="13 B over the budget", total_device_bytes=263),),
        planning_seconds=0.2,
    )


def window(*sizes: tuple[Kind, Phase, int]) -> Trace:
    return Trace(tuple(Event(number, size, kind, phase, "observed") for number, (kind, phase, size) in enumerate(sizes)))


MEASURED = {
    "step 1": window(
        (Kind.WEIGHT, Phase.LOAD, 100), (Kind.SAVED_ACTIVATION, Phase.FORWARD, 30), (Kind.GRADIENT, Phase.BACKWARD, 40)
    ),
    "step 2": window(
        (Kind.WEIGHT, Phase.LOAD, 100),
        (Kind.OPTIMIZER_STATE, Phase.LOAD, 80),
        (Kind.TEMPORARY, Phase.FORWARD, 20),
        (Kind.GRADIENT, Phase.BACKWARD, 40),
        (Kind.TEMPORARY, Phase.UPDATE, 10),
    ),
    "save": Trace(()),
}


def test_the_prediction_is_told_in_the_terms_of_a_measurement() -> None:
    assert compare(choice(), side_of(MEASURED.values(), 2.0)).predicted == Side(
        peak_allocated_bytes=230,
        peak_reserved_bytes=230,
        total_device_bytes=230,
        by_kind={"weight": 100, "gradient": 40, "optimizer state": 80, "activations and temporaries": 10},
        by_phase={"load": 100, "forward": 120, "backward": 170, "update": 230},
        step_seconds=1.5,
    )


def test_the_measurement_is_the_highest_window_and_the_highest_peak_of_each_phase() -> None:
    assert compare(choice(), side_of(MEASURED.values(), 2.0)).measured == Side(
        peak_allocated_bytes=250,
        peak_reserved_bytes=250,
        total_device_bytes=250,
        by_kind={"weight": 100, "gradient": 40, "optimizer state": 80, "activations and temporaries": 30},
        by_phase={"load": 180, "forward": 200, "backward": 240, "update": 250},
        step_seconds=2.0,
    )


@pytest.mark.parametrize(("recomputed", "backward"), [(50, 170), (90, 210)])
def test_recomputation_is_a_part_of_backward(recomputed: int, backward: int) -> None:
    trace = window(
        (Kind.WEIGHT, Phase.LOAD, 120), (Kind.TEMPORARY, Phase.RECOMPUTE, recomputed), (Kind.GRADIENT, Phase.UPDATE, 1)
    )
    freed = Event(1, -recomputed, Kind.TEMPORARY, Phase.BACKWARD, "free")
    again = Event(9, 50, Kind.GRADIENT, Phase.BACKWARD, "observed")
    events = (*trace.events[:2], freed, again, trace.events[2])
    side = side_of([Trace(events)], 2.0)
    assert side.by_phase == {"load": 120, "backward": backward, "update": 171}


def test_phases_stand_in_the_order_of_a_run_whatever_window_came_first() -> None:
    side = side_of([window((Kind.TEMPORARY, Phase.UPDATE, 1)), window((Kind.WEIGHT, Phase.LOAD, 1))], 2.0)
    assert list(side.by_phase) == ["load", "update"]


def test_kinds_of_a_side_sum_to_its_peak_and_an_absent_one_is_zero() -> None:
    side = side_of([window((Kind.WEIGHT, Phase.LOAD, 7))], 2.0)
    assert side.by_kind == {"weight": 7, "gradient": 0, "optimizer state": 0, "activations and temporaries": 0}


def test_the_first_update_is_told_as_an_update() -> None:
    side = side_of([window((Kind.GRADIENT, Phase.FIRST_UPDATE, 30), (Kind.OPTIMIZER_STATE, Phase.UPDATE, 12))], 2.0)
    assert side.by_phase == {"update": 42}
    assert side_of([window((Kind.GRADIENT, Phase.FIRST_UPDATE, 30))], 2.0).by_phase == {"update": 30}


def test_a_card_is_told_with_what_its_allocator_reserves_and_what_its_context_takes() -> None:
    made = choice()
    card = Cuda(
        name="card",
        compute_capability=(8, 0),
        multiprocessors=1,
        usable_bytes=2000,
        context_bytes=1000,
        flops_per_second={"float32": 1.0},
        bytes_per_second=1.0,
        operator_seconds=1.0,
        link_bytes_per_second=1.0,
        host_bytes_per_second=1.0,
    )
    made = replace(made, device=card, footprint=footprint(PREDICTED, card))
    measured = replace(side_of(MEASURED.values(), 2.0), peak_allocated_bytes=5120)
    comparison = compare(made, measured)
    # What is live at the end is four blocks of 512 bytes, in one segment of 2 MiB.
    assert comparison.predicted == Side(
        peak_allocated_bytes=4 * 512,
        peak_reserved_bytes=2 * MIB,
        total_device_bytes=2 * MIB + 1000,
        by_kind={"weight": 512, "gradient": 512, "optimizer state": 512, "activations and temporaries": 512},
        by_phase={"load": 512, "forward": 1024, "backward": 1536, "update": 2048},
        step_seconds=1.5,
    )
    assert comparison.measured is measured
    assert comparison.peak_error == -0.6
    assert (made.to_dict()["device"], made.to_dict()["threads"]) == ("card", None)


def test_counters_of_a_card_tell_peaks_and_not_what_they_are_made_of() -> None:
    by_phase = {"load": 100, FORWARD_AND_BACKWARD: 400, "update": 300}
    side = counted_side(by_phase, reserved_bytes=500, total_bytes=700, step_seconds=2.0)
    assert side == Side(
        peak_allocated_bytes=400,
        peak_reserved_bytes=500,
        total_device_bytes=700,
        by_kind={},
        by_phase=by_phase,
        step_seconds=2.0,
    )
    # Forward and backward of the prediction are then one phase as well.
    assert compare(choice(), side).predicted.by_phase == {"load": 100, "forward and backward": 170, "update": 230}


def test_a_written_choice_says_the_hosts_budget() -> None:
    made = replace(choice(), budget=Budget.of("300 B", host="7 B"))
    assert made.to_dict()["host_budget_bytes"] == 7


def test_the_error_of_the_peak_is_a_signed_fraction_of_the_measured_one() -> None:
    comparison = compare(choice(), side_of(MEASURED.values(), 2.0))
    assert comparison.peak_error == (230 - 250) / 250
    assert Comparison(comparison.measured, comparison.predicted).peak_error == 20 / 230


def test_a_written_comparison_is_plain_data_that_json_reads_back() -> None:
    comparison = compare(choice(), side_of(MEASURED.values(), 2.0))
    written = comparison.to_dict()
    assert json.loads(json.dumps(written)) == written
    assert list(written) == ["predicted", "measured", "peak_error"]
    assert written["measured"] == {
        "peak_allocated_bytes": 250,
        "peak_reserved_bytes": 250,
        "total_device_bytes": 250,
        "by_kind": comparison.measured.by_kind,
        "by_phase": comparison.measured.by_phase,
        "step_seconds": 2.0,
    }


def test_a_written_choice_holds_the_prediction_its_budget_and_the_plans_before_it() -> None:
    made = choice()
    written = made.to_dict()
    assert json.loads(json.dumps(written)) == written
    assert written.items() >= made.footprint.to_dict().items()
    assert {key: value for key, value in written.items() if key not in made.footprint.to_dict()} == {
        "budget_bytes": 250,
        "host_budget_bytes": None,
        "step_seconds": 1.5,
        "plan": to_dict(made.plan),
        "device": "laptop",
        "threads": 2,
        "allocator": "",
        "assumed": ["an item() of a mask is 0"],
        "rejected": [
            {
                "plan": to_dict(Plan(micro_batch_size=4)),
                "reason": "13 B over the budget",
                "total_device_bytes": 263,
                "is_bound": False,
            }
        ],
    }


def test_that_no_plan_fits_is_a_value_error() -> None:
    assert issubclass(NoPlanFits, ValueError)
