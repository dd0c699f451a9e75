"""The verdict of the benchmark on published peaks: table, summary and exit code, for results made by hand."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("sketch_parity")


def result(benchmark: ModuleType, predicted_bytes: int, measured_bytes: int = 10_000) -> Any:
    return benchmark.Result(
        model="ibm/PowerLM-3b",
        method="lora",
        batch=8,
        length=4096,
        measured_bytes=measured_bytes,
        predicted_allocated_bytes=predicted_bytes,
        error=predicted_bytes / measured_bytes - 1,
        predicted_reserved_bytes=12_000,
        peak_phase="update",
        assumed=("a value was assumed",),
        seconds=1.5,
        environment="transformers-4.45.2",
        torch="2.13.0",
        source="peaks.csv",
    )


def test_all_peaks_within_the_bound_exit_with_zero(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "parity.json"
    assert benchmark.report([result(benchmark, 10_004), result(benchmark, 9_998)], file) == 0
    *_, first, second, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["ibm/PowerLM-3b", "lora", "8", "×", "4096", "10,000", "10,004", "+0.0400", "12,000", "1.5"]
    assert second.split()[7] == "-0.0200"
    assert last == "sketch parity: 2 of 2 published peaks within 0.05 %, largest error 0.0400 %, simulated in 3.0 s"
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["summary"] == {
        "records": 2,
        "within": 2,
        "bound": 0.0005,
        "largest_error": pytest.approx(0.0004),
        "seconds": 3.0,
    }
    assert [record["error"] for record in written["records"]] == pytest.approx([0.0004, -0.0002])
    assert written["records"][0]["assumed"] == ["a value was assumed"]


@pytest.mark.parametrize("predicted_bytes", [10_006, 9_994])
def test_one_peak_beyond_the_bound_on_either_side_exits_with_one(benchmark: ModuleType, predicted_bytes: int) -> None:
    assert benchmark.report([result(benchmark, 10_000), result(benchmark, predicted_bytes)]) == 1


def test_what_cannot_be_installed_is_said_and_exits_with_two(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    # No index and an empty folder of packages: pip fails at once and asks nobody.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    assert benchmark.main(tmp_path, None) == 2
    said = capsys.readouterr().err
    assert said.startswith("pip cannot install transformers-4.48.1 (")
    assert "give it an index that has these versions." in said


def test_libraries_that_are_installed_are_not_installed_again(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark.subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    (tmp_path / "installed.txt").write_text("\n".join(benchmark.ENVIRONMENTS["transformers-4.45.2"]) + "\n", encoding="utf-8")
    benchmark.install("transformers-4.45.2", tmp_path)


def test_each_peak_names_a_known_model_method_and_environment(benchmark: ModuleType) -> None:
    assert len(benchmark.PEAKS) == 6
    for peak in benchmark.PEAKS:
        assert peak.model in benchmark.MODELS
        assert peak.method in ("full", "lora")
        assert peak.environment in benchmark.ENVIRONMENTS
