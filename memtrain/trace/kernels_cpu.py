"""The kernel table of processors: what torch's CPU kernels run where data-less tensors would take another path.

See kernels.py for what the parts of a table are. A row that is no longer needed makes its test fail
(tests/cpu/test_kernels.py and test_kernels_cpu.py).

Missing: what oneDNN takes inside a product of bfloat16 matrices, which depends on the processor and not on how large they
are (up to a few megabytes); recurrent layers. Convolutions are in convolutions_cpu.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from memtrain.device import Cpu, Device
from memtrain.trace import convolutions_cpu

aten = torch.ops.aten

# ---------------------------------------------------------------------- kernels


def _attention(
    device: Cpu,
    composite: Callable[..., Tensor],
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
    if not _takes_flash(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        return composite(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if query.dim() == 3:
        # From torch 2.14 on; the kernel itself takes four dimensions.
        query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
        return _attention(
            device, composite, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        ).squeeze(0)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = additive_mask(attn_mask, query.dtype)
    attended: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return attended


def _takes_flash(
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


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is true, -inf elsewhere; in a function of its own, so that the two scalars are freed in time."""
    hidden = aten.scalar_tensor(-torch.inf, dtype=dtype, device="meta")
    seen = aten.scalar_tensor(0.0, dtype=dtype, device="meta")
    additive: Tensor = aten.where.self(mask, seen, hidden)
    return additive


def one_hot(device: Device, composite: Callable[..., Tensor], tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Ones scattered into zeros, on a processor once the classes are known to fit; meta compares with every class instead.

    Source: one_hot in ATen/native/Onehot.cpp.
    """
    if num_classes < 0 or not tensor.numel():
        return composite(tensor, num_classes)
    if isinstance(device, Cpu):
        # Freed before the result is made.
        aten.aminmax(tensor)
    encoded: Tensor = aten.zeros([*tensor.shape, num_classes], dtype=tensor.dtype, device=tensor.device)
    return encoded.scatter_(-1, tensor.unsqueeze(-1), 1)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.one_hot.default: one_hot,
}

# ---------------------------------------------------------------------- results that meta lays out otherwise


def contiguous_first(out: tuple[Tensor | None, ...], *_: Any) -> tuple[Tensor | None, ...]:
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


def _first_like_input(out: tuple[Tensor | None, ...], grad: Tensor, input: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    """The gradient of group norm's input is laid out as the input; meta lays it out as the gradient that it gets.

    Source: native_group_norm_backward in ATen/native/group_norm.cpp.
    """
    return out if out[0] is None else (torch.empty_like(input), *out[1:])


def _statistics_of_the_inputs_type(result: Any, input: Tensor, shape: Any, weight: Tensor | None, *_: Any) -> Any:
    """Mean and rstd have the input's type, unless the weight has another: param_scalar_type in mixed_data_type.h."""
    out, *statistics = result
    if weight is not None and weight.dtype != input.dtype:
        return result
    return (out, *(torch.empty_strided(one.shape, one.stride(), dtype=input.dtype, device="meta") for one in statistics))


def _statistics_of_the_weights_type(result: Any, input: Tensor, weight: Tensor | None, *_: Any) -> Any:
    """Mean and rstd of groups have the weight's type where the input has another: param_scalar_type in mixed_data_type.h."""
    if weight is None or weight.dtype == input.dtype:
        return result
    out, *statistics = result
    return (out, *(torch.empty_like(one, dtype=weight.dtype) for one in statistics))


def _statistics_of_training(
    result: Any, input: Tensor, weight: Tensor | None, bias: Any, mean: Tensor | None, var: Any, training: bool, *_: Any
) -> Any:
    """Mean and rstd of a batch are there in training alone, in the type of the parameters: batch_norm_cpu in Normalization.cpp."""
    out, *statistics = result
    dtype = next((one.dtype for one in (weight, mean) if one is not None), input.dtype)
    return (out, *(torch.empty(one.shape if training else 0, dtype=dtype, device="meta") for one in statistics))


RESULTS: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm: _statistics_of_training,
    aten.native_layer_norm: _statistics_of_the_inputs_type,
    aten.native_layer_norm_backward: contiguous_first,
    aten.native_group_norm: _statistics_of_the_weights_type,
    aten.native_group_norm_backward: _first_like_input,
    aten.mse_loss: _reduced_in_place,
    aten.smooth_l1_loss: _reduced_in_place,
    aten.binary_cross_entropy: _reduced_in_place,
    aten.soft_margin_loss: _reduced_in_place,
}

# ---------------------------------------------------------------------- scratch memory inside kernels


def _attention_splits(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows of queries and of keys that one thread works on (flash_attention_kernel_impl, FlashAttentionKernel.cpp)."""
    queries, keys = query.shape[-2], key.shape[-2]
    return min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries), min(512, keys)


def _flash_forward(device: Cpu, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """Per thread, in fp32: scores, their running maximum and sum, and the output; and the scores once more in a half type
    (cpu_flash_attention, same file)."""
    rows, columns = _attention_splits(query, key)
    halves = 2 * rows * columns if query.element_size() == 2 else 0
    return device.threads * (4 * (rows * columns + 2 * rows + rows * query.shape[-1]) + halves)


def _flash_backward(device: Cpu, grad: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """Per thread, in fp32: scores, their gradient and a sum per query; the first two once more in a half type
    (cpu_flash_attention_backward, same file); and the gradient with heads beside each other, unless it came so
    (_scaled_dot_product_flash_attention_cpu_backward, attention.cpp)."""
    rows, columns = _attention_splits(query, key)
    halves = 2 * 2 * rows * columns if query.element_size() == 2 else 0
    return device.threads * (4 * (2 * rows * columns + rows) + halves) + contiguous_copy(grad.transpose(1, 2))


def _layer_norm(_: Cpu, input: Tensor, *__: Any, **___: Any) -> int:
    """A contiguous input (layer_norm_cpu, layer_norm.cpp)."""
    return contiguous_copy(input)


def _layer_norm_backward(
    device: Cpu,
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
    return device.threads * partial + contiguous_copy(grad) + contiguous_copy(input)


def _group_norm(
    device: Cpu,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: int,
    channels: int,
    positions: int,
    groups: int,
    eps: float,
) -> int:
    """Where channels come last, two numbers per row and channel (GroupNormKernelImplChannelsLastInternal,
    group_norm_kernel.cpp)."""
    if input.is_contiguous():
        return 0
    return _per_thread_sums(device, rows, channels, positions, groups) or 2 * 4 * rows * channels


def _group_norm_backward(
    device: Cpu,
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    rows: int,
    channels: int,
    positions: int,
    groups: int,
    wanted: list[bool],
) -> int:
    """Two sums per row and channel (GroupNormBackwardKernelImplInternal, group_norm_kernel.cpp)."""
    last = 0 if input.is_contiguous() else _per_thread_sums(device, rows, channels, positions, groups)
    return 2 * 4 * rows * channels + last


def _per_thread_sums(device: Cpu, rows: int, channels: int, positions: int, groups: int) -> int:
    """Two sums per row and channel for each thread, and two per group, for images of at least 1024 positions."""
    return 2 * 4 * rows * (device.threads * channels + groups) if positions >= 1024 else 0


def _huber_loss(_: Cpu, input: Tensor, target: Tensor, reduction: int = 1, *__: Any) -> int:
    """One value per element, unless that is the result (huber_loss, Loss.cpp)."""
    elements = torch.broadcast_shapes(input.shape, target.shape).numel() * input.element_size()
    return elements if reduction else 0


def _logits_loss(
    _: Cpu,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> int:
    """The sigmoid's logarithm and either its buffer, the loss, or the weights of the positives on the way
    (binary_cross_entropy_with_logits, Loss.cpp)."""
    elements = input.numel() * input.element_size()
    if pos_weight is not None:
        return 2 * elements + pos_weight.numel() * pos_weight.element_size()
    return 2 * elements


def logsumexp(_: Device, input: Tensor, dims: list[int], *__: Any) -> int:
    """The maxima, and the input less them (logsumexp_out_impl in ATen/native/ReduceOps.cpp)."""
    reduced = math.prod(input.shape[dim] for dim in dims) if dims and input.dim() else input.numel()
    return input.nbytes + input.nbytes // max(1, reduced)


def count_nonzero(_: Device, input: Tensor, *__: Any) -> int:
    """What is not zero as bools, and these as the integers that are added up (count_nonzero in
    ATen/native/TensorAdvancedIndexing.cpp, make_reduction in ReduceOps.h)."""
    return 9 * input.numel()


def contiguous_copy(tensor: Tensor) -> int:
    """Bytes of the copy that ``tensor.contiguous()`` makes."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def _bitsandbytes_update(copies: int) -> Callable[..., int]:
    """fp32 copies of the weight's size, one more where the weight is not fp32.

    Source: the updates of bitsandbytes/backends/default/ops.py, which processors run.
    """

    def scratch(_: Cpu, name: str, gradient: Tensor, weight: Tensor, *__: Any, **___: Any) -> int:
        return 4 * (copies + (weight.dtype != torch.float32)) * weight.numel()

    return scratch


def _cast_operands(_: Cpu, *operands: Any, **__: Any) -> int:
    """Operands of another type than the one computed in, each cast whole (ATen/TensorIterator.cpp, compute_types)."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor) and operand.dim()]
    common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.bool)
    return sum(tensor.numel() * common.itemsize for tensor in tensors if tensor.dtype is not common)


_MIXED = [getattr(aten, f"{name}{ending}").Tensor for name in ("add", "sub", "mul", "div") for ending in ("", "_")]

# By operator, or by name where it exists only once its library is loaded.
SCRATCH: dict[Any, Callable[..., int]] = {
    "bitsandbytes::optimizer_update_32bit": _bitsandbytes_update(3),
    "bitsandbytes::optimizer_update_8bit_blockwise": _bitsandbytes_update(5),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    **dict.fromkeys(_MIXED, _cast_operands),
    aten.huber_loss.default: _huber_loss,
    aten.binary_cross_entropy_with_logits.default: _logits_loss,
    aten.logsumexp.default: logsumexp,
    aten.count_nonzero.dim_IntList: count_nonzero,
    **convolutions_cpu.SCRATCH,
}
UNKNOWN: dict[Any, Callable[..., str | None]] = convolutions_cpu.UNKNOWN
