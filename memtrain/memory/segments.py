"""What the allocator's rules work on: blocks of segments, pools of free blocks, and the device's memory behind them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from operator import attrgetter
from typing import Final

from memtrain.memory.allocator_config import ROUND_SEGMENT_BYTES, round_up

# Free blocks are ordered by one whole number: size, then rank (32 bits), then address (64 bits).
SIZE_SHIFT: Final = 96
_RANK_SHIFT: Final = 32
_ADDRESS_SHIFT: Final = 64
_address: Final = attrgetter("address")


class State(Enum):
    """What a block is at the moment."""

    ALLOCATED = "allocated"
    PENDING = "pending"  # freed, and work of another stream may still use it
    FREE = "free"
    UNMAPPED = "unmapped"  # addresses of an expandable segment without memory behind them


class Block:
    """A stretch of one segment; its neighbours there are ``previous`` and ``next``.

    Attributes:
        address, size: where it starts and how long it is, in bytes.
        stream: the only stream whose requests it serves.
        base: first address of its expandable segment; None in a segment from cudaMalloc.
        rank: order among free blocks of its size, before the address.
        streams: other streams whose work uses it (``recordStream``).
        idle_since: the pool's count of searches when it became free.
        key: its place in the order of free blocks.
    """

    __slots__ = (
        "address",
        "base",
        "idle_since",
        "key",
        "next",
        "pool",
        "previous",
        "rank",
        "size",
        "state",
        "stream",
        "streams",
    )

    def __init__(self, address: int, size: int, stream: int, pool: Pool, base: int | None, rank: int) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.base = base
        self.rank = rank
        self.state = State.FREE
        self.previous: Block | None = None
        self.next: Block | None = None
        self.streams: set[int] | None = None
        self.idle_since = 0
        self.key = 0

    @property
    def is_whole_segment(self) -> bool:
        """Whether no other block is in its segment."""
        return self.previous is None and self.next is None

    def cut_front(self, size: int) -> Block:
        """Make the first ``size`` bytes a block of their own; this one, in no pool meanwhile, keeps the rest."""
        front = self._piece(self.address, size)
        front.previous, front.next = self.previous, self
        if self.previous is not None:
            self.previous.next = front
        self.previous = front
        self.address += size
        self.size -= size
        return front

    def cut_back(self, size: int) -> Block:
        """Make the last ``size`` bytes a block of their own; this one, in no pool meanwhile, keeps the rest."""
        self.size -= size
        back = self._piece(self.address + self.size, size)
        back.previous, back.next = self, self.next
        if self.next is not None:
            self.next.previous = back
        self.next = back
        return back

    def _piece(self, address: int, size: int) -> Block:
        ranks = self.pool.piece_ranks
        return Block(address, size, self.stream, self.pool, self.base, self.rank if ranks is None else next(ranks))


class Pool:
    """Free and unmapped blocks of one class of sizes (``BlockPool``).

    Attributes:
        small: whether it is the pool of blocks of at most 1 MiB.
        page_bytes: size of the pages that its expandable segments map.
        piece_ranks: ranks of blocks that are cut from others; None: they have the same rank.
        keys: per stream, the keys of the free blocks, ascending.
        blocks: the free blocks by key.
        unmapped: per stream, the unmapped blocks by address.
        searches: how often a block was looked for, while garbage collection is on.
    """

    __slots__ = ("blocks", "keys", "page_bytes", "piece_ranks", "searches", "small", "unmapped")

    def __init__(self, small: bool, page_bytes: int, piece_ranks: Iterator[int] | None) -> None:
        self.small = small
        self.page_bytes = page_bytes
        self.piece_ranks = piece_ranks
        self.keys: defaultdict[int, list[int]] = defaultdict(list)
        self.blocks: dict[int, Block] = {}
        self.unmapped: defaultdict[int, list[Block]] = defaultdict(list)
        self.searches = 0

    def insert(self, block: Block) -> None:
        """Add a block that is free or unmapped."""
        if block.state is State.FREE:
            key = block.key = (block.size << _RANK_SHIFT | block.rank) << _ADDRESS_SHIFT | block.address
            block.idle_since = self.searches
            insort(self.keys[block.stream], key)
            self.blocks[key] = block
        else:
            insort(self.unmapped[block.stream], block, key=_address)

    def remove(self, block: Block) -> None:
        """Take a block out; its state and size are still those that it was added with."""
        if block.state is State.FREE:
            keys = self.keys[block.stream]
            del keys[bisect_left(keys, block.key)]
            del self.blocks[block.key]
        else:
            self.unmapped[block.stream].remove(block)

    def merge(self, block: Block) -> None:
        """Add a block, made one with those neighbours that are in the same state (``try_merge_blocks``)."""
        state = block.state
        previous = block.previous
        if previous is not None and previous.state is state:
            self.remove(previous)
            block.address = previous.address
            block.size += previous.size
            block.previous = previous.previous
            if block.previous is not None:
                block.previous.next = block
        following = block.next
        if following is not None and following.state is state:
            self.remove(following)
            block.size += following.size
            block.next = following.next
            if block.next is not None:
                block.next.previous = block
        self.insert(block)

    def in_order(self) -> Iterator[Block]:
        """The free blocks by stream, size, rank and address; those removed meanwhile are still visited."""
        keys = [key for stream in sorted(self.keys) for key in self.keys[stream]]
        return iter([self.blocks[key] for key in keys])


class DeviceMemory:
    """A device's memory and addresses.

    New segments lie below all earlier ones, and an address is never used twice. Recorded runs are reproduced more closely
    so than with addresses that rise.

    Args:
        capacity_bytes: what this process can obtain in all; None: there is no end to it.
        total_bytes: what the device has, others' part included; None: the same.
    """

    def __init__(self, capacity_bytes: int | None = None, total_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.total_bytes = capacity_bytes if total_bytes is None else total_bytes
        self.used_bytes = 0
        self._lowest = 1 << 62

    def allocate(self, size: int, stream: int) -> int | None:
        """Address of ``size`` new bytes (cudaMalloc), None where they are not left."""
        if not self._take(round_up(size, ROUND_SEGMENT_BYTES)):
            return None
        return self.reserve(round_up(size, ROUND_SEGMENT_BYTES), stream)

    def release(self, address: int, size: int) -> None:
        """Give back what ``allocate`` returned (cudaFree)."""
        self.used_bytes -= round_up(size, ROUND_SEGMENT_BYTES)

    def reserve(self, size: int, stream: int) -> int:
        """First of ``size`` addresses without memory (cuMemAddressReserve)."""
        self._lowest -= size
        return self._lowest

    def map(self, address: int, size: int) -> bool:
        """Put memory behind addresses (cuMemCreate and cuMemMap); False, with nothing done, where it is not left."""
        return self._take(size)

    def unmap(self, address: int, size: int) -> None:
        """Take the memory behind addresses away (cuMemUnmap)."""
        self.used_bytes -= size

    def _take(self, size: int) -> bool:
        if self.capacity_bytes is not None and self.used_bytes + size > self.capacity_bytes:
            return False
        self.used_bytes += size
        return True
