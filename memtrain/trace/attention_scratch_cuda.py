"""What attention kernels of NVIDIA cards allocate and free inside themselves, in bytes: rows of the kernel table.

The kernels of torch (see attention_cuda.py for which one is taken) and those of the flash-attn package, whose operators say
what they return and not what they allocate on the way. The numbers were read in the sources that each function names; those
of the package, version 2.8.3, have run on no card.

Missing: deterministic backward passes, which keep a sum per split; the scratch of flash-attn 3 and 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memtrain.device import Cuda
from memtrain.trace.kernels_cpu import contiguous_copy

_HALVES = (torch.float16, torch.bfloat16)

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
    return _split_scratch(device, query, key.shape[2], _rounded_width(query.shape[3]), dropout_p)


def _split_scratch(device: Cuda, query: Tensor, keys: int, rounded_width: int, dropout_p: float) -> int:
    """For queries (rows, heads, tokens, width)."""
    rows, heads, length, width = query.shape
    if dropout_p:
        return 0
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    splits = _splits(rows * heads * -(-length // 64), 2 * device.multiprocessors, -(-keys // block))
    return 0 if splits == 1 else splits * 4 * rows * heads * length * (1 + rounded_width)


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


# ---------------------------------------------------------------------- scratch memory of the flash-attn package


def package_forward_scratch(
    device: Cuda, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, *_: Any, **__: Any
) -> int:
    """As in torch's, of queries (rows, tokens, heads, width): mha_fwd in csrc/flash_attn/flash_api.cpp.

    Sequences of several lengths (mha_varlen_fwd) are split only where keys come in pages.
    """
    return _split_scratch(device, query.transpose(1, 2), key.shape[1], _package_width(query.shape[3]), dropout_p)


def package_backward_scratch(device: Cuda, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """In fp32, the gradient of the queries, rounded up; with grouped heads, the gradients of keys and values per head of the
    queries. The sum per query (softmax_d) is the operator's result. Source: mha_bwd, same file."""
    rows, length, heads, width = query.shape
    return _package_backward(query, key, rows * _rounded(length, 128), heads, width)


def package_varlen_backward_scratch(
    device: Cuda,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    starts: Tensor,
    *_: Any,
    **__: Any,
) -> int:
    """The same of queries (tokens, heads, width), with room for 128 more of each sequence (mha_varlen_bwd, same file)."""
    tokens, heads, width = query.shape
    return _package_backward(query, key, tokens + 128 * (starts.numel() - 1), heads, width)


def _package_backward(query: Tensor, key: Tensor, queries: int, heads: int, width: int) -> int:
    accumulated = 4 * queries * heads * _package_width(width)
    expanded = 2 * heads * (key.numel() // key.shape[-2]) * query.element_size() if key.shape[-2] != heads else 0
    return accumulated + expanded


def _package_width(width: int) -> int:
    return _rounded(width, 32 if width <= 128 else 64)


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
