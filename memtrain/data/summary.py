"""What people see of their rows before they train on them: how long they are, what padding wastes, and what packing would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain.data.batches import StepBatches
from memtrain.data.packing import best_fit_decreasing
from memtrain.data.rows import IGNORED, Rows
from memtrain.data.rowset import Lengths, RowSet

# So many rows are laid out to see what padding and packing come to; of more, the first.
_LAID_OUT = 200_000
_BARS = 10


@dataclass(frozen=True, kw_only=True)
class Bar:
    """How many rows have ``shortest`` to ``longest`` tokens, both included."""

    shortest: int
    longest: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a set of rows is like, packs opened.

    Attributes:
        rows: how many.
        tokens: of all rows.
        learnt: of these, those that are learnt.
        shortest, median, mean, longest: tokens of a row; at_90, at_99: what 90 and 99 % of the rows do not exceed.
        histogram: of the lengths; one bar where all are as long.
        padding: the share of what is computed that is padding, by the way in which rows are put together: ``"by_step"``, each
            step's rows sorted by length, or ``"grouped"``, as with group_by_length.
        packs: rows that are left if short ones are packed, filled: the share of them that is no padding, and is_packed: whether
            they are.
        steps: optimizer steps in an epoch.
    """

    rows: int
    tokens: int
    learnt: int
    shortest: int
    median: float
    mean: float
    at_90: int
    at_99: int
    longest: int
    histogram: tuple[Bar, ...]
    padding: Mapping[str, float]
    packs: int
    filled: float
    is_packed: bool
    steps: int


def summary(
    lengths: Lengths,
    learnt: int,
    rows: RowSet,
    *,
    sequence_length: int,
    micro_batch_size: int,
    global_batch_size: int,
    drop_last: bool = False,
) -> Summary:
    """What rows are like.

    Args:
        lengths: tokens of each row before packing, int64 of shape (rows,), one row or more.
        learnt: the tokens that are learnt.
        rows: as they are trained on.
        sequence_length: tokens of a pack.
        micro_batch_size, global_batch_size: rows that are padded together, and rows of a step.
        drop_last: whether the short step of an epoch is left out.
    """
    some = lengths[:_LAID_OUT]
    packs = best_fit_decreasing(np.minimum(some, sequence_length), sequence_length)
    filled = float(some.sum() / (len(packs) * sequence_length))
    order = StepBatches(rows, global_batch_size=global_batch_size, seed=0, drop_last=drop_last)
    quantiles = np.quantile(lengths, (0.9, 0.99), method="higher")
    return Summary(
        rows=len(lengths),
        tokens=int(lengths.sum()),
        learnt=learnt,
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        mean=float(lengths.mean()),
        at_90=int(quantiles[0]),
        at_99=int(quantiles[1]),
        longest=int(lengths.max()),
        histogram=_histogram(lengths),
        padding={
            name: _padding(some, micro_batch_size, global_batch_size, grouped=name == "grouped")
            for name in ("by_step", "grouped")
        },
        packs=round(len(packs) * len(lengths) / len(some)),
        filled=filled,
        is_packed=rows.packed,
        steps=order.steps_per_epoch,
    )


def _histogram(lengths: Lengths) -> tuple[Bar, ...]:
    """Up to ten bars of one width, a round number of tokens."""
    least, most = int(lengths.min()), int(lengths.max())
    wanted = (most - least + 1) / _BARS
    width = next(step for power in range(12) for step in (10**power, 2 * 10**power, 5 * 10**power) if step >= wanted)
    first = least // width
    counts = np.bincount(lengths // width - first)
    return tuple(
        Bar(shortest=max(least, (first + place) * width), longest=min(most, (first + place + 1) * width - 1), rows=int(count))
        for place, count in enumerate(counts.tolist())
    )


def _padding(lengths: Lengths, micro_batch_size: int, global_batch_size: int, *, grouped: bool) -> float:
    """The share of padding where micro-batches are filled up to their longest row, of rows in an order drawn once."""
    order = np.random.default_rng(0).permutation(len(lengths))
    shuffled = np.sort(lengths[order])[::-1] if grouped else lengths[order]
    computed = 0
    for start in range(0, len(shuffled), global_batch_size):
        step = np.sort(shuffled[start : start + global_batch_size])[::-1]
        for first in range(0, len(step), micro_batch_size):
            part = step[first : first + micro_batch_size]
            # To a multiple of 8, but not beyond the longest row (memtrain.data.padding).
            computed += min(-(-int(part[0]) // 8) * 8, int(lengths.max())) * len(part)
    return 1 - float(lengths.sum()) / computed


def counted_lengths(rows: Rows) -> Lengths:
    """The tokens of each row that are no padding, int64 of shape (rows,), of rows all of whose tokens are labels."""
    return np.array([int((rows[number]["labels"] != IGNORED).sum()) for number in range(len(rows))], dtype=np.int64)


def chosen_examples(lengths: Lengths) -> Sequence[int]:
    """The numbers of three rows that say most: the first, one of median length, and the longest; fewer where they are the same."""
    in_order = np.argsort(lengths, kind="stable")
    return list(dict.fromkeys([0, int(in_order[(len(lengths) - 1) // 2]), int(np.argmax(lengths))]))


def learnt_spans(row: Mapping[str, Any], *, shifted: bool) -> list[tuple[list[int], bool]]:
    """The tokens of a row in pieces that are learnt or not; where labels are not those of tokens, none is marked.

    Args:
        shifted: whether each token is told from those before it, so that nobody learns the first.

    >>> import torch
    >>> learnt_spans({"input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor([5, -100, 7])}, shifted=True)
    [([5, 6], False), ([7], True)]
    """
    ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
    learns = (
        [label != IGNORED for label in labels] if isinstance(labels, list) and len(labels) == len(ids) else [False] * len(ids)
    )
    learns[:1] = [learns[0] and not shifted]
    pieces: list[tuple[list[int], bool]] = []
    for token, counts in zip(ids, learns, strict=True):
        if not pieces or pieces[-1][1] != counts:
            pieces.append(([], counts))
        pieces[-1][0].append(token)
    return pieces
