"""A trace through the caching allocator: what is reserved on the device, and what the blocks take that are handed out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memtrain.memory.allocator import CachingAllocator
from memtrain.memory.allocator_config import AllocatorConfig
from memtrain.memory.segments import DeviceMemory
from memtrain.trace.event import DEVICE, Event, Trace


@dataclass(frozen=True)
class Replay:
    """What the allocator made of a trace.

    Attributes:
        trace: the trace with the bytes of each event on the device replaced by the size of the block that it got, so that
            a ``MemoryTimeline`` over it counts what ``torch.cuda.memory_allocated`` does; other places as they were.
        reserved: reserved bytes after each event on the device, as ``torch.cuda.memory_reserved`` counts them.
        peak_reserved_bytes: their peak, which an allocation that is tried again can exceed for a moment.
        num_alloc_retries: how often the device was full and all that was cached had to be released.
    """

    trace: Trace
    reserved: tuple[int, ...]
    peak_reserved_bytes: int
    num_alloc_retries: int


def replay(trace: Trace, config: AllocatorConfig, capacity_bytes: int | None = None) -> Replay:
    """Run the device's events of a trace through an allocator that has nothing yet.

    A free takes effect at once. On a card it can be later where another stream uses the block (``record_stream``), which a
    trace does not tell.

    Args:
        trace: allocations and frees in order.
        config: the allocator's settings.
        capacity_bytes: what the allocator can obtain of the device in all; None: there is no end to it.

    Raises:
        OutOfMemory: an allocation does not fit into the capacity.
        ValueError: a storage is freed that is not live, or with another size than it was allocated with.
    """
    allocator = CachingAllocator(config, DeviceMemory(capacity_bytes))
    live: dict[int, tuple[int, int, int]] = {}  # by storage: its bytes, its address, the bytes of its block
    events: list[Event] = []
    reserved: list[int] = []
    for position, event in enumerate(trace.events):
        if event.place != DEVICE:
            events.append(event)
            continue
        size = event.bytes
        if size > 0:
            address = allocator.malloc(size, event.stream)
            block = allocator.block_bytes(address)
            live[event.storage] = size, address, block
        else:
            freed, address, block = live.pop(event.storage, (0, 0, 0))
            if freed != -size or not freed:
                raise ValueError(
                    f"event {position} frees {-size} bytes of storage {event.storage}, which is not live with that size."
                )
            allocator.free(address)
            block = -block
        events.append(event if block == size else _resized(event, block))
        reserved.append(allocator.reserved_bytes)
    return Replay(
        trace=replace(trace, events=tuple(events)),
        reserved=tuple(reserved),
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        num_alloc_retries=allocator.num_alloc_retries,
    )


def _resized(event: Event, size: int) -> Event:
    # Positionally, because dataclasses.replace takes longer than the allocator itself.
    return Event(event.storage, size, event.kind, event.phase, event.operator, event.module, event.place, event.stream)
