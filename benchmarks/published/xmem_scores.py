"""The xMem study's metrics, computed from its records: for memtrain and for the four tools that the study ran itself.

- *error*: |estimate − measured| / measured of the first run; in the tables the median over all runs, those that ran out of
  memory and those that a tool does not support included.
- *C1*: whether running out of memory was predicted rightly.
- *C2*: C1, and where the run trained, the same run trains again when it may reserve the estimate only, rounded to 1 % of
  the card. The share of runs without it is the probability of estimation failure (PEF).
- *MCP*: bytes of the card that the estimate leaves to others, per run: total − estimate, or total where C2 says rightly that
  it does not train; 0 where only C1 holds; −total where not even that. The mean, in GiB.

The study ran each capped run again. Here the records say it where they can: a cap at or above the lowest that trained trains,
one at or below the highest that ran out runs out. Between, a cap of the measured peak less 100 MiB trains, the rule that
stands in for a card in the study's data description.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30
_SLACK_BYTES = 100 * 2**20
TOOLS = ("xmem", "dnnmem", "schedtune", "llmem")


@dataclass(frozen=True)
class Score:
    """One tool's estimate of one run.

    Attributes:
        error: relative to the measured bytes, signed for memtrain, as the study has it for its tools.
        c1, c2: as above; c2 is None where the capped run was not made.
        saved_bytes: what the run counts in MCP; None where c2 is.
    """

    error: float
    c1: bool
    c2: bool | None
    saved_bytes: float | None


def score(record: Mapping[str, Any], estimate_bytes: float, out_of_memory: bool) -> Score:
    """The score of an estimate, with the records' facts and the rule between in place of the capped run."""
    c1 = out_of_memory == record["real_oom"]
    c2 = c1 and (record["real_oom"] or trains_under(record, estimate_bytes))
    error = estimate_bytes / record["ground_bytes"] - 1
    return Score(error, c1, c2, _saved(record, estimate_bytes, c1, c2))


def cap_bytes(estimate_bytes: float, total_bytes: int) -> float:
    """The cap that the study makes of an estimate: whole percents of the card, rounded to the nearest."""
    return round(estimate_bytes / total_bytes, 2) * total_bytes


def least_estimate(predicted_bytes: int, reserved_bytes: int, total_bytes: int) -> int:
    """The least estimate from ``predicted_bytes`` on whose cap is at least ``reserved_bytes``.

    >>> least_estimate(604, 604, 1000), least_estimate(604, 600, 1000), least_estimate(607, 607, 1000)
    (606, 604, 607)
    """
    if cap_bytes(predicted_bytes, total_bytes) >= reserved_bytes:
        return predicted_bytes
    estimate = (100 * predicted_bytes // total_bytes * 2 + 1) * total_bytes // 200
    # A half is rounded to the even percent, so a byte more decides.
    while cap_bytes(estimate, total_bytes) < reserved_bytes:
        estimate += 1
    return estimate


def trains_under(record: Mapping[str, Any], estimate_bytes: float) -> bool:
    """Whether a run that trained would train again with the estimate, rounded to 1 % of the card, as its cap."""
    cap = cap_bytes(estimate_bytes, record["total_gpu_memory"])
    trained, ran_out = record.get("cap_ok_min_bytes"), record.get("cap_oom_max_bytes")
    # Whole bytes are recorded of the caps, which are fractions of the card.
    surely = trained is not None and cap >= trained - 1
    never = ran_out is not None and cap <= ran_out + 1
    if surely != never:
        return surely
    return bool(cap >= record["ground_bytes"] - _SLACK_BYTES)


def score_of_tool(record: Mapping[str, Any], tool: str) -> Score | None:
    """The score of one of the study's tools, from the study's own capped run; None where it has no estimate."""
    estimate, error = record.get(f"{tool}_bytes"), record.get(f"{tool}_error")
    if estimate is None or error is None:
        return None
    # What a tool does not support has an estimate below 0 and counts as predicted to run out, with an error of 100 %.
    c1 = record.get(f"{tool}_pred_oom") == record["real_oom"]
    ran_out = record.get(f"{tool}_verify_oom")
    c2: bool | None = c1
    if c1 and not record["real_oom"]:
        c2 = None if ran_out is None else not ran_out
    return Score(error, c1, c2, None if c2 is None else _saved(record, estimate, c1, c2))


def _saved(record: Mapping[str, Any], estimate_bytes: float, c1: bool, c2: bool) -> float:
    total = float(record["total_gpu_memory"])
    if c2:
        return total if record["real_oom"] else total - estimate_bytes
    return 0.0 if c1 else -total


@dataclass(frozen=True)
class Aggregate:
    """The study's figures over runs; fractions, and GiB for ``mcp``. None where there is nothing to count."""

    runs: int
    median_error: float | None
    pef: float | None
    c1: float | None
    mcp: float | None


def aggregate(scores: Sequence[Score]) -> Aggregate:
    """The figures over the scores of one tool."""
    capped = [one for one in scores if one.c2 is not None]
    saved = [one.saved_bytes for one in capped if one.saved_bytes is not None]
    return Aggregate(
        runs=len(scores),
        median_error=statistics.median(abs(one.error) for one in scores) if scores else None,
        pef=sum(not one.c2 for one in capped) / len(capped) if capped else None,
        c1=sum(one.c1 for one in scores) / len(scores) if scores else None,
        mcp=statistics.mean(saved) / GIB if saved else None,
    )
