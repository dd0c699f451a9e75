"""Field reports about evaluating: what it leaves as it was, what it keeps, and what a finished step keeps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from cases.fixtures import column, run, same, tiny_llama, tokens, trainer, weights
from torch import Tensor, nn

from memtrain.job import AdamW
from memtrain.trainer import Result

# ---------------------------------------------------------------------- mod-05


def evaluated(every: int | None, ran: list[tuple[bool, bool]] | None = None) -> tuple[Result, dict[str, Tensor], Any]:
    """Six steps of two micro-batches, with dropout of one half and a layer that was set to evaluation before."""
    made = trainer(
        tiny_llama(attention_dropout=0.5),
        [tokens(8, number) for number in range(12)],
        eval_data=None if every is None else [tokens(8, number) for number in range(20, 23)],
        evaluate_every=every,
        micro_batch_size=1,
        global_batch_size=2,
        steps=6,
        optimizer=AdamW(learning_rate=3e-3),
    )
    model: Any = made.model
    model.model.layers[1].eval()
    if ran is not None:
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda one, _: ran.append((one.training, torch.is_grad_enabled())))
    result = made.train()
    return result, weights(made), model


@pytest.fixture(scope="module")
def never() -> tuple[Result, dict[str, Tensor], Any]:
    return evaluated(None)


@pytest.mark.parametrize("every", [1, 2, 6])
def test_how_often_a_run_is_evaluated_changes_no_number_of_it(every: int, never: tuple[Result, dict[str, Tensor], Any]) -> None:
    """mod-05: dropout is on again after an evaluation, which has drawn no random number and touched no gradient."""
    result, final, _ = evaluated(every)
    assert column(result, "loss") == column(never[0], "loss")
    assert same(final, never[1])


def test_a_module_is_given_back_in_the_modes_in_which_it_was_given(never: tuple[Result, dict[str, Tensor], Any]) -> None:
    """mod-05: the layer that the user had set to evaluation is in evaluation, and every other module trains."""
    _, _, model = evaluated(1)
    for path, module in model.named_modules():
        assert module.training == (not path.startswith("model.layers.1")), path
    assert [module.training for module in model.modules()] == [module.training for module in never[2].modules()]


def test_while_it_trains_the_whole_model_does_and_while_it_is_evaluated_none_of_it() -> None:
    """mod-05: also between two evaluations, and gradients are made when it trains alone."""
    ran: list[tuple[bool, bool]] = []
    evaluated(1, ran)
    assert set(ran) == {(True, True), (False, False)}


# ---------------------------------------------------------------------- mem-03


class Watched(nn.Module):
    """A language model that keeps weak references to its logits, and notes how many are alive when it makes others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(1000, 8)
        self.head = nn.Linear(8, 1000)
        self.seen: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if not input_ids.is_meta and not self.training:
            self.alive.append(sum(1 for one in self.seen if one() is not None))
        logits = self.head(self.embedding(input_ids))
        if not input_ids.is_meta and not self.training:
            self.seen.append(weakref.ref(logits))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


EVALUATION_ROWS = [tokens(16, number) for number in range(40)]
for number, row in enumerate(EVALUATION_ROWS):
    # Rows count different numbers of tokens.
    row["labels"][: number % 5] = -100


def watched(**given: Any) -> tuple[Watched, Result]:
    """One step, and twenty batches of 2 x 16 x 1000 logits before it and after it, and two that are measured."""
    model = Watched()
    settings: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 2, "steps": 1}
    result, _ = run(model, [tokens(16), tokens(16, 1)], eval_data=EVALUATION_ROWS, **settings, **given)
    assert len(model.seen) == 20 + 20 + 2
    return model, result


def argmax(logits: Tensor, labels: Tensor | None) -> Tensor:
    return logits.argmax(-1)


@pytest.mark.parametrize("reduced", [False, True])
def test_logits_of_one_batch_are_gone_before_those_of_the_next_are_made(reduced: bool) -> None:
    """mem-03: for the loss alone, and for a metric of what is left of them; twenty would be 2560000 bytes."""
    kept: list[np.ndarray[Any, Any]] = []

    def compute(prediction: Any) -> dict[str, float]:
        kept.append(prediction.predictions)
        counted = prediction.label_ids != -100
        return {"accuracy": float((prediction.predictions == prediction.label_ids)[counted].mean())}

    given: dict[str, Any] = {"compute_metrics": compute, "reduce_outputs": argmax} if reduced else {}
    model, result = watched(**given)
    assert max(model.alive) == 0
    # In the order of the rows, one number a token: 640.
    assert [(one.shape, one.dtype) for one in kept] == [((40, 16), np.dtype("int64"))] * (2 if reduced else 0)
    assert all(("eval_accuracy" in row) == reduced for row in result.metrics if "eval_loss" in row)


def test_the_loss_of_an_evaluation_is_the_mean_over_all_of_its_tokens() -> None:
    """mem-03: and not over the means of its batches, whose tokens are of different number."""
    model, result = watched()
    whole = {name: torch.stack([row[name] for row in EVALUATION_ROWS]) for name in EVALUATION_ROWS[0]}
    model.eval()
    with torch.no_grad():
        expected = model(**whole)["loss"].item()
    assert result.evaluations[-1][1] == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------- mem-05


class Leaving(nn.Module):
    """A layer that keeps weak references to its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(x)
        if not x.is_meta:
            self.seen.append(weakref.ref(hidden))
        return {"loss": hidden.square().mean(), "hidden": hidden}

    def alive(self) -> int:
        return sum(1 for one in self.seen if one() is not None)


def test_nothing_of_a_finished_step_stays_alive_but_numbers() -> None:
    """mem-05: 30 steps in three epochs, evaluated in each, with a callback that keeps all that it is shown."""
    model = Leaving()
    kept: list[Any] = []
    alive: list[int] = []
    tensors: dict[int, int] = {}

    def look(record: Any) -> None:
        kept.append(record)
        if record.event == "step":
            alive.append(model.alive())
        if record.event == "evaluation":
            gc.collect()
            tensors[record.step] = sum(1 for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter))

    rows = [{"x": torch.arange(6.0) + number} for number in range(20)]
    result, made = run(
        model,
        rows,
        eval_data=rows[:4],
        evaluate_every=10,
        callbacks=[look],
        micro_batch_size=1,
        global_batch_size=2,
        epochs=3,
        optimizer=AdamW(learning_rate=1e-3),
    )
    assert alive == [0] * 30
    assert tensors[10] == tensors[20] == tensors[30]
    # The logged loss is a number without a graph.
    assert {type(value) for row in result.metrics for value in row.values()} <= {int, float}
    assert all(type(value) in (int, float) for record in kept for value in record.metrics.values())
    assert made.model is model
    assert all(parameter.grad is None for parameter in model.parameters())
