"""A run that runs out of memory goes on with less, and trains what it would have trained; when nothing is left it says why."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import ONE_PLAN, losses, stopped_after, weights
from torch import Tensor
from toys import CASES

from memtrain import Trainer, keeper, session
from memtrain.checkpoint import latest, read
from memtrain.job import Job
from memtrain.loop import Loop
from memtrain.models.objective import Objective
from memtrain.plan import DuringBackward, OnHost, Plan, from_dict
from memtrain.recovery import Changes
from memtrain.run import prepare
from memtrain.trainer import Result

LLAMA = CASES["llama"]
ROWS = [LLAMA.row(number) for number in range(10)]
WHOLE = {**ONE_PLAN, "micro_batch_size": 4}


def trainer(run_dir: Path | None = None, **given: Any) -> Trainer:
    settings: dict[str, Any] = {"model": LLAMA.build(), "data": ROWS, "eval_data": ROWS[:3], "constraints": WHOLE}
    settings |= {"budget": "64MiB", "global_batch_size": 4, "steps": 5, "run_dir": run_dir, "progress": False}
    return Trainer(**{**settings, "checkpoint_every": 2, **given})


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Result, dict[str, Tensor]]:
    run = trainer()
    return run.train(), weights(run)


def in_forward(monkeypatch: pytest.MonkeyPatch, when: Callable[[int, int, bool], bool]) -> None:
    """Let forwards fail for which ``when`` says so, by their number from 1, their rows, and whether they train."""
    real, calls = Objective.loss, 0

    def loss(self: Objective, model: Any, batch: dict[str, Tensor]) -> Tensor:
        nonlocal calls
        ids = batch["input_ids"]
        if not ids.is_meta:
            calls += 1
            if when(calls, len(ids), torch.is_grad_enabled()):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return real(self, model, batch)

    monkeypatch.setattr(Objective, "loss", loss)


def in_update(monkeypatch: pytest.MonkeyPatch, call: int, rule: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
    """Let the n-th update of real weights fail after it has been made."""
    real, calls = rule.step, 0

    def step(self: torch.optim.Optimizer, *arguments: Any) -> None:
        nonlocal calls
        real(self, *arguments)
        if not self.param_groups[0]["params"][0].is_meta:
            calls += 1
            if calls == call:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(rule, "step", step)


def same_training(result: Result, run: Trainer, undisturbed: tuple[Result, dict[str, Tensor]]) -> None:
    whole, final = undisturbed
    assert [step for step, _ in losses(result)] == [step for step, _ in losses(whole)]
    assert [loss for _, loss in losses(result)] == pytest.approx([loss for _, loss in losses(whole)], rel=1e-5)
    assert [loss for _, loss in result.evaluations] == pytest.approx([loss for _, loss in whole.evaluations], rel=1e-5)
    for name, tensor in weights(run).items():
        assert torch.allclose(tensor, final[name], atol=1e-5), name


def test_out_of_memory_in_the_rehearsal_halves_the_micro_batch_before_a_weight_changes(
    undisturbed: tuple[Result, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_forward(monkeypatch, lambda call, rows, trains: trains and rows > 1)
    run = trainer()
    same_training(run.train(), run, undisturbed)
    told = [record.getMessage() for record in caplog.records]
    assert [sentence.partition(":")[0] for sentence in told] == [
        "Memory ran out in the rehearsal of a step when 20.0 MiB were asked for",
        "Going on with micro-batch 2 instead of 4",
        "Memory ran out in the rehearsal of a step when 20.0 MiB were asked for",
        "Going on with micro-batch 1 instead of 2",
    ]


def test_out_of_memory_in_a_step_takes_the_same_rows_again_in_halves_and_the_checkpoint_has_the_new_plan(
    undisturbed: tuple[Result, dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The first four are the rehearsal, the evaluation before training and the first step.
    in_forward(monkeypatch, lambda call, rows, trains: trains and rows > 2 and call > 4)
    run = trainer(tmp_path / "run")
    assert run.choice.plan.micro_batch_size == 4
    result = run.train()
    same_training(result, run, undisturbed)
    assert losses(result)[0] == losses(undisturbed[0])[0]
    found, _ = latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert from_dict(found.facts["plan"]).micro_batch_size == 2
    assert "ran out in forward and backward of step 2" in caplog.text
    assert (tmp_path / "run" / "events.jsonl").read_text().count("ran out") == 1
    monkeypatch.undo()
    again = trainer(stopped_after(1, tmp_path / "run", tmp_path / "again"))
    assert again.choice.plan.micro_batch_size == 2
    same_training(again.train(), again, undisturbed)


@pytest.mark.parametrize("update", ["after_backward", "during_backward"])
def test_out_of_memory_after_a_weight_has_changed_goes_back_to_the_last_checkpoint(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fields: dict[str, Any] = {"constraints": {"micro_batch_size": 4, "update": update}, "max_grad_norm": None}
    whole_run = trainer(**fields)
    whole = whole_run.train(), weights(whole_run)
    # Weight by weight in the one case, with as many updates as there are weights.
    updates = sum(1 for _ in whole_run.model.parameters()) if update == "during_backward" else 1
    in_update(monkeypatch, updates * (2 + 3) - updates // 2)
    run = trainer(tmp_path / "run", **fields)
    result = run.train()
    same_training(result, run, whole)
    assert "ran out in the update of step 3" in caplog.text
    assert "Weights had changed, so the run goes back to step 2." in caplog.text
    assert losses(result)[:2] == losses(whole[0])[:2]


def test_before_the_first_checkpoint_the_run_begins_again(
    undisturbed: tuple[Result, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_update(monkeypatch, 2 + 2)
    run = trainer()
    same_training(run.train(), run, undisturbed)
    assert "Weights had changed, so the run goes back to its beginning." in caplog.text


def test_a_given_module_has_no_beginning_to_go_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    in_update(monkeypatch, 2 + 2)
    with pytest.raises(
        ValueError, match=r"memory ran out in the update after step 1, when weights had changed and before the first"
    ):
        trainer(model=LLAMA.build().load()).train()


def test_out_of_memory_in_evaluation_shrinks_its_batches_alone(
    undisturbed: tuple[Result, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_forward(monkeypatch, lambda call, rows, trains: not trains and rows > 2)
    run = trainer()
    result = run.train()
    same_training(result, run, undisturbed)
    assert losses(result) == losses(undisturbed[0])
    assert caplog.text.count("it goes on in batches of 2 instead of 4 rows") == 1


def test_an_evaluation_that_fails_row_by_row_ends_the_run_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    in_forward(monkeypatch, lambda call, rows, trains: not trains)
    with pytest.raises(ValueError, match=r"memory ran out in the evaluation after step 0 with one row at a time \(CUDA out of"):
        trainer().train()


def test_when_nothing_is_left_the_report_names_owners_predicted_and_measured_and_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_forward(monkeypatch, lambda call, rows, trains: trains and call > 4)
    with pytest.raises(ValueError, match="memory ran out in forward and backward of step 2") as raised:
        trainer().train()
    report = str(raised.value)
    assert "with the smallest plan" in report.splitlines()[0]
    for word in ("held by", "measured", "predicted", "instead"):
        assert any(line.startswith(word) or f" {word}" in line for line in report.splitlines()), word


def test_state_goes_to_the_host_with_a_plan_that_keeps_it_there(
    undisturbed: tuple[Result, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A processor's planner has no use for such a plan, so it is put into its mouth.
    def moved(predictor: Any, choice: Any, constraints: Any, needed: Any) -> Any:
        return replace(choice, plan=replace(choice.plan, optimizer_state=OnHost()))

    monkeypatch.setattr(session, "next_smaller", moved)
    in_forward(monkeypatch, lambda call, rows, trains: call == 6)
    run = trainer()
    same_training(run.train(), run, undisturbed)


def test_what_cannot_be_saved_for_want_of_memory_is_told_and_the_run_goes_on(
    undisturbed: tuple[Result, dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, calls = keeper.Writer.save, 0

    def save(self: keeper.Writer, *arguments: Any) -> str | None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return real(self, *arguments)

    monkeypatch.setattr(keeper.Writer, "save", save)
    assert losses(trainer(tmp_path / "run").train()) == losses(undisturbed[0])
    assert "Memory ran out in saving step 2 (CUDA out of memory" in caplog.text
    assert read(tmp_path / "run" / "checkpoints" / "step-000000004").step == 4


def test_the_model_is_saved_without_the_optimizers_state_where_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path / "run")
    real, calls = Trainer.save_model, 0

    def save(self: Trainer, folder: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        real(self, folder)

    monkeypatch.setattr(Trainer, "save_model", save)
    run.train()
    assert "it is saved again without the optimizer's state" in caplog.text
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_nothing_of_what_failed_stays_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(one.untyped_storage().nbytes() for one in gc.get_objects() if type(one) is Tensor)

    def left(fails_at: int | None) -> int:
        in_forward(monkeypatch, lambda call, rows, trains: call == fails_at)
        run = trainer()
        before = tensors()
        run.train()
        monkeypatch.undo()
        return tensors() - before

    assert left(6) == left(None)


def test_a_rehearsal_changes_no_number(undisturbed: tuple[Result, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "rehearse", lambda self: None)
    run = trainer()
    assert losses(run.train()) == losses(undisturbed[0])
    assert all(torch.equal(tensor, undisturbed[1][name]) for name, tensor in weights(run).items())


def test_an_update_is_noticed_by_its_writes() -> None:
    job, plan = (
        Job(model="toy", global_batch_size=2, steps=1, max_grad_norm=None),
        Plan(micro_batch_size=2, update=DuringBackward()),
    )
    run = prepare(job, plan, LLAMA.build().load())
    batch = {name: torch.stack([row[name] for row in ROWS[:2]]) for name in ROWS[0]}
    changes = Changes(run, plan)
    run.objective.loss(run.model, batch)
    assert not changes.begun
    run.objective.loss(run.model, batch).backward()
    assert changes.begun
