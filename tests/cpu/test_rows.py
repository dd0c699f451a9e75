"""Rows and batches: no token or row is lost, doubled or moved, and bad input is refused by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset
from toys import BYTES

from memtrain.data.batches import StepBatches, evaluation_batches, steps_for
from memtrain.data.rows import IGNORED, Batch, TokenRows, check_row, check_rows
from memtrain.data.rowset import alike
from memtrain.data.tokenizer import train_tokenizer

EOS, PAD = 1, 2


def ids(text: str) -> list[int]:
    return list(BYTES.encode(text, add_special_tokens=False))


# ---------------------------------------------------------------------------------------------------------------- rows


def test_documents_stand_end_to_end_each_with_its_end_token_and_labels_equal_inputs() -> None:
    rows = TokenRows.of(["abc", "de"], BYTES, 4)
    assert len(rows) == 2
    assert torch.equal(rows[0]["input_ids"], torch.tensor([*ids("abc"), EOS]))
    assert torch.equal(rows[0]["labels"], rows[0]["input_ids"])
    assert rows[0]["input_ids"].dtype == rows[0]["labels"].dtype == torch.int64


def test_the_last_row_is_filled_up_at_the_right_with_labels_that_do_not_count() -> None:
    last = TokenRows.of(["abc", "de"], BYTES, 4)[1]
    assert torch.equal(last["input_ids"], torch.tensor([*ids("de"), EOS, PAD]))
    assert torch.equal(last["labels"], torch.tensor([*ids("de"), EOS, IGNORED]))


def test_without_a_padding_token_the_end_token_fills_up_and_only_the_real_one_counts() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=BYTES.backend_tokenizer, eos_token="<|eos|>")
    row = TokenRows.of(["ab"], tokenizer, 5)[0]
    assert torch.equal(row["input_ids"], torch.tensor([*ids("ab"), EOS, EOS, EOS]))
    assert torch.equal(row["labels"], torch.tensor([*ids("ab"), EOS, IGNORED, IGNORED]))


def test_a_last_window_of_one_token_makes_no_row() -> None:
    rows = TokenRows.of(["abcd"], BYTES, 4)
    assert len(rows) == 1
    assert torch.equal(rows[0]["input_ids"], torch.tensor(ids("abcd")))


@given(lengths=st.lists(st.integers(0, 12), min_size=2, max_size=6), sequence_length=st.integers(2, 9))
def test_every_token_is_in_exactly_one_row_and_every_row_counts(lengths: list[int], sequence_length: int) -> None:
    documents = ["abcdefghijkl"[:length] for length in lengths]
    tokens = [token for document in documents for token in (*ids(document), EOS)]
    if len(tokens) % sequence_length == 1:
        tokens.pop()
    token_rows = TokenRows.of(documents, BYTES, sequence_length)
    rows = [token_rows[index] for index in range(len(token_rows))]
    counted = [token for row in rows for token in row["labels"].tolist() if token != IGNORED]
    assert counted == tokens
    assert all((row["labels"][1:] != IGNORED).any() for row in rows)
    assert {row["input_ids"].shape for row in rows} == {(sequence_length,)}
    check_rows(rows, what="the rows")


def test_rows_are_numbered_like_a_list_and_are_copies() -> None:
    rows = TokenRows.of(["abcdefg"], BYTES, 4)
    assert torch.equal(rows[-1]["input_ids"], rows[1]["input_ids"])
    with pytest.raises(IndexError):
        rows[2]
    row = rows[0]
    row["input_ids"].zero_()
    assert torch.equal(row["labels"], torch.tensor(ids("abcd")))
    assert torch.equal(rows[0]["input_ids"], torch.tensor(ids("abcd")))


def test_a_document_longer_than_the_models_context_is_cut_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = train_tokenizer([], 259)
    tokenizer.model_max_length = 8
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # it does not propagate to the root, where caplog listens
    try:
        assert len(TokenRows.of(["a" * 99], tokenizer, 10)) == 10
        assert caplog.messages == []
        tokenizer.encode("a" * 99)
        assert "longer than the specified maximum sequence length" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(("documents", "count"), [([], 0), ([""], 1)])
def test_text_of_less_than_two_tokens_is_refused(documents: list[str], count: int) -> None:
    with pytest.raises(ValueError, match=rf"the text has {count} tokens .* must have 2 or more: give more text"):
        TokenRows.of(documents, BYTES, 4)


def test_a_sequence_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_length is 1, and it must be 2 or more"):
        TokenRows.of(["abc"], BYTES, 1)


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=BYTES.backend_tokenizer)
    with pytest.raises(ValueError, match=r"the tokenizer has no end-of-sequence token, .* set its eos_token"):
        TokenRows.of(["abc"], tokenizer, 4)


# ---------------------------------------------------------------------------------------------------- rows of the user


def row(number: int, **others: torch.Tensor) -> Batch:
    return {"input_ids": torch.tensor([number, number + 1]), **others}


class Stream(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        yield row(0)

    def __len__(self) -> int:
        return 3


class Unsized(Dataset[Batch]):
    def __getitem__(self, index: int) -> Batch:
        return row(index)


@pytest.mark.parametrize("rows", [Stream(), Unsized(), iter([row(0)]), row(0)])
def test_rows_that_cannot_be_read_by_number_are_refused(rows: object) -> None:
    message = f"my rows came as {type(rows).__name__}, and rows must have a length and be read by number"
    with pytest.raises(ValueError, match=message):
        check_rows(rows, what="my rows")


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no row in my rows, and training needs 1 or more"):
        check_rows([], what="my rows")


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ([1, 2], "is a list"),
        ({}, "is empty"),
        ({"input_ids": [1, 2]}, "has 'input_ids' as list"),
        ({3: torch.zeros(2)}, "has the key 3"),
    ],
)
def test_a_row_that_is_no_mapping_of_tensors_is_named(bad: object, fault: str) -> None:
    for rows, index in ([bad], 0), ([row(0), row(1), bad], 2):
        with pytest.raises(ValueError, match=f"row {index} of my rows {fault}, and every row must be a mapping of names"):
            check_rows(rows, what="my rows")


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (row(1, mask=torch.ones(2)), r"has the keys \['input_ids', 'mask'\] where row 0 has \['input_ids'\].*same keys"),
        (
            {"input_ids": torch.tensor([1])},
            r"has 'input_ids' as torch\.int64 of shape \(1,\) where row 0 has torch\.int64 of shape \(2,\).*cut or pad",
        ),
        (
            {"input_ids": torch.tensor([1.0, 2.0])},
            r"has 'input_ids' as torch\.float32 of shape \(2,\) where row 0 has torch\.int64",
        ),
    ],
)
def test_a_row_unlike_row_0_is_named_by_the_check_and_by_every_batch(bad: Batch, fault: str) -> None:
    rows = [row(0), row(1), row(2), bad]
    with pytest.raises(ValueError, match=f"row 3 of my rows {fault}"):
        check_rows(rows, what="my rows")
    # A batch of one row has nothing to differ from but row 0 of all rows.
    with pytest.raises(ValueError, match=f"row 3 of the training rows {fault}"):
        StepBatches(alike(rows), global_batch_size=4, seed=0).micro_batches(0, 1)
    with pytest.raises(ValueError, match=f"row 3 of eval_data {fault}"):
        list(evaluation_batches(alike(rows, "eval_data"), 1))


def test_a_row_without_a_label_that_counts_is_named() -> None:
    ignored = torch.tensor([IGNORED, IGNORED])
    rows = [row(0, labels=torch.tensor([IGNORED, 1])), row(1, labels=ignored)]
    message = r"row 1 of my rows has labels of which none counts \(all are -100\).*leave the row out"
    with pytest.raises(ValueError, match=message):
        check_rows(rows, what="my rows")
    regression = row(0, labels=torch.tensor([-100.0]))
    check_rows([regression, regression], what="my rows")


def test_a_large_data_set_is_checked_at_both_ends_and_a_small_one_in_full() -> None:
    class Counted(Dataset[Batch]):
        def __init__(self, count: int) -> None:
            self.count = count
            self.read: list[int] = []

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> Batch:
            self.read.append(index)
            return row(0)

    small, large = Counted(10_000), Counted(10_007)
    check_rows(small, what="my rows")
    check_rows(large, what="my rows")
    assert small.read == [0, *range(10_000)]
    assert large.read == [0, *range(5_000), *range(5_007, 10_007)]


def test_the_checked_row_may_be_any_mapping() -> None:
    from transformers import BatchEncoding

    check_row(BatchEncoding({"input_ids": torch.tensor([1, 2])}), row(0), index=0, what="my rows")


# ------------------------------------------------------------------------------------------------------------- batches


def numbered(count: int) -> list[Batch]:
    return [row(number) for number in range(count)]


def batches(count: int, global_batch_size: int, seed: int = 0) -> StepBatches:
    return StepBatches(alike(numbered(count)), global_batch_size=global_batch_size, seed=seed)


sizes = {"count": st.integers(1, 12), "global_batch_size": st.integers(1, 30), "seed": st.integers(-(2**70), 2**70)}


def test_rows_stack_key_by_key() -> None:
    (batch,) = evaluation_batches(alike([row(0, mask=torch.ones(3)), row(4, mask=torch.zeros(3))]), 2)
    assert list(batch) == ["input_ids", "mask"]
    assert torch.equal(batch["input_ids"], torch.tensor([[0, 1], [4, 5]]))
    assert torch.equal(batch["mask"], torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))


@given(**sizes)
def test_each_epoch_sees_every_row_exactly_once_and_ends_with_a_short_step(
    count: int, global_batch_size: int, seed: int
) -> None:
    run = batches(count, global_batch_size, seed)
    in_epoch = math.ceil(count / global_batch_size)
    for epoch in range(3):
        steps = [run.indices(epoch * in_epoch + step) for step in range(in_epoch)]
        assert [len(step) for step in steps[:-1]] == [global_batch_size] * (in_epoch - 1)
        assert sorted(index for step in steps for index in step) == list(range(count))
        done = (epoch + 1) * in_epoch
        assert (run.epoch(done), run.seen(done)) == (epoch + 1, 2 * (epoch + 1) * count)


@given(**sizes)
def test_dropping_the_short_step_leaves_full_ones(count: int, global_batch_size: int, seed: int) -> None:
    if count < global_batch_size:
        with pytest.raises(
            ValueError, match=f"there are {count} rows and global_batch_size is {global_batch_size}, and drop_last"
        ):
            steps_for(1, count, global_batch_size, drop_last=True)
        return
    rows = alike(numbered(count))
    run = StepBatches(rows, global_batch_size=global_batch_size, seed=seed, drop_last=True)
    steps = [run.indices(step) for step in range(2 * steps_for(1, count, global_batch_size, drop_last=True))]
    assert {len(step) for step in steps} == {global_batch_size}
    # Two tokens a row: what is left out is not seen.
    assert run.seen(len(steps)) == 2 * sum(map(len, steps))
    first = [index for step in steps[: len(steps) // 2] for index in step]
    assert len(set(first)) == len(first) == count - count % global_batch_size


@given(**sizes, steps=st.lists(st.integers(0, 10**9), max_size=4), step=st.integers(0, 10**9))
def test_the_rows_of_a_step_do_not_depend_on_the_steps_asked_for_before(
    count: int, global_batch_size: int, seed: int, steps: list[int], step: int
) -> None:
    run = batches(count, global_batch_size, seed)
    for other in steps:
        run.indices(other)
    assert run.indices(step) == batches(count, global_batch_size, seed).indices(step)


@given(**sizes, step=st.integers(0, 50), micro_batch_size=st.integers(1, 31))
def test_the_micro_batch_size_changes_neither_the_rows_nor_their_order(
    count: int, global_batch_size: int, seed: int, step: int, micro_batch_size: int
) -> None:
    run = batches(count, global_batch_size, seed)
    (whole,) = run.micro_batches(step, global_batch_size)
    cut = run.micro_batches(step, micro_batch_size)
    assert torch.equal(torch.cat([batch["input_ids"] for batch in cut]), whole["input_ids"])
    assert whole["input_ids"][:, 0].tolist() == run.indices(step)
    assert [len(batch["input_ids"]) for batch in cut[:-1]] == [micro_batch_size] * (len(cut) - 1)


def test_the_global_batch_size_cuts_the_same_order_elsewhere() -> None:
    def order(global_batch_size: int) -> list[int]:
        run = batches(7, global_batch_size, seed=3)
        return [index for step in range(3 * math.ceil(7 / global_batch_size)) for index in run.indices(step)]

    assert order(4) == order(3) == order(20)


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    orders = {tuple(batches(20, 20, seed).indices(epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_one_permutation_is_drawn_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    randperm = torch.randperm

    def counted(count: int, **options: Any) -> torch.Tensor:
        drawn.append(count)
        return randperm(count, **options)

    monkeypatch.setattr(torch, "randperm", counted)
    run = batches(10, 4)
    for step in range(6):
        run.indices(step)
    assert drawn == [10, 10]
    run.indices(10**12)
    assert drawn == [10, 10, 10]


def test_the_order_neither_reads_nor_moves_the_global_random_state() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = batches(9, 5, seed=2).indices(3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert batches(9, 5, seed=2).indices(3) == first


def test_evaluation_takes_all_rows_in_order_and_ends_with_a_smaller_batch() -> None:
    taken = [batch["input_ids"][:, 0].tolist() for batch in evaluation_batches(alike(numbered(5)), 2)]
    assert taken == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("epochs", "rows", "global_batch_size", "steps"),
    [(1, 8, 4, 2), (1, 9, 4, 3), (3, 10, 4, 9), (0.5, 8, 4, 1), (0.001, 8, 4, 1), (2, 3, 100, 2), (1.1, 10, 1, 11)],
)
def test_steps_for_epochs_are_rounded_up(epochs: float, rows: int, global_batch_size: int, steps: int) -> None:
    assert steps_for(epochs, rows, global_batch_size) == steps


@pytest.mark.parametrize("epochs", [0, -1.0, float("inf"), float("nan")])
def test_epochs_that_no_run_has_are_refused(epochs: float) -> None:
    with pytest.raises(ValueError, match=f"epochs is {epochs}, and it must be above 0 and finite"):
        steps_for(epochs, rows=10, global_batch_size=2)
