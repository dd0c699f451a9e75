"""A run that was stopped goes on as if it never had been: the same losses, weights and rows, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import CASES

from memtrain import AdamW, Constant, Trainer
from memtrain.checkpoint import read, write
from memtrain.plan import ChunkedLogits, Plan, Recompute, to_dict
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
    assert [place.name[-1] for place in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["4", "5", "6", "7"]


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
    assert resumed_constraints(facts, {"micro_batch_size": 4})["micro_batch_size"] == 1
    assert resumed_constraints(facts, {"micro_batch_size": 2})["micro_batch_size"] == 2
    assert resumed_constraints(facts, {"activations": Recompute()})["activations"] == Recompute()


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


# ---------------------------------------------------------------------- what is refused, and what is told


@pytest.mark.parametrize(
    ("given", "differs"),
    [
        ({"optimizer": AdamW(learning_rate=1e-3)}, r"optimizer\.learning_rate is 0\.001 here and 0\.003 there"),
        ({"steps": 9}, "steps is 9 here and 7 there"),
        ({"data": ROWS[:9]}, r"data is 9 rows \(\w+\) here and 10 rows \(\w+\) there"),
        ({"seed": 1}, "seed is 1 here and 0 there"),
        ({"model": CASES["llama"].build()}, "model.model_type is llama here and gpt2 there"),
    ],
)
def test_another_jobs_run_is_refused_with_what_differs(
    given: dict[str, Any], differs: str, undisturbed: tuple[Path, Result, dict[str, Tensor]]
) -> None:
    folder, _, _ = undisturbed
    with pytest.raises(ValueError, match=rf"holds a run of another job \({differs}\): choose another folder"):
        trainer(folder, **given)
    with pytest.raises(ValueError, match=rf"is of another job \({differs}\): give the same settings"):
        trainer(None, resume=folder, **given)


def test_never_begins_in_an_unused_folder_alone(undisturbed: tuple[Path, Result, dict[str, Tensor]]) -> None:
    with pytest.raises(ValueError, match="already holds a run"):
        trainer(undisturbed[0], resume="never")


@pytest.mark.parametrize(
    ("resume", "told"),
    [
        ("newest", "resume is 'newest', and no folder is there: give that of a checkpoint or of a run, auto or never"),
        (3, "resume is 3, and it must be auto, never, or the path"),
        ("", "resume is '', and it must be"),
    ],
)
def test_what_is_no_way_to_resume_is_refused(resume: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        trainer(resume=resume)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no checkpoint: checkpoint\.json cannot be read"):
        trainer(resume=tmp_path)


def test_an_earlier_checkpoint_of_the_own_run_is_refused_beside_later_ones(
    undisturbed: tuple[Path, Result, dict[str, Tensor]],
) -> None:
    folder, _, _ = undisturbed
    with pytest.raises(ValueError, match=r"which is step 3, and .* holds the later step-000000007.*: choose another run\.dir"):
        trainer(folder, resume=folder / "checkpoints" / "step-000000003")


def damage(place: Path) -> None:
    file = place / "model-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, whole, final = undisturbed
    stopped = stopped_after(5, folder, tmp_path / "run")
    damage(stopped / "checkpoints" / "step-000000005")
    run = trainer(stopped)
    assert losses(run.train()) == losses(whole)
    assert same(weights(run), final)
    assert "not resumed from the latest checkpoint:" in caplog.text
    assert "step-000000005 is no whole checkpoint" in caplog.text
    # It was written again, and whole.
    assert read(stopped / "checkpoints" / "step-000000005").step == 5


def test_a_run_with_damaged_checkpoints_alone_does_not_begin_anew(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    stopped = stopped_after(2, undisturbed[0], tmp_path / "run")
    for place in (stopped / "checkpoints").iterdir():
        damage(place)
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints in .* is whole; of the latest: .*step-000000002"):
        trainer(stopped)
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints in .* is whole; of the latest: .*step-000000002"):
        trainer(resume=stopped)


def test_a_run_that_saved_no_checkpoint_begins_anew(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, whole, final = undisturbed
    stopped = stopped_after(0, folder, tmp_path / "run")
    # Killed in the middle of a line.
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    run = trainer(stopped)
    assert losses(run.train()) == losses(whole)
    assert same(weights(run), final)
    assert "has saved no checkpoint: it begins anew" in caplog.text


def test_a_checkpoint_of_the_same_job_with_other_tensors_is_refused(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    found = read(undisturbed[0] / "checkpoints" / "step-000000003")
    groups = {group: dict(found.tensors(group)) for group in found.files}
    del groups["model"]["transformer.wte.weight"]
    write(tmp_path, 3, groups, found.facts)
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight is here and was not written"):
        trainer(resume=tmp_path).train()


# ---------------------------------------------------------------------- what is kept


def test_the_last_ones_and_the_best_stay(tmp_path: Path) -> None:
    # What is learnt is wrong for these rows, so that their loss rises.
    others = [{**row, "labels": row["labels"].flip(0)} for row in ROWS[:3]]
    run = trainer(tmp_path / "run", keep_checkpoints=2, evaluate_every=1, eval_data=others, optimizer=AdamW(learning_rate=0.03))
    result = run.train()
    best = min(result.evaluations[1:], key=lambda evaluation: evaluation[1])[0]
    assert best < STEPS - 1
    kept = [int(place.name[-1]) for place in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert kept == [best, STEPS - 1, STEPS]


def test_no_checkpoints_are_written_where_none_are_wanted(tmp_path: Path) -> None:
    trainer(tmp_path / "run", checkpoint_every=None).train()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"checkpoint_every": 0}, "checkpoint_every is 0, and it must be 1 or more steps, or None"),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0, and it must be 1 or more"),
        ({"stop_seconds": 0}, "stop_seconds is 0, and it must be above 0 seconds, or None"),
    ],
)
def test_settings_out_of_range_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        trainer(**given)
