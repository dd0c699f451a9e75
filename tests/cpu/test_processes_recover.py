"""Two processes stop, resume and recover together: what one of them meets, both do."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
# What the second process meets, or in saving the first, and the folder of the run; one after another in the same processes, since
# loading the libraries takes longest.
RUNS = (
    ("nothing", "undisturbed"),
    ("stop", "stopped"),
    ("nothing", "stopped"),
    ("forward", "forward"),
    ("update", "update"),
    ("save", "save"),
)
# Before what a run says on stderr.
NEXT = "\0"


def launch(folder: Path) -> list[list[dict[str, Any]]]:
    """Run ``child`` below in two processes; what each of them found out, by run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    environment |= {
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(str(REPOSITORY / name) for name in (".", "tests", "tests/cpu")),
    }
    with ExitStack() as leaving:
        children = []
        for rank in range(2):
            child = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(folder)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            children.append(leaving.enter_context(child))
            # One that hangs does not outlive the test.
            leaving.callback(child.kill)
        said = [child.communicate(timeout=120) for child in children]
    # What one says of another that has failed says nothing about why it did.
    assert [child.returncode for child in children] == [0, 0], "\n".join(errors for _, errors in said)
    by_process = [
        [{**json.loads(line), "said": text} for line, text in zip(out.splitlines(), errors.split(NEXT)[1:], strict=True)]
        for out, errors in said
    ]
    return [list(both) for both in zip(*by_process, strict=True)]


def child(what: str, folder: Path) -> dict[str, Any]:
    import signal
    from unittest.mock import patch

    import torch
    from toys import CASES

    from memtrain import AdamW, Constant, Trainer, machine
    from memtrain.checkpoint_writer import Writer
    from memtrain.models.objective import Objective

    rank, case = machine.processes().rank, CASES["gpt2_with_dropout"]
    rows = [case.row(number) for number in range(10)]
    failure = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    real_loss, real_step, real_save = Objective.loss, torch.optim.AdamW.step, Writer.save
    forwards = updates = saves = 0

    def loss(self: Objective, model: Any, batch: Any) -> Any:
        nonlocal forwards
        if not batch["input_ids"].is_meta:
            forwards += 1
            if what == "stop" and rank == 1 and forwards == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            # Two forwards of the rehearsal and one of the evaluation before training come before those of steps.
            if what == "forward" and rank == 1 and forwards == 5:
                raise failure
        return real_loss(self, model, batch)

    def step(self: Any, *arguments: Any) -> Any:
        nonlocal updates
        if not self.param_groups[0]["params"][0].is_meta:
            updates += 1
            if what == "update" and rank == 1 and updates == 2 + 4:
                raise failure
        return real_step(self, *arguments)

    def save(self: Writer, *arguments: Any) -> Any:
        nonlocal saves
        saves += 1
        # The first process writes for both.
        if what == "save" and saves == 1:
            raise failure
        return real_save(self, *arguments)

    with (
        patch.object(Objective, "loss", loss),
        patch.object(torch.optim.AdamW, "step", step),
        patch.object(Writer, "save", save),
    ):
        run = Trainer(
            model=case.build(),
            data=rows,
            eval_data=rows[:4],
            budget="64MiB",
            global_batch_size=4,
            steps=5,
            optimizer=AdamW(learning_rate=3e-3),
            schedule=Constant(),
            constraints={"micro_batch_size": 2},
            run_dir=folder,
            checkpoint_every=2,
            progress=False,
        )
        code, result = 0, None
        try:
            result = run.train()
        except SystemExit as stopped:
            code = int(str(stopped.code))
    weights = torch.cat([weight.detach().flatten() for weight in run.model.parameters()])
    return {
        "code": code,
        "losses": [] if result is None else [row["loss"] for row in result.metrics if "loss" in row],
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "micro_batch_size": run.choice.plan.micro_batch_size,
        "checkpoints": sorted(place.name for place in (folder / "checkpoints").iterdir()),
    }


Found = dict[tuple[str, str], list[dict[str, Any]]]


def test_two_processes_stop_resume_and_recover_together(tmp_path: Path) -> None:
    # One test, since starting two processes takes longer than all that they do.
    found = dict(zip(RUNS, launch(tmp_path), strict=True))
    undisturbed, second = found["nothing", "undisturbed"]
    assert undisturbed["weights"] == second["weights"]
    a_signal_to_one_stops_both_after_the_same_step_and_they_go_on_bit_for_bit(undisturbed, found)
    for where, told in (("forward", "forward and backward of step 2"), ("update", "goes back to step 2")):
        memory_that_runs_out_in_one_is_made_room_for_in_both(undisturbed, found[where, where])
        assert told in (tmp_path / where / "events.jsonl").read_text()
    a_checkpoint_for_which_there_is_no_memory_is_left_out_and_both_go_on(undisturbed, found["save", "save"])
    for where in ("forward", "update", "save"):
        # By the first process alone.
        assert [one["said"].lower().count("ran out") for one in found[where, where]] == [1, 0]


def a_signal_to_one_stops_both_after_the_same_step_and_they_go_on_bit_for_bit(
    undisturbed: dict[str, Any], found: Found
) -> None:
    stopped = found["stop", "stopped"]
    assert [one["code"] for one in stopped] == [143, 143]
    assert stopped[0]["checkpoints"][-1] == "step-000000003"
    resumed = found["nothing", "stopped"]
    assert [one["weights"] for one in resumed] == [undisturbed["weights"]] * 2
    assert resumed[0]["losses"] == undisturbed["losses"]


def memory_that_runs_out_in_one_is_made_room_for_in_both(undisturbed: dict[str, Any], found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["weights"] == second["weights"]
    assert first["micro_batch_size"] == second["micro_batch_size"] == 1
    assert len(first["losses"]) == 5
    # Dropout draws other numbers in halves of a micro-batch.
    assert first["losses"] == pytest.approx(undisturbed["losses"], rel=0.1)


def a_checkpoint_for_which_there_is_no_memory_is_left_out_and_both_go_on(
    undisturbed: dict[str, Any], found: list[dict[str, Any]]
) -> None:
    assert [one["weights"] for one in found] == [undisturbed["weights"]] * 2
    assert found[0]["losses"] == undisturbed["losses"]
    assert "Memory ran out in saving step 2 (CUDA out of memory." in found[0]["said"]
    # The first evaluation is before the first step, and so the last checkpoint is the best.
    assert found[0]["checkpoints"] == ["step-000000004", "step-000000005"]


if __name__ == "__main__":
    for what, name in RUNS:
        print(NEXT, end="", file=sys.stderr)
        print(json.dumps(child(what, Path(sys.argv[1]) / name)))
