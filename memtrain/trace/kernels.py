"""The kernel table: what a device really runs where data-less tensors would take another path, and what that allocates.

Data-less tensors live on torch's ``meta`` device, which has no kernels of its own for composite operators: scaled dot
product attention, for one, falls back to its mathematical definition there. ``kernels_of(device)`` makes such operators
take the device's path. The replacements sit at a dispatch key that no tensor uses (``AutocastIPU``), above autograd and
below Python, so that they are also reached from C++ composites, from backward and from recomputation, without a mode to
push again.

Each row states its source. A row that is no longer needed makes its test fail (tests/cpu/test_kernels.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

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
    """Flash attention for processors where torch would take it, else the mathematical form.

    The mask's conversion: convert_boolean_attn_mask in ATen/native/transformers/attention.cpp.
    """
    flash = query.is_meta and _takes_flash_on_cpu(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not flash:
        out: Tensor = aten.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out
    if query.dim() == 3:
        # From torch 2.14 on; the kernel itself takes four dimensions.
        query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
        return _attention_on_cpu(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        ).squeeze(0)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _additive(attn_mask, query.dtype)
    attended: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return attended


def _takes_flash_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """torch's own answer (use_flash_attention_cpp in ATen/native/transformers/sdp_utils_cpp.cpp).

    It depends on shapes, on the last stride and on whether the mask wants gradients, and on nothing of this machine; so it
    is asked about processor tensors that have these and one row of memory each.
    """

    def stand_in(tensor: Tensor) -> Tensor:
        strides = [0] * (tensor.dim() - 1) + list(tensor.stride()[-1:])
        like = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")
        return like.requires_grad_(tensor.requires_grad)

    # Out of the recorder's sight.
    with torch._C._DisableTorchDispatch():
        choice = torch._fused_sdp_choice(
            stand_in(query),
            stand_in(key),
            stand_in(value),
            None if attn_mask is None else stand_in(attn_mask),
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return bool(choice == SDPBackend.FLASH_ATTENTION.value)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is true, -inf elsewhere; in a function of its own, so that the two scalars are freed in time."""
    hidden = aten.scalar_tensor(-torch.inf, dtype=dtype, device="meta")
    seen = aten.scalar_tensor(0.0, dtype=dtype, device="meta")
    additive: Tensor = aten.where.self(mask, seen, hidden)
    return additive


_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {"cpu": {"scaled_dot_product_attention": _attention_on_cpu}}


# ---------------------------------------------------------------------- results that meta lays out otherwise


def _contiguous_first(out: tuple[Tensor | None, ...], *_: Any) -> tuple[Tensor | None, ...]:
    """The gradient of layer norm's input is contiguous whatever the strides of the input; meta keeps the strides.

    Source: layer_norm_backward_cpu in ATen/native/layer_norm.cpp.
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


def _flash_backward_scratch(device: Device, grad: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """Per thread, in fp32: scores, their gradient and a sum per query (cpu_flash_attention_backward, same file); and the
    gradient with heads beside each other, unless it came so (_scaled_dot_product_flash_attention_cpu_backward,
    attention.cpp)."""
    rows, columns = _attention_splits(query, key)
    return device.threads * 4 * (2 * rows * columns + rows) + _contiguous_copy(grad.transpose(1, 2))


def _layer_norm_scratch(_: Device, input: Tensor, *__: Any, **___: Any) -> int:
    """A contiguous input (layer_norm_cpu, layer_norm.cpp)."""
    return _contiguous_copy(input)


def _layer_norm_backward_scratch(
    device: Device,
    grad: Tensor,
    input: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: list[bool],
) -> int:
    """Per thread, partial gradients of weight and bias where these are wanted (LayerNormBackwardKernelImpl,
    layer_norm_kernel.cpp); a contiguous gradient and input (layer_norm_backward_cpu, layer_norm.cpp)."""
    partial = 2 * math.prod(shape) * input.element_size() if any(wanted[1:]) else 0
    return device.threads * partial + _contiguous_copy(grad) + _contiguous_copy(input)


def _contiguous_copy(tensor: Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


_SCRATCH: dict[str, dict[Any, Callable[..., int]]] = {
    "cpu": {
        aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_forward_scratch,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward_scratch,
        aten.native_layer_norm.default: _layer_norm_scratch,
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
