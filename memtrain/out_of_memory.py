"""Running out of memory, told from other errors, and caught so that nothing of what failed stays alive."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")

# What allocators say with a plain RuntimeError: torch's on a processor (c10/core/impl/alloc_cpu.cpp), CUDA's outside torch's
# caching allocator, and the libraries that allocate for themselves.
_SAYINGS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


@dataclass(frozen=True)
class OutOfMemory:
    """That memory ran out, and what was said; it holds no reference to what failed.

    Attributes:
        said: the first line of the allocator's message.
    """

    said: str


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of the device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS)


def attempt(work: Callable[[], T]) -> T | OutOfMemory:
    """What ``work`` returns, or that memory ran out; then everything that only the failed call held is freed.

    An exception keeps the frames that it passed, and with them their tensors, so it ends here.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).strip().splitlines()
        failure = OutOfMemory(said[0] if said else type(error).__name__)
    # A frame that keeps its own error stands in a cycle.
    gc.collect()
    return failure
