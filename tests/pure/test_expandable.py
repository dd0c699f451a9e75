"""Expandable segments on a few requests worked out by hand: which pages are mapped, used last, and unmapped."""

from __future__ import annotations

import pytest

from memtrain.memory.allocator import CachingAllocator, OutOfMemory
from memtrain.memory.allocator_config import AllocatorConfig
from memtrain.memory.segments import DeviceMemory, State

MIB = 1 << 20
EXPANDABLE = AllocatorConfig(expandable_segments=True)


class Watched(DeviceMemory):
    """A device that notes which pages are mapped and unmapped, in MiB from the start of their segment."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.pages: list[tuple[str, int, int]] = []
        self.bases: list[int] = []
        self.reserved: list[int] = []

    def reserve(self, size: int, stream: int) -> int:
        self.bases.append(super().reserve(size, stream))
        self.reserved.append(size // MIB)
        return self.bases[-1]

    def map(self, address: int, size: int) -> bool:
        done = super().map(address, size)
        if done:
            self._note("map", address, size)
        return done

    def unmap(self, address: int, size: int) -> None:
        super().unmap(address, size)
        self._note("unmap", address, size)

    def _note(self, what: str, address: int, size: int) -> None:
        base = max(base for base in self.bases if base <= address)
        self.pages.append((what, (address - base) // MIB, size // MIB))


def allocator(capacity: int | None = None, config: AllocatorConfig = EXPANDABLE) -> tuple[CachingAllocator, Watched]:
    memory = Watched(capacity)
    return CachingAllocator(config, memory), memory


def test_a_segment_grows_by_pages_of_20_mib_and_a_small_one_by_2_mib() -> None:
    one, memory = allocator()
    one.malloc(16 * MIB)
    one.malloc(16 * MIB)
    one.malloc(512)
    assert memory.pages == [("map", 0, 20), ("map", 20, 20), ("map", 0, 2)]
    assert (one.reserved_bytes, one.allocated_bytes) == (42 * MIB, 32 * MIB + 512)
    # 8 MiB of the second page are left.
    one.malloc(8 * MIB)
    assert one.reserved_bytes == 42 * MIB


def test_what_is_left_of_a_page_is_used_from_512_bytes_on() -> None:
    one, _ = allocator()
    one.malloc(20 * MIB - 512)
    one.free(one.malloc(MIB + 512))
    assert one.allocated_bytes == 20 * MIB - 512
    assert [size for _, size, state in one.blocks() if state is State.FREE] == [20 * MIB + 512]


def test_freed_blocks_serve_larger_requests_in_the_same_segment() -> None:
    one, _ = allocator()
    for address in [one.malloc(16 * MIB) for _ in range(8)]:
        one.free(address)
    assert one.reserved_bytes == 140 * MIB
    for _ in range(4):
        one.malloc(32 * MIB)
    assert one.reserved_bytes == 140 * MIB


def test_the_block_that_could_grow_is_used_last() -> None:
    one, _ = allocator()
    hole, wall, tail = one.malloc(30 * MIB), one.malloc(5 * MIB), one.malloc(25 * MIB)
    assert hole < wall < tail
    one.free(hole)
    one.free(tail)
    # The tail of 25 MiB would be the best fit, and the hole of 30 MiB cannot grow.
    assert one.malloc(20 * MIB) == hole


def test_of_blocks_that_could_grow_to_the_same_size_the_smaller_is_used() -> None:
    one, memory = allocator()
    memory.bases.append(0)
    wall = (20 * MIB, State.ALLOCATED)
    chain = [wall, (20 * MIB, State.FREE), (20 * MIB, State.UNMAPPED), wall, (40 * MIB, State.FREE), wall]
    one.adopt(0, 0, False, chain, expandable=True)
    assert one.malloc(20 * MIB) == 20 * MIB


def test_a_segment_reserves_more_addresses_than_there_is_memory() -> None:
    one, memory = allocator(capacity=100 * MIB)
    one.malloc(2 * MIB)
    one.malloc(512)
    # An eighth more, in whole pages.
    assert memory.reserved == [120, 114]


def test_of_blocks_that_cannot_grow_the_smallest_is_used() -> None:
    one, _ = allocator()
    large, _, small, _ = one.malloc(30 * MIB), one.malloc(5 * MIB), one.malloc(25 * MIB), one.malloc(5 * MIB)
    one.free(large)
    one.free(small)
    assert one.malloc(20 * MIB) == small


def test_each_stream_has_a_segment_of_its_own() -> None:
    one, memory = allocator()
    one.malloc(16 * MIB, stream=1)
    one.malloc(4 * MIB, stream=2)
    assert memory.pages == [("map", 0, 20), ("map", 0, 20)]
    assert len(memory.bases) == 2


def test_emptying_the_cache_unmaps_the_pages_that_are_wholly_free() -> None:
    one, memory = allocator()
    first, wall, last = one.malloc(50 * MIB), one.malloc(20 * MIB), one.malloc(65 * MIB)
    one.free(first)
    one.free(last)
    one.empty_cache()
    # Free were 0 to 50 and 70 to 140 MiB; the smaller one goes first.
    assert memory.pages[-2:] == [("unmap", 0, 40), ("unmap", 80, 60)]
    assert one.reserved_bytes == 40 * MIB
    assert [(address - first, size) for address, size, _ in one.blocks()] == [
        (40 * MIB, 10 * MIB),
        (50 * MIB, 20 * MIB),
        (70 * MIB, 10 * MIB),
    ]
    assert wall == first + 50 * MIB


def test_unmapped_pages_are_mapped_again_from_the_lowest_on() -> None:
    one, memory = allocator()
    first, _ = one.malloc(50 * MIB), one.malloc(20 * MIB)
    one.free(first)
    one.empty_cache()
    # The hole before the wall has 40 MiB unmapped and 10 MiB free behind them.
    assert one.malloc(50 * MIB) == first
    assert memory.pages[-1] == ("map", 0, 40)
    assert one.reserved_bytes == 80 * MIB


def test_a_free_block_before_unmapped_pages_is_where_they_are_mapped_to() -> None:
    one, memory = allocator()
    one.malloc(12 * MIB)
    address = one.malloc(30 * MIB)
    # 8 MiB of the first page, and two more pages for the other 22 MiB.
    assert memory.pages == [("map", 0, 20), ("map", 20, 40)]
    assert address == memory.bases[0] + 12 * MIB


def test_a_segment_without_pages_is_gone() -> None:
    one, memory = allocator()
    one.free(one.malloc(16 * MIB))
    one.empty_cache()
    one.malloc(16 * MIB)
    assert one.reserved_bytes == 20 * MIB
    assert len(memory.bases) == 2


def test_pages_that_are_left_over_are_found_by_emptying_the_cache() -> None:
    one, memory = allocator(capacity=100 * MIB)
    one.free(one.malloc(60 * MIB, stream=1))
    one.malloc(80 * MIB, stream=2)
    assert memory.pages == [("map", 0, 60), ("unmap", 0, 60), ("map", 0, 80)]
    assert (one.reserved_bytes, one.peak_reserved_bytes, one.num_alloc_retries) == (80 * MIB, 80 * MIB, 1)


def test_pages_mapped_for_an_allocation_that_fails_stay_mapped_until_they_are_released() -> None:
    one, memory = allocator(capacity=110 * MIB)
    first, wall = one.malloc(40 * MIB), one.malloc(20 * MIB)
    one.free(first)
    one.empty_cache()
    middle = one.malloc(18 * MIB)
    one.free(wall)
    # 18 used, 2 and 20 unmapped, 20 free, the rest unmapped: 100 MiB would need more than there is.
    with pytest.raises(OutOfMemory):
        one.malloc(100 * MIB)
    assert memory.pages[-2:] == [("map", 20, 20), ("unmap", 20, 40)]
    assert (one.reserved_bytes, one.peak_reserved_bytes) == (20 * MIB, 60 * MIB)
    assert [(address - middle, size) for address, size, _ in one.blocks()] == [(0, 18 * MIB), (18 * MIB, 2 * MIB)]


def test_an_oversize_block_is_not_used_for_less_in_an_expandable_segment_either() -> None:
    config = AllocatorConfig(expandable_segments=True, max_split_bytes=100 * MIB)
    one, memory = allocator(config=config)
    first, _ = one.malloc(200 * MIB), one.malloc(20 * MIB)
    one.free(first)
    one.malloc(40 * MIB)
    assert memory.pages[-1] == ("map", 220, 40)


def test_blocks_of_expandable_segments_are_left_alone_when_those_are_off() -> None:
    one = CachingAllocator(AllocatorConfig(), DeviceMemory())
    one.adopt(0, 0, False, [(40 * MIB, State.FREE)], expandable=True)
    assert one.malloc(30 * MIB) != 0
    assert one.reserved_bytes == 70 * MIB


def test_an_adopted_segment_grows_where_it_is_not_mapped() -> None:
    one, memory = allocator()
    memory.bases.append(0)
    one.adopt(0, 0, False, [(20 * MIB, State.ALLOCATED), (20 * MIB, State.UNMAPPED), (20 * MIB, State.FREE)], expandable=True)
    assert one.malloc(50 * MIB) == 20 * MIB
    assert memory.pages == [("map", 20, 20), ("map", 60, 20)]
