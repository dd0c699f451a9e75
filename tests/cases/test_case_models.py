"""Field reports about models that are built or answer in their own way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.fixtures import tiny_t5, trainer
from torch import Tensor, nn

from memtrain import Trainer
from memtrain.data.rows import IGNORED, Batch
from memtrain.data.sets import padded
from memtrain.data.store import RaggedRows
from memtrain.data.task import Task
from memtrain.job import Loss
from memtrain.models.objective import objective
from memtrain.models.tasks import task_of

# ---------------------------------------------------------------------- mod-01

SHORT = {"input_ids": [11, 12, 13, 14, 15], "labels": [21, 22, 1]}
LONG = {"input_ids": [31, 32, 33, 34, 35, 36, 37, 38, 39], "labels": [41, 42, 43, 44, 45, 46, 47, 1]}


def test_padding_is_no_target_of_an_encoder_and_decoder_and_its_first_target_counts() -> None:
    """mod-01: pad ids were left in T5's labels and counted, and wrong shifts lost the first target."""
    torch.manual_seed(0)
    given = tiny_t5()
    assert task_of(given) is Task.SEQ2SEQ_LM
    model: Any = given.build().eval()
    assert sum(weight.numel() for weight in model.parameters()) == 44800
    rows = padded(RaggedRows.of([SHORT, LONG]), "data", pad_token_id=0, mask=True)
    batch = rows.batch((number, rows.row(number)) for number in (0, 1))
    assert batch["labels"][0].tolist() == [21, 22, 1, *[IGNORED] * 5]
    assert batch["attention_mask"][0].tolist() == [1] * 5 + [0] * 4
    what = objective(model)
    short, long = ({name: torch.tensor([ids]) for name, ids in row.items()} for row in (SHORT, LONG))
    assert [what.count(one).item() for one in (short, long, batch)] == [3, 8, 11]
    alone, other, together = (what.loss(model, one).item() for one in (short, long, batch))
    assert together == pytest.approx((3 * alone + 8 * other) / 11, rel=1e-6)
    # What the report saw, which is not the same: padding as targets, and padding that is looked at.
    zeros = {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == IGNORED, 0)}
    assert model(**zeros).loss.item() != pytest.approx(together, rel=1e-3)
    unmasked = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    assert model(**unmasked).loss.item() != pytest.approx(together, rel=1e-6)


# ---------------------------------------------------------------------- mod-03


class Scores(nn.Module):
    """One weight of 1, the factor of x; ``form`` makes what is returned of the scores and of y."""

    def __init__(self, form: Callable[[Tensor, Tensor | None], Any]) -> None:
        super().__init__()
        self.form, self.factor = form, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self.form(self.factor * x, y)


def squares(scores: Tensor, y: Tensor | None) -> Tensor:
    assert y is not None
    return (scores - y).square()


def own(output: Any, rows: Batch) -> Tensor:
    return squares(output, rows["y"]).mean()


ROWS = [{"x": torch.tensor([float(x)]), "y": torch.tensor([0.0])} for x in range(1, 6)]


def of_scores(form: Any, loss: Loss | None = None) -> Trainer:
    return trainer(Scores(form), ROWS, eval_data=ROWS, loss=loss, micro_batch_size=2, global_batch_size=2, steps=1)


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        (lambda scores, y: {"loss": squares(scores, y).mean(), "logits": scores}, None),
        (lambda scores, y: (squares(scores, y).mean(), scores), None),
        (lambda scores, y: squares(scores, y).mean(), None),
        (lambda scores, y: scores, own),
    ],
    ids=["mapping", "tuple", "loss_alone", "scores_alone"],
)
def test_the_loss_is_found_in_whatever_form_a_model_answers_and_no_row_is_lost(form: Any, loss: Loss | None) -> None:
    """mod-03: of a bare tensor everything after the first element was taken, so that a sample of each batch vanished."""
    made = of_scores(form, loss)
    # Five rows, in batches of two: the mean of 1, 4, 9, 16 and 25.
    assert made.evaluate()["eval_loss"] == 11.0
    seen: list[Tensor] = []
    made.model.register_forward_hook(lambda module, given, kwargs, output: seen.append(kwargs["x"]), with_kwargs=True)
    made.evaluate()
    assert torch.cat(seen).flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    result = made.train()
    assert result.evaluations[0] == (0, 11.0)
    assert result.evaluations[-1][1] != 11.0


@pytest.mark.parametrize(
    ("form", "described", "remedy"),
    [
        (lambda scores, y: scores, "a tensor of shape (2, 1)", "return a scalar loss (of several the mean), alone,"),
        (lambda scores, y: {"loss": squares(scores, y)[:, 0]}, "loss (a tensor of shape (2,))", "take the mean of its loss."),
        (
            lambda scores, y: {"loss": None, "logits": scores},
            "loss (None), logits (a tensor of shape (2, 1))",
            "return a scalar",
        ),
    ],
    ids=["no_loss", "vector", "none"],
)
def test_a_model_without_one_loss_is_told_what_it_returned_and_what_it_got(form: Any, described: str, remedy: str) -> None:
    """mod-03: a model that returns no loss, a loss for each row or None raised an unclear error."""
    expected = f"Scores returned {described} where its loss was expected: {remedy}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
        of_scores(form).train()
