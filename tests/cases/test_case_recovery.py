"""Field reports about running out of memory: what is let go before a step is taken again, and what an evaluation costs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from cases.fixtures import column, run, same, tiny_llama, tokens, weights
from torch import Tensor, nn

from memtrain import Trainer
from memtrain.job import AdamW

FULL = "CUDA out of memory. Tried to allocate 20.00 MiB."

# ---------------------------------------------------------------------- oom-02


class FailingBackward(torch.autograd.Function):
    """Passes a tensor on, and finds no memory in one of its backwards."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, model: Dropping) -> Tensor:
        ctx.model, ctx.call = model, model.calls
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.call == ctx.model.fails and ctx.model.where == "backward":
            raise torch.OutOfMemoryError(FULL)
        return gradients[0], None


class Dropping(nn.Module):
    """A layer under dropout that keeps weak references to its activations, and finds no memory in one of its forwards."""

    def __init__(self, where: str = "", fails: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.where, self.fails, self.calls = where, fails, 0
        self.seen: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []
        """At each forward, how many activations of those before are still there."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.layer(x), 0.5, self.training)
        if x.is_meta:
            return hidden.square().mean()
        self.calls += 1
        self.alive.append(sum(1 for one in self.seen if one() is not None))
        self.seen.append(weakref.ref(hidden))
        if self.calls == self.fails and self.where == "forward":
            raise torch.OutOfMemoryError(FULL)
        loss: Tensor = FailingBackward.apply(hidden, self).square().mean()
        return loss


def dropped(model: Dropping, micro_batch_size: int) -> tuple[list[float], Trainer]:
    """Three steps of eight rows."""
    rows = [{"x": torch.arange(6.0) + number} for number in range(8)]
    given: dict[str, Any] = {"micro_batch_size": micro_batch_size, "global_batch_size": 8, "steps": 3}
    result, made = run(model, rows, optimizer=AdamW(learning_rate=0.1), **given)
    return column(result, "loss"), made


# Eight micro-batches of the rehearsal come first. The second of the four of step 1 fails.
FAILS = 8 + 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_failed_step_held_is_gone_when_it_is_taken_again_and_none_of_it_is_in_the_gradient(where: str) -> None:
    """oom-02: of micro-batches of two rows; the step is taken again in ones, as if they had been ones from the beginning."""
    model = Dropping(where, FAILS)
    losses, made = dropped(model, 2)
    assert made.choice.plan.micro_batch_size == 1
    # Neither the activation of the failed micro-batch, which a traceback would hold, nor that of the one before it.
    assert model.alive[FAILS] == 0
    assert model.calls == FAILS + 3 * 8
    # Dropout draws what it would have drawn: random numbers are where they were at the beginning of the step.
    expected, whole = dropped(Dropping(), 1)
    assert losses == expected
    assert same(weights(made), weights(whole))


# ---------------------------------------------------------------------- oom-03


class NarrowEvaluation(nn.Module):
    """A model that finds no memory for more than two rows when it is evaluated."""

    def __init__(self, most: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.most = most
        self.rows: list[tuple[bool, list[int]]] = []
        """Of each forward whether it trains, and its rows."""

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        if not x.is_meta:
            self.rows.append((self.training, number.flatten().int().tolist()))
            if not self.training and len(x) > self.most:
                raise torch.OutOfMemoryError(FULL)
        return nn.functional.dropout(self.layer(x), 0.5, self.training).square().mean()


def numbered(count: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.arange(6.0) + number, "number": torch.tensor([float(number)])} for number in range(count)]


def test_memory_that_runs_out_in_an_evaluation_costs_the_size_of_its_batches_and_nothing_else() -> None:
    """oom-03: in batches of 4, 2 and 2 rows of 8; training stays in fours and counts its steps on."""

    def evaluated(most: int) -> tuple[NarrowEvaluation, Any, Trainer]:
        model = NarrowEvaluation(most)
        given: dict[str, Any] = {"micro_batch_size": 4, "global_batch_size": 4, "steps": 4, "evaluate_every": 2}
        result, made = run(model, numbered(16), eval_data=numbered(8), optimizer=AdamW(learning_rate=0.1), **given)
        return model, result, made

    narrow, result, made = evaluated(2)
    wide, expected, undisturbed = evaluated(8)
    assert made.choice.plan.micro_batch_size == 4
    assert column(result, "step") == [1, 2, 3, 4]
    tried = [rows for trains, rows in narrow.rows if not trains]
    # The first batch fails once, in the evaluation before training, and no later one does.
    assert tried[:5] == [[0, 1, 2, 3], [0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(len(rows) == 2 for rows in tried[1:])
    assert [rows for trains, rows in narrow.rows if trains] == [rows for trains, rows in wide.rows if trains]
    assert column(result, "loss") == column(expected, "loss")
    assert same(weights(made), weights(undisturbed))
    assert [step for step, _ in result.evaluations] == [0, 2, 4]
    assert [loss for _, loss in result.evaluations] == pytest.approx([loss for _, loss in expected.evaluations], rel=1e-6)


def test_an_evaluation_alone_finds_its_size_in_a_language_model_as_well() -> None:
    """oom-03: evaluated in twos, a language model has the loss that it has in fours, since tokens weigh alike."""
    rows = [tokens(8, number) for number in range(8)]
    for row in rows[:3]:
        row["labels"][:5] = -100
    losses = []
    for size in (4, 2):
        result, _ = run(tiny_llama(), rows, eval_data=rows, micro_batch_size=size, global_batch_size=4, steps=1)
        losses.append(result.evaluations[0][1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
