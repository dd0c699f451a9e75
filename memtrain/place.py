"""Host buffers: made and moved here and nowhere else, so that a data-less run knows where each storage lies (rule 3).

In a data-less run every tensor is on torch's ``meta`` device, and whether it stands for device or host memory is said by
:func:`placed`, which the recorder asks. What an operator computes from host tensors alone lies on the host too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from memtrain.trace.event import DEVICE, HOST, Place

_said: ContextVar[Place | None] = ContextVar("place", default=None)


def said_place() -> Place | None:
    """Where the storages that are being made lie, None where nobody says."""
    return _said.get()


@contextmanager
def placed(place: Place) -> Iterator[None]:
    """Every storage made inside lies at ``place``."""
    token = _said.set(place)
    try:
        yield
    finally:
        _said.reset(token)


def host_like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor of the same shape, type and layout in host memory."""
    with placed(HOST):
        return torch.empty_like(tensor, device="meta" if tensor.is_meta else "cpu")


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    return host_like(tensor).copy_(tensor)


def move_to_device_(module: nn.Module, device: str) -> nn.Module:
    """Move a module's parameters and buffers from the host, one at a time, each gone from the host before the next.

    In place; a tensor that several modules have stays one, and one that is there already stays. ``device`` is a torch device,
    "meta" in a data-less run.
    """
    moved: dict[int, Tensor] = {}
    for parent in module.modules():
        for tensors in (parent._parameters, parent._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = _on_device(tensor, device)
                tensors[name] = moved[id(tensor)]  # type: ignore[assignment]
    return module


def _on_device(tensor: Tensor, device: str) -> Tensor:
    """The tensor itself with its data on the device; a new one where it is not a parameter."""
    if tensor.device.type == torch.device(device).type == "cuda":
        return tensor
    with placed(DEVICE), torch.no_grad():
        data = torch.empty_like(tensor, device=device).copy_(tensor)
    if isinstance(tensor, nn.Parameter):
        tensor.data = data
        return tensor
    return data
