"""Trackers: accelerate's own, with stand-ins for the packages that they call, and what becomes of a run when one fails."""

from __future__ import annotations

import csv
import importlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memtrain import Trainer
from memtrain.callbacks import Record
from memtrain.command_line import compose_jobs
from memtrain.config import check_folders, settings
from memtrain.metrics import RunFolder
from memtrain.trackers import Tracking, check_trackers

WANDB = """
calls, fails = [], ""

class Run:
    def __init__(self, **given):
        self.id = given["id"] or "run1"
    def log(self, values, step=None, **more):
        if fails == "log":
            raise ConnectionError("no network\\nat all")
        calls.append(("log", step, values))
    def finish(self):
        calls.append(("finish",))

class config:
    @staticmethod
    def update(values, allow_val_change):
        calls.append(("config", values))

def init(**given):
    if fails == "init":
        raise RuntimeError("not logged in.")
    calls.append(("init", given))
    return Run(**given)
"""
MLFLOW = """
from types import SimpleNamespace as N
calls = []
class utils:
    class validation:
        MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH = 500, 100
def search_experiments(filter_string):
    return []
def create_experiment(name, **more):
    calls.append(("experiment", name))
    return "1"
def start_run(run_id, experiment_id, run_name, **more):
    calls.append(("start", run_id, run_name))
    return N(info=N(run_id=run_id or "run7"))
def log_params(values):
    calls.append(("params", len(values)))
def log_metrics(values, step):
    calls.append(("log", step, values))
def end_run():
    calls.append(("finish",))
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins for what cannot be installed for a test."""
    for name, content in {"wandb": WANDB, "mlflow": MLFLOW}.items():
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(content)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    importlib.invalidate_caches()
    yield importlib.import_module
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).square().mean()


def run(folder: Path, **given: Any) -> Trainer:
    rows = [{"x": torch.tensor([float(number)])} for number in range(1, 4)]
    made: dict[str, Any] = {"data": rows, "eval_data": rows, "budget": "64MiB", "global_batch_size": 1, "progress": False}
    return Trainer(model=Line(), run_dir=folder, **{**made, **given})


def test_each_step_and_evaluation_is_logged_once_under_its_number(packages: Any, tmp_path: Path) -> None:
    result = run(tmp_path / "mine", trackers=["wandb", "mlflow"], evaluate_every=2).train()
    calls = packages("wandb").calls
    ((_, begun),) = (call for call in calls if call[0] == "init")
    assert (begun["project"], begun["name"], begun["resume"]) == ("memtrain", "mine", "allow")
    ((_, told),) = (call for call in calls if call[0] == "config")
    assert (told["global_batch_size"], told["optimizer.name"], told["max_grad_norm"]) == (1, "adam_w", 1.0)
    logged = [(step, values) for kind, step, values in (call for call in calls if call[0] == "log")]
    assert [step for step, _ in logged] == [0, 1, 2, 2, 3, 3]
    rows = [{name: value for name, value in row.items() if name != "step"} for row in result.metrics]
    for (_, values), row in zip(logged, rows, strict=True):
        assert values == pytest.approx(row, rel=1e-5)
    assert calls[-1] == ("finish",)
    others = packages("mlflow").calls
    assert others[:2] == [("experiment", "memtrain"), ("start", None, "mine")]
    assert [call[1:] for call in others if call[0] == "log"] == logged
    assert not [thread for thread in threading.enumerate() if thread.name == "trackers"]


def test_a_run_that_goes_on_is_the_same_run_there(packages: Any, tmp_path: Path) -> None:
    folder, given = tmp_path / "mine", {"trackers": ["wandb", "mlflow"], "checkpoint_every": 1}

    def stop_after_one(record: Record) -> None:
        if record.event == "step" and record.step == 2:
            raise ValueError("broken off")

    with pytest.raises(ValueError, match="broken off"):
        run(folder, callbacks=[stop_after_one], **given).train()
    wandb, mlflow = packages("wandb"), packages("mlflow")
    wandb.calls.clear()
    mlflow.calls.clear()
    run(folder, **given).train()
    assert json.loads((folder / "trackers.json").read_text()) == {"wandb": "run1", "mlflow": "run7"}
    assert wandb.calls[0][1]["id"] == "run1"
    assert mlflow.calls[1] == ("start", "run7", "mine")
    assert {call[0] for call in wandb.calls} == {"init", "log", "finish"}
    assert {call[0] for call in mlflow.calls} == {"experiment", "start", "log", "finish"}
    # What was evaluated before is there.
    assert min(call[1] for call in wandb.calls if call[0] == "log") >= 1


def test_a_tracker_that_fails_is_told_of_and_the_run_goes_on(packages: Any, tmp_path: Path) -> None:
    packages("wandb").fails = "log"
    result = run(tmp_path / "mine", trackers=["wandb", "mlflow"]).train()
    assert len([row for row in result.metrics if "loss" in row]) == 3
    events = [json.loads(line)["said"] for line in (tmp_path / "mine" / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if "racker" in event] == [
        "Tracker wandb failed and gets no more metrics (no network); metrics.jsonl has all of them."
    ]
    assert len([call for call in packages("mlflow").calls if call[0] == "log"]) == 5


def test_a_tracker_that_cannot_begin_ends_the_run_before_its_first_step(packages: Any, tmp_path: Path) -> None:
    packages("wandb").fails = "init"
    sentence = r"^tracker wandb cannot begin \(not logged in\): look at its settings and the connection, or leave it out\.$"
    trainer = run(tmp_path / "mine", trackers=["wandb"])
    with pytest.raises(ValueError, match=sentence):
        trainer.train()
    assert not (tmp_path / "mine" / "metrics.jsonl").exists()


def test_a_tracker_that_hangs_does_not_hold_the_end_up(packages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrain.trackers._PATIENCE_SECONDS", 0.01)
    held, told = threading.Event(), []
    tracking = Tracking(["wandb"], RunFolder(tmp_path / "mine"), {}, told.append)
    tracking(Record(event="begin", step=0, steps=1, epoch=0, metrics={}))
    monkeypatch.setattr(tracking, "_log", lambda metrics, step: held.wait())
    tracking(Record(event="step", step=1, steps=1, epoch=1, metrics={"loss": 1.0}))
    tracking.close()
    assert told == ["wandb did not take all metrics within 0 seconds."]
    held.set()


@pytest.mark.parametrize(
    ("names", "has_folder", "sentence"),
    [
        (["wandbee"], True, r"^trackers is 'wandbee', and it must be of tensorboard, wandb, mlflow\.$"),
        (["wandb"], False, r"^trackers has wandb, and a run is called by its folder there: give run_dir\.$"),
    ],
)
def test_trackers_that_there_are_not_are_refused(packages: Any, names: list[str], has_folder: bool, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_trackers(names, has_folder=has_folder)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrain.trackers.find_spec", lambda _: None)
    with pytest.raises(
        ValueError, match=r"^trackers has mlflow, and the package mlflow is not installed: pip install mlflow\.$"
    ):
        check_trackers(["mlflow"], has_folder=True)


def test_tensorboard_gets_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path / "mine", trackers=["tensorboard"]).train()
    read = EventAccumulator(str(tmp_path / "mine" / "tensorboard"))
    read.Reload()
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3]
    assert [event.step for event in read.Scalars("eval_loss")] == [0, 3]


def test_a_recipe_names_trackers() -> None:
    (cfg,) = compose_jobs(["trackers=[wandb,mlflow]"], multirun=False)
    assert settings(cfg).trackers == ("wandb", "mlflow")
    (cfg,) = compose_jobs(["trackers=[wandbb]"], multirun=False)
    with pytest.raises(ValueError, match=r"^trackers is 'wandbb', and it must be of tensorboard, wandb, mlflow\.$"):
        check_folders(settings(cfg))


def test_a_table_of_all_columns_is_written_as_well_and_survives_a_stop(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    result = run(folder, evaluate_every=2).train()
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:3] == ["step", "epoch", "eval_loss"]
    assert "learning_rate" in rows[0]
    for read, logged in zip(rows, result.metrics, strict=True):
        assert {name: float(value) for name, value in read.items() if value} == pytest.approx(dict(logged))
