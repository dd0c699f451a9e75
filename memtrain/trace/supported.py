"""Support lists of torch, which name the devices that a kernel is for, and which data-less tensors are not on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def as_if_supported() -> Iterator[None]:
    """Let torch's foreach and fused functions take data-less tensors for those of a device that has such kernels.

    They look a device up in lists of names, which do not hold ``meta``: without this, clipping refuses ``foreach`` and
    AdamW refuses ``fused``.
    """
    from torch.nn.utils import clip_grad
    from torch.optim import adam, adamw, optimizer
    from torch.utils import _foreach_utils as lists

    fused = lists._get_fused_kernels_supported_devices
    has_foreach = lists._device_has_foreach_support
    substitutes: dict[Any, Any] = {
        fused: lambda: [*fused(), "meta"],
        has_foreach: lambda device: device.type == "meta" or has_foreach(device),
    }
    replaced: list[tuple[Any, str, Any]] = []
    for module in (clip_grad, adam, adamw, optimizer, lists):
        for name, value in vars(module).copy().items():
            if callable(value) and value in substitutes:
                setattr(module, name, substitutes[value])
                replaced.append((module, name, value))
    try:
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
