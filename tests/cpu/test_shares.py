"""Shares: the rows of a step and those to evaluate on, divided among processes without loss."""

from __future__ import annotations

import itertools

import pytest
import torch

from memtrain.data.batches import StepBatches, evaluation_batches
from memtrain.data.rows import Batch
from memtrain.data.rowset import alike

ROWS = [{"x": torch.tensor([number])} for number in range(20)]


def numbers(batches: list[Batch]) -> list[list[int]]:
    return [batch["x"].flatten().tolist() for batch in batches]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_process_takes_every_nth_micro_batch_of_the_step(ranks: int) -> None:
    batches = StepBatches(alike(ROWS), global_batch_size=8, seed=3)
    whole = numbers(batches.micro_batches(1, 2))
    shares = [numbers(batches.micro_batches(1, 2, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert shares == [whole[rank::ranks] for rank in range(ranks)]
    assert [len(share) for share in shares] == [4 // ranks] * ranks


def test_the_rows_of_a_step_are_the_same_for_any_number_of_processes() -> None:
    batches = StepBatches(alike(ROWS), global_batch_size=12, seed=0)
    for ranks, size in ((1, 12), (2, 3), (3, 4), (4, 1)):
        shares = (numbers(batches.micro_batches(2, size, rank=rank, ranks=ranks)) for rank in range(ranks))
        assert sorted(itertools.chain(*itertools.chain(*shares))) == sorted(batches.indices(2))


@pytest.mark.parametrize(
    ("rows", "ranks", "shares"),
    [
        # A short step of 5 and of 3 rows: no process is without a row, and none is there twice.
        (13, 2, [[[0, 1], [4]], [[2, 3]]]),
        (11, 3, [[[0]], [[1]], [[2]]]),
        # Fewer rows than processes: each computes all, which weigh the same.
        (9, 3, [[[0]], [[0]], [[0]]]),
        (10, 3, [[[0], [1]], [[0], [1]], [[0], [1]]]),
    ],
)
def test_a_short_step_leaves_no_process_without_rows(rows: int, ranks: int, shares: list[list[list[int]]]) -> None:
    batches = StepBatches(alike([{"x": torch.tensor([n])} for n in range(rows)]), global_batch_size=8, seed=0)
    short = batches.indices(1)
    found = [numbers(batches.micro_batches(1, 2 if ranks == 2 else 1, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert found == [[[short[place] for place in cut] for cut in share] for share in shares]


@pytest.mark.parametrize(
    ("rows", "ranks", "shares"),
    [
        (5, 1, [[[0, 1], [2, 3], [4]]]),
        (5, 2, [[[0, 2], [4]], [[1, 3]]]),
        (2, 2, [[[0]], [[1]]]),
        (7, 3, [[[0, 3], [6]], [[1, 4]], [[2, 5]]]),
    ],
)
def test_of_rows_to_evaluate_on_each_process_takes_every_nth(rows: int, ranks: int, shares: list[list[list[int]]]) -> None:
    found = [numbers(list(evaluation_batches(alike(ROWS[:rows]), 2, rank=rank, ranks=ranks))) for rank in range(ranks)]
    assert found == shares


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_process_refuses_fewer_rows_than_processes(rank: int) -> None:
    with pytest.raises(
        ValueError, match=r"^there are 2 rows to evaluate on, and each of 3 processes needs one: give more rows"
    ):
        next(evaluation_batches(alike(ROWS[:2]), 1, rank=rank, ranks=3))
