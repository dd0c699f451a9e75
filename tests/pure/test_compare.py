"""Predicted beside measured: the same terms on both sides, and plain data to write."""

from __future__ import annotations

import json

import pytest

from memtrain.device import Device
from memtrain.job import Budget, Job, Limit
from memtrain.memory.footprint import footprint
from memtrain.plan import Plan, Recompute, to_dict
from memtrain.planner.choice import Choice, Comparison, NoPlanFits, Rejected, Side
from memtrain.planner.compare import compare
from memtrain.trace.event import Event, Kind, Phase, Trace

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
        device=Device(
            name="laptop", kind="cpu", threads=2, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-5
        ),
        plan=Plan(micro_batch_size=2, activations=Recompute()),
        footprint=footprint(PREDICTED),
        trace=PREDICTED,
        step_seconds=1.5,
        rejected=(Rejected(plan=Plan(micro_batch_size=4), reason="13 B over the budget", peak_allocated_bytes=263),),
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
    assert compare(choice(), MEASURED, 2.0).predicted == Side(
        peak_allocated_bytes=230,
        by_kind={"weight": 100, "gradient": 40, "optimizer state": 80, "activations and temporaries": 10},
        by_phase={"load": 100, "forward": 120, "backward": 170, "update": 230},
        step_seconds=1.5,
    )


def test_the_measurement_is_the_highest_window_and_the_highest_peak_of_each_phase() -> None:
    assert compare(choice(), MEASURED, 2.0).measured == Side(
        peak_allocated_bytes=250,
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
    side = compare(choice(), {"step 1": Trace(events)}, 2.0).measured
    assert side.by_phase == {"load": 120, "backward": backward, "update": 171}


def test_phases_stand_in_the_order_of_a_run_whatever_window_came_first() -> None:
    measured = {"later": window((Kind.TEMPORARY, Phase.UPDATE, 1)), "earlier": window((Kind.WEIGHT, Phase.LOAD, 1))}
    assert list(compare(choice(), measured, 2.0).measured.by_phase) == ["load", "update"]


def test_kinds_of_a_side_sum_to_its_peak_and_an_absent_one_is_zero() -> None:
    side = compare(choice(), {"load": window((Kind.WEIGHT, Phase.LOAD, 7))}, 2.0).measured
    assert side.by_kind == {"weight": 7, "gradient": 0, "optimizer state": 0, "activations and temporaries": 0}


def test_the_error_of_the_peak_is_a_signed_fraction_of_the_measured_one() -> None:
    comparison = compare(choice(), MEASURED, 2.0)
    assert comparison.peak_error == (230 - 250) / 250
    assert Comparison(comparison.measured, comparison.predicted).peak_error == 20 / 230


def test_a_written_comparison_is_plain_data_that_json_reads_back() -> None:
    comparison = compare(choice(), MEASURED, 2.0)
    written = comparison.to_dict()
    assert json.loads(json.dumps(written)) == written
    assert list(written) == ["predicted", "measured", "peak_error"]
    assert written["measured"] == {
        "peak_allocated_bytes": 250,
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
        "step_seconds": 1.5,
        "plan": to_dict(made.plan),
        "device": "laptop",
        "threads": 2,
        "assumed": ["an item() of a mask is 0"],
        "rejected": [
            {"plan": to_dict(Plan(micro_batch_size=4)), "reason": "13 B over the budget", "peak_allocated_bytes": 263}
        ],
    }


def test_that_no_plan_fits_is_a_value_error() -> None:
    assert issubclass(NoPlanFits, ValueError)
