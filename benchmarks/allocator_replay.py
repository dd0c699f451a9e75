"""Whether the simulated caching allocator does what real ones did: every trace of a folder, replayed and compared.

The files are snapshots of ``torch.cuda.memory``, see benchmarks/snapshots.py. A recording does not say how much memory was
left, where cudaMalloc put a segment, or when ``empty_cache`` was called. So the simulation is told the addresses of new
segments and when a release happened. What it has to find is the address of every allocation, when a segment is obtained and
how large it is, which segments and pages are released, the bytes reserved after every record, and each block at the end.
Each device of a file counts as a trace. Prints a table and one line; exits 1 on any difference.

Usage: python benchmarks/allocator_replay.py FOLDER [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from snapshots import FREED, OBTAINED, RELEASED, REMARKS, Record, Recording, allocator_at_start, read, start_of

from memtrain.memory.allocator import CachingAllocator, OutOfMemory
from memtrain.memory.allocator_config import AllocatorConfig
from memtrain.memory.segments import DeviceMemory

# Addresses that no recording has.
MADE_UP = 1 << 60


class Operation(NamedTuple):
    """One call to replay, with what was recorded about segments since the call before."""

    action: str  # alloc, free, free_requested (completed later), free_completed, oom, end or one that is not known
    address: int
    size: int
    stream: int
    segments: tuple[Record, ...]
    reserved_change: int


def operations(recording: Recording) -> Iterator[Operation]:
    """The calls of a recording; a free that is completed at once is one call."""
    records = [record for record in recording.records if record.action not in REMARKS]
    records.append(Record("end", 0, 0, 0))
    segments: list[Record] = []
    change = 0
    position = 0
    while position < len(records):
        record = records[position]
        position += 1
        if record.action in OBTAINED or record.action in RELEASED:
            segments.append(record)
            change += record.size if record.action in OBTAINED else -record.size
            continue
        action = record.action
        if action == "free_requested":
            following = records[position]
            if following.action == "free_completed" and following.address == record.address:
                action, position = "free", position + 1
        yield Operation(action, record.address, record.size, record.stream, tuple(segments), change)
        segments, change = [], 0


class RecordedMemory(DeviceMemory):
    """A device that answers what was recorded, and notes what it is asked for.

    The size of the card says how many addresses an expandable segment has.
    """

    def __init__(self, card_bytes: int) -> None:
        super().__init__(total_bytes=card_bytes)
        self.asked: list[tuple[str, int, int]] = []
        self._script: list[Record] = []
        self._fails = False

    def begin(self, script: tuple[Record, ...], fails: bool) -> None:
        """Take up what was recorded for the next call; ``fails``: memory ran out in it."""
        self.asked = []
        self._script = list(script)
        self._fails = fails

    def allocate(self, size: int, stream: int) -> int | None:
        if self._script and (self._script[0].action, self._script[0].size, self._script[0].stream) == (
            "segment_alloc",
            size,
            stream,
        ):
            address = self._script.pop(0).address
        elif self._fails:
            return None
        else:
            address = MADE_UP + super().reserve(size, stream)
        self.asked.append(("segment_alloc", address, size))
        return address

    def release(self, address: int, size: int) -> None:
        self._released("segment_free", address, size)

    def reserve(self, size: int, stream: int) -> int:
        mapped = next((record for record in self._script if record.action == "segment_map"), None)
        return MADE_UP + super().reserve(size, stream) if mapped is None else mapped.address

    def map(self, address: int, size: int) -> bool:
        if self._script and (self._script[0].action, self._script[0].address, self._script[0].size) == (
            "segment_map",
            address,
            size,
        ):
            self._script.pop(0)
        elif self._fails:
            return False
        self.asked.append(("segment_map", address, size))
        return True

    def unmap(self, address: int, size: int) -> None:
        self._released("segment_unmap", address, size)

    def _released(self, action: str, address: int, size: int) -> None:
        self.asked.append((action, address, size))
        for position, record in enumerate(self._script):
            if (record.action, record.address, record.size) == (action, address, size):
                del self._script[position]
                break


@dataclass
class Score:
    """How one trace compares: what was recorded, and how much of it the simulation does otherwise."""

    trace: str
    device: int
    settings: str
    allocations: int = 0
    frees: int = 0
    obtained: int = 0  # segments from cudaMalloc and mapped ranges of pages
    released: int = 0  # segments given back and unmapped ranges of pages
    out_of_memory: int = 0
    blocks: int = 0  # at the end
    peak_reserved_bytes: int = 0
    wrong_addresses: int = 0
    wrong_frees: int = 0
    wrong_obtained: int = 0
    wrong_released: int = 0
    wrong_out_of_memory: int = 0
    wrong_blocks: int = 0
    reserved_error_bytes: int = 0  # the largest
    unknown_actions: int = 0
    problem: str = ""  # why it could not be replayed
    note: str = ""
    seconds: float = 0.0  # of processor time, in the replay alone

    @property
    def differences(self) -> list[str]:
        """What differs, in words; empty where the simulation is exact."""
        counts = {name: value for name, value in asdict(self).items() if name.startswith("wrong_") and value}
        found = [f"{value} {name.replace('_', ' ')}" for name, value in counts.items()]
        if self.reserved_error_bytes:
            found.append(f"reserved bytes off by up to {self.reserved_error_bytes}")
        if self.unknown_actions:
            found.append(f"{self.unknown_actions} records of an unknown kind")
        return [*found, self.problem] if self.problem else found


def score(recording: Recording, config: AllocatorConfig | None = None) -> Score:
    """Replay a recording, by other settings than its own where they are given."""
    config = recording.config if config is None else config
    result = Score(recording.name, recording.device, "expandable" if config.expandable_segments else "segments")
    memory = RecordedMemory(recording.card_bytes)
    start = start_of(recording)
    notes = [f"{start.contradictions} contradictory records"] if start.contradictions else []
    if any(segment.private for segment in recording.segments):
        notes.append("private pools, replayed as one")
    result.note = ", ".join(notes)
    try:
        allocator = allocator_at_start(recording, start, config, memory)
    except ValueError as error:
        result.problem = f"its start cannot be rebuilt: {error}"
        return result
    calls = list(operations(recording))
    started = time.process_time()
    _replay(calls, allocator, memory, result)
    result.seconds = time.process_time() - started
    result.peak_reserved_bytes = allocator.peak_reserved_bytes
    recorded = {
        (block.address, block.size, block.state) for segment in recording.segments for block in segment.blocks if block.size
    }
    result.blocks = len(recorded)
    result.wrong_blocks = max(len(recorded - {*allocator.blocks()}), len({*allocator.blocks()} - recorded))
    return result


def _replay(calls: list[Operation], allocator: CachingAllocator, memory: RecordedMemory, result: Score) -> None:
    """Make every call and count what differs."""
    moved: dict[int, int] = {}  # where the simulation has what was recorded elsewhere
    expected = allocator.reserved_bytes
    for action, address, size, stream, segments, change in calls:
        if segments:
            expected += change
            _begin(segments, action == "oom", allocator, memory)
        elif action == "oom":
            memory.begin((), True)
        if action == "alloc":
            result.allocations += 1
            try:
                found = allocator.malloc(size, stream)
            except OutOfMemory:
                result.wrong_out_of_memory += 1
                found = 0
            if found != address:
                result.wrong_addresses += 1
                moved[address] = found
        elif action == "free" or action in FREED:
            result.frees += action != "free_completed"
            place = moved.get(address, address) if moved else address
            try:
                if action == "free_completed":
                    allocator.complete(place)
                else:
                    allocator.free(place, deferred=action == "free_requested")
            except (KeyError, ValueError):
                result.wrong_frees += 1
            if moved and action != "free_requested":
                moved.pop(address, None)
        elif action == "oom":
            result.out_of_memory += 1
            try:
                allocator.malloc(size, stream)
                result.wrong_out_of_memory += 1
            except OutOfMemory:
                pass
        elif action != "end":
            result.unknown_actions += 1
        if segments or memory.asked or action == "oom":
            _compare(segments, memory, result)
            memory.begin((), False)
        if allocator.reserved_bytes != expected:
            result.reserved_error_bytes = max(result.reserved_error_bytes, abs(allocator.reserved_bytes - expected))


def _begin(segments: tuple[Record, ...], ran_out: bool, allocator: CachingAllocator, memory: RecordedMemory) -> None:
    """Prepare a call about which segments were recorded.

    Releases that come first are those of ``empty_cache``, or of a first attempt that could not obtain anything, which
    amounts to the same. Later ones mean that an attempt failed half-way.
    """
    leading = 0
    while leading < len(segments) and segments[leading].action in RELEASED:
        leading += 1
    memory.begin(segments, ran_out or any(record.action in RELEASED for record in segments[leading:]))
    if leading:
        allocator.empty_cache()


def _compare(segments: tuple[Record, ...], memory: RecordedMemory, result: Score) -> None:
    for name, actions in (("obtained", OBTAINED), ("released", RELEASED)):
        recorded = Counter((record.action, record.address, record.size) for record in segments if record.action in actions)
        asked = Counter(event for event in memory.asked if event[0] in actions)
        missing, extra = (recorded - asked).total(), (asked - recorded).total()
        setattr(result, name, getattr(result, name) + recorded.total())
        setattr(result, f"wrong_{name}", getattr(result, f"wrong_{name}") + max(missing, extra))


def replay_folder(folder: Path) -> tuple[list[Score], dict[str, str]]:
    """The scores of all traces of a folder, and the files that have none, each with the reason."""
    scores: list[Score] = []
    unusable: dict[str, str] = {}
    for path in sorted((*folder.glob("*.json"), *folder.glob("*.json.gz"))):
        try:
            recordings = read(path)
        except (OSError, EOFError, ValueError, LookupError) as error:
            unusable[path.name] = f"it cannot be read: {error!r}"
            continue
        usable = [recording for recording in recordings if recording.has_allocations]
        scores += [score(recording) for recording in usable]
        if not usable:
            records = sum(len(recording.records) for recording in recordings)
            unusable[path.name] = f"no allocation among {records} records"
    return scores, unusable


def _print(scores: list[Score], unusable: dict[str, str]) -> None:
    columns = ("allocations", "frees", "obtained", "released", "blocks")
    header = "".join(f"{name:>12}" for name in columns)
    print(f"{'trace':20}{'device':>6}  {'settings':12}{header}{'peak reserved':>16}  result")
    for row in scores:
        counts = "".join(f"{getattr(row, name):12,}" for name in columns)
        result = "; ".join(row.differences) or "exact"
        note = f" ({row.note})" if row.note else ""
        print(f"{row.trace:20}{row.device:6}  {row.settings:12}{counts}{row.peak_reserved_bytes:16,}  {result}{note}")
    for name, reason in unusable.items():
        print(f"{name}: no usable trace, {reason}")


def main(folder: Path, report: Path | None) -> int:
    """Replay the folder, print and write what is found, and return the exit code."""
    scores, unusable = replay_folder(folder)
    if not scores:
        print(f"{folder} holds no trace: give a folder of snapshots, *.json or *.json.gz.", file=sys.stderr)
        return 2
    _print(scores, unusable)
    exact = sum(not row.differences for row in scores)
    seconds = sum(row.seconds for row in scores)
    rate = sum(row.allocations + row.frees for row in scores) / seconds if seconds else 0.0
    totals = {
        name: sum(getattr(row, name) for row in scores)
        for name in ("allocations", "obtained", "released", "out_of_memory", "blocks")
    }
    print(
        f"allocator: {exact} of {len(scores)} device traces exact in {len({row.trace for row in scores})} files, "
        + ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in totals.items())
        + f"; {rate:,.0f} allocations and frees per second of processor time"
    )
    if report is not None:
        summary = {"traces": len(scores), "exact": exact, "events_per_second": round(rate)}
        records = [{**asdict(row), "exact": not row.differences} for row in scores]
        content = {"summary": summary, "records": records, "unusable": unusable}
        report.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if exact == len(scores) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of snapshots")
    parser.add_argument("--json", type=Path, dest="report", help="file for the same as data")
    arguments = parser.parse_args()
    sys.exit(main(arguments.folder, arguments.report))
