"""4-bit layers as bitsandbytes 0.43 makes and multiplies them, on the classes of the installed bitsandbytes.

Until 0.45 every product of more than one row unpacked the whole weight, in forward and again in backward, and cast it to the type
of what it is multiplied with. Packing changed since in what is there beside one another, which decides the blocks that an allocator
hands out. Source: MatMul4Bit in autograd/_functions.py, Linear4bit.forward in nn/modules.py, quantize_4bit in functional.py (0.43.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.method import Nf4
from memtrain.models.adapters import is_linear
from memtrain.models.quantize import is_packed, quantize_

_SCALES_TO_A_SCALE = 256


def quantize_as_loaded_(model: nn.Module, quantization: Nf4, dtype: torch.dtype, card: str) -> nn.Module:
    """Pack each linear layer but the head, in the order in which from_pretrained reads a file: by name. In place.

    Args:
        dtype: of the weights, and of the products at first.
        card: the torch device that layers are packed on.
    """
    with _packing():
        for path in sorted(path for path, layer in model.named_modules() if is_linear(layer)):
            quantize_(model, quantization, dtype, below=path, card=card)
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if is_packed(layer):
            layer.forward = partial(_multiplied, layer)
            # The first input decides the type of the products, whatever was asked for.
            layer.compute_type_is_set = False
    return model


@contextmanager
def _packing() -> Iterator[None]:
    import bitsandbytes

    functional: Any = bitsandbytes.functional
    present = functional.quantize_4bit
    tables: list[Tensor] = []

    def quantize_4bit(weight: Tensor, quant_type: str, compress_statistics: bool, blocksize: int = 64) -> tuple[Tensor, Any]:
        scales = weight.new_zeros(-(-weight.numel() // blocksize), dtype=torch.float32)
        packed = weight.new_zeros(((weight.numel() + 1) // 2, 1), dtype=torch.uint8)
        state = functional.QuantState(
            absmax=scales,
            shape=weight.shape,
            dtype=weight.dtype,
            blocksize=blocksize,
            code=functional.get_4bit_type(quant_type, device=weight.device),
            quant_type=quant_type,
        )
        if compress_statistics:
            state.offset = scales.mean()
            scales -= state.offset
            if not tables:
                # What 8 bits stand for is one table for all layers.
                tables.append(weight.new_zeros(256, dtype=torch.float32))
            state.state2 = functional.QuantState(
                absmax=weight.new_zeros(-(-scales.numel() // _SCALES_TO_A_SCALE), dtype=torch.float32),
                blocksize=_SCALES_TO_A_SCALE,
                code=tables[0],
                dtype=torch.float32,
            )
            state.absmax, state.nested = torch.zeros_like(scales, dtype=torch.uint8), True
        return packed, state

    functional.quantize_4bit = quantize_4bit
    try:
        yield
    finally:
        functional.quantize_4bit = present


def _multiplied(layer: Any, given: Tensor) -> Tensor:
    if layer.bias is not None and layer.bias.dtype is not given.dtype:
        layer.bias.data = layer.bias.data.to(given.dtype)
    if not layer.compute_type_is_set:
        layer.set_compute_type(given)
        layer.compute_type_is_set = True
    computed = given.to(layer.compute_dtype)
    bias = None if layer.bias is None else layer.bias.to(layer.compute_dtype)
    product: Tensor = _Product.apply(computed, layer.weight.t(), bias, layer.weight.quant_state)
    return product.to(given.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, packed: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        ctx.state, ctx.packed = state, packed
        return nn.functional.linear(given, _unpacked(packed, state).to(given.dtype).t(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return torch.matmul(gradient, _unpacked(ctx.packed, ctx.state).to(gradient.dtype).t()), None, None, None


def _unpacked(packed: Tensor, state: Any) -> Tensor:
    """The weight, transposed, in the type that it was packed from."""
    import bitsandbytes

    functional: Any = bitsandbytes.functional
    unpacked: Tensor = functional.dequantize_4bit(packed, state)
    return unpacked
