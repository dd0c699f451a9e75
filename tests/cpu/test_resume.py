"""A run that was stopped goes on as if it never had been: the same losses, weights and rows, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import CASES

from memtrain import AdamW, Constant, Trainer
from memtrain.job import Job
from memtrain.plan import ChunkedLogits, DataParallel, Plan, Recompute, to_dict
from memtrain.resume import resumed_constraints
from memtrain.trainer import Result

GPT2 = CASES["gpt2_with_dropout"]
ROWS = [GPT2.row(number) for number in range(10)]
# Four rows a step of ten rows: steps straddle epochs, and the last of seven steps is in the third.
STEPS = 7
# Nothing is left to search, which keeps planning short.
ONE_PLAN = to_dict(Plan(micro_batch_size=4))


def trainer(run_dir: Path | None = None, **given: Any) -> Trainer:
    settings: dict[str, Any] = {
        "model": GPT2.build(),
        "data": ROWS,
        "eval_data": ROWS[:3],
        "budget": "64MiB",
        "global_batch_size": 4,
        "steps": STEPS,
        "optimizer": AdamW(learning_rate=3e-3),
        "schedule": Constant(),
        "run_dir": run_dir,
        "constraints": ONE_PLAN,
        "checkpoint_every": 1,
        "keep_checkpoints": STEPS,
        "progress": False,
    }
    return Trainer(**{**settings, **given})


def weights(run: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in run.model.named_parameters()}


def losses(result: Result) -> list[tuple[float, float]]:
    return [(row["step"], row["loss"]) for row in result.metrics if "loss" in row]


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, dict[str, Tensor]]:
    """A run that was never stopped: its folder, with a checkpoint of every step, its result and its weights."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run = trainer(folder)
    result = run.train()
    return folder, result, weights(run)


def stopped_after(step: int, folder: Path, target: Path) -> Path:
    """The run in ``folder`` as it would be had it been killed right after the checkpoint of ``step``."""
    shutil.copytree(folder, target)
    for place in sorted((target / "checkpoints").iterdir())[step:]:
        shutil.rmtree(place)
    for name in ("comparison.json", "memory.png"):
        (target / name).unlink()
    return target


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_stopped_after_any_step_goes_on_bit_for_bit(
    step: int, undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, whole, final = undisturbed
    run = trainer(stopped_after(step, folder, tmp_path / "run"))
    result = run.train()
    assert losses(result) == losses(whole)
    assert result.evaluations == whole.evaluations
    assert same(weights(run), final)
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert written == list(result.metrics)


def test_a_run_stopped_twice_goes_on_bit_for_bit(undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, whole, final = undisturbed
    trainer(stopped_after(2, folder, tmp_path / "run")).train()
    run = trainer(stopped_after(5, tmp_path / "run", tmp_path / "again"))
    assert losses(run.train()) == losses(whole)
    assert same(weights(run), final)


def test_the_rows_after_a_checkpoint_are_those_of_the_undisturbed_run(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    class Noted(list[dict[str, Tensor]]):
        asked: list[int]

        def __getitem__(self, index: Any) -> Any:
            self.asked.append(index)
            return super().__getitem__(index)

    folder, _, _ = undisturbed
    whole, rest = Noted(ROWS), Noted(ROWS)
    whole.asked, rest.asked = [], []
    trainer(data=whole, eval_data=None).train()
    run = trainer(stopped_after(4, folder, tmp_path / "run"), data=rest, eval_data=ROWS[:3])
    rest.asked.clear()
    run.train()
    # Planning and comparing ask for row 0.
    of_steps = [index for index in whole.asked if index][-9:]
    assert [index for index in rest.asked if index][-9:] == of_steps


def test_a_run_whose_rows_come_from_workers_goes_on_bit_for_bit(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, whole, final = undisturbed
    run = trainer(stopped_after(3, folder, tmp_path / "run"), workers=1)
    assert losses(run.train()) == losses(whole)
    assert same(weights(run), final)


def test_a_checkpoint_elsewhere_is_gone_on_from_in_a_folder_of_its_own(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, whole, final = undisturbed
    run = trainer(tmp_path / "run", resume=folder / "checkpoints" / "step-000000003")
    assert losses(run.train()) == losses(whole)[3:]
    assert same(weights(run), final)
    # The one that it began with is its own from the start.
    assert [place.name[-1] for place in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["3", "4", "5", "6", "7"]


def test_the_same_call_goes_on_with_a_run_that_began_elsewhere(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, whole, final = undisturbed
    given: dict[str, Any] = {"resume": folder / "checkpoints" / "step-000000003"}
    trainer(tmp_path / "run", **given).train()
    for place in ("step-000000006", "step-000000007"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / place)
    # And a third time, without naming where it began.
    for again in (given, {}):
        stopped = tmp_path / f"again {len(again)}"
        shutil.copytree(tmp_path / "run", stopped)
        run = trainer(stopped, **again)
        assert losses(run.train()) == losses(whole)[3:]
        assert same(weights(run), final)
    assert trainer(stopped)._start.checkpoint.facts["origin"] == [str((folder / "checkpoints" / "step-000000003").resolve()), 3]


def test_a_complete_run_elsewhere_gives_its_model_to_a_folder_of_its_own(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    run = trainer(tmp_path / "run", resume=undisturbed[0])
    assert losses(run.train()) == []
    assert same(weights(run), undisturbed[2])
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "comparison.json").exists()


def test_two_runs_in_one_folder_at_a_time_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    holds = "import sys; from memtrain.metrics import RunFolder\nwith RunFolder(__import__('pathlib').Path(sys.argv[1])).held(): print(); input()"
    command = [sys.executable, "-c", holds, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(
            ValueError, match=r"another process trains in run\.dir .*: wait for its end, or choose another folder"
        ):
            trainer(tmp_path / "run").train()
        other.communicate(b"\n")


@pytest.mark.parametrize("named", ["", "checkpoints"])
def test_of_a_run_or_its_checkpoints_the_latest_is_taken(
    named: str, undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    stopped = stopped_after(6, undisturbed[0], tmp_path / "run")
    run = trainer(None, resume=stopped / named)
    assert [step for step, _ in losses(run.train())] == [7]
    assert same(weights(run), undisturbed[2])


def test_a_run_that_was_complete_trains_nothing_and_is_reported_again(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, whole, final = undisturbed
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    run = trainer(tmp_path / "run")
    assert losses(run.train()) == losses(whole)
    assert same(weights(run), final)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_complete_run_without_a_folder_has_nothing_left(undisturbed: tuple[Path, Result, dict[str, Tensor]]) -> None:
    with pytest.raises(ValueError, match=r"is of the last step: nothing is left to train"):
        trainer(None, resume=undisturbed[0]).train()


# ---------------------------------------------------------------------- the plan


def test_the_plan_of_the_checkpoint_is_kept_but_for_what_is_set_otherwise_now(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    stopped = stopped_after(3, undisturbed[0], tmp_path / "run")
    # Planning would choose by the budget, which this plan is far below.
    kept = trainer(stopped, constraints=None).choice.plan
    assert kept == Plan(micro_batch_size=4)
    fields = {"micro_batch_size": 1, "activations": "recompute", "loss": {"policy": "chunked_logits", "chunk_tokens": 8}}
    changed = trainer(stopped, constraints=fields).choice.plan
    assert changed == Plan(micro_batch_size=1, activations=Recompute(), loss=ChunkedLogits(chunk_tokens=8))


def test_a_smaller_plan_that_a_run_went_on_with_is_kept_beside_the_same_constraints() -> None:
    facts = {
        "plan": to_dict(Plan(micro_batch_size=1)),
        "constraints": {"micro_batch_size": 4, "activations": {"policy": "keep"}},
    }
    job = Job(model="toy", global_batch_size=4, steps=1)
    assert resumed_constraints(facts, {"micro_batch_size": 4}, job)["micro_batch_size"] == 1
    assert resumed_constraints(facts, {"micro_batch_size": 2}, job)["micro_batch_size"] == 2
    assert resumed_constraints(facts, {"activations": Recompute()}, job)["activations"] == Recompute()


def test_among_more_processes_the_micro_batch_is_what_each_can_have() -> None:
    facts = {"plan": to_dict(Plan(micro_batch_size=4)), "constraints": {}}
    job = Job(model="toy", global_batch_size=6, steps=1)
    found = resumed_constraints(facts, {"sharding": DataParallel(2)}, job)
    assert (found["micro_batch_size"], found["sharding"]) == (3, DataParallel(2))


def test_another_micro_batch_changes_losses_and_weights_by_rounding_alone(tmp_path: Path) -> None:
    llama = CASES["llama"]
    data = [llama.row(number) for number in range(10)]
    given: dict[str, Any] = {"data": data, "eval_data": None}
    whole_run = trainer(tmp_path / "whole", model=llama.build(), **given)
    whole = whole_run.train()
    run = trainer(
        stopped_after(3, tmp_path / "whole", tmp_path / "run"),
        model=llama.build(),
        constraints={**ONE_PLAN, "micro_batch_size": 1},
        **given,
    )
    result = run.train()
    assert [step for step, _ in losses(result)] == [1, 2, 3, 4, 5, 6, 7]
    assert [loss for _, loss in losses(result)] == pytest.approx([loss for _, loss in losses(whole)], rel=1e-5)
    assert losses(result)[3:] != losses(whole)[3:]
    for name, tensor in weights(run).items():
        assert torch.allclose(tensor, whole_run.model.get_parameter(name), atol=1e-4)


# ---------------------------------------------------------------------- what is kept


def test_the_last_ones_and_the_best_stay(tmp_path: Path) -> None:
    # What is learnt is wrong for these rows, so that their loss rises.
    others = [{**row, "labels": row["labels"].flip(0)} for row in ROWS[:3]]
    run = trainer(tmp_path / "run", keep_checkpoints=2, evaluate_every=1, eval_data=others, optimizer=AdamW(learning_rate=0.1))
    result = run.train()
    best = min(result.evaluations[1:], key=lambda evaluation: evaluation[1])[0]
    assert best < STEPS - 1
    kept = [int(place.name[-1]) for place in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert kept == [best, STEPS - 1, STEPS]


def test_no_checkpoints_are_written_where_none_are_wanted(tmp_path: Path) -> None:
    trainer(tmp_path / "run", checkpoint_every=None).train()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_rows_that_draw_random_numbers_are_the_same_rows(tmp_path: Path) -> None:
    class Drawing:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            ids = (torch.arange(12) + random.randrange(40) + int(torch.randint(40, ()))) % 90 + 3
            return {"input_ids": ids, "labels": ids}

    given: dict[str, Any] = {"data": Drawing(), "eval_data": None, "steps": 3}
    trainer(tmp_path / "run", **given).train()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000000003")
    whole = trainer(None, **given)
    expected = losses(whole.train())
    run = trainer(tmp_path / "run", **given)
    assert losses(run.train()) == expected
    assert same(weights(run), weights(whole))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"workers": -1}, "workers is -1, and it must be a whole number of 0 or more"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0, and it must be 1 or more steps, or None"),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0, and it must be 1 or more"),
        ({"stop_seconds": 0}, "stop_seconds is 0, and it must be above 0 seconds, or None"),
    ],
)
def test_settings_out_of_range_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        trainer(**given)
