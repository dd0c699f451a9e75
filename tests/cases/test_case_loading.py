"""Field reports about batches: sets smaller than one, streams in several processes, short windows and rows that are rare and long."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from cases.fixtures import ConstGrad, column, factors, run, tiny_llama, trainer, weights
from torch import Tensor, nn
from toys import BYTES

from memtrain import Trainer
from memtrain.data.batches import StepBatches, evaluation_batches
from memtrain.data.loading import step_batches
from memtrain.data.options import DataOptions
from memtrain.data.rows import IGNORED
from memtrain.data.rowset import alike
from memtrain.inputs import Reader

# ---------------------------------------------------------------------- dl-01


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_a_set_of_fewer_rows_than_a_step_is_no_run_of_no_steps(micro_batch_size: int) -> None:
    """dl-01: the only batch was dropped, the loss logged as 0.0, and the run ended normally."""
    given: dict[str, Any] = {"micro_batch_size": micro_batch_size, "global_batch_size": 4, "epochs": 2}
    with pytest.raises(ValueError, match=r"^there are 3 rows and global_batch_size is 4, and drop_last leaves out a step"):
        trainer(ConstGrad(), factors(1, 1, 1), drop_last=True, **given)
    result, _ = run(ConstGrad(), factors(1, 1, 1), **given)
    assert len(column(result, "loss")) == 2


def test_no_rows_are_refused_and_rows_to_evaluate_on_are_never_dropped() -> None:
    """dl-01."""
    with pytest.raises(ValueError, match=r"^there is no row in data, and training needs 1 or more: give rows\.$"):
        trainer(ConstGrad(), [], micro_batch_size=1, global_batch_size=1)
    batches = evaluation_batches(alike(factors(1, 2, 3)), 4)
    assert [batch["x"].tolist() for batch in batches] == [[1.0, 2.0, 3.0]]


# ---------------------------------------------------------------------- dl-03


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_each_row_is_seen_once_per_epoch_whatever_makes_the_rows(workers: int) -> None:
    """dl-03: each worker got the whole stream, so that a row came as often as there were workers; with processes as well."""
    # Used before processes are forked, after which some tokenizers hung.
    BYTES("before")
    rows = factors(*range(10))
    for ranks in (1, 2):
        seen: list[float] = []
        for rank in range(ranks):
            order = StepBatches(alike(rows), global_batch_size=4, seed=0)
            batches = step_batches(order, seed=0, steps=3, workers=workers)
            try:
                for step in range(3):
                    for batch in batches.micro_batches(step, 2, rank=rank, ranks=ranks):
                        seen += batch["x"].tolist()
            finally:
                batches.close()
        assert sorted(seen) == list(range(10))
    assert multiprocessing.active_children() == []


def test_a_stream_is_read_once_and_then_goes_by_number() -> None:
    """dl-03: so there is nothing that workers could each have the whole of."""
    asked: list[int] = []

    def stream() -> Any:
        for number in range(10):
            asked.append(number)
            yield {"x": torch.tensor(float(number))}

    result, _ = run(ConstGrad(), stream(), micro_batch_size=1, global_batch_size=2, epochs=2, workers=2)
    assert asked == list(range(10))
    assert len(column(result, "loss")) == 10


@pytest.mark.parametrize("packing", [False, True])
def test_of_a_stream_without_an_end_as_much_is_read_as_the_run_takes(packing: bool) -> None:
    """dl-03: also where rows are packed, when as many tokens are read as fill the packs."""
    asked: list[int] = []

    def stream() -> Any:
        while True:
            asked.append(len(asked))
            yield {"text": "a" * (1 + len(asked) % 13)}

    reader = Reader(tiny_llama(vocab_size=264), BYTES, DataOptions(sequence_length=16, packing=packing))
    rows = reader.read(stream(), "data", 40)
    assert len(rows) >= 40
    assert len(asked) <= 1000


def test_of_a_stream_of_tensors_as_well() -> None:
    """dl-03."""

    def stream() -> Any:
        while True:
            yield {"x": torch.ones(())}

    result, _ = run(ConstGrad(), stream(), micro_batch_size=1, global_batch_size=2, steps=3)
    assert len(column(result, "loss")) == 3


# ---------------------------------------------------------------------- ga-04


def test_a_short_window_counts_what_it_holds_and_leaves_nothing_to_the_next_epoch() -> None:
    """ga-04: five micro-batches to an epoch, four to a step, twice; divided by four w would be -1, -1.25, -2.25, -2.5."""
    result, made = run(ConstGrad(), factors(*[1.0] * 5), micro_batch_size=1, global_batch_size=4, epochs=2)
    # The loss of a step is w before it.
    assert column(result, "loss") == pytest.approx([0.0, -1.0, -2.0, -3.0], abs=1e-6)
    assert weights(made)["w"].item() == pytest.approx(-4.0, abs=1e-6)


def test_an_epoch_shorter_than_a_window_is_one_step() -> None:
    """ga-04: three micro-batches, four to a step."""
    result, made = run(ConstGrad(), factors(*[1.0] * 3), micro_batch_size=1, global_batch_size=4, epochs=1)
    assert len(column(result, "loss")) == 1
    assert weights(made)["w"].item() == pytest.approx(-1.0, abs=1e-6)


# ---------------------------------------------------------------------- mem-02


class Limited(nn.Module):
    """An embedding and a head, with memory for 200 tokens at a time."""

    def __init__(self, *, limited: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.limited, self.sizes = limited, []

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if not input_ids.is_meta:
            self.sizes.append(tuple(input_ids.shape))
            if self.limited and input_ids.numel() > 200:
                raise torch.OutOfMemoryError("no memory for more than 200 tokens")
        logits = self.head(self.embedding(input_ids))
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED)


def rare_and_long(*, limited: bool) -> tuple[list[float], Limited, Trainer]:
    lengths = [8] * 40
    lengths.insert(37, 128)
    rows = [{name: torch.arange(length) % 8 for name in ("input_ids", "labels")} for length in lengths]
    given: dict[str, Any] = {"budget": "256MiB", "tokenizer": BYTES, "global_batch_size": 2, "epochs": 1, "progress": False}
    made = Trainer(model=Limited(limited=limited), data=rows, **given)
    losses = column(made.train(), "loss")
    return losses, made.model, made  # type: ignore[return-value]


def test_a_long_row_that_comes_late_is_planned_and_met_before_the_first_step() -> None:
    """mem-02: row 37 of 41 has 128 tokens and the others 8, two to a micro-batch; memory ran out at step 19 or later."""
    losses, model, made = rare_and_long(limited=True)
    assert made.rows.longest == (37,)
    assert made.rows.shapes["input_ids"] == ((128,), torch.int64)
    # Two rows of 128 were tried first and nowhere else, and the run goes on with one at a time.
    assert model.sizes[0] == (2, 128)
    assert {rows for rows, _ in model.sizes[1:]} == {1}
    # The same rows in the same order as in a run that had no need of it.
    undisturbed, other, _ = rare_and_long(limited=False)
    assert {rows for rows, _ in other.sizes[-4:-2]} == {2}
    assert losses == pytest.approx(undisturbed, rel=1e-6)
