"""Attention on NVIDIA cards: which kernel scaled dot product attention takes, and why none where it takes none.

Four paths: cuDNN's, flash, memory-efficient (which takes any mask), and the mathematical form, which keeps the scores. torch
tries them in this order and takes the first whose conditions hold (select_sdp_backend in
ATen/native/transformers/cuda/sdp_utils.cpp). The conditions are written down here, each with its words, since torch's own
answer needs a card. The switches of ``torch.nn.attention.sdpa_kernel`` and ``torch.backends.cuda`` are asked, since they
belong to the run. What the kernels allocate inside themselves is in attention_scratch_cuda.py.

Missing: the workspace of cuDNN, which its own heuristics decide; nested tensors, which no simulation runs; FlashAttention 3
and 4, which are chosen by hand; deterministic algorithms; head sizes above 128 in cuDNN, which are taken for flash here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memtrain.device import Cuda
from memtrain.trace.kernels_cpu import additive_mask

aten = torch.ops.aten

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_HALVES = (torch.float16, torch.bfloat16)

Conditions = tuple[tuple[bool, str], ...]
"""What a kernel asks of a call: whether it holds, and what the kernel does where it does not."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of scaled dot product attention.

    Attributes:
        query, key, value: (rows, heads, tokens, width), or all without rows.
        mask: which keys a query sees (bool), or what is added to the scores; broadcast over rows and heads.
        dropout_p: probability that a score is dropped.
        is_causal: whether a query sees the keys up to its own position only.
        grouped: whether several heads of queries may share one of keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    grouped: bool = False

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def wants_gradients(self) -> bool:
        """Whether there will be a backward."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)

    def in_four_dimensions(self) -> Call:
        """The call with one row where it has no rows (normalize_unbatched_input in sdp_utils_cpp.h)."""
        query, key, value = (tensor.unsqueeze(0) for tensor in self.inputs)
        mask = None if self.mask is None else self.mask[(None,) * (4 - self.mask.dim())]
        return replace(self, query=query, key=key, value=value, mask=mask)


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
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    kernel = attention_kernel(device, call)
    if kernel == "math":
        for reasons in _collecting:
            reasons.setdefault(why_math(device, call))
        return composite(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if query.dim() == 3:
        return _in_kernel(kernel, call.in_four_dimensions(), scale).squeeze(0)
    return _in_kernel(kernel, call, scale)


def _in_kernel(kernel: str, call: Call, scale: float | None) -> Tensor:
    query, key, value, mask = *call.inputs, call.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = additive_mask(mask, query.dtype)
    attended: Tensor
    if kernel == "flash":
        # The kernel takes head sizes that are multiples of 8; the scale stays that of the true one.
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        query, key, value = (_pad_to_multiple_of_8(tensor) for tensor in (query, key, value))
        attended = aten._scaled_dot_product_flash_attention(
            query, key, value, call.dropout_p, call.is_causal, False, scale=scale
        )[0]
        return attended if attended.shape[-1] == width else attended[..., :width]
    if kernel == "cudnn":
        attended = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.wants_gradients, call.dropout_p, call.is_causal, False, scale=scale
        )[0]
        return attended
    if mask is not None:
        mask = _aligned_mask(mask).expand(*query.shape[:3], key.shape[2])
    attended = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, call.wants_gradients, call.dropout_p, call.is_causal, scale=scale
    )[0]
    return attended


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


def attention_kernel(device: Cuda, call: Call) -> str:
    """The name of the kernel: "cudnn", "flash", "efficient" or "math"."""
    return next((kernel for kernel, refusal in refusals(device, call).items() if refusal is None), "math")


def refusals(device: Cuda, call: Call) -> dict[str, str | None]:
    """The fused kernels in the order in which torch tries them, with why one does not take the call; None where it does.

    Source: can_use_cudnn_attention, can_use_flash_attention and can_use_mem_efficient_attention in
    ATen/native/transformers/cuda/sdp_utils.cpp, and what they share in sdp_utils_cpp.h. From torch 2.14 on the kernels
    also take three dimensions (pull request 192271), and grouped heads go to memory-efficient (pull request 191085).
    """
    if {tensor.dim() for tensor in call.inputs} == {3} and _TORCH >= (2, 14):
        call = call.in_four_dimensions()
    shared = _shared(call)
    if any(not holds for holds, _ in shared):
        return dict.fromkeys(("cudnn", "flash", "efficient"), _first_refusal(shared))
    return {
        "cudnn": _first_refusal(_cudnn(device, call)),
        "flash": _first_refusal(_flash(device, call)),
        "efficient": _first_refusal(_efficient(device, call)),
    }


_NAMES = {"cudnn": "cuDNN", "flash": "flash", "efficient": "memory-efficient"}
_collecting: list[dict[str, None]] = []


def why_math(device: Cuda, call: Call) -> str:
    """Why no fused kernel takes a call, in words."""
    dtype = str(call.query.dtype).removeprefix("torch.")
    found = refusals(device, call)
    reasons = [f"{_NAMES[kernel]} {refusal}" for kernel, refusal in found.items()]
    same = len(set(found.values())) == 1
    said = f"each {next(iter(found.values()))}" if same else ", ".join(reasons)
    return f"no fused kernel takes {dtype}{'' if call.mask is None else ' with this mask'} on {device.name}: {said}"


@contextmanager
def collect_why_math() -> Iterator[dict[str, None]]:
    """Collect, each once, the reasons why attention of data-less tensors takes the mathematical form inside."""
    reasons: dict[str, None] = {}
    _collecting.append(reasons)
    try:
        yield reasons
    finally:
        _collecting.remove(reasons)


def _first_refusal(conditions: Conditions) -> str | None:
    return next((refusal for holds, refusal in conditions if not holds), None)


def _shared(call: Call) -> Conditions:
    """check_tensor_shapes, check_batch_size_and_num_heads_dense and check_nonzero_sequence_lengths_dense."""
    query, key, value = call.inputs
    return (
        (all(tensor.dim() == 4 for tensor in call.inputs), "takes rows of heads, so four dimensions"),
        (query.shape[0] == key.shape[0] == value.shape[0], "takes as many rows of keys and values as of queries"),
        (0 not in (query.shape[-2], key.shape[-2]), "takes one token or more"),
    )


def _cudnn(device: Cuda, call: Call) -> Conditions:
    """check_cudnn_tensor_shapes, check_cudnn_dropout, check_attn_mask_shape.

    check_prefer_cudnn_attention: with cuDNN above 9.15.0 and CUDA 13, which torch is published with from 2.11 on.
    """
    query, key, value = call.inputs
    widths = (query.shape[3], value.shape[3])
    return (
        (device.compute_capability[0] in (9, 10), "is for cards of compute capability 9 and 10"),
        (torch.backends.cuda.cudnn_sdp_enabled(), "is switched off"),
        (query.dtype in _HALVES, "takes float16 and bfloat16 only"),
        (all(width <= 128 and width % 8 == 0 for width in widths), "takes heads of multiples of 8 up to 128"),
        (key.shape[2] != 1, "takes more than one key"),
        (not (call.dropout_p and query.shape[2] == 1), "drops nothing for a single query"),
        ((call.dropout_p * 16).is_integer(), "takes dropout in sixteenths"),
        (call.mask is None or _suits_cudnn_mask(call, call.mask), "takes a fixed mask of two or four dimensions only"),
        (_last_strides_are_1(call, or_one_wide=True), "takes elements that lie beside each other"),
        (_heads_suit(call, call.grouped, same_of_keys_and_values=False), _heads_refusal(call.grouped)),
    )


def _suits_cudnn_mask(call: Call, mask: Tensor) -> bool:
    full = (*call.query.shape[:3], call.key.shape[2])
    sizes = zip(reversed(mask.shape), reversed(full), strict=False)
    return mask.dim() in (2, 4) and not mask.requires_grad and all(size in (1, whole) for size, whole in sizes)


def _flash(device: Cuda, call: Call) -> Conditions:
    """check_for_attn_mask, check_head_dim_size_flash, check_flash_causal_non_square_seqlens,
    check_flash_attention_hardware_support and check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""
    query, key, value = call.inputs
    width, capability = query.shape[3], device.compute_capability
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    no_backward = small and call.wants_gradients and width > 192 and (width <= 224 or call.dropout_p > 0)
    return (
        (torch.backends.cuda.flash_sdp_enabled(), "is switched off"),
        (capability >= (8, 0), "needs compute capability 8.0"),
        (query.dtype in _HALVES, "takes float16 and bfloat16 only"),
        (call.mask is None, "takes no mask"),
        (width == key.shape[3] == value.shape[3] <= 256, "takes heads of one width, up to 256"),
        (not no_backward, "has no backward for heads this wide on this card"),
        (not (call.is_causal and query.shape[2] != key.shape[2]), "is causal for as many queries as keys only"),
        (_heads_suit(call, call.grouped), _heads_refusal(call.grouped)),
        (_last_strides_are_1(call, or_one_wide=True), "takes elements that lie beside each other"),
    )


def _efficient(device: Cuda, call: Call) -> Conditions:
    """check_head_dim_size_mem_efficient with minimum_gemm_alignment."""
    query, key, value = call.inputs
    halves, major = query.dtype in _HALVES, device.compute_capability[0]
    types = (torch.float32, *(_HALVES if major >= 8 else _HALVES[:1]))
    alignment = 8 if halves and major >= 7 else 4 if major >= 8 else 1
    widths = (query.shape[3], value.shape[3])
    grouped = call.grouped and _TORCH >= (2, 14)
    return (
        (torch.backends.cuda.mem_efficient_sdp_enabled(), "is switched off"),
        (query.dtype in types, f"takes {' and '.join(str(one).removeprefix('torch.') for one in types)} only"),
        (query.shape[3] == key.shape[3], "takes keys as wide as queries"),
        (all(width > 0 and width % alignment == 0 for width in widths), f"takes heads of multiples of {alignment}"),
        (_last_strides_are_1(call, or_one_wide=False), "takes elements that lie beside each other"),
        (_heads_suit(call, grouped), _heads_refusal(grouped)),
    )


def _last_strides_are_1(call: Call, *, or_one_wide: bool) -> bool:
    """check_last_dim_stride_equals_1_dense."""
    inputs = all(tensor.stride(-1) == 1 for tensor in call.inputs) or (or_one_wide and call.query.shape[-1] == 1)
    return inputs and (call.mask is None or call.mask.stride(-1) == 1)


def _heads_suit(call: Call, grouped: bool, *, same_of_keys_and_values: bool = True) -> bool:
    """check_batch_size_and_num_heads_dense and check_grouped_query_attention."""
    heads = [tensor.shape[1] for tensor in call.inputs]
    if _TORCH >= (2, 14) and heads[1] == heads[2] == 1:
        return True
    if not grouped:
        return heads[0] == heads[1] == heads[2]
    if same_of_keys_and_values and heads[1] != heads[2]:
        return False
    return heads[0] % heads[1] == 0 and heads[0] % heads[2] == 0


def _heads_refusal(grouped: bool) -> str:
    return "takes heads of queries in equal groups" if grouped else "takes as many heads of keys and values as of queries"
