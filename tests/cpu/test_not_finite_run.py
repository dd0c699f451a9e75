"""What a run does about a step that is not finite: it names the rows and ends, or goes on without the step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain import recovery
from memtrain.data.batches import StepBatches
from memtrain.data.rowset import alike
from memtrain.job import Job, NotFinite
from memtrain.loop import Loop
from memtrain.not_finite import Health
from memtrain.plan import DuringBackward, Plan
from memtrain.precision import AutocastFp16
from memtrain.run import prepare

NAN = float("nan")
SKIPPING = Job(model="toy", global_batch_size=2, steps=9, on_not_finite=NotFinite.SKIP)
STOPPING = dataclasses.replace(SKIPPING, on_not_finite=NotFinite.STOP)
SCALED = AutocastFp16(initial_scale=8.0)


class Unwatched:
    """A meter that measures nothing."""

    @contextmanager
    def window(self, *_: Any) -> Iterator[None]:
        yield

    def in_update(self, update: Callable[[], Any]) -> Callable[[], Any]:
        return update


class Length(nn.Module):
    """The mean length of what a layer makes of rows. A row of zeros has length 0, where the gradient is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        nn.init.eye_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).square().sum(1).sqrt().mean()
        return out


def looped(job: Job, *rows: tuple[float, float], plan: Plan | None = None) -> tuple[Loop, list[str]]:
    """A loop over rows in their own order, the first two in the first step, and the list of what it tells."""
    plan = plan or Plan(micro_batch_size=1)
    held = [{"x": torch.tensor(row)} for row in rows]

    class InOrder(StepBatches):
        def indices(self, step: int) -> list[int]:
            return [2 * step, 2 * step + 1]

    said: list[str] = []
    loop = Loop(
        buffers=(),
        job=job,
        run=prepare(job, plan, Length()),
        batches=InOrder(alike(held), global_batch_size=2, seed=0),
        eval_rows=None,
        plan=plan,
        evaluation_batch_size=1,
        meter=Unwatched(),  # type: ignore[arg-type]
        device="cpu",
        counts="rows",
        tell=said.append,
    )
    return loop, said


def weight(loop: Loop) -> Tensor:
    layer = loop.run.model.layer
    assert isinstance(layer, nn.Linear)
    return layer.weight


NAN_ROW = ((3.0, 4.0), (NAN, 0.0), (3.0, 4.0), (0.0, 1.0))
ZERO_ROW = ((0.0, 0.0), (3.0, 4.0), (3.0, 4.0), (0.0, 1.0))


@pytest.mark.parametrize("precision", [STOPPING.precision, SCALED], ids=str)
def test_a_skipped_step_names_its_row_and_the_run_goes_on(precision: Any) -> None:
    loop, said = looped(dataclasses.replace(SKIPPING, precision=precision), *NAN_ROW)
    row = loop.step(0)
    assert (str(row["loss"]), row["skipped"]) == ("nan", 1)
    assert said == [
        "The loss of step 1 is nan; no weight was changed, and the run goes on; the loss of row 1 alone is not finite: look there."
    ]
    assert torch.equal(weight(loop), torch.eye(2))
    assert loop.run.model.training
    assert row.get("loss_scale") == (8.0 if precision == SCALED else None)
    # One try: no scale is in the loss.
    assert row.get("overflows") == (1 if precision == SCALED else None)
    row = loop.step(1)
    assert (row["loss"], "skipped" in row) == (3.0, False)
    assert not torch.equal(weight(loop), torch.eye(2))


def test_a_run_that_stops_says_the_row_and_has_changed_no_weight() -> None:
    loop, _ = looped(STOPPING, *NAN_ROW)
    sentence = (
        "the loss of step 1 is nan; no weight was changed; the loss of row 1 alone is not finite: look there, "
        "or set on_not_finite to skip."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        loop.step(0)
    assert torch.equal(weight(loop), torch.eye(2))


def test_where_no_row_is_to_blame_it_is_the_gradient() -> None:
    loop, said = looped(SKIPPING, *ZERO_ROW)
    assert loop.step(0)["loss"] == 2.5
    assert said == [
        "The gradient of step 1 has a norm of nan; no weight was changed, and the run goes on; the loss of each of its rows alone is "
        "finite, so the gradient overflows: look at rows [0, 1]."
    ]


def test_a_weight_that_was_not_finite_before_is_named() -> None:
    loop, said = looped(SKIPPING, *ZERO_ROW)
    with torch.no_grad():
        weight(loop)[0, 0] = NAN
    loop.step(0)
    assert said == [
        "The loss of step 1 is nan; no weight was changed, and the run goes on; layer.weight was not finite before it: go back to an "
        "earlier checkpoint."
    ]


@pytest.mark.parametrize("update", [Plan(micro_batch_size=2), Plan(micro_batch_size=2, update=DuringBackward())], ids=str)
def test_without_a_norm_the_weights_are_spoilt(update: Plan) -> None:
    loop, _ = looped(dataclasses.replace(STOPPING, max_grad_norm=None), *NAN_ROW, plan=update)
    sentence = "the loss of step 1 is nan and has spoilt the weights: lower the learning rate of 5e-05, or look at rows [0, 1]."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        loop.step(0)


def test_a_gradient_that_overflows_at_every_scale_is_skipped_with_the_scale_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MOST_TRIES", 3)
    happened = "he gradient of step 1 is not finite at a loss scale of 1, after 3 tries; no weight was changed"
    loop, said = looped(dataclasses.replace(SKIPPING, precision=SCALED), *ZERO_ROW)
    row = loop.step(0)
    assert (row["skipped"], row["overflows"], row["loss_scale"]) == (1, 3, 8.0)
    assert said[0].startswith(f"T{happened}, and")
    stopping, _ = looped(dataclasses.replace(STOPPING, precision=SCALED), *ZERO_ROW)
    with pytest.raises(ValueError, match=f"^t{re.escape(happened)}; "):
        stopping.step(0)


def test_a_loss_that_is_not_finite_without_its_gradient_is_told_and_applied() -> None:
    loop, said = looped(SKIPPING, *NAN_ROW[2:], *NAN_ROW[:2])
    original = loop.run.model.forward
    loop.run.model.forward = lambda x: original(x) + torch.tensor(NAN)  # type: ignore[method-assign]
    row = loop.step(0)
    assert "skipped" not in row
    assert said == [
        "The loss of step 1 is nan; its gradient is finite and was applied, and the run goes on; the loss of rows 0, 1 alone is not "
        "finite: look there."
    ]


def test_a_run_that_skips_most_steps_ends() -> None:
    health = Health()
    for step in range(1, 101):
        health.check(step, finite=step % 2 == 1, updated=step % 2 == 1, scale=None)
    with pytest.raises(
        ValueError, match=r"^51 of the last 100 steps up to step 101 were not finite and left out: lower the learn"
    ):
        health.check(101, finite=False, updated=False, scale=None)


def test_a_loss_scale_that_has_collapsed_ends_the_run() -> None:
    health = Health()
    health.check(1, finite=True, updated=True, scale=1 / 16)
    with pytest.raises(
        ValueError, match=r"^the loss scale has fallen to 0\.03125 at step 2, .* set precision to autocast_bf16"
    ):
        health.check(2, finite=True, updated=True, scale=1 / 32)
