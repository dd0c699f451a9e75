"""Managed memory in a data-less run: bitsandbytes' paged buffers, without a card to make them on.

The library asks the driver for them (cudaMallocManaged), fills them by a kernel and moves them ahead of a kernel by
another call. None of these can act on data-less tensors, and none allocates anything but the buffer itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memtrain.place import placed
from memtrain.trace.event import MANAGED


@contextmanager
def paged_state() -> Iterator[None]:
    """Let the optimizers of bitsandbytes that step inside page by data-less buffers, placed at MANAGED.

    The library is loaded by what makes such an optimizer, perhaps inside; so its functions are substituted when the first
    step begins, and a run without such an optimizer does not load it.
    """

    def substitute(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        manager: Any = getattr(optimizer, "page_mng", None)
        if manager is None:
            return
        functional: Any = sys.modules["bitsandbytes.functional"]
        if functional.get_paged is _get_paged:
            return
        for name, stand_in in (("get_paged", _get_paged), ("fill", _nothing), ("prefetch_tensor", _nothing)):
            undo.callback(setattr, functional, name, getattr(functional, name))
            setattr(functional, name, stand_in)
        # The library keeps every paged buffer of the process in a list.
        undo.callback(_shorten, manager.paged_tensors, len(manager.paged_tensors))

    with ExitStack() as undo:
        undo.callback(register_optimizer_step_pre_hook(substitute).remove)
        yield


def _shorten(buffers: list[Tensor], length: int) -> None:
    del buffers[length:]


def _get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    with placed(MANAGED):
        buffer = torch.empty(shape, dtype=dtype, device="meta")
    buffer.is_paged = True  # type: ignore[attr-defined]
    return buffer


def _nothing(*_: Any, **__: Any) -> None:
    """Fill or move a buffer."""
