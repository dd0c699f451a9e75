"""The metrics of the xMem study on records and estimates made by hand; a card has 1000 MiB."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xmem
from published.environments import ENVIRONMENTS
from published.xmem_scores import Score, aggregate, cap_bytes, least_estimate, score, score_of_tool, trains_under

MIB = 2**20
TOTAL = 1000 * MIB


def record(ground_mib: int = 500, *, oom: bool = False, **more: Any) -> dict[str, Any]:
    said = {
        "id": "one",
        "model": "gpt2",
        "optimizer": "SGD",
        "batch_size": 32,
        "era": "E2",
        "seq_padding": "dynamic",
        "gpu": "NVIDIA GeForce RTX 3060",
        "total_gpu_memory": TOTAL,
        "ground_bytes": ground_mib * MIB,
        "real_oom": oom,
        "cap_ok_min_bytes": None,
        "cap_oom_max_bytes": None,
    }
    for tool in ("xmem", "dnnmem", "schedtune", "llmem"):
        said |= dict.fromkeys((f"{tool}_bytes", f"{tool}_error", f"{tool}_pred_oom", f"{tool}_verify_oom"))
    return {**said, **more}


# ---------------------------------------------------------------------- one run


def test_a_cap_is_whole_percents_of_the_card_rounded_to_the_nearest() -> None:
    assert cap_bytes(504 * MIB, TOTAL) == 500 * MIB
    assert cap_bytes(506 * MIB, TOTAL) == 510 * MIB


def test_an_estimate_is_raised_only_where_its_cap_does_not_hold_what_is_reserved() -> None:
    assert least_estimate(506 * MIB, 506 * MIB, TOTAL) == 506 * MIB
    assert least_estimate(504 * MIB, 500 * MIB, TOTAL) == 504 * MIB
    raised = least_estimate(504 * MIB, 504 * MIB, TOTAL)
    assert 505 * MIB <= raised <= 505 * MIB + 1
    assert cap_bytes(raised, TOTAL) == 510 * MIB


def test_a_run_trains_under_a_cap_of_its_peak_less_100_mib() -> None:
    assert trains_under(record(500), 400 * MIB)
    assert not trains_under(record(500), 390 * MIB)


def test_caps_that_were_tried_decide_before_the_rule_does() -> None:
    assert trains_under(record(500, cap_ok_min_bytes=300 * MIB), 300 * MIB)
    assert not trains_under(record(500, cap_oom_max_bytes=450 * MIB), 450 * MIB)
    assert trains_under(record(500, cap_oom_max_bytes=450 * MIB), 460 * MIB)


def test_caps_that_contradict_each_other_leave_it_to_the_rule() -> None:
    both = {"cap_ok_min_bytes": 380 * MIB, "cap_oom_max_bytes": 450 * MIB}
    assert trains_under(record(500, **both), 410 * MIB)
    assert not trains_under(record(500, **both), 390 * MIB)


@pytest.mark.parametrize(
    ("ran_out", "predicted", "estimate_mib", "expected"),
    [
        (False, False, 550, (0.1, True, True, 450 * MIB)),
        (False, False, 300, (-0.4, True, False, 0)),
        (False, True, 550, (0.1, False, False, -TOTAL)),
        (True, True, 550, (0.1, True, True, TOTAL)),
        (True, False, 550, (0.1, False, False, -TOTAL)),
    ],
)
def test_a_score_says_error_both_verdicts_and_the_bytes_saved(
    ran_out: bool, predicted: bool, estimate_mib: int, expected: tuple[float, bool, bool, int]
) -> None:
    found = score(record(500, oom=ran_out), estimate_mib * MIB, predicted)
    assert (found.error, found.c1, found.c2, found.saved_bytes) == (pytest.approx(expected[0]), *expected[1:])


def test_a_tool_is_scored_by_the_capped_run_that_the_study_made() -> None:
    said = {"xmem_bytes": 400 * MIB, "xmem_error": 0.2, "xmem_pred_oom": False}
    assert score_of_tool(record(**said, xmem_verify_oom=False), "xmem") == Score(0.2, True, True, 600 * MIB)
    assert score_of_tool(record(**said, xmem_verify_oom=True), "xmem") == Score(0.2, True, False, 0)
    assert score_of_tool(record(**said), "xmem") == Score(0.2, True, None, None)
    assert score_of_tool(record(), "xmem") is None


def test_what_a_tool_does_not_support_counts_as_predicted_to_run_out() -> None:
    said = {"llmem_bytes": -1, "llmem_error": 1.0, "llmem_pred_oom": True}
    assert score_of_tool(record(**said), "llmem") == Score(1.0, False, False, -TOTAL)
    assert score_of_tool(record(oom=True, **said), "llmem") == Score(1.0, True, True, TOTAL)


def test_runs_without_a_capped_run_count_in_the_error_alone() -> None:
    found = aggregate([Score(-0.1, True, True, 2**30), Score(0.3, True, None, None), Score(0.2, False, False, -3 * 2**30)])
    assert (found.runs, found.median_error, found.pef, found.c1, found.mcp) == (3, 0.2, 0.5, pytest.approx(2 / 3), -1)
    assert aggregate([]).median_error is None


# ---------------------------------------------------------------------- all runs


def test_the_summary_leaves_runs_that_ran_out_of_memory_to_the_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xmem, "LOADED_BYTES", {"NVIDIA GeForce RTX 3060": 34 * MIB})
    records = [
        record(500, id="large"),
        record(500, id="small", batch_size=4),
        record(900, id="out", oom=True),
        record(500, id="other"),
    ]
    predictions = [
        xmem.Prediction("large", reserved_bytes=476 * MIB, reached_bytes=476 * MIB, seconds=0.5),
        xmem.Prediction("small", reserved_bytes=366 * MIB, reached_bytes=366 * MIB, seconds=1.5),
        xmem.Prediction("out", reserved_bytes=2000 * MIB, reached_bytes=700 * MIB, out_of_memory=True, seconds=1.0),
        xmem.Prediction("other", skipped="memtrain has no optimizer Rprop."),
    ]
    xmem.report(records, predictions, tmp_path / "found.json")
    written = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    total = written["summary"]
    assert (total["scored"], total["skipped"], total["reasons"]) == (3, 1, {"memtrain has no optimizer Rprop.": 1})
    assert total["median_error_batch16"] == pytest.approx(0.02)
    assert total["median_error"] == pytest.approx((0.02 + 0.2) / 2)
    assert total["median_signed_error"] == pytest.approx((0.02 - 0.2) / 2)
    assert (total["estimation_failure"], total["seconds_per_prediction"]) == (0.0, 1.0)
    assert [one["predicted_out_of_memory"] for one in written["records"]] == [False, False, True]
    assert written["by_the_study"]["memtrain"]["c1"] == 1.0
    printed = capsys.readouterr().out
    assert "other: skipped: memtrain has no optimizer Rprop." in printed
    assert printed.splitlines()[-1].startswith("xmem: 3 runs scored and 1 skipped, median error 11.00 % (2.00 % with 16 rows")


def test_a_prediction_whose_cap_is_too_low_is_raised_and_its_bare_error_kept() -> None:
    (found,) = xmem.results([record(504)], [xmem.Prediction("one", 504 * MIB, 504 * MIB)])
    assert (found.predicted_bytes, found.bare_error) == (504 * MIB, 0.0)
    assert found.estimate_bytes == pytest.approx(505 * MIB, abs=1)


def test_nothing_scored_is_a_summary_without_figures() -> None:
    total = xmem.summary([], [xmem.Prediction("one", failed="ValueError: no")])
    assert (total["scored"], total["skipped"], total["median_error"], total["estimation_failure"]) == (0, 1, None, None)


def test_constants_come_from_runs_whose_lengths_are_no_chance(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [{}, {"batch_size": 4}, {"batch_size": 1, "seq_padding": "fixed_128"}, {"oom": True}]
    records = [record(500, **kind) for kind in kinds]
    reserved = (470, 100, 460, 480)
    xmem.derive_constants(records, [xmem.Prediction("one", size * MIB, size * MIB) for size in reserved])
    assert capsys.readouterr().out == "NVIDIA GeForce RTX 3060: median 35 MiB of 2 runs\n  E2: 30, 40\n"


def test_the_libraries_of_each_record_are_described() -> None:
    assert {xmem.environment(record()), xmem.environment(record(input_size=[3, 86, 86]))} <= ENVIRONMENTS.keys()


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        xmem.Failed, match=r"nothing.jsonl cannot be read .*: give a file of JSON objects with an id, one a line"
    ):
        xmem.read(tmp_path / "nothing.jsonl")
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"id": "a"}\n{"id": "a"}\n', encoding="utf-8")
    with pytest.raises(xmem.Failed, match=r"twice.jsonl has 2 records with 1 ids: give one or more, each with its own"):
        xmem.read(twice)


def test_a_record_without_what_decides_is_skipped_with_what_is_missing() -> None:
    told = xmem.predict({"id": "a", "model": "gpt2", "ground_bytes": 0})
    assert (
        told.skipped
        == "the record does not say optimizer and batch_size and gpu and ground_bytes and total_gpu_memory and real_oom."
    )
