"""The allocator against recordings of real ones, and the benchmark that compares them on files made by hand."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import allocator_replay
import pytest

from memtrain.memory.allocator_config import TieBreak

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "allocator_traces"
MIB = 1 << 20
BASE = 1 << 40

Entry = dict[str, Any]


def entry(action: str, offset: int, size: int, stream: int = 0) -> Entry:
    return {"action": action, "addr": BASE + offset, "size": size, "stream": stream}


def freed(offset: int, size: int) -> list[Entry]:
    return [entry("free_requested", offset, size), entry("free_completed", offset, size)]


def segment(offset: int, *blocks: tuple[int, str], **other: Any) -> Entry:
    """A segment of a snapshot with the keys that every release of torch writes; blocks as (bytes, state)."""
    return {
        "address": BASE + offset,
        "total_size": sum(size for size, _ in blocks),
        "stream": 0,
        "segment_type": "large",
        "blocks": [{"size": size, "state": state} for size, state in blocks],
        **other,
    }


USED, CACHED, WAITING = "active_allocated", "inactive", "active_pending_free"


def write(folder: Path, name: str, segments: list[Entry], *traces: list[Entry], **other: Any) -> Path:
    path = folder / name
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as stream:
        json.dump({"segments": segments, "device_traces": traces, **other}, stream)
    return path


def test_an_old_file_with_the_fewest_keys_is_replayed(tmp_path: Path) -> None:
    trace = [
        entry("segment_alloc", 0, 20 * MIB),
        entry("alloc", 0, 8 * MIB),
        entry("alloc", 8 * MIB, 5 * MIB),
        *freed(0, 8 * MIB),
    ]
    write(tmp_path, "old.json", [segment(0, (8 * MIB, CACHED), (5 * MIB, USED), (7 * MIB, CACHED))], trace)
    (score,), unusable = allocator_replay.replay_folder(tmp_path)
    assert (score.differences, unusable) == ([], {})
    assert (score.allocations, score.frees, score.obtained, score.blocks) == (2, 1, 1, 3)
    assert score.peak_reserved_bytes == 20 * MIB


def test_what_was_there_before_the_recording_is_rebuilt(tmp_path: Path) -> None:
    # The first block was asked for as 5 MiB and is half a MiB longer, which only the address after it tells.
    half = MIB // 2
    trace = [entry("alloc", 5 * MIB + half, 6 * MIB), *freed(0, 5 * MIB), entry("alloc", 0, 5 * MIB + half)]
    blocks = ((5 * MIB + half, USED), (6 * MIB, USED), (8 * MIB + half, CACHED))
    write(tmp_path, "late.json.gz", [segment(0, *blocks)], trace)
    (score,), _ = allocator_replay.replay_folder(tmp_path)
    assert score.differences == []
    assert (score.allocations, score.peak_reserved_bytes) == (2, 20 * MIB)


def test_waiting_blocks_releases_and_remarks_are_replayed(tmp_path: Path) -> None:
    trace = [
        *(entry("segment_alloc", 0, 30 * MIB), entry("alloc", 0, 30 * MIB), entry("free_requested", 0, 30 * MIB)),
        *(entry("segment_alloc", 64 * MIB, 30 * MIB), entry("alloc", 64 * MIB, 30 * MIB), entry("snapshot", 0, 30 * MIB)),
        *(entry("free_completed", 0, 30 * MIB), entry("segment_free", 0, 30 * MIB)),
        *(entry("free_requested", 64 * MIB, 30 * MIB), entry("segment_alloc", 0, 40 * MIB), entry("alloc", 0, 40 * MIB)),
        *freed(0, 40 * MIB),
    ]
    write(tmp_path, "busy.json", [segment(0, (40 * MIB, CACHED)), segment(64 * MIB, (30 * MIB, WAITING))], trace)
    (score,), _ = allocator_replay.replay_folder(tmp_path)
    assert score.differences == []
    assert (score.allocations, score.frees, score.obtained, score.released) == (3, 3, 3, 1)


def test_an_expandable_segment_that_runs_out_of_memory_is_replayed(tmp_path: Path) -> None:
    out = {"action": "oom", "device_free": MIB, "size": 70 * MIB, "stream": 0}
    trace = [
        *(entry("segment_map", 0, 60 * MIB), entry("alloc", 0, 50 * MIB), *freed(0, 50 * MIB)),
        *(entry("alloc", 0, 10 * MIB), entry("segment_unmap", 20 * MIB, 40 * MIB), out),
    ]
    blocks = ((10 * MIB, USED), (10 * MIB, CACHED))
    write(tmp_path, "full.json", [segment(0, *blocks, is_expandable=True)], trace)
    (score,), _ = allocator_replay.replay_folder(tmp_path)
    assert score.differences == []
    assert (score.settings, score.out_of_memory, score.obtained, score.released) == ("expandable", 1, 1, 1)


def test_each_device_counts_and_files_without_allocations_are_named(tmp_path: Path) -> None:
    one = [entry("segment_alloc", 0, 30 * MIB), entry("alloc", 0, 30 * MIB)]
    segments = [segment(0, (30 * MIB, USED), device=0), segment(0, (30 * MIB, USED), device=2)]
    write(tmp_path, "several.json", segments, one, [], one)
    write(tmp_path, "ended.json", [], [entry("segment_free", 0, 30 * MIB)])
    write(tmp_path, "untraced.json", [])
    (tmp_path / "broken.json.gz").write_bytes(b"")
    (tmp_path / "odd.json").write_text('{"segments": [{}], "device_traces": [[]]}', encoding="utf-8")
    scores, unusable = allocator_replay.replay_folder(tmp_path)
    assert [(score.device, score.differences) for score in scores] == [(0, []), (2, [])]
    assert unusable == {
        "broken.json.gz": "it cannot be read: JSONDecodeError('Expecting value: line 1 column 1 (char 0)')",
        "ended.json": "no allocation among 1 records",
        "odd.json": "it cannot be read: KeyError('address')",
        "untraced.json": "no allocation among 0 records",
    }


def test_a_build_that_numbers_segments_breaks_ties_by_them(tmp_path: Path) -> None:
    segments = [
        segment(0, (30 * MIB, USED), registration_counter=7),
        segment(64 * MIB, (30 * MIB, CACHED), registration_counter=3),
    ]
    trace = [*freed(64 * MIB, 30 * MIB), *freed(0, 30 * MIB), entry("alloc", 64 * MIB, 30 * MIB), entry("alloc", 0, 30 * MIB)]
    write(tmp_path, "new.json", segments, [*trace, *freed(64 * MIB, 30 * MIB)])
    (score,), _ = allocator_replay.replay_folder(tmp_path)
    assert score.differences == []
    for numbered in segments:
        del numbered["registration_counter"]
    write(tmp_path, "new.json", segments, [*trace, *freed(64 * MIB, 30 * MIB)])
    (score,), _ = allocator_replay.replay_folder(tmp_path)
    assert score.wrong_addresses == 2


@pytest.mark.parametrize(
    ("trace", "segments", "difference"),
    [
        (
            [entry("segment_alloc", 0, 20 * MIB), entry("alloc", 12 * MIB, 8 * MIB), entry("alloc", 0, 12 * MIB)],
            [segment(0, (12 * MIB, USED), (8 * MIB, USED))],
            "2 wrong addresses; 2 wrong blocks",
        ),
        (
            [entry("segment_alloc", 0, 20 * MIB), entry("alloc", 0, 8 * MIB), entry("alloc", 8 * MIB, 10 * MIB)],
            [segment(0, (8 * MIB, USED), (12 * MIB, USED))],
            "2 wrong blocks",
        ),
        (
            [entry("segment_alloc", 0, 22 * MIB), entry("alloc", 0, 22 * MIB), entry("segment_alloc", 32 * MIB, 2 * MIB)],
            [segment(0, (22 * MIB, USED)), segment(32 * MIB, (2 * MIB, CACHED))],
            "1 wrong obtained; 1 wrong blocks; reserved bytes off by up to 2097152",
        ),
        (
            [entry("segment_alloc", 0, 22 * MIB), entry("alloc", 0, 22 * MIB), entry("segment_free", 64 * MIB, 20 * MIB)],
            [segment(0, (22 * MIB, USED)), segment(128 * MIB, (20 * MIB, CACHED))],
            "1 wrong released; 1 wrong blocks; reserved bytes off by up to 20971520",
        ),
        (
            [entry("segment_alloc", 0, 20 * MIB), entry("alloc", 0, 20 * MIB), entry("resized", 0, 20 * MIB)],
            [segment(0, (20 * MIB, USED))],
            "1 records of an unknown kind",
        ),
        (
            [entry("segment_alloc", 0, 20 * MIB), entry("alloc", 0, 20 * MIB), entry("oom", 0, 10 * MIB)],
            [segment(0, (20 * MIB, USED))],
            "exact",
        ),
    ],
)
def test_a_difference_is_printed_and_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    trace: list[Entry],
    segments: list[Entry],
    difference: str,
) -> None:
    write(tmp_path, "one.json", segments, trace)
    report = tmp_path / "report"
    exact = difference == "exact"
    assert allocator_replay.main(tmp_path, report) == (0 if exact else 1)
    data = json.loads(report.read_text(encoding="utf-8"))
    assert (data["summary"]["traces"], data["summary"]["exact"]) == (1, int(exact))
    assert [record["exact"] for record in data["records"]] == [exact]
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].endswith(f"  {difference}")
    assert printed[-1].startswith(f"allocator: {int(exact)} of 1 device traces exact in 1 files, ")


def test_a_file_that_contradicts_itself_is_not_exact(tmp_path: Path) -> None:
    write(tmp_path, "lost.json", [], [entry("segment_alloc", 0, 20 * MIB), entry("alloc", 0, MIB), *freed(64 * MIB, MIB)])
    (score,), _ = allocator_replay.replay_folder(tmp_path)
    assert score.differences == ["its start cannot be rebuilt: 1 blocks lie outside all segments."]
    assert score.note == "2 contradictory records"


def test_a_folder_without_traces_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert allocator_replay.main(tmp_path, None) == 2
    assert capsys.readouterr().err == f"{tmp_path} holds no trace: give a folder of snapshots, *.json or *.json.gz.\n"


needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no recordings of real allocators in {TRACES}")


@needs_traces
def test_every_recording_of_a_real_allocator_is_reproduced() -> None:
    scores, _ = allocator_replay.replay_folder(TRACES)
    assert len(scores) >= 30
    assert {f"{score.trace}, device {score.device}": score.differences for score in scores if score.differences} == {}


@needs_traces
@pytest.mark.parametrize("tie_break", [TieBreak.BLOCK, TieBreak.SEGMENT])
def test_another_order_of_equal_blocks_would_be_noticed(tie_break: TieBreak) -> None:
    (recording,) = allocator_replay.read(TRACES / "trace_04.json.gz")
    assert allocator_replay.score(recording).differences == []
    other = allocator_replay.score(recording, replace(recording.config, tie_break=tie_break))
    assert other.wrong_addresses > 100


@needs_traces
def test_another_size_of_segments_would_be_noticed() -> None:
    (recording,) = allocator_replay.read(TRACES / "trace_04.json.gz")
    other = allocator_replay.score(recording, replace(recording.config, large_segment_bytes=22 * MIB))
    assert other.wrong_obtained > 0
    assert other.reserved_error_bytes > 0
