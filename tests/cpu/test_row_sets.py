"""Row sets: rows of unequal length as batches, and tokens that are masked anew in each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from memtrain.data.masking import Masking
from memtrain.data.padding import Padded
from memtrain.data.rows import IGNORED
from memtrain.data.sets import padded, tensors
from memtrain.data.store import RaggedRows

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
