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

import torch

from memtrain.data.rows import Batch, Row, Rows, check_row


def _batch(rows: Rows, indices: Iterable[int], what: str) -> Batch:
    """The batch of the rows with these numbers, each compared with row 0 of all rows, in this batch or not."""
    first = rows[0]
    chosen: list[Row] = []
    for index in indices:
        row = rows[index]
        check_row(row, first, index=index, what=what)
        chosen.append(row)
    return {name: torch.stack([row[name] for row in chosen]) for name in first}


class StepBatches:
    """The rows of every step of a run.

    Each epoch is a permutation of all rows drawn from (seed, epoch). The epochs stand end to end, and step ``s`` takes the
    ``global_batch_size`` rows from position ``s * global_batch_size`` on: every row is seen once per epoch, a step may
    straddle two epochs or take several, and no row is dropped at an epoch's end.
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
        assert micro_batch_size >= 1
        assert 0 <= rank < ranks
        indices = self.indices(step)
        return [
            _batch(self._rows, indices[start : start + micro_batch_size], "the training rows")
            for start in range(rank * micro_batch_size, len(indices), ranks * micro_batch_size)
        ]

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
    first, end = (-(-len(rows) * number // ranks) for number in (rank, rank + 1))
    for start in range(first, end, micro_batch_size):
        yield _batch(rows, range(start, min(start + micro_batch_size, end)), "the evaluation rows")


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
