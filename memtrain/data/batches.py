"""Batches: which rows each step of a run sees, and how they are cut into micro-batches.

The order of rows depends on the number of rows, the global batch size and the seed, and on nothing else. The micro-batch
size, which is the plan's choice, only says where a step's rows are cut, and any step can be asked for at once, so a run can
be resumed, or a step repeated in smaller pieces, with exactly the rows it would have had (rule 8).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Final, Protocol

import torch

from memtrain import generators
from memtrain.data.rows import Batch, Row, Rows, check_row

TRAINING_ROWS: Final = "the training rows"
"""What the rows of a step are called in messages."""


class Batches(Protocol):
    """The rows of every step of a run, in micro-batches; :func:`memtrain.data.loading.step_batches` gives them."""

    def indices(self, step: int) -> list[int]:
        """The numbers of the rows of ``step`` (counted from 0), in order."""
        ...

    def micro_batches(self, step: int, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> list[Batch]:
        """The rows of ``step`` in micro-batches; of several processes each takes every ``ranks``-th."""
        ...

    def close(self) -> None:
        """End what makes the rows; where that is this process, nothing."""
        ...


def stacked(rows: Iterable[tuple[int, Row]], first: Row, what: str) -> Batch:
    """The batch of numbered rows, each compared with ``first``.

    Raises:
        ValueError: a row differs from it (:func:`memtrain.data.rows.check_row`).
    """
    chosen: list[Row] = []
    for number, row in rows:
        check_row(row, first, index=number, what=what)
        chosen.append(row)
    return {name: torch.stack([row[name] for row in chosen]) for name in first}


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


class StepBatches:
    """The rows of every step of a run.

    Each epoch is a permutation of all rows drawn from (seed, epoch). The epochs stand end to end, and step ``s`` takes the
    ``global_batch_size`` rows from position ``s * global_batch_size`` on: every row is seen once per epoch, a step may
    straddle two epochs or take several, and no row is dropped at an epoch's end.

    Attributes:
        first: row 0 without its data, which all rows must be like.
    """

    def __init__(self, rows: Rows, *, global_batch_size: int, seed: int) -> None:
        """Order ``rows``, which :func:`memtrain.data.rows.check_rows` has passed.

        Args:
            rows: the training rows, one or more.
            global_batch_size: rows per step.
            seed: of the order.
        """
        assert len(rows) >= 1
        assert global_batch_size >= 1
        self._rows = rows
        self.first = shape_of(rows)
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._epoch = 0
        self._permutation = self._permute(0)

    def indices(self, step: int) -> list[int]:
        """The numbers of the rows of ``step`` (counted from 0), in order.

        The cost does not grow with the step: one permutation where an epoch begins, none within it.
        """
        assert step >= 0
        position = step * self._global_batch_size
        end = position + self._global_batch_size
        numbers: list[int] = []
        while position < end:
            epoch, offset = divmod(position, len(self._rows))
            if epoch != self._epoch:
                self._epoch, self._permutation = epoch, self._permute(epoch)
            taken = self._permutation[offset : offset + end - position].tolist()
            numbers += taken
            position += len(taken)
        return numbers

    def micro_batches(self, step: int, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> list[Batch]:
        """The rows of ``step`` in micro-batches of ``micro_batch_size`` rows; the last has fewer where it does not divide.

        The rows and their order are the same for every ``micro_batch_size``. Of several processes each takes every
        ``ranks``-th micro-batch, so that what they compute at one time are neighbours.

        Args:
            rank: number of this process, from 0.
            ranks: processes that share the step.

        Raises:
            ValueError: a row differs from row 0 (:func:`memtrain.data.rows.check_row`).
        """
        return [
            stacked(((index, self._rows[index]) for index in indices), self.first, TRAINING_ROWS)
            for _, indices in self.cuts(step, micro_batch_size, rank=rank, ranks=ranks)
        ]

    def cuts(self, step: int, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> list[tuple[int, list[int]]]:
        """Of each micro-batch the position of its first row within the step, and the numbers of its rows."""
        assert micro_batch_size >= 1
        assert 0 <= rank < ranks
        indices = self.indices(step)
        starts = range(rank * micro_batch_size, len(indices), ranks * micro_batch_size)
        return [(start, indices[start : start + micro_batch_size]) for start in starts]

    def close(self) -> None:
        """Nothing: the rows are made in this process."""

    def _permute(self, epoch: int) -> torch.Tensor:
        # A hash, because seed + epoch would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
        digest = hashlib.sha256(f"row order, seed {self._seed}, epoch {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]))
        return torch.randperm(len(self._rows), generator=generator, device="cpu")


def evaluation_batches(rows: Rows, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
    """All rows in order, ``micro_batch_size`` at a time; the last batch may be smaller.

    Of several processes each takes a stretch of the rows, which differ by one row at the most; the first has the most.

    Args:
        rank: number of this process, from 0.
        ranks: processes that share the rows.

    Raises:
        ValueError: a row differs from row 0 (:func:`memtrain.data.rows.check_row`), or a process has none.
    """
    assert micro_batch_size >= 1
    assert 0 <= rank < ranks
    # Said by all processes alike, since one that is left waits for the others.
    if len(rows) < ranks:
        raise ValueError(
            f"there are {len(rows)} rows to evaluate on, and each of {ranks} processes needs one: give more rows, or none."
        )
    begin, end = (-(-len(rows) * number // ranks) for number in (rank, rank + 1))
    first = shape_of(rows)
    for start in range(begin, end, micro_batch_size):
        numbers = range(start, min(start + micro_batch_size, end))
        yield stacked(((number, rows[number]) for number in numbers), first, "the evaluation rows")


def steps_for(epochs: float, rows: int, global_batch_size: int) -> int:
    """Steps of ``global_batch_size`` rows in which ``rows`` rows (one or more) are seen ``epochs`` times, rounded up.

    >>> steps_for(3, rows=10, global_batch_size=4), steps_for(1.1, rows=10, global_batch_size=1)
    (8, 11)

    Raises:
        ValueError: ``epochs`` is not above 0 and finite.
    """
    if not 0 < epochs < math.inf:
        raise ValueError(f"epochs is {epochs!r}, and it must be above 0 and finite: give how often each row is seen.")
    # The decimal as written: as floats, 1.1 epochs of 10 rows are 11.000000000000002 rows, and would be rounded up to 12.
    return math.ceil(Fraction(str(epochs)) * rows / global_batch_size)
