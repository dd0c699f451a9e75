"""Rows with what makes batches of them: how rows are joined, how long each is, and what the largest batch looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from memtrain import generators
from memtrain.data.rows import Batch, Row, Rows, check_row, fingerprint

TRAINING_ROWS: Final = "the training rows"
"""What the rows of a step are called in messages."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each tensor of one row, as it stands in a batch."""

Lengths = np.ndarray[tuple[int], np.dtype[np.int64]]

Join = Callable[[Sequence[Row]], Batch]


def stack(rows: Sequence[Row]) -> Batch:
    """The batch of rows of one shape."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True, kw_only=True)
class RowSet:
    """Rows of one run, to train or to evaluate on.

    Attributes:
        rows: the rows by number.
        what: what they are called in messages.
        shapes: of one row in the largest batch that can occur.
        join: makes a batch of rows.
        join_largest: makes a batch of rows in the size of the largest.
        first: row 0 without its data, which all rows are like; None where ``join`` takes rows of any form.
        ragged: the names of the tensors whose length differs from row to row.
        lengths: tokens of each row; None where rows are no text.
        longest: the numbers of the rows that the largest batch is made of.
        packed: whether a row is several, told apart by their positions.
        vary: makes a row another one in each step, given its number and the step, such as by masking tokens.
        fingerprint: by which two processes tell whether theirs are the same rows.
    """

    rows: Rows
    what: str = TRAINING_ROWS
    shapes: Shapes
    join: Join = stack
    join_largest: Join = stack
    first: Row | None
    ragged: frozenset[str] = frozenset()
    lengths: Lengths | None = None
    longest: tuple[int, ...] = ()
    packed: bool = False
    vary: Callable[[Row, int, int], Row] | None = None
    fingerprint: str

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int, step: int = 0) -> Row:
        """The row of a number as it is trained on in a step."""
        row = self.rows[number]
        return row if self.vary is None else self.vary(row, number, step)

    def batch(self, rows: Iterable[tuple[int, Row]]) -> Batch:
        """The batch of numbered rows.

        Raises:
            ValueError: a row is not like the others (:func:`memtrain.data.rows.check_row`).
        """
        chosen: list[Row] = []
        for number, row in rows:
            if self.first is not None:
                check_row(row, self.first, index=number, what=self.what, ragged=self.ragged)
            chosen.append(row)
        return self.join(chosen)

    def largest(self, numbers: Sequence[int]) -> Batch:
        """As large a batch of as many rows as there can be; where all have one shape, of just these."""
        if not self.longest:
            return self.batch((number, self.row(number)) for number in numbers)
        return self.join_largest([self.row(self.longest[place % len(self.longest)]) for place in range(len(numbers))])

    @property
    def alone(self) -> Rows:
        """The rows as tensors, each as the only one of a batch where a function of the user's joins them."""
        return self.rows if self.first is not None else _Alone(self)

    def tokens(self, numbers: Sequence[int]) -> int | None:
        """The tokens of these rows, padding not counted; None where rows are no text."""
        return None if self.lengths is None else int(self.lengths[np.asarray(numbers, dtype=np.int64)].sum())

    @property
    def counts(self) -> str:
        """What the speed of a step is given in."""
        return "rows" if self.lengths is None else "tokens"

    @property
    def in_order_of_length(self) -> Sequence[int]:
        """The numbers of all rows, the longest first where their lengths differ."""
        if not self.ragged or self.lengths is None:
            return range(len(self))
        in_order: list[int] = np.argsort(-self.lengths, kind="stable").tolist()
        return in_order


@dataclass(frozen=True)
class _Alone:
    rows: RowSet

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Row:
        return {name: tensor[0] for name, tensor in self.rows.batch([(number, self.rows.row(number))]).items()}


def alike(rows: Rows, what: str = TRAINING_ROWS) -> RowSet:
    """Rows of one shape, which :func:`memtrain.data.rows.check_rows` has passed."""
    first = shape_of(rows)
    ids = first.get("input_ids")
    return RowSet(
        rows=rows,
        what=what,
        shapes={name: (tuple(tensor.shape), tensor.dtype) for name, tensor in first.items()},
        first=first,
        lengths=None if ids is None else np.broadcast_to(np.int64(len(ids)), len(rows)),
        fingerprint=fingerprint(rows),
    )


def shape_of(rows: Rows) -> Row:
    """Row 0 without its data.

    It is made once, and the generators of random numbers are put back. So a row that draws some does not change what the
    run draws after it, and a run that is resumed draws the same.
    """
    put_back = generators.remember()
    try:
        return {name: torch.empty_like(tensor, device="meta") for name, tensor in rows[0].items()}
    finally:
        put_back()


def check_alike(rows: RowSet, like: RowSet) -> None:
    """Refuse rows that are others than those trained on in more than their length.

    Raises:
        ValueError: another tensor, or one of another type or number of dimensions.
    """
    for name in sorted({*rows.shapes, *like.shapes}):
        mine, other = (_kind(one.shapes.get(name)) for one in (rows, like))
        if mine != other:
            raise ValueError(
                f"{rows.what} has {mine} for {name!r} in its rows and {like.what} has {other}, and both must be alike: give rows "
                f"that were made in one way."
            )


def _kind(found: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    if found is None:
        return "nothing"
    shape, dtype = found
    return f"{dtype} of {len(shape)} dimensions"
