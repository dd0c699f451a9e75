"""What a processor's convolutions allocate inside themselves: oneDNN's layouts, on processors with AVX2 or AVX-512.

Only of the usual kind is it known: fp32, two dimensions, one group, no dilation, a stride of 1 or 2, rows in torch's own layout.
What others take depends on which kernel oneDNN, or torch, has for them on a processor, and a sentence says that it is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtrain.device import Cpu

aten = torch.ops.aten


def _is_usual(input: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> bool:
    """Whether it is a convolution whose scratch memory is known: what oneDNN takes in blocks of channels, or a product."""
    stride, _padding, dilation, transposed, _output_padding, groups = settings[:6]
    plain = input.dim() == 4 and input.is_contiguous() and input.dtype is weight.dtype is torch.float32
    return plain and not transposed and groups == 1 and max(dilation) == 1 and max(stride) <= 2 and weight.shape[0] >= 16


def _is_product(weight: Tensor, settings: tuple[Any, ...]) -> bool:
    return max(weight.shape[2:]) == 1 and max(settings[0]) == 1


def _blocked(tensor: Tensor, *channels: int) -> int:
    """Bytes of a tensor in oneDNN's layout, in which channels come in blocks of 16."""
    sizes = (-(-size // 16) * 16 if dim in channels else size for dim, size in enumerate(tensor.shape))
    return math.prod(sizes) * tensor.element_size()


def _blocked_input(input: Tensor) -> int:
    """The same of the input of a convolution, which stays as it is where its channels fill no block, as those of an image."""
    return _blocked(input, 1) if input.shape[1] >= 16 else 0


def convolution(_: Cpu, input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> int:
    """Input and weight in oneDNN's layout beside the result in it, and then that beside the result as torch has it
    (_mkldnn_convolution in ATen/native/mkldnn/Conv.cpp). One pixel at a time it is a product, which takes nothing."""
    if not _is_usual(input, weight, settings) or _is_product(weight, settings):
        return 0
    # Out of the recorder's sight.
    with torch._C._DisableTorchDispatch():
        out: Tensor = aten.convolution.default(input, weight, bias, *settings)
    made = _blocked(out, 1)
    return max(_blocked_input(input) + _blocked(weight, 0, 1) + made - out.numel() * out.element_size(), made)


def convolution_backward(_: Cpu, grad: Tensor, input: Tensor, weight: Tensor, bias: Any, *settings: Any) -> int:
    """Gradient and weight in oneDNN's layout beside the gradient of the input in it, then that beside itself as torch has it, with
    strides by way of one copy more; then gradient and input beside the gradient of the weight (mkldnn_convolution_backward)."""
    stride, (of_input, of_weight, _of_bias) = settings[0], settings[-1]
    if not _is_usual(input, weight, settings) or _is_product(weight, settings):
        return 0
    inside = _blocked(grad, 1) + _blocked_input(input) if of_weight else 0
    if of_input:
        made = _blocked(input, 1)
        at_once = max(_blocked(grad, 1) + _blocked(weight, 0, 1) + made, made * (3 if max(stride) > 1 else 2))
        results = input.numel() + weight.numel() * of_weight
        inside = max(inside, at_once - results * input.element_size())
    return inside


_MISSING = (
    "what some convolutions take inside themselves on a processor is not in the prediction: it is known in fp32, two dimensions, "
    "one group, and strides of 1 or 2"
)


def _unknown(input: Tensor, weight: Tensor, _: Any, *settings: Any) -> str | None:
    return None if _is_usual(input, weight, settings) else _MISSING


def _unknown_backward(_: Tensor, input: Tensor, weight: Tensor, bias: Any, *settings: Any) -> str | None:
    return _unknown(input, weight, bias, *settings)


SCRATCH: dict[Any, Callable[..., int]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
UNKNOWN: dict[Any, Callable[..., str | None]] = {
    aten.convolution.default: _unknown,
    aten.convolution_backward.default: _unknown_backward,
}
