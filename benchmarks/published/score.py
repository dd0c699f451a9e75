"""A prediction beside what was published: which bytes are compared, how far apart they are, and what that sums up to.

Nothing here knows torch. An error is predicted over published, less one. It is 0 where the two differ by less than half a unit of the
last digit that was published, and where the published unit is unknown and the prediction lies between the two readings of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from published.record import Record
from published.run import Prediction

Compared = Literal["allocated", "reserved", "total"]
GIB = 2**30
# A gigabyte of 10**9 bytes for one of 2**30, which is what an unknown unit may be.
_SMALLER_UNIT = 10**9 / GIB
WHOLE_STEPS = ("train_step", "fwd_bwd")


@dataclass(frozen=True)
class Scored:
    """A record with its prediction.

    Attributes:
        published_bytes: of one card; 0 where the run ended for want of memory.
        predicted_bytes: of the kind that the metric counts.
        error: a fraction; 0 within what the published digits leave open.
        oom_right: of a run that ended for want of memory, whether more is predicted than the card has; None of others.
    """

    record: Record
    prediction: Prediction
    compared: Compared
    published_bytes: float
    predicted_bytes: int
    error: float
    oom_right: bool | None = None


@dataclass(frozen=True)
class Skipped:
    """A record without a score, and why."""

    record: Record
    reason: str
    failed: bool = False


def why_not(record: Record, qualities: Sequence[str], core: bool, scopes: Sequence[str] = WHOLE_STEPS) -> str:
    """Why a record is not even simulated, empty where it is."""
    if record.quality not in qualities:
        return f"quality {record.quality} was not asked for"
    if core and not record.core:
        return "not of the core subset that was asked for"
    if record.scope not in scopes:
        return f"the scope {record.scope!r} is no whole step"
    if record.outcome not in ("ok", "oom"):
        return f"the outcome {record.outcome!r} is neither ok nor oom"
    if record.outcome == "ok" and not (record.peak_gib or (record.unit == "bytes" and record.peak_value)):
        return "no peak was published, in bytes or in GiB"
    for name, value in (
        ("batch size", record.batch_size_per_gpu),
        ("length", record.seq_len),
        ("accumulation", record.grad_accum),
    ):
        if value is not None and (type(value) is not int or value < 1):
            return f"the {name} {value!r} is no whole number of 1 or more"
    return ""


def compared(metric: str) -> Compared:
    """Which of the predicted bytes a metric counts; one that does not say is taken for the allocator's reservation."""
    words = metric.lower()
    if "reserved" in words:
        return "reserved"
    if "nvidia-smi" in words:
        return "total"
    return "reserved" if "unspecified" in words and "torch" not in words else "allocated"


def score(record: Record, prediction: Prediction, decimals: int) -> Scored | Skipped:
    """The score of a record.

    Args:
        decimals: digits after the point that its source publishes.
    """
    if prediction.skipped or prediction.failed:
        return Skipped(record, prediction.skipped or prediction.failed, failed=bool(prediction.failed))
    what = compared(record.metric)
    if record.outcome == "oom":
        right = prediction.total_bytes > prediction.usable_bytes
        return Scored(record, prediction, what, 0.0, prediction.total_bytes, 0.0, right)
    predicted = {
        "allocated": prediction.allocated_bytes,
        "reserved": prediction.reserved_bytes,
        "total": prediction.total_bytes,
    }[what]
    published = published_bytes(record)
    return Scored(record, prediction, what, published, predicted, error(record, predicted, decimals))


def published_bytes(record: Record) -> float:
    """The published peak of one card, in bytes."""
    if record.unit == "bytes" and record.peak_value is not None:
        return float(record.peak_value)
    assert record.peak_gib is not None
    return record.peak_gib * GIB


def error(record: Record, predicted: int, decimals: int) -> float:
    """Predicted over published, less one, with what the published digits and unit leave open."""
    highest = published_bytes(record)
    lowest = highest * (_SMALLER_UNIT if record.unit_interpreted.endswith("?") else 1.0)
    # The published number may be a sum over cards, or in another unit: what one of its last digits is follows from both.
    digit = 0.0 if not record.peak_value else highest / record.peak_value * 10.0**-decimals
    if lowest - digit / 2 <= predicted <= highest + digit / 2:
        return 0.0
    return predicted / (highest if predicted > highest else lowest) - 1


def decimals_by_source(records: Iterable[Record]) -> dict[tuple[str, str], int]:
    """Digits after the point that each source publishes in a unit: the most of any of its numbers, since trailing zeros are lost."""
    most: dict[tuple[str, str], int] = {}
    for record in records:
        fraction = "" if record.peak_value is None else f"{record.peak_value:.6f}".partition(".")[2].rstrip("0")
        key = (record.source_family, record.unit)
        most[key] = max(most.get(key, 0), len(fraction))
    return most


# ---------------------------------------------------------------------- sums


def summary(scored: Sequence[Scored], skipped: Sequence[Skipped]) -> dict[str, Any]:
    """The last line as data; errors are fractions, and those of runs that ended for want of memory are none."""
    errors = [one.error for one in scored if one.oom_right is None]
    ooms = [one.oom_right for one in scored if one.oom_right is not None]
    return {
        "scored": len(errors),
        "skipped": len(skipped),
        "failed": sum(one.failed for one in skipped),
        **_of(errors),
        "oom_right": sum(ooms),
        "oom_total": len(ooms),
        # Runs that trained and would have been called too large for their card.
        "unfit": sum(one.oom_right is None and one.prediction.total_bytes > one.prediction.usable_bytes > 0 for one in scored),
        "clusters": len(by_cluster(scored)),
        "median_error_of_clusters": _median([abs(found["median_error"]) for found in by_cluster(scored).values()]),
    }


def by_cluster(scored: Sequence[Scored]) -> dict[str, dict[str, Any]]:
    """The same sums of each cluster's errors."""
    errors: dict[str, list[float]] = {}
    for one in scored:
        if one.oom_right is None:
            errors.setdefault(one.record.cluster, []).append(one.error)
    return {cluster: {"scored": len(found), **_of(found)} for cluster, found in sorted(errors.items())}


def _of(errors: Sequence[float]) -> dict[str, Any]:
    sizes = sorted(abs(error) for error in errors)
    return {
        "median_error": _median(sizes),
        # The smallest that nine of ten do not exceed.
        "p90_error": sizes[-(-9 * len(sizes) // 10) - 1] if sizes else None,
        "largest_error": sizes[-1] if sizes else None,
        "median_signed_error": _median(errors),
        "under_1pct": sum(error < -0.01 for error in errors) / len(errors) if errors else None,
        "under_3pct": sum(error < -0.03 for error in errors) / len(errors) if errors else None,
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def as_data(one: Scored) -> dict[str, Any]:
    """What is written of a score."""
    record, prediction = one.record, one.prediction
    return {
        "id": record.id,
        "cluster": record.cluster,
        "model": record.model,
        "method": record.method,
        "quality": record.quality,
        "metric": record.metric,
        "compared": one.compared,
        "outcome": record.outcome,
        "published_bytes": one.published_bytes,
        "predicted_bytes": one.predicted_bytes,
        "error": one.error,
        "oom_right": one.oom_right,
        **_without(prediction.to_dict(), "id", "skipped", "failed"),
    }


def _without(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in names}
