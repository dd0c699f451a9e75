"""Predicted beside measured, in the terms that both can tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from memtrain.memory.footprint import Footprint, footprint
from memtrain.planner.choice import Choice, Comparison, Side
from memtrain.trace.event import Kind, Phase, Trace

# A profiler sees an address and a size: what is neither of the first three it cannot tell apart.
_REST = "activations and temporaries"
_TOLD_APART = (Kind.WEIGHT, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
# The phase that a card's counters tell, whose peaks have no times.
FORWARD_AND_BACKWARD = "forward and backward"

# What a phase is a part of, seen from outside.
FROM_OUTSIDE = {Phase.RECOMPUTE: Phase.BACKWARD, Phase.FIRST_UPDATE: Phase.UPDATE}


def compare(choice: Choice, measured: Side) -> Comparison:
    """The prediction of a choice beside a measurement, in the phases that the measurement tells apart."""
    predicted = _side([choice.footprint], choice.step_seconds)
    if FORWARD_AND_BACKWARD in measured.by_phase:
        predicted = replace(predicted, by_phase=_together(predicted.by_phase))
    return Comparison(predicted, measured)


def _together(by_phase: Mapping[str, int]) -> dict[str, int]:
    """Forward and backward as one phase, in the place of the first of them."""
    parts = (str(Phase.FORWARD), str(Phase.BACKWARD))
    folded: dict[str, int] = {}
    for phase, peak in by_phase.items():
        name = FORWARD_AND_BACKWARD if phase in parts else phase
        folded[name] = max(folded.get(name, 0), peak)
    return folded


def side_of(traces: Iterable[Trace], step_seconds: float) -> Side:
    """A measured side from traces on a processor.

    Args:
        traces: one per window of the run, each starting with what was live.
        step_seconds: the median.
    """
    return _side([footprint(trace) for trace in traces if trace.events], step_seconds)


def counted_side(by_phase: Mapping[str, int], reserved_bytes: int, total_bytes: int, step_seconds: float) -> Side:
    """A measured side from a card's counters, which tell peaks and not what they are made of.

    Args:
        by_phase: allocated peak within each phase that was told apart, at least one.
        reserved_bytes, total_bytes: as in a Footprint.
    """
    return Side(
        peak_allocated_bytes=max(by_phase.values()),
        peak_reserved_bytes=reserved_bytes,
        total_device_bytes=total_bytes,
        by_kind={},
        by_phase=dict(by_phase),
        step_seconds=step_seconds,
    )


def _side(footprints: list[Footprint], step_seconds: float) -> Side:
    highest = max(footprints, key=lambda one: one.peak_allocated_bytes)
    by_kind = {str(kind): highest.by_kind.get(kind, 0) for kind in _TOLD_APART}
    by_kind[_REST] = highest.peak_allocated_bytes - sum(by_kind.values())
    by_phase: dict[str, int] = {}
    for one in footprints:
        for phase, peak in one.by_phase.items():
            told = str(FROM_OUTSIDE.get(phase, phase))
            by_phase[told] = max(by_phase.get(told, 0), peak)
    ordered = {str(phase): by_phase[phase] for phase in Phase if phase in by_phase}
    return Side(
        peak_allocated_bytes=highest.peak_allocated_bytes,
        peak_reserved_bytes=max(one.peak_reserved_bytes for one in footprints),
        total_device_bytes=max(one.total_device_bytes for one in footprints),
        by_kind=by_kind,
        by_phase=ordered,
        step_seconds=step_seconds,
    )
