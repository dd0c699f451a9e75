"""Predicted beside measured, in the terms that both can tell."""

from __future__ import annotations

from collections.abc import Mapping

from memtrain.memory.footprint import footprint
from memtrain.planner.choice import Choice, Comparison, Side
from memtrain.trace.event import Kind, Phase, Trace

# A profiler sees an address and a size: what is neither of the first three it cannot tell apart.
_REST = "activations and temporaries"
_TOLD_APART = (Kind.WEIGHT, Kind.GRADIENT, Kind.OPTIMIZER_STATE)


def compare(choice: Choice, measured: Mapping[str, Trace], step_seconds: float) -> Comparison:
    """The prediction beside the measured windows of a run.

    Args:
        measured: a trace per window of the run, each starting with what was live.
        step_seconds: measured, the median.
    """
    predicted = _side([choice.trace], choice.step_seconds)
    return Comparison(predicted, _side(list(measured.values()), step_seconds))


def _side(traces: list[Trace], step_seconds: float) -> Side:
    footprints = [footprint(trace) for trace in traces if trace.events]
    highest = max(footprints, key=lambda one: one.peak_allocated_bytes)
    by_kind = {str(kind): highest.by_kind.get(kind, 0) for kind in _TOLD_APART}
    by_kind[_REST] = highest.peak_allocated_bytes - sum(by_kind.values())
    by_phase: dict[str, int] = {}
    for one in footprints:
        for phase, peak in one.by_phase.items():
            # From outside, recomputation is a part of backward.
            told = str(Phase.BACKWARD if phase is Phase.RECOMPUTE else phase)
            by_phase[told] = max(by_phase.get(told, 0), peak)
    ordered = {str(phase): by_phase[phase] for phase in Phase if phase in by_phase}
    return Side(peak_allocated_bytes=highest.peak_allocated_bytes, by_kind=by_kind, by_phase=ordered, step_seconds=step_seconds)
