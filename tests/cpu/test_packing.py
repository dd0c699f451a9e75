"""Rows of unequal length, padded or packed, train what each trains alone."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from memtrain.data.masking import Masking
from memtrain.data.packing import PackedRows, best_fit_decreasing
from memtrain.data.padding import Padded
from memtrain.data.rows import IGNORED
from memtrain.data.sets import padded, tensors
from memtrain.data.store import RaggedRows
from memtrain.models.packed import check_can_pack, check_separates

PAD = 0


def rows_of(*lengths: int) -> RaggedRows:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]
    return RaggedRows.of([{"input_ids": ids, "labels": ids} for ids in made])


def llama(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, attn_implementation=attention, use_cache=False, **shape))


def gpt2(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False)
    return GPT2LMHeadModel._from_config(config, attn_implementation=attention)


# ---------------------------------------------------------------------- the store


def test_rows_come_back_as_they_were_kept() -> None:
    rows = RaggedRows.of([{"input_ids": [1, 2, 3], "labels": 1, "w": [0.5]}, {"input_ids": [4], "labels": 0, "w": [1.5, 2.0]}])
    assert [rows[0]["input_ids"].tolist(), rows[1]["input_ids"].tolist()] == [[1, 2, 3], [4]]
    assert (rows[0]["labels"].item(), rows[0]["labels"].shape, rows[1]["w"].tolist()) == (1, (), [1.5, 2.0])
    assert (rows.lengths.tolist(), rows.longest) == ([3, 1], {"input_ids": 3, "labels": None, "w": 2})
    with pytest.raises(IndexError):
        rows[2]


def test_what_is_more_than_memory_goes_to_the_disk_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = rows_of(3, 50, 7)
    monkeypatch.setattr("memtrain.data.store._IN_MEMORY_BYTES", 64)
    on_disk = rows_of(3, 50, 7)
    assert on_disk.digest == in_memory.digest != rows_of(3, 50, 8).digest
    assert all(torch.equal(on_disk[row]["labels"], in_memory[row]["labels"]) for row in range(3))


def test_rows_of_other_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has no column 'input_ids' where row 0 has one, and rows must be alike"):
        RaggedRows.of([{"input_ids": [1]}, {"labels": [1]}])


def test_rows_are_sent_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(rows_of(2, 5))).digest == rows_of(2, 5).digest


# ---------------------------------------------------------------------- packing


@settings(derandomize=True, max_examples=50)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_every_row_is_packed_once_and_no_pack_is_too_full(lengths: list[int]) -> None:
    packs = best_fit_decreasing(lengths, 20)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in pack) <= 20 for pack in packs)
    # Any two packs hold more than one would: else the second row would have gone into the first.
    full = sorted(sum(lengths[row] for row in pack) for pack in packs)
    assert len(full) < 2 or full[0] + full[1] > 20


@pytest.mark.parametrize(("capacity", "packs"), [(16, [[2, 1, 0]]), (8, [[2, 0], [1]])])
def test_three_rows_in_packs_of_16_and_of_8(capacity: int, packs: list[list[int]]) -> None:
    packed = PackedRows(rows_of(3, 4, 5), capacity, PAD)
    assert packed.packs == packs
    assert sum(packed.lengths) == 12
    assert packed[0]["labels"].tolist().count(IGNORED) == capacity - packed.lengths[0] + len(packs[0])
    assert packed[len(packs) - 1]["position_ids"][-1] == {16: 3, 8: 3}[capacity]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_packed_rows_have_the_logits_loss_and_gradient_that_each_has_alone(build: Any, attention: str) -> None:
    rows, model = rows_of(9, 5, 12, 7), build(attention).eval()
    packed = PackedRows(rows, 24, PAD)
    batch = {name: torch.stack([packed[0][name], packed[1][name]]) for name in packed[0]}
    found = model(**batch)
    found.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    total, counted = torch.zeros(()), 0
    for number, pack in enumerate(packed.packs):
        start = 0
        for row in pack:
            ids = rows[row]["input_ids"]
            logits = model(input_ids=ids[None]).logits[0]
            torch.testing.assert_close(found.logits[number, start : start + len(ids)], logits, rtol=1e-5, atol=1e-5)
            total = total + nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
            start, counted = start + len(ids), counted + len(ids) - 1
    torch.testing.assert_close(found.loss, total / counted)
    (total / counted).backward()
    for parameter, packed_gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(packed_gradient, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_model_that_keeps_rows_apart_passes(build: Any) -> None:
    model = build().train()
    check_can_pack(model)
    check_separates(model)
    assert model.training


def test_a_model_that_lets_rows_see_each_other_is_refused() -> None:
    model = llama()
    real = model.forward
    # As with a cache or a mask, transformers then does not look at the positions.
    model.forward = lambda **given: real(**given, attention_mask=torch.ones_like(given["input_ids"]))
    with pytest.raises(ValueError, match="in LlamaForCausalLM packed rows see each other"):
        check_separates(model)


def test_models_that_cannot_be_packed_are_refused_without_running_them() -> None:
    bert = BertForMaskedLM(
        BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    with pytest.raises(ValueError, match="BertForMaskedLM is no causal language model: set packing to false"):
        check_can_pack(bert)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2))
    with pytest.raises(ValueError, match="MambaForCausalLM takes no position_ids"):
        check_can_pack(mamba)


# ---------------------------------------------------------------------- padding


def test_a_batch_is_as_long_as_its_longest_row_in_eights_and_never_longer_than_any() -> None:
    made = padded(rows_of(3, 9, 20), "data", pad_token_id=PAD, mask=True)
    short, long = ([(number, made.row(number)) for number in numbers] for numbers in ((0, 1), (0, 2)))
    assert made.batch(short)["input_ids"].shape == (2, 16)
    assert made.batch(long)["input_ids"].shape == made.largest([0, 1])["input_ids"].shape == (2, 20)
    assert made.batch(short)["attention_mask"].sum(1).tolist() == [3, 9]
    assert made.batch(short)["labels"][0, 3:].unique().tolist() == [IGNORED]
    assert (made.shapes["attention_mask"], made.longest, made.tokens([0, 2])) == (((20,), torch.int64), (2,), 23)


def test_padding_changes_no_loss_of_a_model_that_reads_one_text_and_writes_another() -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=100, dropout_rate=0.0, **shape))
    rows = RaggedRows.of([{"input_ids": [5] * 5, "labels": [7, 8, 9]}, {"input_ids": list(range(3, 12)), "labels": [4] * 8}])
    made = padded(rows, "data", pad_token_id=PAD, mask=True)
    alone = [made.batch([(number, made.row(number))]) for number in (0, 1)]
    both = made.batch([(number, made.row(number)) for number in (0, 1)])
    one, other = (model(**batch).loss for batch in alone)
    torch.testing.assert_close(model(**both).loss, (3 * one + 8 * other) / 11)


def test_rows_of_tensors_are_padded_where_only_their_lengths_differ() -> None:
    rows = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (2, 5)]
    made = tensors(rows, "data", pad_token_id=9, mask=False)
    assert made.batch([(0, rows[0]), (1, rows[1])])["input_ids"].tolist() == [[0, 1, 9, 9, 9], [0, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match="data has rows of unequal length, and nothing says with which token"):
        tensors(rows, "data", pad_token_id=None, mask=False)
    with pytest.raises(ValueError, match="'pixels' has rows of unequal length, and nothing says with what it is filled up"):
        Padded(values={}, limits={"pixels": 3})


# ---------------------------------------------------------------------- masking


def test_tokens_are_masked_anew_in_each_step_and_the_same_when_it_is_taken_again() -> None:
    masking = Masking(mask_token_id=1, vocab_size=90, kept=frozenset({2}), seed=0)
    ids = torch.tensor([2, *range(10, 210), 2])
    row = {"input_ids": ids, "labels": ids}
    first, again, next_step = masking(row, 0, 0), masking(row, 0, 0), masking(row, 0, 1)
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["labels"], next_step["labels"])
    learnt = first["labels"] != IGNORED
    assert torch.equal(first["labels"][learnt], ids[learnt])
    assert 15 <= int(learnt.sum()) <= 50
    assert not learnt[[0, -1]].any()
    shares = np.array([int((first["input_ids"][learnt] == 1).sum()), int((first["input_ids"][learnt] == ids[learnt]).sum())])
    assert (shares / int(learnt.sum())).round(1).tolist()[0] == pytest.approx(0.8, abs=0.15)
    assert torch.equal(first["input_ids"][~learnt], ids[~learnt])


def test_at_least_one_token_of_a_row_is_masked() -> None:
    masking = Masking(mask_token_id=1, vocab_size=90, kept=frozenset({2}), seed=0)
    ids = torch.tensor([2, 10, 2])
    for step in range(20):
        assert masking({"input_ids": ids, "labels": ids}, 3, step)["labels"].tolist() == [IGNORED, 10, IGNORED]
