"""One picture per run: the loss over the steps, and the memory inside one optimizer step, predicted and measured.

The memory curve is made here, without matplotlib, by :func:`step_curve`; drawing goes through ``matplotlib.figure.Figure``
alone, so neither pyplot nor any other global state is touched and several runs may draw in one process.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from memtrain.planner.choice import Choice
from memtrain.planner.compare import FROM_OUTSIDE
from memtrain.trace.event import DEVICE, Event, Kind, Phase, Trace
from memtrain.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Paul Tol's "light" scheme: told apart by colour-blind readers, and pale enough for a black line on top.
KIND_COLOURS = {
    Kind.WEIGHT: "#77AADD",
    Kind.GRADIENT: "#EE8866",
    Kind.OPTIMIZER_STATE: "#44BB99",
    Kind.INPUT: "#99DDFF",
    Kind.LOGITS: "#FFAABB",
    Kind.SAVED_ACTIVATION: "#EEDD88",
    Kind.WORKSPACE: "#AAAA00",
    Kind.TEMPORARY: "#DDDDDD",
}
PHASE_GREYS = {Phase.FORWARD: "#E4E4E4", Phase.BACKWARD: "#BDBDBD", Phase.UPDATE: "#8C8C8C"}
LOSS_COLOUR, EVALUATION_COLOUR, BUDGET_COLOUR = "#0072B2", "#D55E00", "#CC0000"

# A budget further above the peak than this is named, not shown: its line would press the curve flat.
BUDGET_IN_VIEW = 1.6
# About two points per pixel of the panel.
POINTS_DRAWN = 2000
VALUES_WRITTEN = 8
# Part of the panel's width from which a phase's name fits inside its stretch of the strip.
NAMED_INSIDE = 0.06


@dataclass(frozen=True)
class StepCurve:
    """Live bytes on the device over the last optimizer step of a trace.

    Attributes:
        positions: place of each point in the step: the bytes allocated and freed so far, as a fraction of the step's.
        by_kind: live bytes of each kind at each point; kinds that never occur are left out.
        phases: (phase, start, stop) in order, in the unit of ``positions``; recomputation is part of backward, with which
            it alternates block by block.
    """

    positions: tuple[float, ...]
    by_kind: dict[Kind, tuple[int, ...]]
    phases: tuple[tuple[Phase, float, float], ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """Live bytes of all kinds at each point."""
        return tuple(map(sum, zip(*self.by_kind.values(), strict=True)))

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes of the step."""
        return max(self.totals, default=0)


def step_curve(trace: Trace, most_points: int = POINTS_DRAWN) -> StepCurve:
    """The curve of the last section whose mark starts with ``step``, thinned to about ``most_points`` points.

    It starts from what is live before the section. Of neighbouring points the one with the most live bytes is kept, so
    thinning never lowers a peak.

    Raises:
        ValueError: the trace has no such section.
    """
    steps = [name for name, _ in trace.marks if name.startswith("step ")]
    if not steps:
        raise ValueError(
            f"the trace has the sections {[name for name, _ in trace.marks]}, and its memory curve needs one named 'step N': "
            f"mark the beginning of an optimizer step."
        )
    start, stop = trace.section(steps[-1])
    live = dict.fromkeys(Kind, 0)
    for event in trace.events[:start]:
        if event.place == DEVICE:
            live[event.kind] += event.bytes

    within = _first_and_last_micro_batch([event for event in trace.events[start:stop] if event.place == DEVICE])
    points, moved = [dict(live)], [0]
    for event in within:
        live[event.kind] += event.bytes
        points.append(dict(live))
        moved.append(moved[-1] + abs(event.bytes))

    kept = _highest([sum(point.values()) for point in points], most_points)
    phases = [FROM_OUTSIDE.get(event.phase, event.phase) for event in within]
    # Measured by bytes and not by events, because a measurement has many small events that a prediction has not. A step
    # without a single event is one point, at 0.
    length = max(1, moved[-1])
    return StepCurve(
        positions=tuple(moved[position] / length for position in kept),
        by_kind={
            kind: tuple(points[position][kind] for position in kept) for kind in Kind if any(point[kind] for point in points)
        },
        phases=tuple((phase, moved[first] / length, moved[last] / length) for phase, first, last in _runs(phases)),
    )


def _first_and_last_micro_batch(step: list[Event]) -> list[Event]:
    """A step without the micro-batches between its first and its last, which do what the last does.

    A prediction simulates two; so a measurement of more is drawn like it.
    """
    turns = [
        position
        for position in range(1, len(step))
        if step[position].phase is Phase.FORWARD and step[position - 1].phase is Phase.BACKWARD
    ]
    # Behind the last backward there is no micro-batch, only the sum of the losses.
    turns = [turn for turn in turns if any(event.phase is Phase.BACKWARD for event in step[turn:])]
    if len(turns) < 2:
        return step
    left_out = {event.storage for event in step[turns[0] : turns[-1]] if event.bytes > 0}
    return [
        event
        for position, event in enumerate(step)
        if event.storage not in left_out and (not turns[0] <= position < turns[-1] or event.bytes < 0)
    ]


def plot_run(path: Path, metrics: Sequence[Mapping[str, float]], choice: Choice, measured: Trace | None) -> None:
    """Write the picture of a run to ``path``, as a PNG of 1200 × 900 pixels.

    Args:
        path: the file to write.
        metrics: rows with ``step`` and one or both of ``loss`` and ``eval_loss``.
        choice: the prediction, and the budget it was made for.
        measured: the real run's trace, or None where none was measured.

    Raises:
        ValueError: a trace has no section named ``step N``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), dpi=100, layout="constrained")
    # A model's path may hold a dollar sign, which would begin a formula.
    job = textwrap.fill(f"{choice.job.model}, global batch size {choice.job.global_batch_size}", width=110)
    figure.suptitle(f"{job}\n{choice.plan}", fontsize=12, parse_math=False)
    loss, memory = figure.subplots(2, 1, height_ratios=(2, 3))
    _draw_loss(loss, metrics)
    _draw_memory(memory, choice, measured)
    figure.savefig(path, format="png")


def _draw_loss(axes: Axes, metrics: Sequence[Mapping[str, float]]) -> None:
    from matplotlib.ticker import MaxNLocator

    trained = [(row["step"], row["loss"]) for row in metrics if "loss" in row]
    evaluated = [(row["step"], row["eval_loss"]) for row in metrics if "eval_loss" in row]
    axes.set_title("Loss", loc="left")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.3)
    if trained:
        # A line of one point is invisible.
        axes.plot(
            *zip(*trained, strict=True),
            color=LOSS_COLOUR,
            linewidth=1.2,
            marker="." if len(trained) < 30 else "",
            label="training",
        )
    if evaluated:
        axes.plot(
            *zip(*evaluated, strict=True),
            color=EVALUATION_COLOUR,
            linestyle=":",
            marker="o",
            zorder=4,  # above the numbers, whose white ground would hide the next marker
            label="evaluation",
        )
        for step, value in _spread([point for point in evaluated if math.isfinite(point[1])]):
            axes.annotate(
                f"{value:.3f}",
                (step, value),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )
        # Room for the number above the highest marker.
        axes.margins(y=0.15)
    if trained or evaluated:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)


def _draw_memory(axes: Axes, choice: Choice, measured: Trace | None) -> None:
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    predicted = step_curve(choice.trace)
    peak = predicted.peak_bytes
    title = f"Memory over one optimizer step: peak predicted {format_bytes(peak)} (filled)"
    axes.stackplot(
        predicted.positions,
        *predicted.by_kind.values(),
        labels=[str(kind) for kind in predicted.by_kind],
        colors=[KIND_COLOURS[kind] for kind in predicted.by_kind],
        step="post",
    )
    if measured is not None:
        real = step_curve(measured)
        axes.step(real.positions, real.totals, where="post", color="black", linewidth=1.1, label="measured total")
        peak = max(peak, real.peak_bytes)
        title = f"{title}, measured {format_bytes(real.peak_bytes)} (line)"

    budget = choice.budget.device_bytes
    in_view = budget <= BUDGET_IN_VIEW * peak
    label = f"budget {format_bytes(budget)}" + ("" if in_view else "\n(above the picture)")
    axes.axhline(budget, color=BUDGET_COLOUR, linestyle="--", label=label)
    top = 1.06 * max(peak, budget if in_view else 1)

    axes.set_title(title, loc="left", pad=26)
    axes.set_xlabel("bytes allocated and freed since the step began, as a fraction")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(top / 7))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(int(size))))
    _draw_phases(axes, predicted.phases)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, reverse=True)


def _draw_phases(axes: Axes, phases: Sequence[tuple[Phase, float, float]]) -> None:
    """Draw a strip above the panel that names the phases of the step, each at least once."""
    above = axes.get_xaxis_transform()
    longest: dict[Phase, tuple[float, float]] = {}
    for phase, start, stop in phases:
        axes.broken_barh(
            [(start, stop - start)], (1.01, 0.05), transform=above, clip_on=False, facecolor=PHASE_GREYS.get(phase, "white")
        )
        if stop - start >= NAMED_INSIDE:
            axes.text((start + stop) / 2, 1.033, phase, transform=above, ha="center", va="center", fontsize=9)
        longest[phase] = max(longest.get(phase, (0.0, 0.0)), (stop - start, (start + stop) / 2))
    for phase, (length, middle) in longest.items():
        if length < NAMED_INSIDE:
            axes.text(middle, 1.065, phase, transform=above, ha="right" if middle > 0.9 else "center", fontsize=9)


def _runs(phases: Sequence[Phase]) -> Iterator[tuple[Phase, int, int]]:
    """Neighbouring equal phases as (phase, first position, position after the last)."""
    start = 0
    for phase, group in groupby(phases):
        stop = start + sum(1 for _ in group)
        yield phase, start, stop
        start = stop


def _highest(totals: Sequence[int], most_points: int) -> list[int]:
    """Positions of the first, the last and the highest total of each stretch of neighbours, in order."""
    stretch = math.ceil(len(totals) / most_points)
    stretches = (range(start, min(start + stretch, len(totals))) for start in range(0, len(totals), stretch))
    return sorted({0, len(totals) - 1, *(max(positions, key=totals.__getitem__) for positions in stretches)})


def _spread(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``VALUES_WRITTEN`` of the points, evenly spread and with the first and the last."""
    if len(points) <= VALUES_WRITTEN:
        return list(points)
    return [points[round(place * (len(points) - 1) / (VALUES_WRITTEN - 1))] for place in range(VALUES_WRITTEN)]
