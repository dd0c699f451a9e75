"""PyTorch's CUDA caching allocator, simulated: which block each request gets, and when memory is obtained and released.

Requests are rounded up and served from cached blocks of their stream, best fit first; a block that is too large is split,
and freed neighbours are merged. What is not cached is obtained from the device in segments, which stay reserved until an
allocation would fail or the cache is emptied. So ``reserved_bytes`` depends on the order of all requests and frees.

The rules are those of c10/cuda/CUDACachingAllocator.cpp in PyTorch; each method names its function there. Not simulated:
the pools of CUDA graphs and of ``torch.cuda.MemPool``. When other streams finish with a block is unknown without a device,
so the caller says it (``complete``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import count, repeat
from typing import Final

from memtrain.memory.allocator_config import MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorConfig, TieBreak
from memtrain.memory.expandable import address_bytes, expand, growable_bytes, unmap
from memtrain.memory.segments import SIZE_SHIFT, Block, DeviceMemory, Pool, State
from memtrain.units import format_bytes

UNLIMITED: Final = 1 << 64
_ALLOCATED: Final = State.ALLOCATED
_FREE: Final = State.FREE


class OutOfMemory(RuntimeError):
    """A request could not be served, although all that is cached and whole was released (``torch.OutOfMemoryError``).

    Attributes:
        requested_bytes: what was asked for.
        allocated_bytes, reserved_bytes: what was held at that moment.
    """

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int | None) -> None:
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        limit = "" if capacity_bytes is None else f" of {format_bytes(capacity_bytes)}"
        super().__init__(
            f"an allocation of {format_bytes(requested_bytes)} finds no room: {format_bytes(allocated_bytes)} are allocated "
            f"and {format_bytes(reserved_bytes)} reserved{limit}."
        )


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        allocated_bytes, peak_allocated_bytes: sizes of the blocks in use, as ``torch.cuda.memory_allocated`` counts them.
        reserved_bytes, peak_reserved_bytes: what is held of the device, as ``torch.cuda.memory_reserved`` counts it.
        num_alloc_retries: how often the whole cache was released because memory could not be obtained.

    Raises:
        ValueError: a memory fraction is set, and the size of the device is not known.
    """

    def __init__(self, config: AllocatorConfig, memory: DeviceMemory) -> None:
        self.config = config
        self.memory = memory
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0
        self._ranks: Iterator[int] = repeat(0) if config.tie_break is TieBreak.ADDRESS else count()
        piece_ranks = self._ranks if config.tie_break is TieBreak.BLOCK else None
        self._small = Pool(True, SMALL_SEGMENT_BYTES, piece_ranks)
        self._large = Pool(False, config.large_segment_bytes, piece_ranks)
        self._live: dict[int, Block] = {}  # allocated and pending blocks by address
        self._pending: dict[int, Block] = {}  # in the order of their frees
        self._block_bytes: dict[int, int] = {}  # by requested bytes
        self._max_split = UNLIMITED if config.max_split_bytes is None else config.max_split_bytes
        rounding = config.max_non_split_rounding_bytes
        self._max_rounding = config.large_segment_bytes if rounding is None else rounding
        self._allowed_bytes: int | None = None
        if config.memory_fraction < 1:
            if memory.total_bytes is None:
                raise ValueError(
                    f"memory_fraction is {config.memory_fraction}, a share of a device whose size is not known: give the size."
                )
            self._allowed_bytes = int(config.memory_fraction * memory.total_bytes)
        self._collects = config.garbage_collection_threshold > 0 and self._allowed_bytes is not None

    def malloc(self, size: int, stream: int = 0) -> int:
        """Address of a block for ``size`` bytes (``malloc``).

        Raises:
            OutOfMemory: there is none, and none can be obtained.
            ValueError: ``size`` is not above 0.
        """
        rounded = self._block_bytes.get(size)
        if rounded is None:
            rounded = self._block_bytes[size] = self.config.block_bytes(size)
        pool = self._small if rounded <= SMALL_BYTES else self._large
        block = self._best_fit(pool, rounded, stream)
        if block is None:
            block = self._obtain(pool, rounded, stream)
            if block is None:
                capacity = self.memory.capacity_bytes if self._allowed_bytes is None else self._allowed_bytes
                raise OutOfMemory(size, self.allocated_bytes, self.reserved_bytes, capacity)
        rest = block.size - rounded
        # should_split
        if rest and (
            rest >= MIN_BLOCK_BYTES
            if pool.small or self.config.expandable_segments
            else rest > SMALL_BYTES and rounded < self._max_split
        ):
            whole, block = block, block.cut_front(rounded)
            pool.insert(whole)
        block.state = _ALLOCATED
        self._live[block.address] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block.address

    def free(self, address: int, deferred: bool = False) -> None:
        """Free what ``malloc`` returned; the block is cached (``free``).

        If it is deferred, or another stream was recorded, the block is out of use but not cached before ``complete``.

        Raises:
            ValueError: nothing is allocated at the address.
        """
        block = self._live.get(address)
        if block is None or block.state is not _ALLOCATED:
            raise ValueError(f"nothing is allocated at address {address:#x}: free what malloc returned, and once.")
        self.allocated_bytes -= block.size
        if deferred or block.streams:
            block.state = State.PENDING
            self._pending[address] = block
        else:
            self._cache(block)

    def record_stream(self, address: int, stream: int) -> None:
        """Note that work of another stream uses the block, which defers its free (``recordStream``)."""
        block = self._live[address]
        if stream != block.stream:
            block.streams = {*(block.streams or ()), stream}

    def complete(self, address: int) -> None:
        """Cache a block whose free was deferred: the other streams' work is done (``process_events``).

        Raises:
            KeyError: no free is deferred at the address.
        """
        self._cache(self._pending.pop(address))

    def empty_cache(self) -> None:
        """Release every free segment and every free page, after waiting for all streams (``release_cached_blocks``)."""
        for address in list(self._pending):
            self.complete(address)
        for pool in (self._large, self._small):
            free = list(pool.in_order())
            for block in free:
                if block.base is None and block.is_whole_segment:
                    self._release(block)
            for block in free:
                if block.base is not None:
                    self._count_reserved(-unmap(block, self.memory))

    def block_bytes(self, address: int) -> int:
        """Size of the block in use at the address."""
        return self._live[address].size

    def blocks(self) -> list[tuple[int, int, State]]:
        """Address, size and state of each block that memory lies behind, by address."""
        free = [block for pool in (self._small, self._large) for block in pool.blocks.values()]
        return sorted(
            ((block.address, block.size, block.state) for block in (*self._live.values(), *free)), key=lambda row: row[0]
        )

    def adopt(
        self, address: int, stream: int, small: bool, blocks: Iterable[tuple[int, State]], expandable: bool = False
    ) -> None:
        """Take over a segment that exists already, such as a snapshot of a running process lists.

        Args:
            address: first address of the segment.
            stream: the stream that it serves.
            small: whether it belongs to the pool of small blocks.
            blocks: bytes and state of each block in order, without gaps; only an expandable segment has unmapped ones.
            expandable: whether more pages can be mapped behind the last block.
        """
        pool = self._small if small else self._large
        base = address if expandable else None
        chain = list(blocks)
        if expandable:
            chain.append((address_bytes(pool, self.memory) - sum(size for size, _ in chain), State.UNMAPPED))
        rest = Block(address, sum(size for size, _ in chain), stream, pool, base, next(self._ranks))
        for size, state in chain:
            block = rest.cut_front(size) if size < rest.size else rest
            block.state = state
            if state is _FREE or state is State.UNMAPPED:
                pool.insert(block)
            else:
                self._live[block.address] = block
                if state is _ALLOCATED:
                    self.allocated_bytes += size
                else:
                    self._pending[block.address] = block
            if state is not State.UNMAPPED:
                self._count_reserved(size)
                self.memory.used_bytes += size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def _best_fit(self, pool: Pool, rounded: int, stream: int) -> Block | None:
        """Take the smallest free block that suits out of the pool (``get_free_block``)."""
        if self._collects:
            pool.searches += 1
        keys = pool.keys.get(stream)
        if not keys:
            return None
        position = bisect_left(keys, rounded << SIZE_SHIFT)
        if position == len(keys):
            return None
        block = pool.blocks[keys[position]]
        if block.base is not None:
            if self.config.expandable_segments:
                # The block that could still grow is the last to be used.
                while position + 1 < len(keys):
                    following = pool.blocks[keys[position + 1]]
                    if growable_bytes(following) >= growable_bytes(block):
                        break
                    position, block = position + 1, following
            else:
                while block.base is not None:
                    position += 1
                    if position == len(keys):
                        return None
                    block = pool.blocks[keys[position]]
        # Only this one candidate is looked at: a larger one that would suit is not searched for.
        limit = self._max_split if rounded < self._max_split else rounded + self._max_rounding
        if block.size >= limit:
            return None
        del pool.blocks[keys[position]]
        del keys[position]
        return block

    def _obtain(self, pool: Pool, rounded: int, stream: int) -> Block | None:
        """A block of new memory; before it fails, cached memory is released (the rest of ``malloc``)."""
        if self._collects:
            self._collect_garbage()
        block = self._grow(pool, rounded, stream)
        if block is None and self._release_oversize(pool, rounded, stream):
            block = self._grow(pool, rounded, stream)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._grow(pool, rounded, stream)
        return block

    def _grow(self, pool: Pool, rounded: int, stream: int) -> Block | None:
        """A block in a new segment or in new pages, None where they cannot be obtained (``alloc_block``)."""
        size = self.config.segment_bytes(rounded)
        if self._allowed_bytes is not None and self.reserved_bytes + size > self._allowed_bytes:
            return None
        if self.config.expandable_segments:
            block, mapped = expand(pool, rounded, stream, self.memory, self._ranks)
            self._count_reserved(mapped)
            return block
        address = self.memory.allocate(size, stream)
        if address is None:
            return None
        self._count_reserved(size)
        return Block(address, size, stream, pool, None, next(self._ranks))

    def _count_reserved(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release(self, block: Block) -> None:
        """Give back a segment that is one free block (``release_block``)."""
        block.pool.remove(block)
        self.memory.release(block.address, block.size)
        self._count_reserved(-block.size)

    def _release_oversize(self, pool: Pool, rounded: int, stream: int) -> bool:
        """Release as few unsplittable blocks as make room (``release_available_cached_blocks``); whether they do."""
        if self._max_split == UNLIMITED:
            return False
        wanted = max(rounded, self._max_split)
        keys = pool.keys.get(stream, [])
        position = bisect_left(keys, wanted << SIZE_SHIFT)
        if position < len(keys) and pool.blocks[keys[position]].base is None:
            self._release(pool.blocks[keys[position]])
            return True
        found = 0
        for key in reversed(keys[:position]):
            block = pool.blocks[key]
            if found >= wanted or block.size < self._max_split:
                break
            if block.base is None:
                found += block.size
                self._release(block)
        return found >= wanted

    def _collect_garbage(self) -> None:
        """Release segments that have not been used for long (``garbage_collect_cached_blocks``)."""
        assert self._allowed_bytes is not None
        excess = self.reserved_bytes - int(self.config.garbage_collection_threshold * self._allowed_bytes)
        if excess <= 0:
            return
        pool = self._large
        idle = {block: pool.searches - block.idle_since for block in pool.in_order() if block.is_whole_segment}
        released = 0
        while idle and released < excess:
            mean = sum(idle.values()) / len(idle)
            # All of the old ones go, also when fewer would be enough.
            old = [block for block, age in idle.items() if age >= mean and block.base is None]
            if not old:
                break
            for block in old:
                released += block.size
                del idle[block]
                self._release(block)

    def _cache(self, block: Block) -> None:
        """Make a block free (``free_block``)."""
        del self._live[block.address]
        block.state = _FREE
        block.streams = None
        block.pool.merge(block)
