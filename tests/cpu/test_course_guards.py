"""The ends of a run and its folder: which checkpoint is the best, what is said, and what cannot be read or written."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_not_finite_run import Length
from test_recovery import trainer
from test_resume import losses

from memtrain import checkpoint_writer, machine
from memtrain import course as course_module
from memtrain.checkpoint import Checkpoint, NotWritten, latest, read
from memtrain.job import Budget, Job, Limit
from memtrain.keeper import Keeper
from memtrain.loop import Loop
from memtrain.metrics import RunFolder
from memtrain.plan import Plan
from memtrain.run import Run, prepare
from memtrain.trainer import Trainer

PLAN = Plan(micro_batch_size=1)


class Kept:
    """A keeper of one checkpoint beside the best, of a run of one weight."""

    def __init__(self, folder: Path | None, *, rank: int = 0, start: Checkpoint | None = None) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.run: Run = prepare(Job(model="toy", global_batch_size=1, steps=9), PLAN, Length())
        self.keeper = Keeper(folder, rank=rank, every=1, keep=1, facts={}, start=start, copy_bytes=0, tell=self.said.append)

    def save(self, step: int, *evaluations: tuple[int, float]) -> None:
        self.keeper.save(step, self.run, PLAN, evaluations, 0)

    @property
    def there(self) -> list[int]:
        assert self.folder is not None
        return sorted(int(place.name.removeprefix("step-")) for place in self.folder.iterdir())

    @property
    def best(self) -> Any:
        return self.last().facts["best"]

    def last(self) -> Checkpoint:
        found = self.keeper.last()
        assert found is not None
        return found


# ---------------------------------------------------------------------- keeper


def test_a_save_that_fails_leaves_the_best_checkpoint_and_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise NotWritten("the disk is full.")

    kept = Kept(tmp_path / "checkpoints")
    kept.save(1, (1, 1.0))
    monkeypatch.setattr(checkpoint_writer, "write", full)
    kept.save(2, (1, 1.0), (2, 0.5))
    assert (kept.said, kept.there, kept.keeper.holds(2)) == (["the disk is full."], [1], False)
    monkeypatch.undo()
    kept.save(3, (1, 1.0), (2, 0.5), (3, 2.0))
    assert (kept.there, kept.best) == ([1, 3], [1, 1.0])
    kept.save(2, (1, 1.0), (2, 0.5))
    assert kept.keeper.holds(2)
    assert read(tmp_path / "checkpoints" / "step-000000002").facts["best"] == [2, 0.5]


def test_an_evaluation_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "checkpoints")
    kept.save(1, (1, float("nan")))
    assert kept.best is None
    kept.save(2, (2, 3.0))
    kept.save(3, (3, float("nan")))
    assert (kept.there, kept.best) == ([2, 3], [2, 3.0])


def test_a_checkpoint_that_is_evaluated_after_it_was_written_can_be_the_best(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "checkpoints")
    # As a run that is stopped in an evaluation writes it, and is resumed.
    kept.save(2, (0, 1.0))
    again = Kept(tmp_path / "checkpoints", start=kept.last())
    again.save(2, (0, 1.0), (2, 0.5))
    again.save(3, (2, 0.5), (3, 0.75))
    assert (again.there, again.best) == ([2, 3], [2, 0.5])


def test_a_stop_in_an_evaluation_does_not_keep_its_checkpoint_from_being_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, evaluations = Loop.evaluate, 0

    def evaluate(self: Loop) -> dict[str, float]:
        nonlocal evaluations
        evaluations += 1
        # The second is that after step 2; a run asks before each batch.
        if evaluations == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        # Each is worse than the one before.
        return {"eval_loss": real(self)["eval_loss"] + evaluations}

    monkeypatch.setattr(Loop, "evaluate", evaluate)
    given: dict[str, Any] = {"evaluate_every": 2, "keep_checkpoints": 1, "steps": 4}
    with pytest.raises(SystemExit):
        trainer(tmp_path / "run", **given).train()
    stopped, _ = latest(tmp_path / "run" / "checkpoints")
    assert stopped is not None
    assert (stopped.step, stopped.facts["best"]) == (2, None)
    result = trainer(tmp_path / "run", **given).train()
    kept = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [read(place).step for place in kept] == [2, 4]
    assert read(kept[1]).facts["best"] == [2, result.evaluations[1][1]]


def test_a_keeper_holds_what_it_saved_or_went_on_from_in_its_own_folder(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "checkpoints")
    assert not kept.keeper.holds(2)
    kept.save(2)
    assert [step for step in range(4) if kept.keeper.holds(step)] == [2]
    assert Kept(tmp_path / "checkpoints", start=kept.last()).keeper.holds(2)
    assert not Kept(tmp_path / "another", start=kept.last()).keeper.holds(2)
    assert not Kept(None).keeper.holds(2)


def test_where_a_run_goes_on_is_said_with_the_steps_that_are_lost(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "checkpoints")
    assert kept.keeper.where_to_go_on(1) == "The run has stopped after step 1, and nothing of it is saved."
    kept.save(2)
    place = tmp_path / "checkpoints" / "step-000000002"
    goes_on = f"the same call goes on from step 2, in {place}"
    assert kept.keeper.where_to_go_on(2) == f"The run has stopped after step 2; {goes_on}."
    assert kept.keeper.where_to_go_on(5) == f"The run has stopped after step 5; {goes_on}, so that 3 steps are taken again."


def test_a_process_that_a_checkpoint_has_no_generators_for_draws_numbers_of_its_own(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "checkpoints")
    kept.save(2)
    drawn: dict[int, tuple[float, ...]] = {}
    for rank in (0, 1, 2, 1):
        other = Kept(tmp_path / "checkpoints", rank=rank)
        other.keeper.restore(kept.last(), other.run, PLAN)
        found = tuple(torch.rand(3).tolist())
        assert drawn.setdefault(rank, found) == found
    assert len(set(drawn.values())) == 3


# ---------------------------------------------------------------------- the end of a run


def test_a_run_that_is_terminated_as_it_saves_its_model_saves_it_and_ends_as_terminated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Trainer.save_model

    def save(self: Trainer, folder: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        real(self, folder)

    monkeypatch.setattr(Trainer, "save_model", save)
    with pytest.raises(SystemExit) as stopped:
        trainer(tmp_path / "run", steps=2).train()
    assert stopped.value.code == 143
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("in_the_way", ["a file", "a folder inside"])
def test_a_model_that_cannot_be_written_is_told_and_the_same_call_saves_it(in_the_way: str, tmp_path: Path) -> None:
    place = tmp_path / "run" / "model"
    run = trainer(tmp_path / "run", steps=3)
    assert run.choice.plan.micro_batch_size == 4
    if in_the_way == "a file":
        place.touch()
    else:
        (place / "model.safetensors").mkdir(parents=True)
    told = re.escape(f"the trained model cannot be written to {place} (")
    with pytest.raises(ValueError, match=f"^{told}.*: free space there, and make the same call again, which saves it from the"):
        run.train()
    if in_the_way == "a file":
        place.unlink()
    else:
        (place / "model.safetensors").rmdir()
    assert [step for step, _ in losses(trainer(tmp_path / "run", steps=3).train())] == [1, 2, 3]
    assert (place / "model.safetensors").is_file()


def test_a_comparison_that_cannot_be_written_is_told_and_the_result_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path / "run", steps=2)
    (tmp_path / "run" / "comparison.json" / "something").mkdir(parents=True)
    assert [step for step, _ in losses(run.train())] == [1, 2]
    assert f"The comparison is not written (run.dir {tmp_path / 'run'} cannot be written (" in caplog.text


def test_the_time_that_a_stop_may_take_reaches_the_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    real, seconds = course_module.listen, []

    @contextmanager
    def listen(stop_seconds: float | None, tell: Any) -> Iterator[Any]:
        seconds.append(stop_seconds)
        with real(stop_seconds, tell) as requests:
            yield requests

    monkeypatch.setattr(course_module, "listen", listen)
    trainer(steps=1, stop_seconds=12.5).train()
    assert seconds == [12.5]


@pytest.mark.parametrize("device", ["cpu", "l4"])
def test_copies_of_a_checkpoint_get_the_memory_of_the_host_that_a_plan_for_a_card_leaves(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(course_module, "Keeper", lambda *_, **named: given.append(named["copy_bytes"]))
    budget = Budget(limits=(Limit("asked for", 2**30),), host_limits=(Limit("asked for", 2**33),))
    run = trainer(device=machine.named(device), budget=budget)
    run._course.keeper(run.choice, lambda _: None)
    left = 2**33 - run.choice.footprint.host_bytes
    assert given == [0 if device == "cpu" else left]
    assert left > 0


def test_a_trainer_that_goes_on_evaluates_its_checkpoint(tmp_path: Path) -> None:
    result = trainer(tmp_path / "run", steps=2).train()
    first, last = (loss for _, loss in result.evaluations)
    assert trainer(tmp_path / "run", steps=2).evaluate()["eval_loss"] == last != first


# ---------------------------------------------------------------------- the folder


def folder_with(path: Path, **files: str | bytes) -> RunFolder:
    contents: dict[str, str | bytes] = {"job.json": "{}", **{f"{name}.jsonl": content for name, content in files.items()}}
    path.mkdir()
    for name, content in contents.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return RunFolder(path, goes_on=True)


def test_a_line_that_was_cut_short_is_ended_before_the_next(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run", metrics='{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    folder.log({"step": 2, "loss": 1.5})
    folder.log({"step": 3, "loss": 0.5})
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() == [
        '{"step": 1, "loss": 2.5}',
        '{"step": 2, "lo',
        '{"step": 2, "loss": 1.5}',
        '{"step": 3, "loss": 0.5}',
    ]
    assert [row["step"] for row in folder.rows()] == [1, 2, 3]


@pytest.mark.parametrize(("name", "content"), [("job.json", b"{"), ("job.json", b"\xff\xfe"), ("metrics.jsonl", b"\xff\xfe")])
def test_a_file_of_a_run_that_cannot_be_read_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(content)
    told = re.escape(f"{tmp_path / 'run' / name} cannot be read (")
    with pytest.raises(ValueError, match=rf"^{told}.*\): choose another run\.dir\.$"):
        _ = folder.identity if name == "job.json" else folder.rows()


@pytest.mark.parametrize("name", ["job.json", "metrics.jsonl"])
def test_a_folder_in_place_of_a_file_of_a_run_is_named(name: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).mkdir()
    with pytest.raises(ValueError, match=r"cannot be read \(.*Is a directory.*\): choose another run\.dir\.$"):
        _ = folder.identity if name == "job.json" else folder.rows()
