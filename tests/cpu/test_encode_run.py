"""A file of conversations trains the loss of its answers, however its rows are put into batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import BYTES
from transformers import LlamaConfig, LlamaForCausalLM

from memtrain import Trainer
from memtrain.data.encode import Encoder, Reading
from memtrain.data.options import DataOptions
from memtrain.data.records import Origin, Record
from memtrain.data.rows import IGNORED
from memtrain.data.task import Task


def said(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def llama() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=264, max_position_embeddings=64, **shape))


@pytest.mark.parametrize("given", [{}, {"packing": True}, {"constraints": {"micro_batch_size": 1}}, {"group_by_length": True}])
def test_a_file_of_conversations_trains_the_loss_of_its_answers(tmp_path: Path, given: dict[str, Any]) -> None:
    turns = [("hi", "hello"), ("what", "a longer answer than that"), ("q", "a"), ("bye", "see you")]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": said(*turn)}) + "\n" for turn in turns))
    encoder = Encoder(BYTES, Task.CAUSAL_LM, DataOptions(), sequence_length=64)
    records = [Record({"messages": said(*turn)}, Origin("chat.jsonl", line)) for line, turn in enumerate(turns, start=1)]
    rows = list(encoder.encode_all(records, Reading("data", 64)))
    total, counted = 0.0, 0
    for row in rows:
        logits = llama()(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        target = torch.tensor(row["labels"])[1:]
        total += torch.nn.functional.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum").item()
        counted += int((target != IGNORED).sum())
    trainer = Trainer(
        model=llama(),
        data=file,
        eval_data=file,
        tokenizer=BYTES,
        budget="64MiB",
        global_batch_size=4,
        steps=2,
        progress=False,
        **given,
    )
    result = trainer.train()
    first, _ = (row for row in result.metrics if "loss" in row)
    assert first["loss"] == pytest.approx(total / counted, rel=1e-5)
    assert result.evaluations[0][1] == pytest.approx(total / counted, rel=1e-5)
    # Four rows fill one pack, which is fewer than a step may have.
    assert given == {"packing": True} or result.comparison.peak_error == pytest.approx(0, abs=0.002)
