"""A run that is told to stop saves first, wherever it is, and goes on from there; what cannot be saved loses nothing before it."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_resume
import torch
from test_resume import ONE_PLAN, STEPS, losses, same, weights
from torch import Tensor

from memtrain import checkpoint, training
from memtrain.checkpoint import latest
from memtrain.data.rows import Batch
from memtrain.models.objective import Objective
from memtrain.run import Run
from memtrain.trainer import Result, Trainer

# Steps of two micro-batches, so that there is something to break off.
HALVES = {**ONE_PLAN, "micro_batch_size": 2}


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """Also where these tests run in the background of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def trainer(run_dir: Path, **given: Any) -> Trainer:
    return test_resume.trainer(run_dir, **{"constraints": HALVES, "checkpoint_every": 3, "evaluate_every": 2, **given})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Trainer]:
    run = trainer(tmp_path_factory.mktemp("undisturbed") / "run")
    return run.train(), run


class At:
    """Does something at the n-th call of a function that it stands in for, before or after it."""

    def __init__(self, real: Callable[..., Any], call: int, does: Callable[[], None], *, after: bool = False) -> None:
        self.real, self.call, self.does, self.after, self.calls = real, call, does, after, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == self.call and not self.after:
            self.does()
        result = self.real(*arguments, **named)
        if self.calls == self.call and self.after:
            self.does()
        return result


def told(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def count_micro_batches(monkeypatch: pytest.MonkeyPatch, call: int, does: Callable[[], None]) -> None:
    """Do something in the forward of the n-th micro-batch, those of the rehearsal and of evaluations counted."""
    real, at = Objective.loss, At(Objective.loss, call, does)

    def loss(self: Objective, model: Any, batch: Batch) -> Tensor:
        planned = next(iter(batch.values())).is_meta
        found: Tensor = (real if planned else at)(self, model, batch)
        return found

    monkeypatch.setattr(Objective, "loss", loss)


def goes_on(run_dir: Path, undisturbed: tuple[Result, Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    run = trainer(run_dir)
    assert losses(run.train()) == losses(undisturbed[0])
    assert same(weights(run), weights(undisturbed[1]))


# Four micro-batches of the rehearsal and two of the first evaluation, of three rows, come before those of step 1.
@pytest.mark.parametrize(
    ("micro_batch", "saved"),
    [
        (2, 0),  # in the rehearsal
        (5, 0),  # in the evaluation before training
        (7, 0),  # in the first micro-batch of step 1, which is broken off before the second
        (8, 1),  # in the second
        (10, 2),
        (11, 2),  # in the evaluation after step 2
        (14, 3),
    ],
)
def test_a_run_that_is_terminated_in_a_micro_batch_saves_and_goes_on_bit_for_bit(
    micro_batch: int, saved: int, undisturbed: tuple[Result, Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_micro_batches(monkeypatch, micro_batch, told(signal.SIGTERM))
    with pytest.raises(SystemExit) as stopped:
        trainer(tmp_path / "run").train()
    assert stopped.value.code == 143
    found, _ = latest(tmp_path / "run" / "checkpoints")
    assert (0 if found is None else found.step) == saved
    goes_on(tmp_path / "run", undisturbed, monkeypatch)


def test_a_run_that_is_interrupted_while_it_saves_saves_whole_and_goes_on(
    undisturbed: tuple[Result, Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_take_place", At(checkpoint._take_place, 1, told(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run").train()
    found, wrong = latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert (found.step, wrong) == (3, ())
    goes_on(tmp_path / "run", undisturbed, monkeypatch)


@pytest.mark.parametrize("where", ["step", "save"])
def test_a_second_interruption_stops_at_once_and_the_checkpoint_before_stays(
    where: str, undisturbed: tuple[Result, Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> None:
        told(signal.SIGINT)()
        told(signal.SIGINT)()

    if where == "step":
        count_micro_batches(monkeypatch, 17, twice)
    else:
        monkeypatch.setattr(checkpoint, "_take_place", At(checkpoint._take_place, 2, twice))
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run").train()
    folder = tmp_path / "run" / "checkpoints"
    found, _ = latest(folder)
    assert found is not None
    assert found.step == 3
    assert [path.name for path in folder.iterdir()] == ["step-000000003"]
    goes_on(tmp_path / "run", undisturbed, monkeypatch)


def test_a_run_that_is_asked_to_save_does_and_goes_on(
    undisturbed: tuple[Result, Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_micro_batches(monkeypatch, 8, told(signal.SIGUSR1))
    run = trainer(tmp_path / "run")
    assert losses(run.train()) == losses(undisturbed[0])
    kept = [int(place.name[-1]) for place in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert kept == [1, 3, 6, 7]


def test_a_run_without_a_folder_stops_and_says_that_nothing_is_saved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count_micro_batches(monkeypatch, 8, told(signal.SIGTERM))
    with pytest.raises(SystemExit):
        test_resume.trainer(constraints=HALVES).train()
    assert "The run has stopped after step 1, and nothing of it is saved." in caplog.text


def test_the_handlers_are_those_from_before_afterwards(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    trainer(tmp_path / "run").train()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


# ---------------------------------------------------------------------- disks


def test_a_full_disk_leaves_the_run_and_the_checkpoint_before_it_alive(
    undisturbed: tuple[Result, Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, limits = training.Training._save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(self: training.Training) -> None:
        # No file may become as large as a checkpoint's; small ones may.
        full = self._done == 6
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, limits[1]))
        try:
            real(self)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    monkeypatch.setattr(training.Training, "_save", save)
    run = trainer(tmp_path / "run")
    assert losses(run.train()) == losses(undisturbed[0])
    assert "the checkpoint of step 6 cannot be written to" in caplog.text
    assert "(File too large): raise the limit on the size of a file, or name another folder." in caplog.text
    kept = [int(place.name[-1]) for place in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert kept == [3, STEPS]


def test_a_folder_that_cannot_be_written_any_more_ends_no_training(
    undisturbed: tuple[Result, Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    checkpoints, metrics = folder / "checkpoints", folder / "metrics.jsonl"
    real = Run.step

    def step(self: Run, micro_batches: Any) -> Any:
        if micro_batches[0]["input_ids"].is_meta:
            return real(self, micro_batches)
        # Others in their places, since the superuser may write into what is read-only. The first two steps are the
        # rehearsal.
        if step.calls == 4:
            metrics.rename(folder / "metrics.before")
            metrics.mkdir()
            checkpoints.touch()
        if step.calls == 8:
            metrics.rmdir()
            checkpoints.unlink()
        step.calls += 1
        return real(self, micro_batches)

    vars(step)["calls"] = 0
    monkeypatch.setattr(Run, "step", step)
    result = trainer(folder).train()
    assert losses(result) == losses(undisturbed[0])
    assert caplog.text.count("The run goes on, and its metrics are written when that is possible again.") == 1
    assert "the checkpoint of step 3 cannot be written to" in caplog.text
    assert len(metrics.read_text().splitlines()) == len(result.metrics)
    assert latest(checkpoints)[0] is not None


def test_a_malicious_pickle_in_a_checkpoint_is_never_loaded(
    undisturbed: tuple[Result, Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    count_micro_batches(monkeypatch, 14, told(signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer(tmp_path / "run").train()
    (place,) = (tmp_path / "run" / "checkpoints").iterdir()
    for name in ("optimizer-00001.safetensors", "model-00001.safetensors"):
        torch.save(Malicious(), place / name)
        with pytest.raises(ValueError, match=r"none of the 1 checkpoints .* is whole"):
            trainer(tmp_path / "run")
    # Beside the files that belong there it is not looked at.
    assert not (tmp_path / "executed").exists()
