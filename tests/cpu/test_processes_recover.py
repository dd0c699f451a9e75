"""Two processes stop, resume and recover together: what one of them meets, both do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


def launch(what: str, folder: Path) -> list[dict[str, Any]]:
    """Run ``child`` below in two processes; what each of them found out."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    environment |= {
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(str(REPOSITORY / name) for name in (".", "tests", "tests/cpu")),
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, what, str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [child.communicate(timeout=120) for child in children]
    for child, (_, errors) in zip(children, said, strict=True):
        assert child.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def child(what: str, folder: Path) -> None:
    import signal

    import torch
    from toys import CASES

    from memtrain import AdamW, Constant, Trainer, machine
    from memtrain.models.objective import Objective

    rank, case = machine.processes().rank, CASES["gpt2_with_dropout"]
    rows = [case.row(number) for number in range(10)]
    real, calls = Objective.loss, 0

    def fails(call: int, rows: int) -> bool:
        # Two forwards of the rehearsal and one of the evaluation before training come before those of steps.
        return what == "forward" and rank == 1 and call == 5

    def loss(self: Objective, model: Any, batch: Any) -> Any:
        nonlocal calls
        if not batch["input_ids"].is_meta:
            calls += 1
            if what == "stop" and rank == 1 and calls == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            if fails(calls, len(batch["input_ids"])):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, model, batch)

    Objective.loss = loss  # type: ignore[method-assign]
    real_step, updates = torch.optim.AdamW.step, 0

    def step(self: Any, *arguments: Any) -> Any:
        nonlocal updates
        if not self.param_groups[0]["params"][0].is_meta:
            updates += 1
            if what == "update" and rank == 1 and updates == 2 + 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real_step(self, *arguments)

    torch.optim.AdamW.step = step  # type: ignore[method-assign]
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
    found = {
        "code": code,
        "losses": [] if result is None else [row["loss"] for row in result.metrics if "loss" in row],
        "weights": weights.tolist(),
        "micro_batch_size": run.choice.plan.micro_batch_size,
    }
    print(json.dumps(found))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    first, second = launch("nothing", tmp_path_factory.mktemp("undisturbed") / "run")
    assert first["weights"] == second["weights"]
    return [first, second]


def test_a_signal_to_one_stops_both_after_the_same_step_and_they_go_on_bit_for_bit(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert [found["code"] for found in launch("stop", tmp_path / "run")] == [143, 143]
    assert max(place.name for place in (tmp_path / "run" / "checkpoints").iterdir()) == "step-000000003"
    resumed = launch("nothing", tmp_path / "run")
    assert [found["weights"] for found in resumed] == [found["weights"] for found in undisturbed]
    assert resumed[0]["losses"] == undisturbed[0]["losses"]


@pytest.mark.parametrize(("where", "told"), [("forward", "forward and backward of step 2"), ("update", "goes back to step 2")])
def test_memory_that_runs_out_in_one_is_made_room_for_in_both(
    where: str, told: str, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    first, second = launch(where, tmp_path / "run")
    assert first["weights"] == second["weights"]
    assert first["micro_batch_size"] == second["micro_batch_size"] == 1
    assert len(first["losses"]) == 5
    # Dropout draws other numbers in halves of a micro-batch.
    assert first["losses"] == pytest.approx(undisturbed[0]["losses"], rel=0.1)
    assert told in (tmp_path / "run" / "events.jsonl").read_text()


if __name__ == "__main__":
    child(sys.argv[1], Path(sys.argv[2]))
