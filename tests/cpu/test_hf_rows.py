"""Rows and collators of transformers' Trainer, and the losses that come of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chats import words
from from_hf import ROWS, Net, arguments, tiny
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)

from memtrain.hf.arguments import arguments_from_hf
from memtrain.hf.rows import Keeping
from memtrain.trainer import Trainer


def settings(given: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    given = {"model": Net(), "train_dataset": ROWS, **(given or {})}
    return dict(arguments_from_hf(arguments(**fields), **given).settings)


class Words:
    """Stands for a tokenizer where none is called."""

    pad_token_id = 0


def test_columns_that_forward_does_not_take_are_left_out_and_named() -> None:
    collator = settings()["data_collator"]
    assert collator == Keeping(default_data_collator, frozenset(("x", "labels", "label", "label_ids")))
    batch = collator(ROWS[:2])
    assert (batch["x"].tolist(), batch["labels"].tolist()) == ([[1.0, 2.0], [1.0, 2.0]], [0, 0])
    said = arguments_from_hf(arguments(), Net(), train_dataset=ROWS).said
    assert "Net does not take source, which the data_collator does not see; remove_unused_columns=False shows it all." in said
    assert settings(remove_unused_columns=False)["data_collator"] is default_data_collator
    with pytest.raises(ValueError, match=r"^train_dataset has columns source, of which Net takes none: rename them, or set"):
        settings({"train_dataset": [{"source": "a"}]})


def test_a_collator_that_is_given_sees_what_it_would_see() -> None:
    def join(rows: list[Any]) -> Any:
        return sorted(rows[0])

    assert settings({"data_collator": join})["data_collator"](ROWS) == ["label", "x"]
    assert settings({"data_collator": join, "train_dataset": [{"x": [1.0], "labels": 1}]})["data_collator"] is join


def test_rows_of_tokens_are_read_by_memtrain_and_not_cut_before_the_model_ends() -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4] * 9, "labels": [4] * 9}]
    found = settings({"model": tiny(), "train_dataset": rows, "processing_class": Words()})
    assert ("data_collator" in found, found["sequence_length"]) == (False, 24)
    assert settings({"train_dataset": rows, "tokenizer": Words(), "model": "a/path"})["sequence_length"] == 9
    assert (
        settings({"model": tiny(), "train_dataset": rows, "processing_class": Words(), "packing": True})
        .keys()
        .isdisjoint(("data_collator", "sequence_length"))
    )


def test_other_rows_are_joined_as_transformers_does() -> None:
    model = tiny()
    tokens = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, 2])}]
    assert settings({"model": model, "train_dataset": tokens})["data_collator"] is default_data_collator
    tokenizer = words()
    joined = settings({"model": model, "train_dataset": [{"input_ids": [1], "position_ids": [0]}], "tokenizer": tokenizer})
    assert isinstance(joined["data_collator"], DataCollatorWithPadding)


@pytest.mark.skipif(
    not hasattr(transformers.trainer_utils, "align_special_tokens"), reason="this version of transformers does not do it"
)
def test_the_padding_token_of_the_tokenizer_becomes_that_of_the_model() -> None:
    tokenizer, model = words(), tiny()
    tokenizer.pad_token = "<unk>"
    assert model.config.pad_token_id is None
    settings({"model": model, "processing_class": tokenizer, "train_dataset": [{"input_ids": [1], "labels": [1]}]})
    assert model.config.pad_token_id == 0


def test_text_is_left_to_memtrain() -> None:
    found = settings({"model": tiny(), "train_dataset": [{"text": "a b"}], "processing_class": Words()})
    assert found.keys().isdisjoint(("data_collator", "sequence_length"))


# ---------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize(("batch", "accumulated"), [(6, 1), (2, 3)])
def test_losses_are_those_of_transformers_step_by_step(batch: int, accumulated: int, tmp_path: Path) -> None:
    # Each step has all rows, whatever their order; they count 7 to 2 tokens.
    rows = [
        {"input_ids": [(7 * row + place) % 32 for place in range(8)], "labels": [-100] * row + [1 + row] * (8 - row)}
        for row in range(6)
    ]
    args = arguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulated,
        max_steps=5,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    theirs = transformers.Trainer(tiny(), args, train_dataset=rows)
    theirs.train()
    steps = [one for one in theirs.state.log_history if "loss" in one]
    ours = Trainer.from_hf(args, tiny(), train_dataset=rows, budget="1GiB", progress=False).train().metrics
    assert [row["step"] for row in ours] == [1, 2, 3, 4, 5]
    assert [row["learning_rate"] for row in ours] == pytest.approx([0.01, 0.008, 0.006, 0.004, 0.002])
    # The trainer of transformers rounds neither loss nor norm.
    assert [row["loss"] for row in ours] == pytest.approx([one["loss"] for one in steps], rel=1e-5)
    assert [row["grad_norm"] for row in ours] == pytest.approx([one["grad_norm"] for one in steps], rel=1e-5)
    assert ours[-1]["loss"] < ours[0]["loss"] / 1.1


@pytest.mark.parametrize("kind", [DataCollatorForLanguageModeling, DataCollatorForTokenClassification, DataCollatorForSeq2Seq])
def test_collators_of_transformers_give_its_losses(kind: Any, tmp_path: Path) -> None:
    tokenizer = words()
    tokenizer.pad_token = "<unk>"
    collator = kind(tokenizer, mlm=False) if kind is DataCollatorForLanguageModeling else kind(tokenizer)
    rows: list[dict[str, Any]] = [{"input_ids": [6 + place % 7 for place in range(row, 2 * row + 3)]} for row in range(4)]
    if kind is not DataCollatorForLanguageModeling:
        rows = [{**row, "labels": [-100, *row["input_ids"][1:]], "source": "a"} for row in rows]
    args = arguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=4,
        max_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    given: dict[str, Any] = {"train_dataset": rows, "processing_class": tokenizer}
    theirs = transformers.Trainer(tiny(), args, collator, **given)
    theirs.train()
    expected = [one["loss"] for one in theirs.state.log_history if "loss" in one]
    # Rows of tokens with labels are padded by memtrain itself where no collator is given.
    for joins in (collator, None)[: 1 + (kind is DataCollatorForSeq2Seq)]:
        args.output_dir = str(tmp_path / str(joins is None))
        ours = Trainer.from_hf(args, tiny(), joins, **given, budget="1GiB", progress=False).train().metrics
        assert [row["loss"] for row in ours] == pytest.approx(expected, rel=1e-5)
