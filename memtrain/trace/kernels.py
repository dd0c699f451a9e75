"""The kernel tables: what a device really runs where data-less tensors would take another path, and what that allocates.

Data-less tensors live on torch's ``meta`` device, which has no kernels of its own for composite operators: scaled dot
product attention, for one, falls back to its mathematical definition there. ``kernels_of(device)`` makes such operators
take the device's path. The replacements sit at a dispatch key that no tensor uses (``AutocastIPU``), above autograd and
below Python, so that they are also reached from C++ composites, from backward and from recomputation, without a mode to
push again.

A table has four parts, and there is one per kind of device (kernels_cpu.py, kernels_cuda.py). Each row states its source.

- ``KERNELS``: by operator, ``replacement(device, operator, *arguments)``; it may call ``operator``, torch's own path.
- ``RESULTS``: by operator, whatever the overload, ``layout(result, *arguments)``, where ``meta`` lays a result out otherwise.
- ``SCRATCH``: by operator, ``bytes(device, *arguments)`` that the kernel allocates and frees inside itself.
- ``UNKNOWN``: by operator, from its arguments, a sentence where those bytes are not known; it is listed with the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from memtrain.device import Device
from memtrain.trace import autocast, kernels_bitsandbytes, kernels_cpu, kernels_cuda
from memtrain.trace.layouts import tensors_in

_KEY_NAME = "AutocastIPU"
_KEY = torch._C._dispatch_key_parse(_KEY_NAME)

_KERNELS = {"cpu": kernels_cpu.KERNELS, "cuda": kernels_cuda.KERNELS}
_RESULTS = {"cpu": kernels_cpu.RESULTS, "cuda": kernels_cuda.RESULTS}
_SCRATCH = {
    "cpu": kernels_cpu.SCRATCH | kernels_bitsandbytes.SCRATCH_CPU,
    "cuda": kernels_cuda.SCRATCH | kernels_bitsandbytes.SCRATCH,
}
_UNKNOWN = {"cpu": kernels_cpu.UNKNOWN, "cuda": kernels_cuda.UNKNOWN}


def as_laid_out(device: Device, operator: Any, out: Any, args: Any) -> Any:
    """The data-less result ``out`` of ``operator`` with the strides and storage that the device's kernel gives it."""
    row = _RESULTS[device.kind].get(operator._overloadpacket)
    return out if row is None else row(out, *args)


def scratch_bytes(device: Device, operator: Any, args: Any, kwargs: Any) -> int:
    """Bytes that the device's kernel for ``operator`` allocates and frees inside itself."""
    row = _scratch_row(device, operator)
    return 0 if row is None else row(device, *args, **kwargs)


def has_scratch(device: Device, operator: Any) -> bool:
    """Whether the device's kernel for ``operator`` ever allocates inside itself."""
    return _scratch_row(device, operator) is not None


def unknown_scratch(device: Device, operator: Any, args: Any) -> str | None:
    """One sentence where nothing tells beforehand what the device's kernel for ``operator`` allocates inside itself."""
    row = _UNKNOWN[device.kind].get(operator)
    return None if row is None else row(*args)


def _scratch_row(device: Device, operator: Any) -> Callable[..., int] | None:
    table = _SCRATCH[device.kind]
    row = table.get(operator)
    return table.get(operator.name()) if row is None and operator.namespace != "aten" else row


_active: dict[Any, Callable[..., Any]] = {}
_libraries: list[torch.library.Library] = []
_registered: set[Any] = set()


def _register(operators: Iterable[Any]) -> None:
    """Register the dispatcher for these operators, once each; it passes on where no device is in force."""
    if not _libraries:
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
        # A library's registrations last as long as the object.
        _libraries.extend((everything, torch.library.Library("aten", "IMPL")))
    for operator in operators:
        if operator not in _registered:
            _registered.add(operator)
            _libraries[1].impl(operator, partial(_dispatch, operator), _KEY_NAME, with_keyset=True)


def _dispatch(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """The device's path where there is one for these tensors, else torch's own, in whose inside the table stays in force."""
    below = keys.remove(_KEY)
    if operator not in _active and not autocast.is_on():
        return operator.redispatch(below, *args, **kwargs)
    if not any(tensor.is_meta for tensor in tensors_in((*args, *kwargs.values()))):
        return operator.redispatch(below, *args, **kwargs)
    with autocast.casts(operator, args, kwargs) as (called, cast_args, cast_kwargs):
        plain = partial(called.redispatch, below)
        replacement = _active.get(called)
        if replacement is None:
            return plain(*cast_args, **cast_kwargs)
        return replacement(plain, *cast_args, **cast_kwargs)


@contextmanager
def kernels_of(device: Device) -> Iterator[None]:
    """Let data-less tensors take the paths of ``device`` inside, and autocast act on them as it does there."""
    _register(_KERNELS[device.kind])
    _register(autocast.operators_of(autocast.POLICIES[device.kind]))
    before = dict(_active)
    _active.clear()
    _active.update({operator: partial(row, device) for operator, row in _KERNELS[device.kind].items()})
    # A key in the include set is still skipped while its autocast state is off.
    enabled = torch.is_autocast_enabled("ipu")
    torch.set_autocast_enabled("ipu", True)
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY), autocast.emulated(device.kind):
            yield
    finally:
        torch.set_autocast_enabled("ipu", enabled)
        _active.clear()
        _active.update(before)
