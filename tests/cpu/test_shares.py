"""Shares: the rows of a step and those to evaluate on, divided among processes without loss."""

from __future__ import annotations

import itertools

import pytest
import torch

from memtrain.data.batches import StepBatches, evaluation_batches
from memtrain.data.rows import Batch

ROWS = [{"x": torch.tensor([number])} for number in range(20)]


def numbers(batches: list[Batch]) -> list[list[int]]:
    return [batch["x"].flatten().tolist() for batch in batches]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_process_takes_every_nth_micro_batch_of_the_step(ranks: int) -> None:
    batches = StepBatches(ROWS, global_batch_size=8, seed=3)
    whole = numbers(batches.micro_batches(1, 2))
    shares = [numbers(batches.micro_batches(1, 2, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert shares == [whole[rank::ranks] for rank in range(ranks)]
    assert [len(share) for share in shares] == [4 // ranks] * ranks


def test_the_rows_of_a_step_are_the_same_for_any_number_of_processes() -> None:
    batches = StepBatches(ROWS, global_batch_size=12, seed=0)
    for ranks, size in ((1, 12), (2, 3), (3, 4), (4, 1)):
        shares = (numbers(batches.micro_batches(2, size, rank=rank, ranks=ranks)) for rank in range(ranks))
        assert sorted(itertools.chain(*itertools.chain(*shares))) == sorted(batches.indices(2))


@pytest.mark.parametrize(
    ("rows", "ranks", "shares"),
    [
        (5, 1, [[[0, 1], [2, 3], [4]]]),
        (5, 2, [[[0, 1], [2]], [[3, 4]]]),
        (2, 2, [[[0]], [[1]]]),
        (7, 3, [[[0, 1], [2]], [[3, 4]], [[5, 6]]]),
    ],
)
def test_rows_to_evaluate_on_are_divided_in_stretches(rows: int, ranks: int, shares: list[list[list[int]]]) -> None:
    found = [numbers(list(evaluation_batches(ROWS[:rows], 2, rank=rank, ranks=ranks))) for rank in range(ranks)]
    assert found == shares


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_process_refuses_fewer_rows_than_processes(rank: int) -> None:
    with pytest.raises(
        ValueError, match=r"^there are 2 rows to evaluate on, and each of 3 processes needs one: give more rows"
    ):
        next(evaluation_batches(ROWS[:2], 1, rank=rank, ranks=3))
