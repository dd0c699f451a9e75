"""The folder of a run: made with its first file, never used twice, and refused in words where it cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from memtrain.metrics import RunFolder

FILES = ["job.json", "plan.yaml", "prediction.json", "metrics.jsonl", "comparison.json", "memory.png", "model"]


def test_the_folder_is_made_with_the_first_file_and_not_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "one")
    assert not (tmp_path / "runs").exists()
    folder.write_text("config.yaml", "steps: 3\n")
    assert (tmp_path / "runs" / "one" / "config.yaml").read_text(encoding="utf-8") == "steps: 3\n"


@pytest.mark.parametrize("name", FILES)
def test_a_folder_that_holds_a_file_of_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(
        ValueError, match=rf"^run\.dir .* already holds a run \({name}\): choose another folder or remove it\.$"
    ) as refusal:
        RunFolder(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_every_file_of_a_used_folder_is_named(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "plan.yaml"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"already holds a run \(plan\.yaml, metrics\.jsonl\)"):
        RunFolder(tmp_path)


def test_a_folder_with_other_files_is_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    RunFolder(tmp_path).write_text("plan.yaml", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "plan.yaml"]


def test_yaml_keeps_the_order_of_the_keys(tmp_path: Path) -> None:
    content = {"plan": {"micro_batch_size": 2}, "budget": "1GiB", "Ärger": None}
    RunFolder(tmp_path).write_yaml("config.yaml", content)
    read = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    assert read == content
    assert list(read) == list(content)


def test_json_is_indented_and_ends_with_a_line_break(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_json("prediction.json", {"peak": 3})
    assert (tmp_path / "prediction.json").read_text(encoding="utf-8") == '{\n  "peak": 3\n}\n'


def test_a_file_that_is_written_again_is_replaced(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_text("plan.yaml", "first and longer")
    folder.write_text("plan.yaml", "second")
    assert (tmp_path / "plan.yaml").read_text(encoding="utf-8") == "second"


def test_every_logged_row_is_one_line_of_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 0.1 + 0.2}]
    for row in rows:
        folder.log(row)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows


@pytest.mark.parametrize(("below", "reason"), [("", "File exists"), ("deeper", "Not a directory")])
def test_a_file_in_the_way_of_the_folder_is_reported_with_the_remedy(tmp_path: Path, below: str, reason: str) -> None:
    (tmp_path / "run").write_text("in the way", encoding="utf-8")
    folder = RunFolder(tmp_path / "run" / below)
    for write in (folder.write_yaml, folder.write_json):
        with pytest.raises(ValueError, match=rf"^run\.dir .* cannot be written \({reason}\): choose another folder\.$"):
            write("plan.yaml", {})


def test_a_folder_in_the_way_of_a_file_is_reported_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "plan.yaml").mkdir()
    with pytest.raises(ValueError, match=rf"^run\.dir .*{tmp_path.name} cannot be written \(Is a directory\): choose"):
        folder.write_text("plan.yaml", "")
