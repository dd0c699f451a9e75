"""Recorded runs of PyTorch's CUDA caching allocator: reading them, and rebuilding what was there when recording began.

A file is what ``torch.cuda.memory._snapshot`` returns, as JSON, compressed or not: the segments with their blocks at the end,
and per device the last allocations and frees, with the sizes that were asked for. What a run held before is rebuilt by going
through its records backwards. Keys that differ between releases of torch are read in either form.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from memtrain.memory.allocator import CachingAllocator
from memtrain.memory.allocator_config import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorConfig,
    TieBreak,
)
from memtrain.memory.segments import DeviceMemory, State

OBTAINED = ("segment_alloc", "segment_map")
RELEASED = ("segment_free", "segment_unmap")
FREED = ("free_requested", "free_completed")
# What the recorder notes besides: nothing happens to memory.
REMARKS = ("snapshot", "user_defined")
CARDS_GIB = (16, 24, 32, 40, 48, 80, 141, 192, 288)
_STATES = {"active_allocated": State.ALLOCATED, "inactive": State.FREE}


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a device's trace; allocations and frees carry the bytes that were asked for."""

    action: str
    address: int
    size: int
    stream: int


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """A block of a segment at the end of the recording; ``requested`` is what was asked for."""

    address: int
    size: int
    requested: int
    state: State


@dataclass(frozen=True, slots=True)
class RecordedSegment:
    """A segment at the end of the recording; of an expandable one, a stretch of mapped pages."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    private: bool
    order: int  # in which segments were obtained, where torch says it
    blocks: tuple[RecordedBlock, ...]


@dataclass(frozen=True)
class Recording:
    """What one device of a file did."""

    name: str
    device: int
    config: AllocatorConfig
    segments: tuple[RecordedSegment, ...]
    records: tuple[Record, ...]

    @property
    def card_bytes(self) -> int:
        """The smallest usual memory of a card that what was reserved at the end fits into; its own is not recorded."""
        reserved = sum(segment.size for segment in self.segments)
        return next((size << 30 for size in CARDS_GIB if reserved < size << 30), CARDS_GIB[-1] << 30)

    @property
    def has_allocations(self) -> bool:
        """Whether there is anything to replay."""
        return any(record.action == "alloc" for record in self.records)


def read(path: Path) -> list[Recording]:
    """Every device of a file that has a trace, an empty one included."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as stream:
        snapshot: dict[str, Any] = json.load(stream)
    segments = snapshot.get("segments", [])
    config = _config(snapshot.get("allocator_settings") or {}, segments)
    return [
        Recording(
            name=path.name.removesuffix(".gz").removesuffix(".json"),
            device=device,
            config=config,
            segments=tuple(_segment(segment) for segment in segments if segment.get("device", 0) == device),
            records=tuple(
                Record(entry["action"], entry.get("addr", 0), entry.get("size", 0), entry.get("stream", 0)) for entry in trace
            ),
        )
        for device, trace in enumerate(snapshot.get("device_traces", []))
    ]


def _config(settings: dict[str, Any], segments: list[dict[str, Any]]) -> AllocatorConfig:
    largest_split = settings.get("max_split_size", -1)
    divisions = settings.get("roundup_power2_divisions") or {}
    # The builds that break ties by segment are those that say in which order segments were obtained.
    counted = any("registration_counter" in segment for segment in segments)
    return AllocatorConfig(
        expandable_segments=settings.get("expandable_segments", any(segment.get("is_expandable") for segment in segments)),
        max_split_bytes=None if largest_split in (-1, None) else largest_split,
        roundup_power2_divisions=tuple(divisions.get(str(1 << power), 0) for power in range(16)),
        tie_break=TieBreak.SEGMENT if counted else TieBreak.ADDRESS,
    )


def _segment(segment: dict[str, Any]) -> RecordedSegment:
    blocks, address = [], segment["address"]
    for block in segment["blocks"]:
        # Blocks without an address of their own follow each other.
        address = block.get("address", address)
        state = _STATES.get(block["state"], State.PENDING)
        blocks.append(RecordedBlock(address, block["size"], block.get("requested_size", block["size"]), state))
        address += block["size"]
    return RecordedSegment(
        address=segment["address"],
        size=segment["total_size"],
        stream=segment.get("stream", 0),
        small=segment.get("segment_type") == "small",
        expandable=bool(segment.get("is_expandable")),
        private=any(segment.get("segment_pool_id", ())),
        order=segment.get("registration_counter", 0),
        blocks=tuple(blocks),
    )


@dataclass(slots=True)
class Live:
    """A block in use; its size is not known where only the bytes asked for were recorded."""

    requested: int
    size: int | None
    state: State


@dataclass
class Start:
    """What a device held when recording began.

    Attributes:
        segments: bytes, stream, whether small, and order of each segment from cudaMalloc, by address.
        pages: stream, whether small, and bytes of each page of an expandable segment, by address.
        live: blocks in use, by address.
        contradictions: records that what came after them does not allow.
    """

    segments: dict[int, tuple[int, int, bool, int]] = field(default_factory=dict)
    pages: dict[int, tuple[int, bool, int]] = field(default_factory=dict)
    live: dict[int, Live] = field(default_factory=dict)
    contradictions: int = 0


def start_of(recording: Recording) -> Start:
    """The start, from the end: each record is undone, the last one first."""
    start = Start()
    large_page = recording.config.large_segment_bytes
    for segment in recording.segments:
        if segment.expandable:
            page = SMALL_SEGMENT_BYTES if segment.small else large_page
            for address in range(segment.address, segment.address + segment.size, page):
                start.pages[address] = segment.stream, segment.small, page
        else:
            start.segments[segment.address] = segment.size, segment.stream, segment.small, segment.order
        for block in segment.blocks:
            if block.state is not State.FREE:
                start.live[block.address] = Live(block.requested, block.size, block.state)
    for record in reversed(recording.records):
        _undo(record, start, large_page)
    return start


def _undo(record: Record, start: Start, large_page: int) -> None:
    possible = True
    match record.action:
        case "alloc":
            possible = start.live.pop(record.address, None) is not None
        case "free_completed":
            possible = record.address not in start.live
            start.live[record.address] = Live(record.size, None, State.PENDING)
        case "free_requested":
            possible = record.address in start.live
            if possible:
                start.live[record.address].state = State.ALLOCATED
        case "segment_alloc":
            possible = start.segments.pop(record.address, None) is not None
        case "segment_free":
            small = record.size == SMALL_SEGMENT_BYTES
            start.segments[record.address] = record.size, record.stream, small, 0
        case "segment_map":
            page = start.pages.get(record.address, (0, False, SMALL_SEGMENT_BYTES))[2]
            for address in range(record.address, record.address + record.size, page):
                possible = start.pages.pop(address, None) is not None and possible
        case "segment_unmap":
            small = record.size % large_page != 0
            page = SMALL_SEGMENT_BYTES if small else large_page
            for address in range(record.address, record.address + record.size, page):
                start.pages[address] = record.stream, small, page
    start.contradictions += not possible


def allocator_at_start(recording: Recording, start: Start, config: AllocatorConfig, memory: DeviceMemory) -> CachingAllocator:
    """An allocator that holds what the device held when recording began.

    Raises:
        ValueError: blocks overlap, or lie outside all segments: the file contradicts itself.
    """
    allocator = CachingAllocator(config, memory)
    _find_tails(recording, start, config)
    addresses = sorted(start.live)
    placed = 0

    def chain(address: int, size: int) -> list[tuple[int, State]]:
        """Sizes and states of the blocks of a stretch of mapped memory."""
        nonlocal placed
        found: list[tuple[int, State]] = []
        inside = addresses[bisect_left(addresses, address) : bisect_left(addresses, address + size)]
        placed += len(inside)
        position = address
        for block, following in pairwise([*inside, address + size]):
            live = start.live[block]
            length = config.block_bytes(live.requested) if live.size is None else live.size
            if position > block or block + length > following:
                raise ValueError(f"blocks overlap at {block:#x}.")
            if position < block:
                found.append((block - position, State.FREE))
            found.append((length, live.state))
            position = block + length
        if position < address + size:
            found.append((address + size - position, State.FREE))
        return found

    in_order = sorted(start.segments.items(), key=lambda item: (item[1][3], item[0]))
    for address, (size, stream, small, _) in in_order:
        allocator.adopt(address, stream, small, chain(address, size))
    for (stream, small, page), pages in _by_segment(start).items():
        blocks: list[tuple[int, State]] = []
        position = pages[0]
        for first, end in _stretches(pages, page):
            if first > position:
                blocks.append((first - position, State.UNMAPPED))
            blocks += chain(first, end - first)
            position = end
        allocator.adopt(pages[0], stream, small, blocks, expandable=True)
    if placed != len(start.live):
        raise ValueError(f"{len(start.live) - placed} blocks lie outside all segments.")
    return allocator


def _by_segment(start: Start) -> dict[tuple[int, bool, int], list[int]]:
    """Addresses of pages in order, by what makes one expandable segment."""
    segments: defaultdict[tuple[int, bool, int], list[int]] = defaultdict(list)
    for address in sorted(start.pages):
        segments[start.pages[address]].append(address)
    return segments


def _stretches(pages: list[int], page: int) -> list[tuple[int, int]]:
    """First address and end of each run of pages without a gap."""
    runs = [[pages[0], pages[0] + page]]
    for address in pages[1:]:
        if address == runs[-1][1]:
            runs[-1][1] += page
        else:
            runs.append([address, address + page])
    return [(first, end) for first, end in runs]


def _find_tails(recording: Recording, start: Start, config: AllocatorConfig) -> None:
    """Set the sizes of large blocks that are freed in the recording, where a later allocation shows them.

    Up to 1 MiB more than was asked for can belong to such a block. An allocation in that stretch, while the block still
    lives, begins where it ends. Where none does, it makes no difference: no large request is small enough for the rest.
    """
    ends = sorted(
        (address + config.block_bytes(live.requested), address)
        for address, live in start.live.items()
        if live.size is None and config.block_bytes(live.requested) > SMALL_BYTES
    )
    segments = sorted(start.segments)
    gone: set[int] = set()
    for record in recording.records if ends else ():
        if record.action == "free_completed":
            gone.add(record.address)
        elif record.action == "alloc" and config.block_bytes(record.size) > SMALL_BYTES:
            position = bisect_right(ends, (record.address, 1 << 64)) - 1
            if position < 0 or record.address - ends[position][0] > SMALL_BYTES:
                continue
            block = ends[position][1]
            index = bisect_right(segments, block) - 1
            same_segment = index >= 0 and record.address < segments[index] + start.segments[segments[index]][0]
            if same_segment and block not in gone and start.live[block].size is None:
                start.live[block].size = record.address - block
