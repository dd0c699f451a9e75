"""The kernel table of NVIDIA cards: what torch's CUDA kernels run where data-less tensors would take another path.

See kernels.py for what the parts of a table are, attention_cuda.py for attention and attention_scratch_cuda.py for what
its kernels take. The rows were read in torch's source, those of flash-attn in that of the package, and have run on no card.

Missing, so that a prediction is too low by it: the workspaces of cuDNN (attention, convolutions), whose sizes are chosen at
run time; what CUB takes to sort indices (embedding, ``index_put_``, ``sort``, ``topk``, ``cumsum``), a few integers per
index; the partial sums of a reduction over several blocks, below a megabyte each; copies of matrices whose strides cuBLAS
does not take; recurrent layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtrain.device import Cuda
from memtrain.trace import attention_cuda
from memtrain.trace import attention_scratch_cuda as attention_scratch
from memtrain.trace.kernels_cpu import contiguous_copy, contiguous_first, count_nonzero, logsumexp, one_hot

aten = torch.ops.aten

# ---------------------------------------------------------------------- kernels


def _dropout(device: Cuda, composite: Callable[..., Tensor], input: Tensor, p: float, train: bool) -> Tensor:
    """One kernel, which keeps a mask of one byte per element (dropout in ATen/native/Dropout.cpp)."""
    if train and 0 < p < 1 and input.numel():
        dropped: Tensor = aten.native_dropout(input, p, train)[0]
        return dropped
    return composite(input, p, train)


def _rms_norm(
    device: Cuda,
    composite: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """One kernel, which keeps its input and one number per row, unless the types differ (rms_norm_symint in
    ATen/native/layer_norm.cpp)."""
    if weight is not None and weight.dtype != input.dtype:
        return composite(input, normalized_shape, weight, eps)
    out: Tensor = _FusedRmsNorm.apply(input, normalized_shape, weight, eps)
    return out


class _FusedRmsNorm(torch.autograd.Function):
    """aten::_fused_rms_norm as autograd knows it on a card; without a kernel of its own, meta takes it apart above autograd."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = aten._fused_rms_norm(input, shape, weight, eps)
        ctx.save_for_backward(input, rstd, weight)
        ctx.shape = shape
        normalized: Tensor = out
        return normalized

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        grad_input, grad_weight = aten._fused_rms_norm_backward(grad, input, ctx.shape, rstd, weight, wanted)
        return grad_input, None, grad_weight, None


def _softmax_of(operator: Any) -> Callable[..., Tensor]:
    """fp16 to fp32 in one kernel, without a copy of the input in fp32 (softmax and log_softmax in ATen/native/SoftMax.cpp)."""

    def softmax(
        device: Cuda, composite: Callable[..., Tensor], input: Tensor, dim: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        if input.dtype is torch.float16 and dtype is torch.float32:
            widened: Tensor = operator(input, dim, True)
            return widened
        return composite(input, dim, dtype)

    return softmax


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: attention_cuda.attention,
    aten.dropout.default: _dropout,
    aten.rms_norm.default: _rms_norm,
    aten.softmax.int: _softmax_of(aten._softmax),
    aten.log_softmax.int: _softmax_of(aten._log_softmax),
    aten.one_hot.default: one_hot,
}

# ---------------------------------------------------------------------- results that meta lays out otherwise


def _normalized(out: tuple[Tensor, Tensor], input: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Contiguous, and the numbers per row in the type of accumulation (_fused_rms_norm_cuda in
    ATen/native/cuda/layer_norm_kernel.cu)."""
    accumulated = torch.float64 if input.dtype is torch.float64 else torch.float32
    return (
        torch.empty(input.shape, dtype=input.dtype, device="meta"),
        torch.empty(out[1].shape, dtype=accumulated, device="meta"),
    )


def _seeds_on_host(out: tuple[Tensor, ...], *_: Any) -> tuple[Tensor, ...]:
    """Seed and offset of memory-efficient attention are numbers on the host, where they count for nothing
    (_efficient_attention_forward in ATen/native/transformers/cuda/attention.cu)."""
    return (*out[:2], *(torch.empty(0, dtype=torch.int64, device="meta") for _ in out[2:]))


RESULTS: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm_backward: contiguous_first,
    aten._fused_rms_norm: _normalized,
    aten._fused_rms_norm_backward: contiguous_first,
    aten._scaled_dot_product_efficient_attention: _seeds_on_host,
}

# ---------------------------------------------------------------------- scratch memory inside kernels


def _first_contiguous(_: Cuda, input: Tensor, *__: Any, **___: Any) -> int:
    """A contiguous input: layer_norm_cuda and _fused_rms_norm_cuda in cuda/layer_norm_kernel.cu, host_softmax in
    cuda/SoftMax.cu."""
    return contiguous_copy(input)


def _softmax_backward(_: Cuda, grad: Tensor, out: Tensor, *__: Any, **___: Any) -> int:
    """Contiguous gradient and output (host_softmax_backward in cuda/SoftMax.cu)."""
    return contiguous_copy(grad) + contiguous_copy(out)


def _safe_softmax(_: Cuda, input: Tensor, *__: Any, **___: Any) -> int:
    """A byte per score, which says whether it is hidden, and one per row; and a zero (_safe_softmax in
    ATen/native/transformers/attention.cpp)."""
    return input.numel() + input.numel() // max(1, input.shape[-1]) + input.element_size()


def _layer_norm_backward(
    device: Cuda,
    grad: Tensor,
    input: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: list[bool],
) -> int:
    return _norm_backward(device, grad, input, shape, sum(wanted[1:]))


def _rms_norm_backward(
    device: Cuda, grad: Tensor, input: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, wanted: list[bool]
) -> int:
    return _norm_backward(device, grad, input, shape, int(wanted[1]))


def _norm_backward(device: Cuda, grad: Tensor, input: Tensor, shape: list[int], parameters: int) -> int:
    """A contiguous gradient and input; for very many narrow rows, partial gradients of each parameter
    (LaunchGammaBetaBackwardCUDAKernel in cuda/layer_norm_kernel.cu)."""
    copies = contiguous_copy(grad) + contiguous_copy(input)
    width = math.prod(shape)
    rows = input.numel() // width if width else 0
    if rows <= 64 * 1024 or width // 32 >= device.multiprocessors // 2:
        return copies
    blocks = min(32 * 1024 // -(-width // 32), -(-rows // 32))
    return copies + parameters * blocks * width * input.element_size()


def _embedding_backward(device: Cuda, grad: Tensor, indices: Tensor, rows: int, *_: Any) -> int:
    """Above 3072 indices: the indices sorted, where they came from, where each row's run begins, and in fp32 a partial
    gradient for each run of ten (embedding_dense_backward_cuda in cuda/Embedding.cu, embedding_backward_cuda_kernel in
    cuda/EmbeddingBackwardKernel.cu).

    Releases of 2026 spare the partial gradients where the table is small against the number of indices.
    """
    copies = contiguous_copy(grad) + contiguous_copy(indices)
    count = indices.numel()
    if count <= 3072:
        return copies
    runs = min(count, rows)
    partials = count // 10 + runs
    # Two counters, each one number.
    integers = indices.element_size() * (3 * count + 2 * runs + partials) + 2 * 8
    accumulated = max(4, grad.element_size())
    return copies + integers + partials * grad.shape[-1] * accumulated


# By operator, or by name where it exists only once its library is loaded.
SCRATCH: dict[Any, Callable[..., int]] = {
    "flash_attn::_flash_attn_forward": attention_scratch.package_forward_scratch,
    "flash_attn::_flash_attn_backward": attention_scratch.package_backward_scratch,
    "flash_attn::_flash_attn_varlen_backward": attention_scratch.package_varlen_backward_scratch,
    aten._scaled_dot_product_flash_attention.default: attention_scratch.flash_forward_scratch,
    aten._scaled_dot_product_flash_attention_backward.default: attention_scratch.flash_backward_scratch,
    aten._scaled_dot_product_efficient_attention.default: attention_scratch.efficient_forward_scratch,
    aten._scaled_dot_product_efficient_attention_backward.default: attention_scratch.efficient_backward_scratch,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax.default: _first_contiguous,
    aten._log_softmax.default: _first_contiguous,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.native_layer_norm.default: _first_contiguous,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _first_contiguous,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.logsumexp.default: logsumexp,
    aten.count_nonzero.default: count_nonzero,
    aten.count_nonzero.dim_IntList: count_nonzero,
}

_OF_CONVOLUTIONS = (
    "the workspaces of convolutions are not in the prediction: cuDNN chooses them at run time, larger where memory is free"
)

UNKNOWN: dict[Any, Callable[..., str | None]] = dict.fromkeys(
    (aten.convolution.default, aten.convolution_backward.default), lambda *_: _OF_CONVOLUTIONS
)
"""Operators whose scratch memory nothing tells beforehand, each with the sentence that says so."""

# ---------------------------------------------------------------------- cuBLAS

_CUBLAS = {
    getattr(aten, name).default
    for name in (
        *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
        *("_int_mm", "_scaled_mm", "_grouped_mm"),
    )
}


def cublas_workspace_bytes(device: Cuda) -> int:
    """Memory that torch hands to cuBLAS, once per thread that multiplies matrices, and keeps.

    Source: parseChosenWorkspaceSize in ATen/cuda/CublasHandlePool.cpp, where ``CUBLAS_WORKSPACE_CONFIG`` is not set.
    """
    if device.compute_capability[0] in (9, 10, 12):
        return 32 * 2**20
    return 2 * 4096 * 2**10 + 8 * 16 * 2**10


def uses_cublas(operator: Any) -> bool:
    """Whether the operator runs in cuBLAS or cuBLASLt, which share the workspace of the thread."""
    return operator in _CUBLAS
