"""Expandable segments: addresses are reserved once per pool and stream, and memory is put behind them page by page.

Sources in c10/cuda/CUDACachingAllocator.cpp of PyTorch: ``ExpandableSegment`` and the functions named below.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memtrain.memory.allocator_config import round_up
from memtrain.memory.segments import Block, DeviceMemory, Pool, State

# Where the device's size is not known, a segment never runs out of addresses.
_ENDLESS_BYTES: Final = 1 << 50


def address_bytes(pool: Pool, memory: DeviceMemory) -> int:
    """Addresses that one segment reserves: more than the device has memory, so that it never needs a second one."""
    total = memory.total_bytes
    return round_up(_ENDLESS_BYTES if total is None else total + total // 8, pool.page_bytes)


def growable_bytes(block: Block) -> int:
    """Size of a block with the unmapped one after it, which it could grow into."""
    following = block.next
    return block.size + (following.size if following is not None and following.state is State.UNMAPPED else 0)


def expand(pool: Pool, size: int, stream: int, memory: DeviceMemory, ranks: Iterator[int]) -> tuple[Block | None, int]:
    """Map pages until a block is ``size`` bytes long, and take it out of the pool (``try_allocate_expandable_block``).

    Returns:
        The block, None where memory is not left, and the bytes that were mapped; those stay mapped even so.
    """
    block = _start(pool, size, stream, memory, ranks)
    mapped = 0
    while block.state is State.UNMAPPED or block.size < size:
        # All that is mapped so far is one block, so what follows it is not.
        missing = block if block.state is State.UNMAPPED else block.next
        assert missing is not None
        got = _map(missing, min(missing.size, size if missing is block else size - block.size), memory)
        if not got:
            return None, mapped
        mapped += got
        block = missing
    pool.remove(block)
    return block, mapped


def unmap(block: Block, memory: DeviceMemory) -> int:
    """Unmap the pages that lie wholly inside a free block (``unmap_block``), and return their bytes.

    What is left of the block at either end stays free; a segment without any page is gone.
    """
    assert block.base is not None
    pool, page, end = block.pool, block.pool.page_bytes, block.address + block.size
    first = block.base + round_up(block.address - block.base, page)
    last = end - (end - block.base) % page
    if first >= last:
        return 0
    pool.remove(block)
    if first > block.address:
        pool.insert(block.cut_front(first - block.address))
    if last < end:
        pool.insert(block.cut_back(end - last))
    memory.unmap(first, last - first)
    block.state = State.UNMAPPED
    pool.merge(block)
    if block.is_whole_segment:
        pool.remove(block)
    return last - first


def _start(pool: Pool, size: int, stream: int, memory: DeviceMemory, ranks: Iterator[int]) -> Block:
    """The lowest block from which ``size`` bytes are free or unmapped (``find_expandable_block``)."""
    for unmapped in pool.unmapped.get(stream, ()):
        previous = unmapped.previous
        start = previous if previous is not None and previous.state is State.FREE else unmapped
        available, block = 0, start
        while available < size:
            available += block.size
            if block.next is None or block.next.state not in (State.FREE, State.UNMAPPED):
                break
            block = block.next
        if available >= size:
            return start
    reserved = address_bytes(pool, memory)
    base = memory.reserve(reserved, stream)
    block = Block(base, reserved, stream, pool, base, next(ranks))
    block.state = State.UNMAPPED
    pool.insert(block)
    return block


def _map(block: Block, needed: int, memory: DeviceMemory) -> int:
    """Map the first pages of an unmapped block (``map_block``); their bytes, 0 where memory is not left."""
    size = round_up(needed, block.pool.page_bytes)
    if not memory.map(block.address, size):
        return 0
    pool = block.pool
    pool.remove(block)
    if size < block.size:
        rest = block.cut_back(block.size - size)
        rest.state = State.UNMAPPED
        pool.insert(rest)
    block.state = State.FREE
    pool.merge(block)
    return size
