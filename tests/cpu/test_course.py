"""The course of a run when something goes wrong: what is saved, what is told, and what the smaller plan keeps of the one before."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_stopping
import torch
from test_recovery import ROWS, in_forward, same_training, trainer
from test_resume import losses, same, weights
from torch import Tensor

from memtrain import keeper, machine, not_finite, session
from memtrain.checkpoint import latest
from memtrain.data.batches import StepBatches
from memtrain.data.rowset import alike
from memtrain.keeper import Keeper
from memtrain.loop import Loop
from memtrain.metrics import RunFolder
from memtrain.models.objective import Objective
from memtrain.not_finite import NotFiniteStep
from memtrain.session import Session
from memtrain.trainer import Result, Trainer

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
NAN = float("nan")


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Result, dict[str, Tensor]]:
    run = trainer()
    return run.train(), weights(run)


def saved(run_dir: Path) -> int | None:
    found, wrong = latest(run_dir / "checkpoints")
    assert not wrong
    return None if found is None else found.step


def failing_once(real: Callable[..., Any], call: int = 1) -> Callable[..., Any]:
    """The function, whose n-th call finds no memory."""
    calls = 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise FULL
        return real(*arguments, **named)

    return called


def in_training_loss(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, Tensor], Tensor]) -> None:
    """Change what forwards that train return, by their number from 1; the first two are the rehearsal."""
    real, calls = Objective.loss, 0

    def loss(self: Objective, model: Any, batch: dict[str, Tensor]) -> Tensor:
        nonlocal calls
        found = real(self, model, batch)
        if found.is_meta or not torch.is_grad_enabled():
            return found
        calls += 1
        return change(calls, found)

    monkeypatch.setattr(Objective, "loss", loss)


def gradient_overflows(run: Trainer, call: int) -> None:
    """Let a gradient be infinite in the n-th backward, of which the first two are the rehearsal's."""
    calls = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient * math.inf if calls == call else gradient

    run.model.get_parameter("model.norm.weight").register_hook(hook)


# ---------------------------------------------------------------------- leaks


@pytest.mark.parametrize("why", ["a smaller plan", "a copy that is written"])
def test_memory_that_a_run_needs_for_good_reason_is_no_leak(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, taken = Loop.step, 0

    def step(self: Loop, number: int) -> dict[str, float]:
        nonlocal taken
        if why == "a smaller plan" and number == 3 and self.plan.micro_batch_size == 4:
            raise FULL
        taken = number + 1
        return real(self, number)

    monkeypatch.setattr(Loop, "step", step)
    monkeypatch.setattr(machine, "used_bytes", lambda _: 2**30 if taken > 3 else 0)
    if why == "a copy that is written":
        monkeypatch.setattr(Keeper, "is_writing", property(lambda _: taken > 3))
    # After the third step, the baseline, there are the five that growth has to stay for.
    trainer(steps=8, eval_data=None).train()
    assert ("micro-batch 2 instead of 4" in caplog.text) == (why == "a smaller plan")
    assert "more than after step" not in caplog.text


# ---------------------------------------------------------------------- what is saved


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    fields = {"micro_batch_size": 4, "update": "during_backward"}
    run = trainer(tmp_path / "run", constraints=fields, max_grad_norm=None, checkpoint_every=1, eval_data=None)
    gradient_overflows(run, 2 + 3)
    told = (
        "is not finite after step 3, which is not saved: lower the learning rate, or set max_grad_norm, with which a gradient that "
        "is not finite changes no weight."
    )
    with pytest.raises(ValueError, match=f"^model\\.norm\\.weight {re.escape(told)}$"):
        run.train()
    assert saved(tmp_path / "run") == 2
    assert told in (tmp_path / "run" / "events.jsonl").read_text()


def test_a_step_that_is_not_finite_and_has_changed_weights_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loss is not finite, and its gradient is.
    in_training_loss(monkeypatch, lambda call, loss: loss + NAN if call == 2 + 3 else loss)
    with pytest.raises(NotFiniteStep, match="the loss of step 3 is nan; its gradient is finite and was applied"):
        trainer(tmp_path / "run", checkpoint_every=None).train()
    assert saved(tmp_path / "run") is None


def test_before_a_step_that_is_not_finite_and_has_changed_no_weight_the_run_is_saved(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", checkpoint_every=None)
    gradient_overflows(run, 2 + 3)
    with pytest.raises(NotFiniteStep, match=r"the gradient of step 3 has a norm of (nan|inf); no weight was changed"):
        run.train()
    assert saved(tmp_path / "run") == 2


def test_a_row_that_cannot_be_read_lets_the_run_save_first_and_go_on_bit_for_bit(
    undisturbed: tuple[Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    class Faulty(list[dict[str, Tensor]]):
        fault: int | None = None

        def __getitem__(self, index: Any) -> Any:
            if index == self.fault:
                raise OSError(f"row {index} cannot be read")
            return super().__getitem__(index)

    rows = Faulty(ROWS)
    order = StepBatches(alike(ROWS), global_batch_size=4, seed=0)
    run = trainer(tmp_path / "run", data=rows, checkpoint_every=None)
    assert run.choice.plan.micro_batch_size == 4
    rows.fault = next(row for row in order.indices(1) if row not in order.indices(0))
    with pytest.raises(OSError, match=f"^row {rows.fault} cannot be read$"):
        run.train()
    assert saved(tmp_path / "run") == 1
    assert f"OSError: row {rows.fault} cannot be read" in (tmp_path / "run" / "events.jsonl").read_text()
    rows.fault = None
    again = trainer(tmp_path / "run", data=rows, checkpoint_every=None)
    assert losses(again.train()) == losses(undisturbed[0])
    assert same(weights(again), undisturbed[1])


def test_an_error_between_two_micro_batches_lets_the_run_save_as_it_was_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise OSError("a file is gone")

    given: dict[str, Any] = {"eval_data": None, "checkpoint_every": None, "evaluate_every": None, "steps": 3}
    whole = test_stopping.trainer(tmp_path / "whole", **given)
    expected = losses(whole.train())
    # Four of the rehearsal and two of step 1 come before; dropout has drawn for the first of step 2.
    test_stopping.count_micro_batches(monkeypatch, 4 + 2 + 2, fails)
    with pytest.raises(OSError, match=r"^a file is gone$"):
        test_stopping.trainer(tmp_path / "run", **given).train()
    monkeypatch.undo()
    assert saved(tmp_path / "run") == 1
    again = test_stopping.trainer(tmp_path / "run", **given)
    assert losses(again.train()) == expected
    assert same(weights(again), weights(whole))


def test_metrics_are_written_before_the_checkpoint_that_they_lead_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, save, written = RunFolder.log, keeper.Writer.save, []

    def log(self: RunFolder, row: Any, name: str = "metrics.jsonl") -> None:
        if name == "metrics.jsonl" and row["step"] == 2:
            raise ValueError("the disk is full.")
        real(self, row, name)

    def noted(self: keeper.Writer, step: int, *arguments: Any) -> str | None:
        written.append((step, [row["step"] for row in RunFolder(tmp_path / "run", goes_on=True).rows()]))
        return save(self, step, *arguments)

    monkeypatch.setattr(RunFolder, "log", log)
    monkeypatch.setattr(keeper.Writer, "save", noted)
    trainer(tmp_path / "run", steps=3, eval_data=None).train()
    assert written == [(2, [1, 2]), (3, [1, 2, 3])]


# ---------------------------------------------------------------------- a smaller plan


def test_a_smaller_plan_keeps_the_batches_that_evaluation_has_come_down_to(
    undisturbed: tuple[Result, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Two of the rehearsal, five of the evaluation in three sizes and step 1 come before step 2.
    in_forward(monkeypatch, lambda call, rows, trains: call == 9 if trains else rows > 1)
    run = trainer()
    same_training(run.train(), run, undisturbed)
    told = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert [sentence for sentence in told if "it goes on in batches" in sentence] == [
        "it goes on in batches of 2 instead of 4 rows.",
        "it goes on in batches of 1 instead of 2 rows.",
    ]
    assert "micro-batch 2 instead of 4" in caplog.text


@pytest.mark.parametrize("fails_in", [None, 3])
def test_a_run_that_leaves_out_most_steps_ends_also_when_its_plan_became_smaller(
    fails_in: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def change(call: int, loss: Tensor) -> Tensor:
        if fails_in is not None and call == 2 + fails_in:
            raise FULL
        return loss * NAN

    monkeypatch.setattr(not_finite, "_WATCHED_STEPS", 4)
    in_training_loss(monkeypatch, change)
    with pytest.raises(NotFiniteStep, match=r"^3 of the last 3 steps up to step 3 were not finite and left out: lower"):
        trainer(on_not_finite="skip", eval_data=None).train()
    assert ("micro-batch 2 instead of 4" in caplog.text) == (fails_in is not None)


def test_what_was_held_and_asked_for_is_what_a_smaller_plan_has_to_be_below(monkeypatch: pytest.MonkeyPatch) -> None:
    real, plan_smaller, needed, held = session.next_smaller, Session.plan_smaller, [], []

    def next_smaller(predictor: Any, choice: Any, constraints: Any, needed_bytes: int | None) -> Any:
        needed.append(needed_bytes)
        return real(predictor, choice, constraints, needed_bytes)

    def noted(self: Session, needed_bytes: int | None) -> Any:
        held.append(self.meter.side(0.0).total_device_bytes)
        return plan_smaller(self, needed_bytes)

    monkeypatch.setattr(session, "next_smaller", next_smaller)
    monkeypatch.setattr(Session, "plan_smaller", noted)
    in_forward(monkeypatch, lambda call, rows, trains: trains and call == 2 + 3)
    run = trainer(eval_data=None)
    run.train()
    (bytes_held,) = held
    assert bytes_held > sum(weight.nbytes for weight in run.model.parameters())
    assert needed == [bytes_held + 20 * 2**20]


def test_a_folder_that_takes_no_plan_any_more_does_not_end_the_run(
    undisturbed: tuple[Result, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_forward(monkeypatch, lambda call, rows, trains: trains and rows > 2)
    run = trainer(tmp_path / "run")
    assert run.choice.plan.micro_batch_size == 4
    place = tmp_path / "run" / "plan.yaml"
    place.unlink()
    (place / "something").mkdir(parents=True)
    same_training(run.train(), run, undisturbed)
    assert run.choice.plan.micro_batch_size == 2


# ---------------------------------------------------------------------- out of memory while the run is put together


def test_out_of_memory_while_a_run_is_put_together_at_its_start(
    undisturbed: tuple[Result, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "prepare", failing_once(session.prepare))
    run = trainer()
    same_training(run.train(), run, undisturbed)
    assert run.choice.plan.micro_batch_size == 2
    assert "Memory ran out in putting the run together when 20.0 MiB were asked for" in caplog.text
    assert "The run is put together again at its beginning." in caplog.text


def test_out_of_memory_while_a_checkpoint_is_put_back(
    undisturbed: tuple[Result, dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    in_training_loss(monkeypatch, lambda call, loss: loss * NAN if call == 2 + 4 else loss)
    with pytest.raises(NotFiniteStep):
        trainer(tmp_path / "run").train()
    monkeypatch.undo()
    monkeypatch.setattr(keeper, "restore_", failing_once(keeper.restore_))
    run = trainer(tmp_path / "run")
    same_training(run.train(), run, undisturbed)
    assert run.choice.plan.micro_batch_size == 2
    assert "The run is put together again at step 3." in caplog.text


# Before anything was given back of the run under way, and after.
@pytest.mark.parametrize(
    ("where", "call", "step", "place"), [("carry_over_", 1, 2, "its beginning"), ("prepare", 2, 3, "step 2")]
)
def test_out_of_memory_while_the_smaller_plan_takes_over(
    where: str,
    call: int,
    step: int,
    place: str,
    undisturbed: tuple[Result, dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # An evaluation comes before step 1.
    in_forward(monkeypatch, lambda number, rows, trains: number == 2 + 1 + step)
    monkeypatch.setattr(session, where, failing_once(getattr(session, where), call))
    run = trainer(tmp_path / "run")
    same_training(run.train(), run, undisturbed)
    assert run.choice.plan.micro_batch_size == 1
    assert f"The run is put together again at {place}." in caplog.text
