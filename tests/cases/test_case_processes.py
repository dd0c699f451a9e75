"""Field reports about several processes: schedules, recomputation, checkpoints and signals. Two are started once for all of them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases.fixtures import ConstGrad, column, factors, in_order, run, tiny_llama, tokens, trainer, two_processes
from torch import Tensor, nn

from memtrain import Trainer, machine
from memtrain.callbacks import Action, Record
from memtrain.features import recompute
from memtrain.job import AdamW, Linear, Sgd
from memtrain.method import Lora
from memtrain.plan import DataParallel, Recompute

BOTH: dict[str, Any] = {"sharding": DataParallel(2)}

Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    """What each of the two processes found out, by what it ran, and the folder of the runs."""
    folder = tmp_path_factory.mktemp("processes")
    ended = two_processes(__file__, folder, seconds=120)
    for code, _, errors in ended:
        assert code == 0, errors
    return {name: [said[number] for _, said, _ in ended] for number, name in enumerate(RUNS)}, folder


def digest(made: Trainer) -> str:
    """By which two processes tell whether their weights are the same."""
    whole = torch.cat([weight.detach().flatten() for weight in made.model.parameters()])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


# ---------------------------------------------------------------------- ga-05


def schedule(_: Path) -> dict[str, Any]:
    # The same twelve micro-batches a process.
    given: dict[str, Any] = {"optimizer": Sgd(learning_rate=0.3, momentum=0.0), "schedule": Linear(), "epochs": 1}
    result, made = run(ConstGrad(), factors(*[1.0] * 24), plan=BOTH, micro_batch_size=1, global_batch_size=8, **given)
    return {"rates": column(result, "learning_rate"), "w": made.model.get_parameter("w").item()}


def test_the_schedule_of_two_processes_is_that_of_one(found: tuple[Found, Path]) -> None:
    """ga-05: once a step and not once a process."""
    for one in found[0]["schedule"]:
        assert one["rates"] == pytest.approx([0.3, 0.2, 0.1], abs=1e-12)
        assert one["w"] == pytest.approx(-0.6, abs=1e-6)


# ---------------------------------------------------------------------- gc-03


def recomputed(_: Path) -> dict[str, Any]:
    seen: list[Any] = []
    real = recompute.checkpoint

    def checkpoint(*given: Any, **named: Any) -> Any:
        seen.append(named.get("use_reentrant"))
        return real(*given, **named)

    lora = Lora(rank=4, target_modules=("q_proj", "v_proj"))
    given: dict[str, Any] = {"method": lora, "optimizer": AdamW(learning_rate=0.01), "steps": 2}
    rows = [tokens(8, number) for number in range(4)]
    with warnings.catch_warnings(record=True) as warned, patch.object(recompute, "checkpoint", checkpoint):
        warnings.simplefilter("always")
        plan = {**BOTH, "activations": Recompute()}
        result, made = run(tiny_llama(), rows, plan=plan, micro_batch_size=1, global_batch_size=4, **given)
    moved = [path for path, one in made.model.named_parameters() if "lora_B" in path and one.any()]
    return {
        "reentrant": sorted({str(one) for one in seen}),
        "warned": [str(one.message) for one in warned if "use_reentrant" in str(one.message)],
        "weights": digest(made),
        "losses": column(result, "loss"),
        "moved": len(moved),
    }


def test_adapters_train_in_two_processes_with_recomputation(found: tuple[Found, Path]) -> None:
    """gc-03: without a parameter that is ready twice, without a re-entrant call, and with equal weights."""
    first, second = found[0]["recomputed"]
    assert first["reentrant"] == second["reentrant"] == ["False"]
    assert first["warned"] == second["warned"] == []
    assert first["weights"] == second["weights"]
    # Every one of the four adapters, which begin with zeros, has been given a gradient.
    assert first["moved"] == 4
    assert first["losses"] == second["losses"]
    assert len(first["losses"]) == 2


# ---------------------------------------------------------------------- dst-01, dst-02


class Three(nn.Module):
    """Three weights of 0 and one that is frozen, one of them under two names; the gradient of a row is the row."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.again = self.w
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x * self.frozen).sum(-1).mean()


def clipped(_: Path) -> dict[str, Any]:
    rows = in_order([{"x": torch.tensor(row)} for row in ([6.0, 0.0, 12.0], [0.0, 8.0, 12.0])], 2)
    result, made = run(Three(), rows, plan=BOTH, micro_batch_size=1, global_batch_size=2, steps=1, max_grad_norm=1.0)
    return {"norms": column(result, "grad_norm"), "w": made.model.get_parameter("w").tolist()}


def test_the_norm_that_clips_is_that_of_the_whole_gradient_in_all_processes(found: tuple[Found, Path]) -> None:
    """dst-01: a row with 6 in one process and one with 8 in the other, both with 12; alone they would be 13.4 and 14.4."""
    for said in found[0]["clipped"]:
        assert said["norms"] == pytest.approx([13.0], rel=1e-6)
        assert said["w"] == pytest.approx([-3 / 13, -4 / 13, -12 / 13], rel=1e-5)


def uneven(_: Path) -> dict[str, Any]:
    # Five micro-batches for the first process and four for the second, two to a step, and a last step of one row.
    rows = in_order(factors(1, 3, 1, 3, 1, 3, 1, 3, 1), 4)
    result, made = run(ConstGrad(), rows, plan=BOTH, micro_batch_size=1, global_batch_size=4, epochs=1)
    return {"losses": column(result, "loss"), "w": made.model.get_parameter("w").item()}


def test_processes_with_unequal_numbers_of_micro_batches_make_the_same_updates(found: tuple[Found, Path]) -> None:
    """dst-02: w is 0, -2, -4 and -5, and the loss of a step w times the mean of its rows."""
    for said in found[0]["uneven"]:
        assert said["losses"] == pytest.approx([0.0, -4.0, -4.0], abs=1e-6)
        assert said["w"] == pytest.approx(-5.0, abs=1e-6)


# ---------------------------------------------------------------------- ckp-04, ckp-06


class Dropped(nn.Module):
    """Eight weights under dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (nn.functional.dropout(self.w, 0.5, self.training) * x.unsqueeze(-1)).square().mean()


SIXTEEN = factors(*range(1, 17))


class Slow(list[dict[str, torch.Tensor]]):
    """Rows that take up to 50 ms, other times in each process, once it is asked of them."""

    asked = 0

    def __getitem__(self, index: Any) -> Any:
        Slow.asked += 1
        time.sleep(((Slow.asked * 7 + machine.processes().rank * 5) % 11) / 200)
        return super().__getitem__(index)


def four_saves(run_dir: Path, rows: Any = None, **given: Any) -> Trainer:
    """Four steps, saved after each, with dropout; two micro-batches of a process to a step."""
    settings: dict[str, Any] = {"optimizer": AdamW(learning_rate=3e-3), "checkpoint_every": 1, "keep_checkpoints": 9}
    settings |= {"micro_batch_size": 1, "global_batch_size": 4, "epochs": 1, "plan": BOTH}
    return trainer(Dropped(), SIXTEEN if rows is None else rows, run_dir=run_dir, **{**settings, **given})


def files(run_dir: Path) -> dict[str, list[str]]:
    """What is in each checkpoint, as the process sees it that writes them."""
    return (
        {}
        if machine.processes().rank
        else {place.name: sorted(file.name for file in place.iterdir()) for place in (run_dir / "checkpoints").iterdir()}
    )


def saved(folder: Path) -> dict[str, Any]:
    made = four_saves(folder / "saved", Slow(SIXTEEN))
    losses = column(made.train(), "loss")
    # By the first process alone, as people write it; nobody waits for the other.
    if machine.processes().rank == 0:
        made.save_model(folder / "by the first")
    return {"losses": losses, "weights": digest(made), "files": files(folder / "saved")}


def failed(folder: Path) -> dict[str, Any]:
    real = os.fsync

    def fsync(file: int) -> None:
        if "step-000000003" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, "No space left on device")
        real(file)

    with patch.object(os, "fsync", fsync):
        made = four_saves(folder / "failed")
        made.train()
    return {"weights": digest(made), "files": files(folder / "failed")}


def asked(folder: Path) -> dict[str, Any]:
    def ask(record: Record) -> Action | None:
        return Action.SAVE if record.event == "step" and record.step == 2 else None

    made = four_saves(folder / "asked", callbacks=[ask], checkpoint_every=None)
    made.train()
    return {"weights": digest(made), "files": files(folder / "asked")}


def stopped(folder: Path) -> dict[str, Any]:
    made, forwards = four_saves(folder / "stopped", checkpoint_every=None), 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        # Four of the rehearsal and two of the first step come before; this is between the micro-batches of the second.
        if forwards == 4 + 2 + 1 and machine.processes().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    made.model.register_forward_pre_hook(count)
    try:
        made.train()
    except SystemExit as ends:
        return {"code": ends.code, "files": files(folder / "stopped")}
    return {"code": 0}


def resumed(folder: Path) -> dict[str, Any]:
    made = four_saves(folder / "stopped", checkpoint_every=None)
    return {"losses": column(made.train(), "loss"), "weights": digest(made)}


def test_two_processes_write_one_checkpoint_and_each_its_own_random_state(found: tuple[Found, Path]) -> None:
    """ckp-04 (a): four saves in a row by processes of different speed; one set of weights, and the random state of each."""
    runs, folder = found
    expected = ["checkpoint.json", "model-00001.safetensors", "optimizer-00001.safetensors"]
    expected += ["random-00001.safetensors", "random_1-00001.safetensors"]
    assert runs["saved"][0]["files"] == {f"step-{step:09d}": expected for step in (1, 2, 3, 4)}
    assert runs["saved"][0]["weights"] == runs["saved"][1]["weights"]
    assert (folder / "by the first" / "model.safetensors").exists()


def test_what_one_process_cannot_write_ends_neither_and_costs_no_other_checkpoint(found: tuple[Found, Path]) -> None:
    """ckp-04 (b): the disk is full in the third of four saves; both go on to the same end, and nothing is half there."""
    runs, folder = found
    assert sorted(runs["failed"][0]["files"]) == [f"step-{step:09d}" for step in (1, 2, 4)]
    assert [one["weights"] for one in runs["failed"]] == [runs["saved"][0]["weights"]] * 2
    told = (folder / "failed" / "events.jsonl").read_text()
    assert told.count("the checkpoint of step 3 cannot be written to") == 1


def test_a_save_that_one_process_asks_for_is_made_by_both(found: tuple[Found, Path]) -> None:
    """ckp-04 (c): callbacks run in the first process alone, and the other does not wait until a collective times out."""
    runs, _ = found
    assert sorted(runs["asked"][0]["files"]) == ["step-000000002"]
    assert len(runs["asked"][0]["files"]["step-000000002"]) == 5
    assert [one["weights"] for one in runs["asked"]] == [runs["saved"][0]["weights"]] * 2


def test_a_signal_to_one_process_ends_both_after_the_same_step_and_they_go_on_bit_for_bit(found: tuple[Found, Path]) -> None:
    """ckp-06: sent to the second in the middle of step 2."""
    runs, _ = found
    assert [one["code"] for one in runs["stopped"]] == [143, 143]
    assert sorted(runs["stopped"][0]["files"]) == ["step-000000002"]
    assert [one["weights"] for one in runs["resumed"]] == [runs["saved"][0]["weights"]] * 2
    assert runs["resumed"][0]["losses"] == runs["saved"][0]["losses"]


RUNS = {
    "schedule": schedule,
    "recomputed": recomputed,
    "clipped": clipped,
    "uneven": uneven,
    "saved": saved,
    "failed": failed,
    "asked": asked,
    "stopped": stopped,
    "resumed": resumed,
}

if __name__ == "__main__":
    for ran in RUNS.values():
        print(json.dumps(ran(Path(sys.argv[1]))), flush=True)
