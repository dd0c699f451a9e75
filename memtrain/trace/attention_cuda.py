"""Attention on NVIDIA cards: which kernel scaled dot product attention takes, and what that kernel allocates.

Four paths: cuDNN's, flash, memory-efficient (which takes any mask), and the mathematical form, which keeps the scores. torch
tries them in this order and takes the first whose conditions hold (select_sdp_backend in
ATen/native/transformers/cuda/sdp_utils.cpp). The conditions are written down here, since torch's own answer needs a card.
The switches of ``torch.nn.attention.sdpa_kernel`` and ``torch.backends.cuda`` are asked, since they belong to the run.

Missing: the workspace of cuDNN, which its own heuristics decide; nested tensors, which no simulation runs; FlashAttention 3
and 4, which are chosen by hand; deterministic algorithms; head sizes above 128 in cuDNN, which are taken for flash here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtrain.device import Cuda
from memtrain.trace.kernels_cpu import additive_mask, contiguous_copy

aten = torch.ops.aten

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_HALVES = (torch.float16, torch.bfloat16)


def attention(
    device: Cuda,
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
    """scaled_dot_product_attention in ATen/native/transformers/attention.cpp, with the kernel that the card takes."""
    kernel = attention_kernel(device, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if kernel == "math":
        return composite(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if query.dim() == 3:
        query, key, value, attn_mask = _four_dimensions(query, key, value, attn_mask)
        return attention(
            device, composite, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        ).squeeze(0)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = additive_mask(attn_mask, query.dtype)
    attended: Tensor
    if kernel == "flash":
        # The kernel takes head sizes that are multiples of 8; the scale stays that of the true one.
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        query, key, value = (_pad_to_multiple_of_8(tensor) for tensor in (query, key, value))
        attended = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return attended if attended.shape[-1] == width else attended[..., :width]
    if kernel == "cudnn":
        attended = aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, _wants_gradients(query, key, value), dropout_p, is_causal, False, scale=scale
        )[0]
        return attended
    if attn_mask is not None:
        attn_mask = _aligned_mask(attn_mask).expand(*query.shape[:3], key.shape[2])
    attended = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, _wants_gradients(query, key, value), dropout_p, is_causal, scale=scale
    )[0]
    return attended


def _wants_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """normalize_unbatched_input in sdp_utils_cpp.h."""
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask


def _pad_to_multiple_of_8(tensor: Tensor) -> Tensor:
    """pad_last_dim in attention.cpp."""
    beyond = tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, 8 - beyond)) if beyond else tensor


def _aligned_mask(mask: Tensor) -> Tensor:
    """Rows that begin at multiples of 8, by padding each (preprocess_mask in attention.cpp).

    A mask whose rows are in order but whose outer strides are not gets a whole 8 more.
    """
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]


# ---------------------------------------------------------------------- which kernel


def attention_kernel(
    device: Cuda,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    """The name of the kernel: "cudnn", "flash", "efficient" or "math".

    Source: can_use_cudnn_attention, can_use_flash_attention and can_use_mem_efficient_attention in
    ATen/native/transformers/cuda/sdp_utils.cpp, and what they share in sdp_utils_cpp.h. From torch 2.14 on the kernels
    also take three dimensions (pull request 192271), and grouped heads go to memory-efficient (pull request 191085).
    """
    if query.dim() == key.dim() == value.dim() == 3 and _TORCH >= (2, 14):
        query, key, value, attn_mask = _four_dimensions(query, key, value, attn_mask)
    if not query.dim() == key.dim() == value.dim() == 4 or not query.shape[0] == key.shape[0] == value.shape[0]:
        return "math"
    if query.shape[2] == 0 or key.shape[2] == 0:
        return "math"
    case = (device, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    # check_prefer_cudnn_attention: with cuDNN above 9.15.0 and CUDA 13, which torch is published with from 2.11 on.
    if device.compute_capability[0] in (9, 10) and torch.backends.cuda.cudnn_sdp_enabled() and _suits_cudnn(*case):
        return "cudnn"
    if torch.backends.cuda.flash_sdp_enabled() and _suits_flash(*case):
        return "flash"
    if torch.backends.cuda.mem_efficient_sdp_enabled() and _suits_efficient(*case):
        return "efficient"
    return "math"


def _suits_cudnn(
    device: Cuda,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """check_cudnn_tensor_shapes, check_cudnn_dropout, check_attn_mask_shape."""
    widths = (query.shape[3], value.shape[3])
    return (
        query.dtype in _HALVES
        and all(width <= 128 and width % 8 == 0 for width in widths)
        and key.shape[2] != 1
        and not (dropout_p and query.shape[2] == 1)
        and (dropout_p * 16).is_integer()
        and (mask is None or _suits_cudnn_mask(query, key, mask))
        and _last_strides_are_1(query, key, value, mask, or_one_wide=True)
        and _heads_suit(query, key, value, enable_gqa, same_of_keys_and_values=False)
    )


def _suits_cudnn_mask(query: Tensor, key: Tensor, mask: Tensor) -> bool:
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    sizes = zip(reversed(mask.shape), reversed(full), strict=False)
    return mask.dim() in (2, 4) and not mask.requires_grad and all(size in (1, whole) for size, whole in sizes)


def _suits_flash(
    device: Cuda,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """check_for_attn_mask, check_head_dim_size_flash, check_flash_causal_non_square_seqlens,
    check_flash_attention_hardware_support and check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""
    width = query.shape[3]
    small = (8, 6) <= device.compute_capability <= (8, 9) or device.compute_capability[0] == 12
    no_backward = small and _wants_gradients(query, key, value) and width > 192 and (width <= 224 or dropout_p > 0)
    return (
        mask is None
        and device.compute_capability >= (8, 0)
        and query.dtype in _HALVES
        and width == key.shape[3] == value.shape[3] <= 256
        and not no_backward
        and not (is_causal and query.shape[2] != key.shape[2])
        and _heads_suit(query, key, value, enable_gqa)
        and _last_strides_are_1(query, key, value, mask, or_one_wide=True)
    )


def _suits_efficient(
    device: Cuda,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """check_head_dim_size_mem_efficient with minimum_gemm_alignment."""
    halves, major = query.dtype in _HALVES, device.compute_capability[0]
    if query.dtype not in (torch.float32, torch.float16) and not (major >= 8 and halves):
        return False
    alignment = 8 if halves and major >= 7 else 4 if major >= 8 else 1
    return (
        query.shape[3] == key.shape[3]
        and all(width > 0 and width % alignment == 0 for width in (query.shape[3], value.shape[3]))
        and _last_strides_are_1(query, key, value, mask, or_one_wide=False)
        and _heads_suit(query, key, value, enable_gqa and _TORCH >= (2, 14))
    )


def _last_strides_are_1(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, or_one_wide: bool) -> bool:
    """check_last_dim_stride_equals_1_dense."""
    inputs = all(tensor.stride(-1) == 1 for tensor in (query, key, value)) or (or_one_wide and query.shape[-1] == 1)
    return inputs and (mask is None or mask.stride(-1) == 1)


def _heads_suit(query: Tensor, key: Tensor, value: Tensor, grouped: bool, *, same_of_keys_and_values: bool = True) -> bool:
    """check_batch_size_and_num_heads_dense and check_grouped_query_attention."""
    heads = [tensor.shape[1] for tensor in (query, key, value)]
    if _TORCH >= (2, 14) and heads[1] == heads[2] == 1:
        return True
    if not grouped:
        return heads[0] == heads[1] == heads[2]
    if same_of_keys_and_values and heads[1] != heads[2]:
        return False
    return heads[0] % heads[1] == 0 and heads[0] % heads[2] == 0


# ---------------------------------------------------------------------- scratch memory of flash


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _rounded_width(width: int) -> int:
    rounded = _rounded(width, 32)
    return rounded if rounded < 224 else 256


def flash_forward_scratch(
    device: Cuda, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, *_: Any, **__: Any
) -> int:
    """In fp32, where the keys are split over the card for want of other work: a partial output and a log-sum-exp per split
    (set_params_splitkv in flash_attn/flash_api.cpp)."""
    rows, heads, length, width = query.shape
    if dropout_p:
        return 0
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    splits = _splits(rows * heads * -(-length // 64), 2 * device.multiprocessors, -(-key.shape[2] // block))
    return 0 if splits == 1 else splits * 4 * rows * heads * length * (1 + _rounded_width(width))


def _splits(work: int, processors: int, blocks: int, most: int = 128) -> int:
    """The smallest number of splits of the keys whose last wave is nearly full (num_splits_heuristic, same file)."""
    if work >= 0.8 * processors:
        return 1
    candidates = [
        splits
        for splits in range(1, min(most, processors, blocks) + 1)
        if splits == 1 or -(-blocks // splits) != -(-blocks // (splits - 1))
    ]
    efficiency = {splits: (waves := work * splits / processors) / math.ceil(waves) for splits in candidates}
    return next(splits for splits in candidates if efficiency[splits] >= 0.85 * max(efficiency.values()))


def flash_backward_scratch(
    device: Cuda, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *_: Any, **__: Any
) -> int:
    """In fp32, a sum per query and the gradient of the queries, both rounded up; with grouped heads, the gradients of keys
    and values per head of the queries (mha_bwd in flash_attn/flash_api.cpp); gradient and output with heads beside each
    other, unless they came so (_flash_attention_backward in attention_backward.cu)."""
    rows, heads, length, width = query.shape
    accumulated = 4 * rows * heads * _rounded(length, 128) * (1 + _rounded_width(width))
    expanded = 2 * rows * heads * key.shape[2] * width * query.element_size() if key.shape[1] != heads else 0
    copies = contiguous_copy(grad.transpose(1, 2)) + contiguous_copy(out.transpose(1, 2))
    return accumulated + expanded + copies


# ---------------------------------------------------------------------- scratch memory of memory-efficient


def efficient_forward_scratch(device: Cuda, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """The output in fp32 where heads are too wide for registers (kNeedsOutputAccumulatorBuffer in
    mem_eff_attention/kernel_forward.h)."""
    wide = max(key.shape[3], value.shape[3]) > 128
    return 4 * query.shape[:3].numel() * value.shape[3] if wide and query.dtype in _HALVES else 0


def efficient_backward_scratch(
    device: Cuda,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    *_: Any,
    **__: Any,
) -> int:
    """The gradient with heads beside each other, unless it came so; with grouped heads, the gradients of keys and values
    per head of the queries; a sum per query, which fp32 makes by way of a whole product; and the workspace
    (_efficient_attention_backward in attention_backward.cu)."""
    rows, heads, length, width = query.shape
    per_key = heads * (width + value.shape[3]) if key.shape[1] != heads else 0
    expanded = rows * key.shape[2] * per_key * query.element_size()
    delta = 4 * rows * heads * length
    workspace = _efficient_workspace(device, query, key, value, dropout_p > 0)
    product = 0 if query.dtype in _HALVES else 4 * grad.numel() + delta
    return contiguous_copy(grad.transpose(1, 2)) + expanded + delta + max(product, workspace)


def _efficient_workspace(device: Cuda, query: Tensor, key: Tensor, value: Tensor, dropout: bool) -> int:
    """Parameters' workspace_size in mem_eff_attention/kernel_backward.h: in fp32, tiles of the queries' gradient; and of
    the keys' and values' where these do not stay in registers."""
    rows, heads, length, width = query.shape
    keys, widest = key.shape[2], max(width, value.shape[3])
    queries_tile, keys_tile, kept = _efficient_tiles(device, query.dtype, widest, dropout)
    splits = -(-keys // keys_tile)
    if rows * heads >= 256 and keys <= 2 * keys_tile:
        splits = 1
    elements = 0
    if not kept:
        splits = max(1, min(splits, 200 // (rows * heads)))
        elements += splits * keys_tile * (_rounded(width, queries_tile) + _rounded(value.shape[3], queries_tile))
    # Each tile has a header of 16 bytes: a lock and a counter.
    elements += -(-length // queries_tile) * -(-width // keys_tile) * (queries_tile * keys_tile + 4)
    return 4 * rows * heads * _rounded(elements, 4)


def _efficient_tiles(device: Cuda, dtype: torch.dtype, width: int, dropout: bool) -> tuple[int, int, bool]:
    """Rows of queries and of keys in a tile, and whether the gradients of keys and values need no buffer in memory.

    The first kernel of dispatch_cutlassB (mem_eff_attention/kernels/cutlassB.h) that suits. Of a kernel that comes in a
    large and a small form, the small one is for cards with less shared memory, as its generator (generate_kernels.py) says.
    """
    capability = device.compute_capability
    roomy = capability == (8, 0) or capability[0] in (9, 10)
    if dtype not in _HALVES:
        return (128 if width > 64 and roomy else 64), 64, True
    if width <= 64:
        return 64, 64, True
    if width <= 96 and capability in ((8, 6), (8, 9)) and not dropout:
        return 128, 64, True
    if width <= 128 and roomy:
        return 128, 128, True
    if capability == (7, 0):
        return 128, 64, width <= 128
    return (128 if roomy else 64), 64, False
