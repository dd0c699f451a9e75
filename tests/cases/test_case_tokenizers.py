"""Field reports about tokens: a padding token without a row, an end that is the padding too, and the side on which rows are padded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.fixtures import run, tiny_gpt2, tiny_llama
from chats import words
from toys import BYTES
from transformers import PreTrainedTokenizerFast

from memtrain import Trainer
from memtrain.data.options import DataOptions
from memtrain.data.rows import IGNORED
from memtrain.inputs import Reader
from memtrain.method import Lora
from memtrain.models.build import source

# ---------------------------------------------------------------------- tok-03


def tokenizer_of(size: int, *, pads: bool) -> PreTrainedTokenizerFast:
    """So many tokens, each a word w0, w1, …; the last of them, added later, is for padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size - pads)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w2", unk_token="w0")
    if pads:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert len(tokenizer) == size
    return tokenizer


def fitted(folder: Path, tokenizer: Any, *, tied: bool, **given: Any) -> tuple[Any, Trainer]:
    tiny_llama(tied=tied).load().save_pretrained(folder)  # type: ignore[operator]
    rows = [{"text": "w5 w6 w7 w8"}, {"text": "w9"}]
    made = Trainer(
        model=folder, data=rows, tokenizer=tokenizer, budget="256MiB", global_batch_size=2, steps=1, progress=False, **given
    )
    before = source(folder).load()
    made.train()
    return before, made


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embeddings_grow_for_a_padding_token_and_what_was_there_stays(tied: bool, tmp_path: Path) -> None:
    """tok-03 (a): 1001 tokens and 1000 rows; the first batch with padding failed. They become 1008, a multiple of 8."""
    before, made = fitted(tmp_path, tokenizer_of(1001, pads=True), tied=tied)
    model: Any = made.model
    weight, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (tuple(weight.shape), tuple(head.shape), model.config.vocab_size) == ((1008, 64), (1008, 64), 1008)
    assert (head is weight) is tied
    # Of tokens that are in no row only the head learns, and that is tied or not.
    old: Any = before.get_input_embeddings().weight
    if not tied:
        assert torch.equal(weight[100:1000], old[100:])
        torch.testing.assert_close(weight[1007], old.mean(dim=0), rtol=0, atol=1e-6)


def test_embeddings_do_not_shrink_and_need_no_padding_token(tmp_path: Path) -> None:
    """tok-03 (b) and (c): 990 tokens leave 1000 rows; without a padding token another stands in, whose labels do not count."""
    _, made = fitted(tmp_path / "b", tokenizer_of(990, pads=False), tied=True)
    assert made.model.get_input_embeddings().weight.shape == (1000, 64)  # type: ignore[operator]
    batch = made.rows.batch([(0, made.rows.row(0)), (1, made.rows.row(1))])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 2], [9, 2, 2, 2, 2]]
    assert batch["labels"].tolist() == [[5, 6, 7, 8, 2], [9, 2, IGNORED, IGNORED, IGNORED]]


def test_new_rows_that_adapters_do_not_train_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tok-03: with LoRA."""
    tiny_llama().load().save_pretrained(tmp_path)  # type: ignore[operator]
    given: dict[str, Any] = {"budget": "256MiB", "global_batch_size": 2, "steps": 1, "method": Lora(rank=2)}
    tokenizer = tokenizer_of(1001, pads=True)
    Trainer(model=tmp_path, data=[{"text": "w5 w6"}], tokenizer=tokenizer, run_dir=tmp_path / "run", **given).train()
    said = " ".join(capsys.readouterr().out.split())
    assert "8 rows are added, each the mean of the others." in said
    assert "stay as they are, since adapters neither train nor carry them" in said


# ---------------------------------------------------------------------- tok-04


def test_an_end_that_is_the_padding_too_is_learnt_once_and_the_padding_is_not() -> None:
    """tok-04: labels were masked wherever the id was that of the padding, so the end was never learnt and nothing stopped."""
    tokenizer = words()
    tokenizer.pad_token = tokenizer.eos_token
    # a is 6, b 7 and so on; the end is 2.
    rows = [{"text": "a b"}, {"text": "a b c d"}, {"text": "a <eos>"}]
    reader = Reader(tiny_llama(), tokenizer, DataOptions(sequence_length=4))
    made = reader.read(rows, "data")
    batch = made.batch([(number, made.row(number)) for number in range(3)])
    assert batch["input_ids"].tolist() == [[6, 7, 2, 2], [6, 7, 8, 9], [6, 2, 2, 2]]
    assert batch["labels"].tolist() == [[6, 7, 2, IGNORED], [6, 7, 8, 9], [6, 2, IGNORED, IGNORED]]
    assert (reader.readings["data"].truncated, reader.readings["data"].without_end) == (1, 1)


# ---------------------------------------------------------------------- tok-05


@pytest.mark.parametrize("model", [tiny_gpt2, tiny_llama], ids=["positions that are learnt", "rotated positions"])
def test_the_loss_of_a_row_does_not_depend_on_its_neighbours(model: Any) -> None:
    """tok-05: rows were padded at the left without positions, and a model with learnt ones saw them shifted, by 0.68 in its logits."""
    tokenizer = copy.deepcopy(BYTES)
    tokenizer.padding_side = "left"
    torch.manual_seed(0)
    module: Any = model(vocab_size=264).load().eval()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    rows = [{"text": "abcdef"}, {"text": "abcdefghi"}]
    total, counted = 0.0, 0
    for row in rows:
        ids = torch.tensor([[*BYTES.encode(row["text"]), BYTES.eos_token_id]])
        with torch.no_grad():
            total += module(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        counted += ids.shape[1] - 1
    given: dict[str, Any] = {"tokenizer": tokenizer, "sequence_length": 16, "global_batch_size": 2, "steps": 1}
    result, made = run(module, rows, micro_batch_size=2, **given)
    assert result.metrics[0]["loss"] == pytest.approx(total / counted, rel=1e-6)
    batch = made.rows.batch([(0, made.rows.row(0)), (1, made.rows.row(1))])
    assert batch["labels"][0, -3:].tolist() == [IGNORED] * 3
