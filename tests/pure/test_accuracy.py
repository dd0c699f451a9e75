"""The scores of predictions against published peaks: bytes compared, errors, sums, what is skipped and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import accuracy
import pytest
from published import environments, express, fms, page, score
from published.record import Record, read
from published.run import Prediction
from published.score import Scored, Skipped

ROOT = Path(__file__).parents[2]
GIB = 2**30
RECORD = Record(
    id="one",
    source="peaks.csv row 1",
    model="some/Model-1B",
    source_family="somebody",
    unit="GiB",
    unit_interpreted="GiB",
    peak_value=10.2,
    peak_gib=10.2,
    metric="max_memory_allocated",
    quality="A",
    cluster="somebody|Model-1B|full",
    gpus={"count": 1, "type": "A100-80GB"},
)


def prediction(gib: float, **others: Any) -> Prediction:
    size = round(gib * GIB)
    return Prediction(
        "one", allocated_bytes=size, reserved_bytes=2 * size, total_bytes=3 * size, usable_bytes=80 * GIB, seconds=1.0, **others
    )


def scored(record: Record, found: Prediction, decimals: int = 1) -> Scored:
    result = score.score(record, found, decimals)
    assert isinstance(result, Scored)
    return result


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("max_memory_allocated", "allocated"),
        ("max active", "allocated"),
        ("unspecified (torch peak, rounded)", "allocated"),
        ("max_memory_reserved (log line)", "reserved"),
        ("reserved/nvidia-smi-like (axolotl logs max reserved)", "reserved"),
        ("unspecified", "reserved"),
        ("nvidia-smi used memory", "total"),
        ("unspecified (peak; nvidia-smi-like)", "total"),
    ],
)
def test_the_metric_decides_which_bytes_are_compared(metric: str, expected: str) -> None:
    found = scored(replace(RECORD, metric=metric), prediction(10.0))
    assert found.compared == expected
    assert found.predicted_bytes == {"allocated": 10, "reserved": 20, "total": 30}[expected] * GIB


@pytest.mark.parametrize(("gib", "expected"), [(10.249, 0.0), (10.151, 0.0), (10.404, 0.02), (9.996, -0.02)])
def test_an_error_below_half_of_the_last_published_digit_is_none(gib: float, expected: float) -> None:
    assert score.error(RECORD, round(gib * GIB), 1) == pytest.approx(expected)


def test_of_an_unknown_unit_both_readings_are_right() -> None:
    unknown = replace(RECORD, unit_interpreted="GB?")
    assert score.error(unknown, round(10.2 * 10**9), 1) == 0.0
    assert score.error(unknown, round(10.2 * 0.99 * 10**9), 1) == pytest.approx(-0.01)
    assert score.error(unknown, round(10.2 * 1.01 * GIB), 1) == pytest.approx(0.01)


def test_published_bytes_are_taken_as_they_are() -> None:
    exact = replace(RECORD, unit="bytes", unit_interpreted="bytes", peak_value=26_704_571_904.0, peak_gib=24.8706)
    assert score.error(exact, 26_704_571_904, 0) == 0.0
    assert score.error(exact, 26_704_571_392, 0) == pytest.approx(-512 / 26_704_571_904)


def test_a_source_publishes_as_many_digits_as_its_longest_number() -> None:
    records = [replace(RECORD, peak_value=14.0), replace(RECORD, peak_value=14.25), replace(RECORD, peak_value=None)]
    assert score.decimals_by_source(records) == {("somebody", "GiB"): 2}


@pytest.mark.parametrize(("gib", "right"), [(27.0, True), (26.0, False)])
def test_a_run_out_of_memory_is_right_where_more_is_predicted_than_the_card_has(gib: float, right: bool) -> None:
    found = scored(replace(RECORD, outcome="oom", peak_value=None, peak_gib=None), prediction(gib))
    assert found.oom_right is right
    assert score.summary([found], [])["scored"] == 0
    assert (score.summary([found], [])["oom_right"], score.summary([found], [])["oom_total"]) == (int(right), 1)


def test_a_summary_counts_errors_and_their_sides() -> None:
    errors = [0.0, 0.01, -0.02, 0.03, -0.04, 0.05, -0.06, 0.07, 0.08, -0.5]
    found = [Scored(RECORD, prediction(1.0), "allocated", 1.0, 1, error) for error in errors]
    total = score.summary(found, [Skipped(RECORD, "why"), Skipped(RECORD, "RuntimeError: no", failed=True)])
    assert (total["scored"], total["skipped"], total["failed"]) == (10, 2, 1)
    assert total["median_error"] == pytest.approx(0.045)
    assert total["p90_error"] == 0.08
    assert total["median_signed_error"] == pytest.approx(0.005)
    assert (total["under_1pct"], total["under_3pct"]) == (0.4, 0.3)
    assert score.summary([], [])["median_error"] is None


def test_clusters_are_averaged_each_by_itself() -> None:
    other = replace(RECORD, cluster="another")
    found = [Scored(record, prediction(1.0), "allocated", 1.0, 1, error) for record, error in ((RECORD, 0.02), (other, -0.04))]
    clusters = score.by_cluster(found)
    assert [clusters[name]["median_error"] for name in ("another", RECORD.cluster)] == [0.04, 0.02]
    assert score.summary(found, [])["median_error_of_clusters"] == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"quality": "C"}, "quality C was not asked for"),
        ({"core": False}, "not of the core subset"),
        ({"scope": "component"}, "the scope 'component' is no whole step"),
        ({"peak_gib": None}, "no peak was published"),
        ({"scope": "fwd_bwd"}, ""),
        ({"outcome": "oom", "peak_gib": None}, ""),
    ],
)
def test_what_is_not_simulated_has_a_reason(changed: dict[str, Any], reason: str) -> None:
    record = replace(RECORD, core=True)
    found = score.why_not(replace(record, **changed), ("A", "B"), core=True)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_prediction_that_is_missing_is_skipped_with_its_reason() -> None:
    told = score.score(RECORD, Prediction("one", skipped="it is sharded"), 1)
    assert told == Skipped(RECORD, "it is sharded")
    assert score.score(RECORD, Prediction("one", failed="RuntimeError: no"), 1) == Skipped(
        RECORD, "RuntimeError: no", failed=True
    )


def test_the_report_prints_each_record_and_groups_what_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "accuracy.json"
    out = scored(replace(RECORD, id="oom-1", outcome="oom", peak_value=None, peak_gib=None), prediction(40.0))
    skipped = [Skipped(replace(RECORD, id=name), "it is sharded") for name in ("a-1", "a-2")]
    assert accuracy.report([scored(RECORD, prediction(10.404)), out], skipped, file) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].split() == ["one", "some/Model-1B", "full", "allocated", "10,952,166,605", "11,171,209,937", "+2.0000"]
    assert said[2].split()[-1] == "right"
    assert "    2  it is sharded: a-1, a-2" in said
    assert said[-1] == (
        "accuracy: 1 scored, 2 skipped, median error 2.0000 %, 90th percentile 2.0000 %, median signed error +2.0000 %, "
        "under by more than 1 % 0.0000 %, than 3 % 0.0000 %, out of memory 1 of 1 right, 0 that trained called too large"
    )
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["summary"]["median_error"] == pytest.approx(0.02)
    assert [record["id"] for record in written["records"]] == ["one", "oom-1"]
    assert [record["reason"] for record in written["skipped"]] == ["it is sharded", "it is sharded"]


@pytest.mark.parametrize(
    ("gib", "skipped", "expected"),
    [
        (10.404, [], 1),
        (10.2, [], 0),
        (10.2, [Skipped(RECORD, "RuntimeError: no", failed=True)], 2),
        (10.2, [Skipped(RECORD, "it is sharded")], 0),
    ],
)
def test_the_bound_decides_the_exit_code(gib: float, skipped: list[Skipped], expected: int) -> None:
    assert accuracy.report([scored(RECORD, prediction(gib))], skipped, bound=0.0005) == expected


def test_nothing_scored_is_no_success() -> None:
    assert accuracy.report([], [], bound=0.0005) == 1


def test_what_cannot_be_installed_is_said_and_exits_with_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    # No index and an empty folder of packages: pip fails at once and asks nobody.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    file = ROOT / "benchmarks" / "published_peaks.jsonl"
    asked = Namespace(
        records=[file],
        quality=("A",),
        core=False,
        scopes=score.WHOLE_STEPS,
        environments=tmp_path,
        published=None,
        json=None,
        bound=0.1,
    )
    assert accuracy.main(asked) == 2
    said = capsys.readouterr().out
    assert "failed: pip cannot install transformers-4.48.1 (" in said
    assert "give it an index that has these versions: " in said
    assert said.splitlines()[-1].startswith("accuracy: 0 scored, 6 skipped")


def test_libraries_that_are_installed_are_not_installed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments.subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    wanted = environments.ENVIRONMENTS["transformers-4.45.2"]
    (tmp_path / "installed.txt").write_text("\n".join(wanted) + "\n", encoding="utf-8")
    environments.install("transformers-4.45.2", tmp_path)
    environments.install(environments.CURRENT, tmp_path / "never made")


# A child that tells of each record and ends without a word at the one called "bad".
CHILD = """
import json, sys
for line in sys.stdin:
    name = json.loads(line)["id"]
    if name == "bad":
        sys.exit("it broke")
    print("noise of a library")
    print("prediction " + json.dumps({"id": name, "allocated_bytes": 7, "assumed": ["a guess"]}), flush=True)
"""


def test_a_child_that_ends_loses_one_record_and_not_those_behind_it(tmp_path: Path) -> None:
    records = [replace(RECORD, id=name) for name in ("first", "bad", "last")]
    found = list(environments.predict_in(environments.CURRENT, tmp_path, records, [sys.executable, "-c", CHILD]))
    assert [(one.id, one.allocated_bytes) for one in found] == [("first", 7), ("bad", 0), ("last", 7)]
    assert found[1].failed == "the process with current ended: it broke"
    assert found[0].assumed == ("a guess",)


def test_records_are_read_and_nulls_are_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(
        '{"id": "a", "source": "s", "model": "m", "lora_targets": ["q"], "seq_len": null, "new": 1}\n\n', encoding="utf-8"
    )
    assert list(read(file)) == [Record(id="a", source="s", model="m", lora_targets=("q",))]
    # As Windows ends lines, nulls inside, and a word where a list is expected.
    file.write_bytes(b'{"id": "a", "assume": "one", "gpus": {"count": null}, "arch": null}\r\n{"id": "b"}\r\n')
    assert list(read(file)) == [Record(id="a", assume=("one",)), Record(id="b")]
    file.write_text('{"id": "a"}\n{"id": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2 of .* has the id 'a' of a line before: give each record its own"):
        list(read(file))
    with pytest.raises(ValueError, match=r"nothing.jsonl cannot be read .*: give a file of JSON objects, one a line"):
        list(read(tmp_path / "nothing.jsonl"))
    file.write_text("{\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 1 of .* is no record .*: give one JSON object a line"):
        list(read(file))


def test_what_would_lose_its_results_is_refused_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*files: Path, json: Path | None = None) -> str:
        assert accuracy.main(Namespace(records=list(files), json=json, published=None)) == 2
        return capsys.readouterr().err

    one, other, empty = (tmp_path / name for name in ("one.jsonl", "other.jsonl", "empty.jsonl"))
    empty.write_text("\n", encoding="utf-8")
    for file in (one, other):
        file.write_text('{"id": "a"}\n', encoding="utf-8")
    assert "nothing.jsonl cannot be read" in said(tmp_path / "nothing.jsonl")
    assert "empty.jsonl holds no record: give one JSON object a line." in said(empty)
    assert "the id 'a' is in two files: give each record its own." in said(one, other)
    assert "since its folder is not there: make it first." in said(one, json=tmp_path / "none" / "found.json")


def test_numbers_are_read_however_they_are_written() -> None:
    told = Record.of(
        {
            "id": 7,
            "peak_value": "3.25",
            "batch_size_per_gpu": 2.0,
            "arch": {"layers": 2.0},
            "checkpointing": True,
            "outcome": "OOM",
        }
    )
    assert (told.id, told.peak_value, told.batch_size_per_gpu, told.arch) == ("7", 3.25, 2, {"layers": 2})
    assert (told.checkpointing, told.outcome) == ("True", "oom")
    assert Record.of({"id": "a", "arch": "llama"}).arch == {}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"outcome": "hung"}, "the outcome 'hung' is neither ok nor oom"),
        ({"peak_gib": None}, "no peak was published, in bytes or in GiB"),
        ({"batch_size_per_gpu": 0.5}, "the batch size 0.5 is no whole number of 1 or more"),
    ],
)
def test_what_no_run_can_be_is_skipped_with_the_reason(changed: dict[str, Any], reason: str) -> None:
    assert score.why_not(replace(RECORD, **changed), (RECORD.quality,), False) == reason


def test_a_run_that_trained_and_is_predicted_above_its_card_is_counted() -> None:
    found = scored(RECORD, replace(prediction(10.2), total_bytes=2, usable_bytes=1))
    assert score.summary([found], [])["unfit"] == 1


def test_a_record_goes_to_its_family() -> None:
    assert express.family(replace(RECORD, source_family="fms-acceleration (IBM)")) == "fms"
    assert express.family(replace(RECORD, source_family="Lightning-AI/litgpt")) == "litgpt"
    assert express.family(RECORD) == "general"


def test_what_hands_out_the_records_loads_neither_torch_nor_transformers() -> None:
    loads = "import sys, accuracy, published.fms; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", loads], cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_each_file_of_fms_has_the_versions_that_it_was_measured_with() -> None:
    files = {
        "refs/a100_80gb.csv row 1": "transformers-4.48.1",
        "refs/a100_80gb_granite.csv row 1": "transformers-4.45.2",
        "refs/a100_80gb_liger.csv row 1": "transformers-4.45.2-peft-0.13.2",
    }
    for source, expected in files.items():
        assert fms.environment(replace(RECORD, source=source)) == expected
        assert expected in environments.ENVIRONMENTS
    assert fms.framework(replace(RECORD, notes="framework_config=accelerated-peft-bnb; packed")) == "accelerated-peft-bnb"
    assert fms.framework(RECORD) == "none"


def test_the_peaks_of_the_check_are_six_records_of_fms() -> None:
    records = list(read(ROOT / "benchmarks" / "published_peaks.jsonl"))
    assert len(records) == 6
    for record in records:
        assert express.family(record) == "fms"
        assert not score.why_not(record, ("A",), core=True)


def test_the_page_has_a_row_for_each_peak_with_its_settings() -> None:
    settings = replace(RECORD, method="lora", lora_rank=16, batch_size_per_gpu=4, seq_len=4096, loss="a|b")
    versions = {"torch": "2.13.0", "transformers": "4.48.1"}
    lines = page.text([scored(settings, prediction(10.404, versions=versions))], "python make_it.py").splitlines()
    assert "    python make_it.py" in lines
    assert "- torch 2.13.0, transformers 4.48.1" in lines
    assert lines[-1] == (
        "| 10.2000 | 10.4040 | +2.000 % | allocated | some/Model-1B | lora, rank 16 | 4 × 4096 |  |  |  | a/b | A100-80GB | peaks.csv row 1 |"
    )
