"""The picture of a run: the curve exactly, the drawing as a file that matplotlib makes without a warning."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memtrain.device import Cpu
from memtrain.job import Budget, Job
from memtrain.memory.footprint import footprint
from memtrain.plan import Plan
from memtrain.planner.choice import Choice
from memtrain.report.plot import KIND_COLOURS, plot_run, step_curve
from memtrain.trace.event import HOST, Event, Kind, Phase, Trace

METRICS = [{"step": 0, "eval_loss": 5.0}, {"step": 1, "loss": 4.9}, {"step": 2, "loss": 4.0, "eval_loss": 3.9}]


def make_trace(scale: int = 1) -> Trace:
    """Weights of 8, then two steps in which activations of 4 come and go and a gradient of 2 stays until the update."""
    load = [
        Event(0, 8 * scale, Kind.WEIGHT, Phase.LOAD, "load"),
        Event(1, 64 * scale, Kind.INPUT, Phase.LOAD, "load", place=HOST),
    ]
    steps = [
        [
            Event(storage, 4 * scale, Kind.SAVED_ACTIVATION, Phase.FORWARD, "mm"),
            Event(storage + 1, 2 * scale, Kind.GRADIENT, Phase.RECOMPUTE, "mm"),
            Event(storage, -4 * scale, Kind.SAVED_ACTIVATION, Phase.BACKWARD, "free"),
            Event(storage + 1, -2 * scale, Kind.GRADIENT, Phase.UPDATE, "free"),
        ]
        for storage in (2, 4)
    ]
    evaluation = [Event(6, 100 * scale, Kind.LOGITS, Phase.EVALUATE, "mm")]
    return Trace(
        (*load, *steps[0], *steps[1], *evaluation), marks=(("load", 0), ("step 1", 2), ("step 2", 6), ("evaluate", 10))
    )


def make_choice(trace: Trace, budget: str, model: str = "gpt2") -> Choice:
    return Choice(
        job=Job(model=model, global_batch_size=8, steps=2),
        budget=Budget.of(budget),
        device=Cpu(name="cpu", threads=2, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-5),
        plan=Plan(micro_batch_size=4),
        footprint=footprint(trace),
        trace=trace,
        step_seconds=1.0,
        rejected=(),
        planning_seconds=1.0,
    )


def test_the_curve_is_the_last_step_and_starts_from_what_is_live_before_it() -> None:
    curve = step_curve(make_trace())
    # The step moves 4 + 2 + 4 + 2 bytes.
    assert curve.positions == (0 / 12, 4 / 12, 6 / 12, 10 / 12, 12 / 12)
    assert curve.by_kind == {
        Kind.WEIGHT: (8, 8, 8, 8, 8),
        Kind.GRADIENT: (0, 0, 2, 2, 0),
        Kind.SAVED_ACTIVATION: (0, 4, 4, 0, 0),
    }
    assert curve.totals == (8, 12, 14, 10, 8)
    assert curve.peak_bytes == 14


def test_recomputation_is_part_of_backward() -> None:
    assert step_curve(make_trace()).phases == (
        (Phase.FORWARD, 0 / 12, 4 / 12),
        (Phase.BACKWARD, 4 / 12, 10 / 12),
        (Phase.UPDATE, 10 / 12, 12 / 12),
    )


def test_the_first_update_is_an_update() -> None:
    events = [
        event._replace(phase=Phase.FIRST_UPDATE) if event.phase is Phase.UPDATE else event for event in make_trace().events
    ]
    assert step_curve(replace(make_trace(), events=tuple(events))) == step_curve(make_trace())


def test_every_kind_has_a_colour_of_its_own() -> None:
    assert list(KIND_COLOURS) == list(Kind)
    assert len(set(KIND_COLOURS.values())) == len(Kind)


def test_bytes_on_the_host_are_left_out() -> None:
    assert Kind.INPUT not in step_curve(make_trace()).by_kind


def test_thinning_keeps_the_peak_and_both_ends() -> None:
    spike = 567
    events = [Event(0, 8, Kind.WEIGHT, Phase.LOAD, "load")]
    for storage in range(1, 1001):
        size = 1000 if storage == spike else 1
        events.append(Event(storage, size, Kind.TEMPORARY, Phase.FORWARD, "mm"))
        events.append(Event(storage, -size, Kind.TEMPORARY, Phase.FORWARD, "free"))
    curve = step_curve(Trace(tuple(events), marks=(("load", 0), ("step 1", 1))), most_points=50)
    assert len(curve.positions) <= 52
    assert (curve.positions[0], curve.positions[-1]) == (0.0, 1.0)
    assert (curve.totals[0], curve.totals[-1]) == (8, 8)
    assert curve.positions[curve.totals.index(1008)] == (2 * (spike - 1) + 1000) / (2 * 999 + 2000)


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has the sections \['load'\], and its memory curve needs one named 'step N'"):
        step_curve(Trace((Event(0, 8, Kind.WEIGHT, Phase.LOAD, "load"),), marks=(("load", 0),)))


@pytest.mark.parametrize("budget", ["20B", "1GiB"], ids=["budget in view", "budget far above"])
@pytest.mark.parametrize("measured", [None, make_trace()], ids=["predicted alone", "with the measurement"])
def test_the_picture_is_a_png_of_1200_by_900(tmp_path: Path, budget: str, measured: Trace | None) -> None:
    path = tmp_path / "run.png"
    plot_run(path, METRICS, make_choice(make_trace(), budget), measured)
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")) == (1200, 900)


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [{"step": 0, "eval_loss": math.nan}, {"step": 1, "loss": math.inf}],
        [{"step": step, "eval_loss": 1.0 / (step + 1)} for step in range(40)],
    ],
    ids=["none", "diverged", "many evaluations"],
)
def test_unusual_metrics_are_drawn_without_a_warning(tmp_path: Path, metrics: list[dict[str, float]]) -> None:
    path = tmp_path / "run.png"
    plot_run(path, metrics, make_choice(make_trace(2**20), "1GiB"), None)
    assert path.stat().st_size > 10_000


def test_a_dollar_sign_in_the_model_is_not_a_formula(tmp_path: Path) -> None:
    plot_run(tmp_path / "run.png", METRICS, make_choice(make_trace(), "20B", model=r"/data/$\frac$/gpt2"), None)
    assert (tmp_path / "run.png").exists()


def test_drawing_leaves_pyplot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes every import of the module fail.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    plot_run(tmp_path / "run.png", METRICS, make_choice(make_trace(), "20B"), make_trace())
    assert (tmp_path / "run.png").exists()


def test_a_step_of_more_than_two_micro_batches_is_drawn_as_its_first_and_its_last() -> None:
    events = [Event(0, 8, Kind.WEIGHT, Phase.LOAD, "load")]
    for number in range(1, 5):
        events += [
            Event(10 * number, 4, Kind.SAVED_ACTIVATION, Phase.FORWARD, "mm"),
            Event(10 * number + 1, 2, Kind.TEMPORARY, Phase.BACKWARD, "mm"),
            Event(10 * number + 1, -2, Kind.TEMPORARY, Phase.BACKWARD, "free"),
            Event(10 * number, -4, Kind.SAVED_ACTIVATION, Phase.BACKWARD, "free"),
            Event(10 * number + 2, 1, Kind.TEMPORARY, Phase.FORWARD, "add"),
            Event(10 * number + 2, -1, Kind.TEMPORARY, Phase.FORWARD, "free"),
        ]
    events += [Event(99, 3, Kind.TEMPORARY, Phase.UPDATE, "norm"), Event(99, -3, Kind.TEMPORARY, Phase.UPDATE, "free")]
    curve = step_curve(Trace(tuple(events), marks=(("load", 0), ("step 1", 1))))
    micro_batch = [12, 14, 12, 8, 9, 8]
    assert curve.totals == (8, *micro_batch, *micro_batch, 11, 8)
