"""The rules of the caching allocator, each on a few requests worked out by hand, and its laws over random ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.memory.allocator import CachingAllocator, OutOfMemory
from memtrain.memory.allocator_config import AllocatorConfig, TieBreak
from memtrain.memory.segments import DeviceMemory, State

MIB = 1 << 20
PLAIN = AllocatorConfig()


def allocator(config: AllocatorConfig = PLAIN, capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(config, DeviceMemory(capacity))


def cached(one: CachingAllocator, *sizes: int, stream: int = 0) -> list[int]:
    """Allocate blocks of these sizes and free them, so that they lie in the cache; returns their addresses."""
    addresses = [one.malloc(size, stream) for size in sizes]
    for address in addresses:
        one.free(address)
    return addresses


def test_allocated_bytes_are_those_of_blocks_and_reserved_bytes_those_of_segments() -> None:
    one = allocator()
    address = one.malloc(3 * MIB + 1)
    assert one.block_bytes(address) == one.allocated_bytes == 3 * MIB + 512
    assert one.reserved_bytes == 20 * MIB
    one.free(address)
    assert (one.allocated_bytes, one.peak_allocated_bytes, one.reserved_bytes) == (0, 3 * MIB + 512, 20 * MIB)


def test_small_and_large_requests_do_not_share_segments() -> None:
    one = allocator()
    cached(one, 20 * MIB)
    one.malloc(MIB)
    assert one.reserved_bytes == 22 * MIB


def test_a_block_serves_its_own_stream_alone() -> None:
    one = allocator()
    cached(one, 30 * MIB, stream=1)
    one.malloc(30 * MIB, stream=2)
    assert one.reserved_bytes == 60 * MIB
    one.malloc(30 * MIB, stream=1)
    assert one.reserved_bytes == 60 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    one = allocator()
    _, smaller, _ = cached(one, 40 * MIB, 32 * MIB, 30 * MIB)
    assert one.malloc(31 * MIB + 512) == smaller


def test_a_large_block_is_split_if_more_than_1_mib_is_left() -> None:
    for requested, taken in ((19 * MIB, 20 * MIB), (19 * MIB - 512, 19 * MIB - 512)):
        one = allocator()
        cached(one, 20 * MIB)
        one.malloc(requested)
        assert one.allocated_bytes == taken


def test_a_small_block_is_split_if_512_bytes_are_left() -> None:
    one = allocator()
    first = one.malloc(MIB)
    assert one.malloc(MIB - 512) == first + MIB
    assert one.malloc(512) == first + 2 * MIB - 512
    assert one.reserved_bytes == 2 * MIB


def test_freed_neighbours_are_merged() -> None:
    one = allocator()
    first, second, third = (one.malloc(6 * MIB) for _ in range(3))
    one.free(first)
    one.free(third)
    one.malloc(12 * MIB)
    assert one.reserved_bytes == 32 * MIB
    # All but the 12 MiB: 6 + 6 + 6 and the 2 MiB behind them.
    one.free(second)
    assert one.malloc(20 * MIB) == first
    assert one.reserved_bytes == 32 * MIB


def test_neighbours_of_two_segments_are_not_merged() -> None:
    one = allocator()
    upper, lower = cached(one, 16 * MIB, 16 * MIB)
    assert upper == lower + 16 * MIB
    one.malloc(32 * MIB)
    assert one.reserved_bytes == 64 * MIB


def test_larger_blocks_serve_smaller_requests_but_not_the_other_way() -> None:
    rising, falling = allocator(), allocator()
    cached(rising, *[16 * MIB] * 8)
    cached(falling, *[32 * MIB] * 4)
    for _ in range(4):
        rising.malloc(32 * MIB)
    for _ in range(8):
        falling.malloc(16 * MIB)
    assert (rising.reserved_bytes, falling.reserved_bytes) == (256 * MIB, 128 * MIB)


@pytest.mark.parametrize(
    ("tie_break", "taken"),
    # First a and b, each the front of its segment, in falling addresses; freed in the order a, b, their tails in use. The
    # records of the fronts are made when they are cut off, those of the tails when the segments are obtained.
    [(TieBreak.ADDRESS, "b"), (TieBreak.BLOCK, "a"), (TieBreak.SEGMENT, "a")],
)
def test_of_equal_blocks_the_order_decides(tie_break: TieBreak, taken: str) -> None:
    one = allocator(AllocatorConfig(tie_break=tie_break))
    a, tail_a = one.malloc(5 * MIB), one.malloc(15 * MIB)
    b, tail_b = one.malloc(5 * MIB), one.malloc(15 * MIB)
    assert (tail_a, tail_b) == (a + 5 * MIB, b + 5 * MIB)
    assert b < a
    one.free(b)
    one.free(a)
    assert one.malloc(5 * MIB) == {"a": a, "b": b}[taken]


def test_the_rest_of_a_split_keeps_its_record_and_the_front_gets_a_new_one() -> None:
    # One segment of 20 MiB, record 0: the front of 5 MiB gets record 1, the next 10 MiB record 2, the last 5 MiB keep 0.
    found = {}
    for tie_break in TieBreak:
        one = allocator(AllocatorConfig(tie_break=tie_break))
        front, wall, rest = one.malloc(5 * MIB), one.malloc(10 * MIB), one.malloc(5 * MIB)
        one.free(front)
        one.free(rest)
        found[tie_break] = "front" if one.malloc(5 * MIB) == front else "rest"
        assert front < wall < rest
    assert found == {TieBreak.ADDRESS: "front", TieBreak.BLOCK: "rest", TieBreak.SEGMENT: "front"}


OVERSIZE = AllocatorConfig(max_split_bytes=100 * MIB)


@pytest.mark.parametrize(
    ("requested", "reserved"),
    [
        (50 * MIB, 250 * MIB),  # a smaller request does not get the 200 MiB
        (180 * MIB, 380 * MIB),  # 20 MiB too much is too much
        (180 * MIB + 512, 200 * MIB),
        (200 * MIB, 200 * MIB),
    ],
)
def test_an_oversize_block_serves_requests_of_about_its_size_alone(requested: int, reserved: int) -> None:
    one = allocator(OVERSIZE)
    cached(one, 200 * MIB)
    one.malloc(requested)
    assert one.reserved_bytes == reserved


def test_how_much_too_large_an_oversize_block_may_be_can_be_set() -> None:
    one = allocator(AllocatorConfig(max_split_bytes=100 * MIB, max_non_split_rounding_bytes=60 * MIB))
    cached(one, 200 * MIB)
    one.malloc(140 * MIB + 512)
    assert (one.reserved_bytes, one.allocated_bytes) == (200 * MIB, 200 * MIB)


def test_a_full_device_is_emptied_and_asked_again() -> None:
    one = allocator(capacity=100 * MIB)
    cached(one, 60 * MIB)
    one.malloc(80 * MIB)
    assert (one.reserved_bytes, one.peak_reserved_bytes, one.num_alloc_retries) == (80 * MIB, 80 * MIB, 1)


def test_of_oversize_blocks_only_as_many_are_released_as_make_room() -> None:
    one = allocator(OVERSIZE, capacity=400 * MIB)
    cached(one, 150 * MIB, 200 * MIB)
    one.malloc(180 * MIB)
    assert (one.reserved_bytes, one.num_alloc_retries) == (330 * MIB, 0)


def test_several_oversize_blocks_are_released_from_the_largest_on() -> None:
    one = allocator(OVERSIZE, capacity=400 * MIB)
    smallest, *_ = cached(one, 100 * MIB, 120 * MIB, 150 * MIB)
    one.malloc(250 * MIB)
    assert (one.reserved_bytes, one.num_alloc_retries) == (350 * MIB, 0)
    assert one.malloc(100 * MIB) == smallest


def test_oversize_blocks_that_are_too_few_are_released_with_all_the_rest() -> None:
    one = allocator(OVERSIZE, capacity=300 * MIB)
    cached(one, 60 * MIB, stream=1)
    cached(one, 150 * MIB)
    # After the 150 MiB there would be room, but they are less than what is asked for.
    one.malloc(200 * MIB)
    assert (one.reserved_bytes, one.num_alloc_retries) == (200 * MIB, 1)


def test_the_cache_is_released_large_blocks_first_by_stream_and_size() -> None:
    released: list[int] = []

    class Watched(DeviceMemory):
        def release(self, address: int, size: int) -> None:
            super().release(address, size)
            released.append(size // MIB)

    one = CachingAllocator(PLAIN, Watched())
    cached(one, MIB, stream=0)
    cached(one, 40 * MIB, 30 * MIB, stream=2)
    cached(one, 50 * MIB, stream=1)
    one.empty_cache()
    assert released == [50, 30, 40, 2]


def test_what_is_partly_used_is_not_released() -> None:
    one = allocator()
    first, _ = one.malloc(6 * MIB), one.malloc(6 * MIB)
    one.free(first)
    cached(one, 40 * MIB)
    one.empty_cache()
    assert one.reserved_bytes == 20 * MIB


def test_no_room_is_an_error_with_its_numbers() -> None:
    one = allocator(capacity=100 * MIB)
    one.malloc(80 * MIB)
    message = r"^an allocation of 40\.0 MiB finds no room: 80\.0 MiB are allocated and 80\.0 MiB reserved of 100 MiB\.$"
    with pytest.raises(OutOfMemory, match=message) as caught:
        one.malloc(40 * MIB)
    error = caught.value
    assert (error.requested_bytes, error.allocated_bytes, error.reserved_bytes) == (40 * MIB, 80 * MIB, 80 * MIB)
    assert one.num_alloc_retries == 1
    # It can go on.
    one.malloc(20 * MIB)


def test_a_memory_fraction_limits_what_is_reserved() -> None:
    one = allocator(AllocatorConfig(memory_fraction=0.5), capacity=100 * MIB)
    one.malloc(50 * MIB)
    with pytest.raises(OutOfMemory, match=r"reserved of 50\.0 MiB"):
        one.malloc(512)


def test_a_memory_fraction_is_of_the_whole_device() -> None:
    one = CachingAllocator(AllocatorConfig(memory_fraction=0.5), DeviceMemory(90 * MIB, total_bytes=100 * MIB))
    one.malloc(50 * MIB)
    assert one.reserved_bytes == 50 * MIB


def test_a_memory_fraction_of_an_unknown_device_is_refused() -> None:
    message = r"^memory_fraction is 0\.5, a share of a device whose size is not known: give the size\.$"
    with pytest.raises(ValueError, match=message):
        allocator(AllocatorConfig(memory_fraction=0.5))


COLLECTING = AllocatorConfig(garbage_collection_threshold=0.5, memory_fraction=0.9)


def test_old_segments_are_collected_above_the_threshold() -> None:
    one = allocator(COLLECTING, capacity=1000 * MIB)
    cached(one, 230 * MIB, 250 * MIB)
    # 480 MiB, and half of 900 is the threshold. Both were freed after the second search, so both have the mean age and go.
    one.malloc(320 * MIB)
    assert (one.reserved_bytes, one.num_alloc_retries) == (320 * MIB, 0)


def test_segments_younger_than_the_mean_are_kept_if_enough_is_collected() -> None:
    one = allocator(COLLECTING, capacity=1000 * MIB)
    (old,) = cached(one, 300 * MIB)
    for _ in range(3):
        assert one.malloc(10 * MIB, stream=1)
    (young,) = cached(one, 200 * MIB, stream=2)
    one.malloc(320 * MIB)
    # 530 MiB reserved, 80 MiB too many: the old one is enough.
    assert one.reserved_bytes == (30 + 200 + 320) * MIB
    assert one.malloc(200 * MIB, stream=2) == young
    assert old not in [address for address, _, _ in one.blocks()]


def test_without_a_memory_fraction_nothing_is_collected() -> None:
    one = allocator(AllocatorConfig(garbage_collection_threshold=0.5), capacity=1000 * MIB)
    cached(one, 300 * MIB, 310 * MIB)
    one.malloc(320 * MIB)
    assert one.reserved_bytes == 930 * MIB


def test_a_block_that_another_stream_uses_waits() -> None:
    one = allocator(capacity=100 * MIB)
    address = one.malloc(60 * MIB)
    one.record_stream(address, 7)
    one.free(address)
    assert (one.allocated_bytes, one.blocks()) == (0, [(address, 60 * MIB, State.PENDING)])
    one.malloc(30 * MIB)
    assert one.reserved_bytes == 90 * MIB
    # A device that is full waits for the other stream, and the block goes with the rest of the cache.
    one.malloc(60 * MIB)
    assert (one.reserved_bytes, one.num_alloc_retries) == (90 * MIB, 1)


def test_a_block_is_cached_when_the_other_stream_is_done() -> None:
    one = allocator()
    address = one.malloc(60 * MIB)
    one.record_stream(address, 7)
    one.free(address)
    one.complete(address)
    assert one.malloc(60 * MIB) == address
    # The block forgets the stream with its free.
    one.free(address)
    assert one.malloc(60 * MIB) == address


def test_a_free_can_be_deferred_without_naming_a_stream() -> None:
    one = allocator()
    address = one.malloc(60 * MIB)
    one.free(address, deferred=True)
    assert one.blocks() == [(address, 60 * MIB, State.PENDING)]


def test_its_own_stream_defers_nothing() -> None:
    one = allocator()
    address = one.malloc(60 * MIB, stream=3)
    one.record_stream(address, 3)
    one.free(address)
    assert one.malloc(60 * MIB, stream=3) == address


def test_freeing_twice_is_an_error() -> None:
    one = allocator()
    (address,) = cached(one, 512)
    with pytest.raises(
        ValueError, match=rf"^nothing is allocated at address {address:#x}: free what malloc returned, and once\.$"
    ):
        one.free(address)


def test_a_request_for_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^0 bytes are no allocation: leave requests for nothing out\.$"):
        allocator().malloc(0)


def test_an_adopted_segment_goes_on_as_it_was() -> None:
    one = allocator()
    blocks = [(6 * MIB, State.ALLOCATED), (8 * MIB, State.FREE), (6 * MIB, State.PENDING)]
    one.adopt(32 * MIB, 5, False, blocks)
    assert (one.reserved_bytes, one.allocated_bytes) == (20 * MIB, 6 * MIB)
    assert one.malloc(7 * MIB, stream=5) == 38 * MIB
    one.complete(46 * MIB)
    assert one.malloc(6 * MIB, stream=5) == 46 * MIB


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Requests (bytes, stream, 0) and frees (0, 0, which of the live ones)."""
    sizes = st.sampled_from([1, 512, 5000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 25 * MIB, 70 * MIB])
    request = st.tuples(sizes, st.integers(0, 1), st.just(0))
    free = st.tuples(st.just(0), st.just(0), st.integers(0, 100))
    return draw(st.lists(st.one_of(request, free), max_size=40))


configs = st.builds(
    AllocatorConfig,
    expandable_segments=st.booleans(),
    max_split_bytes=st.sampled_from([None, 20 * MIB, 64 * MIB]),
    tie_break=st.sampled_from(TieBreak),
)


@given(program=programs(), config=configs, capacity=st.sampled_from([None, 100 * MIB, 300 * MIB]))
def test_the_laws_of_every_program(program: list[tuple[int, int, int]], config: AllocatorConfig, capacity: int | None) -> None:
    one = allocator(config, capacity)
    live: dict[int, int] = {}
    for size, stream, which in program:
        if size:
            try:
                address = one.malloc(size, stream)
            except OutOfMemory:
                assert capacity is not None
                continue
            assert one.block_bytes(address) >= size
            live[address] = one.block_bytes(address)
        elif live:
            address = sorted(live)[which % len(live)]
            one.free(address)
            del live[address]
        assert one.allocated_bytes == sum(live.values())
        assert one.reserved_bytes == sum(length for _, length, _ in one.blocks()) == one.memory.used_bytes
        assert one.allocated_bytes <= one.reserved_bytes <= (capacity or one.reserved_bytes)
    blocks = one.blocks()
    assert all(here[0] + here[1] <= there[0] for here, there in pairwise(blocks))
    assert one.peak_allocated_bytes <= one.peak_reserved_bytes
    for address in live:
        one.free(address)
    one.empty_cache()
    assert (one.allocated_bytes, one.reserved_bytes, one.blocks()) == (0, 0, [])
