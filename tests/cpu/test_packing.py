"""Packing: every token once, as few packs as best-fit finds, and rows that do not see each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_models import CONFIGS, NOT_TOLD, attend_with, model_of
from torch import Tensor, nn

from memtrain.data.packing import PackedRows, best_fit_decreasing
from memtrain.data.rows import IGNORED
from memtrain.data.store import RaggedRows
from memtrain.features.packed_flash import separate_rows_
from memtrain.features.recompute import recompute_blocks_
from memtrain.models.blocks import blocks
from memtrain.models.objective import objective

PAD = 90


def stored(lengths: Sequence[int]) -> RaggedRows:
    """Rows of distinct numbers, each label 1000 above its token."""
    starts = np.cumsum([0, *lengths])
    return RaggedRows.of(
        {"input_ids": [*range(start, stop)], "labels": [*range(1000 + start, 1000 + stop)]}
        for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    )


# ---------------------------------------------------------------------- which rows go together


def test_rows_that_fit_into_one_pack_are_one() -> None:
    assert best_fit_decreasing([3, 4, 5], 16) == [[2, 1, 0]]


def test_a_row_goes_where_it_leaves_the_least_room() -> None:
    assert best_fit_decreasing([3, 4, 5], 8) == [[2, 0], [1]]
    # 7 leaves 3 and 6 leaves 4: the 3 goes to the 7, the 4 to the 6.
    assert best_fit_decreasing([3, 7, 4, 6], 10) == [[1, 0], [3, 2]]


def test_no_rows_are_no_packs() -> None:
    assert best_fit_decreasing([], 8) == []


@pytest.mark.parametrize("lengths", [[9], [0], [3, 9]])
def test_a_row_that_fits_into_no_pack_is_a_fault_of_the_caller(lengths: list[int]) -> None:
    with pytest.raises(AssertionError):
        best_fit_decreasing(lengths, 8)


@given(st.integers(1, 40).flatmap(lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity)))))
def test_every_row_is_in_one_pack_and_no_two_packs_would_fit_into_one(found: tuple[int, list[int]]) -> None:
    capacity, lengths = found
    packs = best_fit_decreasing(lengths, capacity)
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    filled = sorted(sum(lengths[number] for number in pack) for pack in packs)
    assert all(tokens <= capacity for tokens in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > capacity


# ---------------------------------------------------------------------- what a pack holds


def test_positions_begin_anew_and_no_row_predicts_the_next() -> None:
    rows = PackedRows(stored([2, 3]), 8, PAD)
    assert {name: tensor.tolist() for name, tensor in rows[0].items()} == {
        "input_ids": [2, 3, 4, 0, 1, PAD, PAD, PAD],
        "labels": [IGNORED, 1003, 1004, IGNORED, 1001, IGNORED, IGNORED, IGNORED],
        "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
    }
    assert (len(rows), rows.tokens(0), rows.filled) == (1, 5, 5 / 8)


def test_the_pack_with_the_most_rows_is_known_its_padding_counted() -> None:
    # 6 + 2, 5 + 3, and 4 + 1 + 1 with two of padding.
    lengths = [6, 5, 4, 3, 2, 1, 1]
    rows = PackedRows(stored(lengths), 8, PAD)
    assert [[lengths[number] for number in pack] for pack in rows.packs] == [[6, 2], [5, 3], [4, 1, 1]]
    assert rows.most_rows == 2
    assert PackedRows(stored([8, 7]), 8, PAD).most_rows == 1
    assert PackedRows(stored([]), 8, PAD).most_rows == 0


@pytest.mark.parametrize(
    ("lengths", "capacity", "tokens"),
    [([3, 4, 5], 16, [12]), ([3, 4, 5], 8, [8, 4]), ([8, 8, 4], 8, [8, 8, 4]), ([8], 8, [8]), ([1], 8, [1]), ([], 8, [])],
)
def test_the_length_is_that_of_the_packs_and_a_few_tokens_are_one(lengths: list[int], capacity: int, tokens: list[int]) -> None:
    """Rows of 20 tokens in packs of 8 come split, as 8, 8 and 4, or truncated, as 8."""
    rows = PackedRows(stored(lengths), capacity, PAD)
    assert len(rows) == len(tokens)
    assert [rows.tokens(number) for number in range(len(rows))] == rows.lengths.tolist() == tokens
    assert sum(int((rows[number]["input_ids"] == PAD).sum()) for number in range(len(rows))) == len(rows) * capacity - sum(
        tokens
    )


@given(
    st.integers(1, 24).flatmap(lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=12)))
)
def test_every_token_is_there_once_with_the_label_and_the_position_that_it_has_alone(found: tuple[int, list[int]]) -> None:
    capacity, lengths = found
    rows, packed = stored(lengths), PackedRows(stored(lengths), capacity, 2000)
    seen = {}
    for number in range(len(packed)):
        pack = {name: tensor.tolist() for name, tensor in packed[number].items()}
        assert all(len(values) == capacity for values in pack.values())
        for token, label, position in zip(pack["input_ids"], pack["labels"], pack["position_ids"], strict=True):
            if token == 2000:
                assert label == IGNORED
            else:
                assert token not in seen
                seen[token] = label, position
    for number in range(len(rows)):
        for position, token in enumerate(rows[number]["input_ids"].tolist()):
            assert seen.pop(token) == (1000 + token if position else IGNORED, position)
    assert seen == {}


def test_the_digest_is_that_of_the_rows_and_of_the_length() -> None:
    found = {PackedRows(stored(lengths), capacity, PAD).digest for lengths in ([3, 4], [4, 3]) for capacity in (8, 16)}
    assert len(found) == 4
    assert PackedRows(stored([3, 4]), 8, PAD).digest in found


@pytest.mark.parametrize("index", [-1, 2])
def test_a_number_without_a_pack_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=f"^pack {index} of 2$"):
        PackedRows(stored([3, 4, 5]), 8, PAD)[index]


# ---------------------------------------------------------------------- what it does to a loss

ATTENTION = ("sdpa", "eager", "flash_attention_2")
# One of each way to count positions and to look back: turned, learnt, over a window, with experts.
KINDS = ("llama", "gpt2", "gemma3_text", "mixtral")
PAIRS = [(kind, attention) for kind in KINDS for attention in ATTENTION if (kind, attention) not in NOT_TOLD]


def texts(lengths: Sequence[int]) -> RaggedRows:
    generator = np.random.default_rng(0)
    return RaggedRows.of(
        {"input_ids": (ids := generator.integers(3, 96, length).tolist()), "labels": [IGNORED, IGNORED, *ids[2:]]}
        for length in lengths
    )


def stack(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def summed(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, int, list[Tensor]]:
    """The summed loss of a batch, over how many labels, and its gradients."""
    what = objective(model)
    model.zero_grad()
    count = what.count(batch)
    loss = what.loss(model, batch) * count
    loss.backward()
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in model.parameters()]
    return loss.item(), int(count), gradients


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize(("kind", "attention"), PAIRS)
def test_loss_and_gradients_of_packed_rows_are_those_of_each_alone(
    kind: str, attention: str, micro_batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attend_with(model_of(kind), attention, monkeypatch).train()
    rows = texts([9, 14, 11, 5, 16, 3])
    packed = PackedRows(rows, 24, PAD)
    alone = [summed(model, stack([rows[number]])) for number in range(len(rows))]
    separate_rows_(model)
    packs = [packed[number] for number in range(len(packed))]
    batches = [stack(packs[start : start + micro_batch_size]) for start in range(0, len(packs), micro_batch_size)]
    for undo in (lambda: None, recompute_blocks_(list(blocks(model).values()))):
        together = [summed(model, batch) for batch in batches]
        assert sum(found[1] for found in together) == sum(found[1] for found in alone) == sum(rows.lengths) - 2 * len(rows)
        assert sum(found[0] for found in together) == pytest.approx(sum(found[0] for found in alone), rel=1e-5)
        for number, parameter in enumerate(model.parameters()):
            expected = torch.stack([found[2][number] for found in alone]).sum(dim=0)
            got = torch.stack([found[2][number] for found in together]).sum(dim=0)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(parameter.detach().abs().max())))
        undo()


@pytest.mark.parametrize(("kind", "attention"), PAIRS)
def test_the_logits_of_a_packed_row_are_those_of_the_row_alone(
    kind: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attend_with(model_of(kind), attention, monkeypatch).eval()
    rows = texts([9, 14, 11, 5, 16, 3])
    packed = PackedRows(rows, 24, PAD)
    settings = objective(model).settings
    with torch.no_grad():
        alone = [model(input_ids=rows[number]["input_ids"].unsqueeze(0), **settings).logits[0] for number in range(len(rows))]
        separate_rows_(model)
        together = model(**stack([packed[number] for number in range(len(packed))]), **settings).logits
    for logits, pack in zip(together, packed.packs, strict=True):
        parts = logits.split([*rows.lengths[pack].tolist(), 24 - int(rows.lengths[pack].sum())])
        for number, found in zip(pack, parts, strict=False):
            torch.testing.assert_close(found, alone[number], rtol=1e-5, atol=1e-5)


def test_what_separates_rows_is_taken_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attend_with(model_of("llama"), "flash_attention_2", monkeypatch)
    before: Callable[..., Any] = model.forward
    separate_rows_(model)()
    assert model.forward == before
    assert "forward" not in vars(model)


def test_the_kernel_is_told_where_each_row_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = model_of("llama"), []
    monkeypatch.setattr(model, "forward", lambda **given: told.append(given))
    separate_rows_(model)
    packed = PackedRows(texts([9, 14, 11, 5, 16, 3]), 24, PAD)
    model(**stack([packed[number] for number in range(3)]))
    # 16 + 5 + 3, 14 + 9 and a token of padding, 11 and 13 tokens of padding.
    assert packed.packs == [[4, 3, 5], [1, 0], [2]]
    assert told[0]["cu_seq_lens_q"].tolist() == [0, 16, 21, 24, 38, 47, 48, 59, 72]
    assert told[0]["cu_seq_lens_q"].dtype == torch.int32
    assert told[0]["cu_seq_lens_k"] is told[0]["cu_seq_lens_q"]
    assert told[0]["max_length_q"] == told[0]["max_length_k"] == 24
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    model(position_ids=torch.zeros(3, 1, 4, dtype=torch.int64))
    assert [sorted(given) for given in told[1:]] == [["input_ids"], ["position_ids"]]
    assert math.prod(told[2]["position_ids"].shape) == 12


def test_every_kind_is_a_model_that_is_known_to_separate() -> None:
    assert set(KINDS) <= set(CONFIGS)
