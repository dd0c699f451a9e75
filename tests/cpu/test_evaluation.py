"""Metrics of an evaluation: what transformers' Trainer would compute of the same rows, in their order."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toys import BYTES
from transformers import Trainer as TheirTrainer
from transformers import TrainingArguments

from memtrain import EarlyStopping, Trainer
from memtrain.evaluation import Collected, Metrics, metrics_of
from memtrain.models.build import source
from memtrain.plan import ChunkedLogits

TINY = {"vocab_size": len(BYTES), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LENGTHS = (3, 8, 5, 2, 6)


def model(task: str | None, kind: str) -> Any:
    torch.manual_seed(0)
    return source({"model_type": kind, **TINY, **SPECIAL}, task=task).build()


def rows(task: str | None) -> list[dict[str, Any]]:
    made = []
    for number, length in enumerate(LENGTHS):
        ids = [(7 * number + 3 * place) % 250 + 3 for place in range(length)]
        made.append({"input_ids": ids, "labels": number % 2 if task else ids})
    return made


def ours(task: str | None, kind: str, compute: Any, **given: Any) -> dict[str, float]:
    trainer = Trainer(
        model=model(task, kind).eval(),
        data=rows(task),
        eval_data=rows(task),
        tokenizer=BYTES,
        sequence_length=8,
        compute_metrics=compute,
        budget="256MiB",
        steps=1,
        progress=False,
        constraints={"micro_batch_size": 2},
        **given,
    )
    return trainer.evaluate()


def theirs(task: str | None, kind: str, compute: Any, tmp_path: Any) -> None:
    padded = []
    for row in rows(task):
        more = 8 - len(row["input_ids"])
        labels = row["labels"] if task else row["labels"] + [-100] * more
        mask = [1] * len(row["input_ids"]) + [0] * more
        padded.append({"input_ids": row["input_ids"] + [0] * more, "attention_mask": mask, "labels": labels})
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_eval_batch_size=2, report_to=[], disable_tqdm=True
    )
    TheirTrainer(model=model(task, kind), args=args, eval_dataset=padded, compute_metrics=compute).evaluate()


@pytest.mark.parametrize(("task", "kind"), [("sequence_classification", "bert"), (None, "llama")])
def test_the_arrays_are_those_of_transformers(task: str | None, kind: str, tmp_path: Any) -> None:
    seen: list[Any] = []

    def compute(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {"count": len(prediction.predictions), "eval_named": np.float32(0.5)}

    found = ours(task, kind, compute)
    theirs(task, kind, compute, tmp_path)
    mine, other = seen
    assert (found["eval_count"], found["eval_named"]) == (5.0, 0.5)
    assert np.array_equal(mine.label_ids, other.label_ids)
    assert mine.predictions.shape == other.predictions.shape
    for number, length in enumerate(LENGTHS):
        # Padding is computed there and filled up with -100 here.
        part = slice(None) if task else slice(length)
        np.testing.assert_allclose(mine.predictions[number][part], other.predictions[number][part], rtol=1e-4, atol=1e-6)


def test_what_is_reduced_is_kept_and_ends_a_run_that_gets_no_better() -> None:
    kept: list[Any] = []

    def accuracy(prediction: Any) -> dict[str, float]:
        kept.append(prediction.predictions)
        return {"accuracy": 0.25}

    trainer = Trainer(
        model=model(None, "llama"),
        data=rows(None),
        eval_data=rows(None),
        tokenizer=BYTES,
        sequence_length=8,
        compute_metrics=accuracy,
        reduce_outputs=lambda logits, labels: logits.argmax(-1).where(labels != -100, -100),
        budget="256MiB",
        global_batch_size=1,
        evaluate_every=1,
        callbacks=[EarlyStopping(patience=2, metric="eval_accuracy", greater_is_better=True)],
        progress=False,
    )
    result = trainer.train()
    # Before the first step, and after the first and second.
    assert [row["eval_accuracy"] for row in result.metrics if "eval_loss" in row] == [0.25] * 3
    assert [(one.shape, one.dtype) for one in kept] == [((5, 8), np.dtype("int64"))] * 3
    assert [(row == -100).sum() for row in kept[0]] == [8 - length for length in LENGTHS]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (torch.ones(2, 3), (2, 3)),
        ((torch.tensor(0.0), torch.ones(2, 3)), (2, 3)),
        ({"loss": torch.tensor(0.0), "logits": torch.ones(2, 3), "states": torch.ones(2, 9)}, (2, 3)),
        (SimpleNamespace(loss=torch.tensor(0.0), scores=torch.ones(2, 3)), (2, 3)),
        ({"a": torch.ones(2, 3), "b": torch.ones(2)}, ((2, 3), (2,))),
        (torch.ones(2, 3, dtype=torch.bfloat16), (2, 3)),
    ],
)
def test_of_what_a_model_returns_its_logits_are_kept_or_all_but_the_loss(output: Any, expected: Any) -> None:
    collected, seen = Collected(Metrics(lambda found: seen.append(found) or {})), []  # type: ignore[func-returns-value]
    collected.see({"x": torch.ones(2)}, output)
    assert collected.result([0, 1]) == {}
    found = seen[0].predictions
    assert (tuple(one.shape for one in found) if isinstance(found, tuple) else found.shape) == expected
    assert seen[0].label_ids is None


@pytest.mark.parametrize(
    ("reduce", "returned", "sentence"),
    [
        (None, 0.5, "compute_metrics returned 0.5, and it must return numbers by name: return a dict of them."),
        (
            None,
            {"matrix": [[1]]},
            "compute_metrics returned a list for 'matrix', and what is logged are numbers: return one, or le",
        ),
        (
            lambda logits, labels: logits.sum(),
            {},
            "for metrics an array of shape () was to be kept of a batch of 2 rows, and tens",
        ),
        (lambda logits, labels: None, {}, "for metrics a NoneType was to be kept of a batch of 2 rows, and tensors are needed"),
    ],
)
def test_what_cannot_be_kept_or_logged_is_refused(reduce: Any, returned: Any, sentence: str) -> None:
    collected = Collected(Metrics(lambda _: returned, reduce))

    def evaluated() -> None:
        collected.see({"x": torch.ones(2)}, torch.ones(2, 3))
        collected.result([1, 0])

    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        evaluated()


@pytest.mark.parametrize(
    ("given", "evaluates", "sentence"),
    [
        (
            (None, max, {}),
            True,
            "reduce_outputs is given, and what it keeps is for compute_metrics alone: give that too, or neither.",
        ),
        ((dict, None, {}), False, "compute_metrics is given, and there is nothing to evaluate on: give eval_data."),
        (
            (dict, None, {"loss": ChunkedLogits(8)}),
            True,
            "compute_metrics reads logits, and the constraints say that the loss is",
        ),
    ],
)
def test_metrics_need_rows_and_logits(given: Any, evaluates: bool, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        metrics_of(*given, evaluates=evaluates)


def test_a_module_that_returns_its_loss_alone_shows_it_as_all_there_is() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).mean()

    given: dict[str, Any] = {"data": [{"x": torch.ones(1)}], "eval_data": [{"x": torch.ones(1)}], "budget": "64MiB", "steps": 1}
    with pytest.raises(ValueError, match=r"^for metrics an array of shape \(\) was to be kept of a batch of 1 rows"):
        Trainer(model=Loss(), compute_metrics=lambda _: {}, progress=False, **given).evaluate()
