"""The other processes of a data-less run: a process group in which this one is the first and collectives do nothing.

What they allocate is what the first process allocates. DistributedDataParallel makes and rebuilds its buckets in it as it does
between real processes, since each bucket's future is done at once (features/data_parallel.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup


@contextmanager
def processes_of(ranks: int) -> Iterator[None]:
    """Let torch.distributed's default group be that of ``ranks`` processes which are not there; one needs no group."""
    if ranks == 1:
        yield
        return
    before = dist.group.WORLD
    dist.group.WORLD = _group(ranks)
    try:
        yield
    finally:
        dist.group.WORLD = before


def _group(ranks: int) -> dist.ProcessGroup:
    backend = FakeProcessGroup._create_internal(0, ranks)
    # The stubs do not know that it can be made of a rank and a size.
    make: Any = dist.ProcessGroup
    group: dist.ProcessGroup = make(0, ranks)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    # torch.tensor and the order of the buckets are on the host.
    for device in ("meta", "cpu"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return group
