"""The verdicts of the two benchmarks beside other trainers: ratios, intervals, tables and exit codes, for runs made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import overhead
import peak_vs_peers
import peers
import pytest


def run(losses: list[float], seconds: list[float], **more: Any) -> Any:
    given = {"peak_bytes": None, "plan": None, "predicted_bytes": None, "versions": {}, **more}
    return peers.Run(losses=losses, cpu_seconds=seconds, seconds=seconds, **given)


def test_who_begins_a_round_moves_on_and_comes_round_again() -> None:
    assert [peers.rotated("abc", by) for by in (0, 2, 4)] == [["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"]]


def test_times_that_touch_a_watched_step_do_not_count() -> None:
    # Six steps have five times between updates; steps 1, 2 and 6 are watched.
    assert peers.steady([12, 23, 34, 45, 56]) == [34, 45]
    # Above the usual 2: 7 and 6 at the beginning, 5 at the end.
    assert overhead.watched([9, 8, 2, 2, 3, 7]) == 18


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5, 1, 2, 3, 4, 6, 7, 8, 9, 10], (2, 9, 1 - 22 / 1024)),
        ([3, 1, 2], (1, 3, 0.75)),
        ([4], (4, 4, 0.0)),
    ],
)
def test_the_interval_of_a_median_is_a_pair_of_order_statistics(
    values: list[float], expected: tuple[float, float, float]
) -> None:
    assert overhead.interval(values) == expected


def overhead_table(ours: float, loss: float = 2.0) -> list[Any]:
    loop, memtrain = run([2.0], [9, 9, 1, 1, 9]), run([loss], [9, 9, ours, ours, 9])
    return overhead.rows(overhead.CONTENDERS[:2], [[loop, memtrain]] * 3)


def test_a_ratio_within_its_bound_and_equal_losses_exit_with_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "overhead.json"
    assert overhead.report(overhead_table(1.015625), ["a machine"], file) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "a machine"
    assert last == (
        "overhead: memtrain takes 1.0156 of the plain loop's processor time per step "
        "(1.0156 to 1.0156, bound 1.02 kept), losses equal to 0.0e+00"
    )
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["summary"]["ratio"] == 1.015625
    assert [record["ratios"] for record in written["records"]] == [[1.0] * 3, [1.015625] * 3]


@pytest.mark.parametrize(("ours", "loss"), [(1.03125, 2.0), (1.0, 2.001)])
def test_too_slow_or_another_loss_exits_with_one(ours: float, loss: float) -> None:
    assert overhead.report(overhead_table(ours, loss), []) == 1


def peak_table(ours: int, loss: float = 2.0) -> list[Any]:
    reference = peers.Contender(name="HF Trainer", kind="hf")
    contenders = [reference, *peak_vs_peers.budgets([1000, 800])]
    peaks = [run([2.0, 1.0], [], peak_bytes=1000)]
    peaks += [run([2.0, 1.0], [], peak_bytes=ours, predicted_bytes=590, plan="a plan") for _ in range(2)]
    timed = [run([2.0, 1.0], [9, 9, 4, 9]), *(run([2.0, loss - 1], [9, 9, 3, 9]) for _ in range(2))]
    return peak_vs_peers.rows(contenders, peaks, [timed])


def test_memtrain_gets_a_share_of_the_first_peak_and_the_smallest_peak() -> None:
    assert [contender.budget_bytes for contender in peak_vs_peers.budgets([1000, 550, 700])] == [600, 550]


def test_peaks_within_the_budgets_and_equal_losses_exit_with_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "peaks.json"
    assert peak_vs_peers.report(peak_table(590), ["a machine"], file) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["HF", "Trainer", "1,000", "1000", "B", "1.000", "4.000", "1.000", "0.0e+00"]
    assert lines[3].endswith("590      590 B  0.590    3.000  0.750          0.0e+00")
    assert lines[5:7] == ["memtrain, 60 % of HF Trainer: budget 600 B, predicted 590 B (+0.0000 %)", "  a plan"]
    assert lines[-1] == (
        "peak vs peers: memtrain takes 59.0 % of HF Trainer's peak and 0.75 of its time per step, "
        "losses equal to 0.0e+00, within its budgets"
    )
    assert json.loads(file.read_text(encoding="utf-8"))["summary"]["peak_ratio"] == 0.59


@pytest.mark.parametrize(("ours", "loss"), [(601, 2.0), (590, 2.001)])
def test_more_than_the_budget_or_another_loss_exits_with_one(ours: int, loss: float) -> None:
    assert peak_vs_peers.report(peak_table(ours, loss), []) == 1


@pytest.mark.parametrize("benchmark", [overhead, peak_vs_peers], ids=["overhead", "peak_vs_peers"])
def test_what_cannot_be_installed_is_said_and_exits_with_two(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(command: list[str], **_: Any) -> Any:
        return peers.subprocess.CompletedProcess(command, 1, "", "warning\nno such version\n")

    monkeypatch.setattr(peers.subprocess, "run", refuse)
    assert benchmark.main(tmp_path, 1, 1, None) == 2
    assert capsys.readouterr().err == "venv cannot make an environment: no such version\n"
