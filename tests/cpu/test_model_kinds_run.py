"""Models of every kind through the Trainer: what is logged of the first step is the loss of its rows in one batch."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from toys import BYTES

from memtrain import Trainer
from memtrain.command_line import compose_jobs
from memtrain.config import settings
from memtrain.data.rows import IGNORED
from memtrain.data.task import Task
from memtrain.job import Constant, Sgd
from memtrain.models.build import source
from memtrain.recipe import choice_of
from memtrain.session import Session

TINY = {"vocab_size": 264, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IDS = torch.tensor([[3, 4, 5, 6], [6, 7, 8, 3], [9, 3, 4, 5], [5, 6, 7, 8]])


def built(model_type: str, task: str | None = None, **more: Any) -> Any:
    torch.manual_seed(0)
    return source({"model_type": model_type, **TINY, **SPECIAL, **more}, task=task).build()


def rows_of(**columns: Tensor) -> list[dict[str, Tensor]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def trained(model: Any, data: Any, **given: Any) -> Any:
    """A run of two steps of four rows, cut into two micro-batches unless said otherwise."""
    settings: dict[str, Any] = {
        "constraints": {"micro_batch_size": 2},
        "budget": "256MiB",
        "global_batch_size": 4,
        "steps": 2,
        "optimizer": Sgd(learning_rate=0.1, momentum=0.0),
        "schedule": Constant(),
        "progress": False,
    }
    return Trainer(model=model, data=data, eval_data=data, **{**settings, **given}).train()


def check(model: nn.Module, rows: list[dict[str, Tensor]], expected: Tensor, **given: Any) -> Any:
    result = trained(model, rows, **given)
    first, second = (row for row in result.metrics if "loss" in row)
    assert first["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert second["loss"] < first["loss"]
    assert result.evaluations[0][1] == pytest.approx(expected.item(), rel=1e-6)
    predicted, measured = (side.peak_allocated_bytes for side in (result.comparison.predicted, result.comparison.measured))
    assert predicted == pytest.approx(measured, rel=1e-3, abs=64)
    return result


# ---------------------------------------------------------------------- rows that are computed together


def test_a_mixture_that_balances_its_experts_is_planned_with_the_whole_batch() -> None:
    model = built("mixtral", num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, output_router_logits=True)
    columns = {"input_ids": IDS, "labels": IDS}
    with torch.no_grad():
        expected = copy.deepcopy(model)(**columns).loss
    rows = rows_of(**columns)
    with pytest.raises(
        ValueError, match=r"micro_batch_size 2 would train something else than the batch of 4 rows: set micro_batch"
    ):
        trained(model, rows)
    result = trained(model, rows, constraints={})
    assert next(row["loss"] for row in result.metrics if "loss" in row) == pytest.approx(expected.item(), rel=1e-6)


# ---------------------------------------------------------------------- a loss of the user's


class Named(NamedTuple):
    scores: Tensor


class Scores(nn.Module):
    """A module used twice, which returns its scores in one of the forms that people return."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(4, 4)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        scores = self.shared(self.shared(x).relu())
        match self.form:
            case "tensor":
                return scores
            case "tuple":
                return scores, x
            case "named tuple":
                return Named(scores)
            case "mapping":
                return {"scores": scores}
            case _:
                return SimpleNamespace(scores=scores)


def scores_in(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return output["scores"]
    return output[0] if isinstance(output, tuple) else output.scores


def cross_entropy(output: Any, rows: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(scores_in(output), rows["labels"], ignore_index=IGNORED)


@pytest.mark.parametrize("form", ["tensor", "tuple", "named tuple", "mapping", "object"])
def test_a_model_without_a_loss_trains_with_one_that_is_given(form: str) -> None:
    model, x = Scores(form), torch.linspace(-2, 2, 16).view(4, 4)
    labels = torch.tensor([0, IGNORED, 3, 2])
    with torch.no_grad():
        expected = cross_entropy(model(x), {"labels": labels})
    # A row that does not count stands beside one that does.
    rows = rows_of(x=x, labels=labels)
    with pytest.raises(ValueError, match="labels of which none counts"):
        trained(model, rows, loss=cross_entropy)
    rows[1]["labels"] = torch.tensor(1)
    with torch.no_grad():
        expected = cross_entropy(model(x), {"labels": torch.tensor([0, 1, 3, 2])})
    result = check(model, rows, expected, loss=lambda output, rows: cross_entropy(output, rows))
    assert "perplexity" not in result.metrics[0]


# ---------------------------------------------------------------------- vocabularies


def test_a_token_that_was_added_gets_a_row_of_its_own_and_is_trained(tmp_path: Path) -> None:
    """tok-03: an embedding with too few rows fails at the first batch that has the token."""
    folder = tmp_path / "model"
    built("llama", tie_word_embeddings=True, vocab_size=len(BYTES)).save_pretrained(folder)
    tokenizer = copy.deepcopy(BYTES)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "sequence_length": 8,
        "budget": "256MiB",
        "global_batch_size": 2,
        "steps": 1,
    }
    run = Trainer(model=folder, data=[{"text": "a<new>b"}, {"text": "cd"}], progress=False, **given)
    assert run._said[0].endswith("has embeddings for 259: 5 rows are added, each the mean of the others.")
    before = source(folder).load().get_input_embeddings().weight  # type: ignore[operator]
    run.train()
    after = run.model.get_input_embeddings().weight  # type: ignore[operator]
    assert after.shape == (264, 16)
    assert not torch.equal(after[259], before.mean(dim=0))
    run.save_model(tmp_path / "saved")
    again: Any = source(tmp_path / "saved").load()
    assert torch.equal(again.get_input_embeddings().weight, after)


# ---------------------------------------------------------------------- the command line


def configured(*overrides: str) -> Any:
    (cfg,) = compose_jobs(overrides, multirun=False)
    return settings(cfg)


def test_a_recipe_says_what_a_model_is_for_and_what_its_configuration_is(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    built("bert").save_pretrained(folder)
    BYTES.save_pretrained(folder)
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\nabc,2\nde,0\n")
    read = configured(
        f"model.path={folder}",
        "model.config=null",
        "model.task=sequence_classification",
        "model.settings={num_labels: 3}",
        "data.tokenizer.train_vocab_size=null",
        f"data.path={rows}",
        "data.held_out=0",
        "data.sequence_length=8",
        "global_batch_size=2",
    )
    assert (read.model.task, read.model.settings) == (Task.SEQUENCE_CLASSIFICATION, {"num_labels": 3})
    assert choice_of(read, configured_device()).plan.micro_batch_size in (1, 2)


def configured_device() -> Any:
    from memtrain import machine

    return machine.cpu()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.task=regression", "model.task is 'regression', and it must be one of causal_lm, masked_lm, seq2seq_lm, seq"),
        ("model.settings={num_labels: 3}", "model.settings is {'num_labels': 3}, and model.config says all of it: put them"),
    ],
)
def test_what_a_recipe_cannot_say_of_a_model_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^{sentence.replace('{', '.').replace('}', '.')}"):
        configured(override)


def test_a_loss_that_cannot_be_sent_stays_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several processes the first plans for all, and a lambda cannot be pickled."""
    import pickle

    sent: list[Any] = []

    def through_pickle(work: Any) -> Any:
        sent.append(pickle.dumps(work()))
        return pickle.loads(sent[-1])

    monkeypatch.setattr("memtrain.session.distributed.from_first", through_pickle)
    x = torch.linspace(-2, 2, 16).view(4, 4)
    run = Trainer(
        model=Scores("tensor"),
        data=rows_of(x=x, labels=torch.tensor([0, 1, 3, 2])),
        loss=lambda output, rows: cross_entropy(output, rows),
        budget="64MiB",
        steps=1,
        progress=False,
    )
    assert isinstance(run._session, Session)
    assert run.choice.job.loss is run.job.loss
    assert b"Choice" in sent[-1]
