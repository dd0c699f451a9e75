"""Batches: which rows each step of a run sees, and how they are cut into micro-batches.

Which rows a step has depends on their number, on the global batch size and on the seed, and on nothing else. The micro-batch
size, which is the plan's choice, only says where a step's rows are cut, and any step can be asked for at once, so a run can
be resumed, or a step repeated in smaller pieces, with exactly the rows it would have had (rule 8).

Where rows are padded, those of a step are cut in the order of their lengths, so that rows of like length stand together. That
changes what is padded and not what is trained. Grouping rows of like length into a step does change it, and is only done
where the job says so.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Protocol

import torch

from memtrain.data.rows import Batch
from memtrain.data.rowset import RowSet


class Batches(Protocol):
    """The rows of every step of a run, in micro-batches; :func:`memtrain.data.loading.step_batches` gives them."""

    def indices(self, step: int) -> list[int]:
        """The numbers of the rows of ``step`` (counted from 0), in order."""
        ...

    def micro_batches(self, step: int, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> list[Batch]:
        """The rows of ``step`` in micro-batches; of several processes each takes every ``ranks``-th."""
        ...

    def largest(self, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> list[Batch]:
        """The micro-batches of one process in the largest step that there can be."""
        ...

    def tokens(self, step: int) -> int | None:
        """The tokens of the rows of ``step``, padding not counted; None where rows are no text."""
        ...

    def epoch(self, steps: int) -> float:
        """How often each row has been seen after so many steps."""
        ...

    def seen(self, steps: int) -> int:
        """The tokens of all rows of so many steps; rows where they are no text."""
        ...

    def close(self) -> None:
        """End what makes the rows; where that is this process, nothing."""
        ...


class StepBatches:
    """The rows of every step of a run.

    Each epoch is a permutation of all rows drawn from (seed, epoch), and is cut into steps of ``global_batch_size`` rows. The
    last step of an epoch has those that are left, so that every row is seen once per epoch.
    """

    def __init__(
        self, rows: RowSet, *, global_batch_size: int, seed: int, drop_last: bool = False, group_by_length: bool = False
    ) -> None:
        """Order ``rows``.

        Args:
            rows: the training rows, one or more.
            global_batch_size: rows per step.
            seed: of the order.
            drop_last: leave out the short step at an epoch's end.
            group_by_length: put rows of like length into one step, as :func:`memtrain.data.batches.grouped` does.
        """
        assert len(rows) >= 1
        assert global_batch_size >= 1
        self.rows = rows
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._groups = group_by_length and rows.lengths is not None
        self.steps_per_epoch = steps_in_epoch(len(rows), global_batch_size, drop_last=drop_last)
        self._rows_per_epoch = min(len(rows), self.steps_per_epoch * global_batch_size)
        self._epoch = 0
        self._permutation = self._permute(0)

    def indices(self, step: int) -> list[int]:
        """The numbers of the rows of ``step`` (counted from 0), in the order in which they are cut.

        The cost does not grow with the step: one permutation where an epoch begins, none within it.
        """
        assert step >= 0
        epoch, number = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self._permute(epoch)
        start = number * self._global_batch_size
        numbers: list[int] = self._permutation[start : start + self._global_batch_size].tolist()
        lengths = self.rows.lengths
        if lengths is not None and self.rows.ragged:
            numbers.sort(key=lambda index: -int(lengths[index]))
        return numbers

    def micro_batches(self, step: int, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> list[Batch]:
        """The rows of ``step`` in micro-batches of ``micro_batch_size`` rows; the last has fewer where it does not divide.

        The rows are the same for every ``micro_batch_size``. Of several processes each takes every ``ranks``-th micro-batch, so
        that what they compute at one time are neighbours.

        Args:
            rank: number of this process, from 0.
            ranks: processes that share the step.

        Raises:
            ValueError: a row differs from row 0 (:func:`memtrain.data.rows.check_row`).
        """
        return [
            self.rows.batch((index, self.rows.row(index, step)) for index in indices)
            for _, indices in self.cuts(step, micro_batch_size, rank=rank, ranks=ranks)
        ]

    def cuts(self, step: int, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> list[tuple[int, list[int]]]:
        """Of each micro-batch the position of its first row within the step, and the numbers of its rows."""
        assert micro_batch_size >= 1
        assert 0 <= rank < ranks
        indices = self.indices(step)
        if len(indices) < ranks:
            # Every process has to take part: each computes all of the few rows, which count as often and so weigh the same.
            rank, ranks = 0, 1
        # In a short step smaller micro-batches leave something for every process.
        size = min(micro_batch_size, len(indices) // ranks)
        return [(start, indices[start : start + size]) for start in range(rank * size, len(indices), ranks * size)]

    def largest(self, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> list[Batch]:
        """The micro-batches of one process in the largest step that there can be."""
        cuts = self.cuts(0, micro_batch_size, rank=rank, ranks=ranks)
        return [self.rows.largest(numbers) for _, numbers in cuts]

    def tokens(self, step: int) -> int | None:
        """The tokens of the rows of ``step``, padding not counted; None where rows are no text."""
        return self.rows.tokens(self.indices(step))

    def epoch(self, steps: int) -> float:
        """How often each row has been seen after so many steps."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs + min(rest * self._global_batch_size, self._rows_per_epoch) / self._rows_per_epoch

    def seen(self, steps: int) -> int:
        """The tokens of all rows of so many steps; rows where they are no text."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        begun = [index for step in range(rest) for index in self.indices(epochs * self.steps_per_epoch + step)]
        lengths = self.rows.lengths
        if lengths is None:
            return epochs * self._rows_per_epoch + len(begun)
        seen = epochs * int(lengths.sum()) + int(lengths[begun].sum())
        if self._rows_per_epoch < len(self.rows):
            seen -= sum(int(lengths[self._permute(epoch)[self._rows_per_epoch :]].sum()) for epoch in range(epochs))
        return seen

    def close(self) -> None:
        """Nothing: the rows are made in this process."""

    def _permute(self, epoch: int) -> torch.Tensor:
        # A hash, because seed + epoch would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
        digest = hashlib.sha256(f"row order, seed {self._seed}, epoch {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]))
        permutation = torch.randperm(len(self.rows), generator=generator, device="cpu")
        if not self._groups:
            return permutation
        assert self.rows.lengths is not None
        return grouped(permutation, torch.from_numpy(self.rows.lengths.copy()), self._global_batch_size, generator)


_GROUPED_STEPS = 50


def grouped(
    permutation: torch.Tensor, lengths: torch.Tensor, global_batch_size: int, generator: torch.Generator
) -> torch.Tensor:
    """The same rows in an order in which each step has rows of like length, as transformers' ``group_by_length`` does.

    Of every 50 steps' rows those of like length go into one step; the order of the steps is drawn again. The last, short step
    stays the last.
    """
    steps: list[torch.Tensor] = []
    for some in permutation.split(_GROUPED_STEPS * global_batch_size):
        steps += some[lengths[some].argsort(descending=True, stable=True)].split(global_batch_size)
    short = [] if len(steps[-1]) == global_batch_size else [steps.pop()]
    order = torch.randperm(len(steps), generator=generator, device="cpu").tolist()
    return torch.cat([*(steps[number] for number in order), *short])


def evaluation_batches(rows: RowSet, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
    """All rows, ``micro_batch_size`` at a time, the longest first where they differ; the last batch may be smaller.

    Of several processes each takes every ``ranks``-th row; the first has the most.

    Args:
        rank: number of this process, from 0.
        ranks: processes that share the rows.

    Raises:
        ValueError: a row differs from row 0 (:func:`memtrain.data.rows.check_row`), or a process has none.
    """
    assert micro_batch_size >= 1
    # Said by all processes alike, since one that is left waits for the others.
    if len(rows) < ranks:
        raise ValueError(
            f"there are {len(rows)} rows to evaluate on, and each of {ranks} processes needs one: give more rows, or none."
        )
    numbers = evaluation_order(rows, rank=rank, ranks=ranks)
    for start in range(0, len(numbers), micro_batch_size):
        yield rows.batch((number, rows.row(number)) for number in numbers[start : start + micro_batch_size])


def evaluation_order(rows: RowSet, *, rank: int = 0, ranks: int = 1) -> Sequence[int]:
    """The numbers of the rows that a process evaluates on, in the order in which :func:`evaluation_batches` takes them."""
    assert 0 <= rank < ranks
    return rows.in_order_of_length[rank::ranks]


def steps_in_epoch(rows: int, global_batch_size: int, *, drop_last: bool = False) -> int:
    """Steps of ``global_batch_size`` rows in which ``rows`` rows (one or more) are seen once.

    Raises:
        ValueError: there are none, since the only step would be a short one, and that is dropped.
    """
    if not drop_last:
        return math.ceil(rows / global_batch_size)
    if rows < global_batch_size:
        raise ValueError(
            f"there are {rows} rows and global_batch_size is {global_batch_size}, and drop_last leaves out a step that is not "
            f"full, so there would be no step: set drop_last to false, or global_batch_size to {rows} or less."
        )
    return rows // global_batch_size


def steps_for(epochs: float, rows: int, global_batch_size: int, *, drop_last: bool = False) -> int:
    """Steps of ``global_batch_size`` rows in which ``rows`` rows (one or more) are seen ``epochs`` times, rounded up.

    >>> steps_for(3, rows=10, global_batch_size=4), steps_for(1.1, rows=10, global_batch_size=1)
    (9, 11)

    Raises:
        ValueError: ``epochs`` is not above 0 and finite, or an epoch has no step (:func:`steps_in_epoch`).
    """
    if not 0 < epochs < math.inf:
        raise ValueError(f"epochs is {epochs!r}, and it must be above 0 and finite: give how often each row is seen.")
    # The decimal as written: as floats, 1.1 epochs of 10 steps are 11.000000000000002 steps, and would be rounded up to 12.
    return math.ceil(Fraction(str(epochs)) * steps_in_epoch(rows, global_batch_size, drop_last=drop_last))
