"""The kernel table: what a device really runs where data-less tensors would take another path, and what that allocates.

Data-less tensors live on torch's ``meta`` device, which has no kernels of its own for composite operators: scaled dot
product attention, for one, falls back to its mathematical definition there. ``kernels_of(device)`` makes such operators
take the device's path. The replacements sit at a dispatch key that no tensor uses (``AutocastIPU``), above autograd and
below Python, so that they are also reached from C++ composites, from backward and from recomputation, without a mode to
push again.

Each row states its source. A row that is no longer needed makes its test fail (tests/cpu/test_kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memtrain.device import Device

aten = torch.ops.aten

_KEY_NAME = "AutocastIPU"
_KEY = torch._C._dispatch_key_parse(_KEY_NAME)
_KEY_SET = torch._C.DispatchKeySet(_KEY)


# ---------------------------------------------------------------------- kernels


def _attention_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention for processors where its conditions hold, else the mathematical form.

    Conditions: use_flash_attention_cpp in ATen/native/transformers/sdp_utils_cpp.cpp; the mask's conversion:
    convert_boolean_attn_mask in ATen/native/transformers/attention.cpp.
    """
    flash = (
        query.is_meta
        and query.dim() == key.dim() == value.dim() == 4
        and dropout_p == 0.0
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and (attn_mask is None or not attn_mask.requires_grad)
        and 0 not in (query.shape[-2], key.shape[-2])
    )
    if not flash:
        out: Tensor = aten.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _additive(attn_mask, query.dtype)
    attended: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return attended


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is true, -inf elsewhere; in a function of its own, so that the two scalars are freed in time."""
    hidden = aten.scalar_tensor(-torch.inf, dtype=dtype, device="meta")
    seen = aten.scalar_tensor(0.0, dtype=dtype, device="meta")
    additive: Tensor = aten.where.self(mask, seen, hidden)
    return additive


_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {"cpu": {"scaled_dot_product_attention": _attention_on_cpu}}


# ---------------------------------------------------------------------- results that meta lays out otherwise


def _contiguous_first(out: tuple[Tensor | None, ...], *_: Any) -> tuple[Tensor | None, ...]:
    """Layer norm returns contiguous results whatever the strides of its input; meta keeps the strides.

    Source: layer_norm_cpu and layer_norm_backward_cpu in ATen/native/layer_norm.cpp.
    """
    first = out[0]
    if first is None or first.is_contiguous():
        return out
    return (torch.empty(first.shape, dtype=first.dtype, device="meta"), *out[1:])


def _reduced_in_place(out: Tensor, input: Tensor, target: Tensor, *_: Any) -> Tensor:
    """These losses fill their result with one value per element and reduce it into the same storage, which stays as large.

    Source: mse_loss_out and its siblings in ATen/native/Loss.cpp; the result is resized, its storage is not.
    """
    elements = torch.broadcast_shapes(input.shape, target.shape).numel()
    return torch.empty(elements, dtype=out.dtype, device="meta").as_strided(out.shape, out.stride())


_RESULTS: dict[str, dict[Any, Callable[..., Any]]] = {
    "cpu": {
        aten.native_layer_norm: _contiguous_first,
        aten.native_layer_norm_backward: _contiguous_first,
        aten.mse_loss: _reduced_in_place,
        aten.smooth_l1_loss: _reduced_in_place,
        aten.binary_cross_entropy: _reduced_in_place,
        aten.soft_margin_loss: _reduced_in_place,
    }
}


def as_laid_out(device: Device, operator: Any, out: Any, args: Any) -> Any:
    """The data-less result ``out`` of ``operator`` with the strides and storage that the device's kernel gives it."""
    row = _RESULTS[device.kind].get(operator._overloadpacket)
    return out if row is None else row(out, *args)


# ---------------------------------------------------------------------- scratch memory inside kernels


def _attention_splits(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows of queries and of keys that one thread works on (flash_attention_kernel_impl, FlashAttentionKernel.cpp)."""
    queries, keys = query.shape[-2], key.shape[-2]
    return min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries), min(512, keys)


def _flash_forward_scratch(device: Device, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """Per thread, in fp32: scores, their running maximum and sum, and the output (cpu_flash_attention, same file)."""
    rows, columns = _attention_splits(query, key)
    return device.threads * 4 * (rows * columns + 2 * rows + rows * query.shape[-1])


def _flash_backward_scratch(device: Device, _: Tensor, query: Tensor, key: Tensor, *__: Any, **___: Any) -> int:
    """Per thread, in fp32: scores and their gradient (cpu_flash_attention_backward, same file)."""
    rows, columns = _attention_splits(query, key)
    return device.threads * 4 * 2 * rows * columns


def _layer_norm_backward_scratch(device: Device, _: Tensor, __: Tensor, shape: list[int], *___: Any, **____: Any) -> int:
    """Per thread, partial gradients of weight and bias (LayerNormBackwardKernelImpl, layer_norm_kernel.cpp)."""
    width = 1
    for size in shape:
        width *= size
    return device.threads * 4 * 2 * width


_SCRATCH: dict[str, dict[Any, Callable[..., int]]] = {
    "cpu": {
        aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_forward_scratch,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward_scratch,
        aten.native_layer_norm_backward.default: _layer_norm_backward_scratch,
    }
}


def scratch_bytes(device: Device, operator: Any, args: Any, kwargs: Any) -> int:
    """Bytes that the device's kernel for ``operator`` allocates and frees inside itself."""
    row = _SCRATCH[device.kind].get(operator)
    return 0 if row is None else row(device, *args, **kwargs)


# ---------------------------------------------------------------------- putting the table in force

_active: dict[str, Callable[..., Any]] = {}
_libraries: list[torch.library.Library] = []


def _register() -> None:
    """Register a dispatcher for every operator of the table, once; it passes on where no device is in force."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
    library = torch.library.Library("aten", "IMPL")
    for name in {name for table in _KERNELS.values() for name in table}:
        operator = getattr(aten, name).default

        def kernel(keys: Any, *args: Any, _operator: Any = operator, _name: str = name, **kwargs: Any) -> Any:
            replacement = _active.get(_name)
            if replacement is None:
                return _operator.redispatch(keys.remove(_KEY), *args, **kwargs)
            # Excluded, so that a replacement can fall back to the operator it replaces.
            with torch._C._ExcludeDispatchKeyGuard(_KEY_SET):
                return replacement(*args, **kwargs)

        library.impl(name, kernel, _KEY_NAME, with_keyset=True)
    # A library's registrations last as long as the object.
    _libraries.extend((everything, library))


@contextmanager
def kernels_of(device: Device) -> Iterator[None]:
    """Let data-less tensors take the paths of ``device`` inside."""
    if not _libraries:
        _register()
    before = dict(_active)
    _active.clear()
    _active.update(_KERNELS[device.kind])
    # A key in the include set is still skipped while its autocast state is off.
    enabled = torch.is_autocast_enabled("ipu")
    torch.set_autocast_enabled("ipu", True)
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        torch.set_autocast_enabled("ipu", enabled)
        _active.clear()
        _active.update(before)
