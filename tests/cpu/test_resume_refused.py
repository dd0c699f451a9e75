"""What a run does not go on from, and what is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_resume import ROWS, losses, same, stopped_after, trainer, undisturbed, weights
from torch import Tensor
from toys import CASES

from memtrain import AdamW
from memtrain.checkpoint import read, write
from memtrain.resume import name_of
from memtrain.trainer import Result

__all__ = ["undisturbed"]


def loss_of_a_user(output: Any, rows: Any) -> Any:
    return output.loss


class Halved:
    """A loss with a setting."""

    def __call__(self, output: Any, rows: Any) -> Any:
        return output.loss / 2


def test_a_function_is_known_by_its_name_and_an_object_by_that_of_its_class() -> None:
    assert name_of(loss_of_a_user) == f"{__name__}.loss_of_a_user"
    assert name_of(Halved()) == name_of(Halved()) == f"{__name__}.Halved"


@pytest.mark.parametrize(
    ("given", "differs"),
    [
        ({"optimizer": AdamW(learning_rate=1e-3)}, r"optimizer\.learning_rate is 0\.001 here and 0\.003 there"),
        ({"steps": 9}, "steps is 9 here and 7 there"),
        ({"data": ROWS[:9]}, r"data is 9 rows \(\w+\) here and 10 rows \(\w+\) there"),
        ({"seed": 1}, "seed is 1 here and 0 there"),
        ({"model": CASES["llama"].build()}, "model.model_type is llama here and gpt2 there"),
        (
            {"task": "sequence_classification"},
            "model.class is GPT2ForSequenceClassification here and GPT2LMHeadModel there",
        ),
        ({"loss": loss_of_a_user}, r"loss is (\w+\.)*test_resume_refused\.loss_of_a_user here and not set there"),
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
    with pytest.raises(ValueError, match="and no checkpoint is there: give that of a checkpoint or of a run, auto or never"):
        trainer(resume=tmp_path)


def test_a_complete_run_without_checkpoints_does_not_begin_anew(tmp_path: Path) -> None:
    trainer(tmp_path / "run", checkpoint_every=None).train()
    with pytest.raises(ValueError, match="holds a run that is complete and has no checkpoint: choose another folder"):
        trainer(tmp_path / "run", checkpoint_every=None)


def test_an_earlier_checkpoint_of_the_own_run_is_refused_beside_later_ones(
    undisturbed: tuple[Path, Result, dict[str, Tensor]],
) -> None:
    folder, _, _ = undisturbed
    with pytest.raises(
        ValueError, match=r"which is step 3, and .* has step 7 of a run that did not begin there: choose another"
    ):
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
    assert "A later checkpoint is passed over:" in caplog.text
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
    assert "has saved no checkpoint, and begins anew." in caplog.text


def test_a_checkpoint_of_the_same_job_with_other_tensors_is_refused(
    undisturbed: tuple[Path, Result, dict[str, Tensor]], tmp_path: Path
) -> None:
    found = read(undisturbed[0] / "checkpoints" / "step-000000003")
    groups = {group: dict(found.tensors(group)) for group in found.files}
    del groups["model"]["transformer.wte.weight"]
    write(tmp_path, 3, groups, found.facts)
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight is here and was not written"):
        trainer(resume=tmp_path).train()
