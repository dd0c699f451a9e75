"""What bitsandbytes' kernels do inside themselves with packed weights, and what data-less tensors cannot tell of 8-bit products.

The rows of the two kinds of device stand here together, since they are the operators of one library (0.50). Each names its source
in it. An upper bound on a card: its fused product with 4-bit weights, which unpacks nothing, is taken for a few rows of input by a
rule of thumb of each architecture (``_gemm_4bit_use_custom_cuda`` in backends/cuda/ops.py: never above 1536 rows, and above 512
for small weights only), so that the weight is taken to be unpacked always, as it is in backward.

Missing: layers of an odd number of inputs, which a processor unpacks through 32-bit integers.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memtrain.device import Cpu, Cuda, Device
from memtrain.models.quantize import is_packed
from memtrain.place import placed
from memtrain.trace.event import DEVICE

# ---------------------------------------------------------------------- scratch memory inside kernels


def _product_4_bit(
    device: Device,
    input: Tensor,
    packed: Tensor,
    shape: list[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    *__: Any,
    **___: Any,
) -> int:
    """The unpacked weight, and where its scales are packed too these in fp32 (_gemm_4bit_default_impl in backends/default/ops.py), on
    a card without and with their mean (_dequant_linear_fallback in backends/cuda/ops.py)."""
    copies = 0 if absmax_8bit is None else 4 * absmax_8bit.numel() * (2 if isinstance(device, Cuda) else 1)
    return math.prod(shape) * input.element_size() + copies


def _pack_4_bit_cpu(_: Cpu, weight: Tensor, *__: Any) -> int:
    """In fp32 the weight, unless it is, and its values over their scales; then 32 bits, 8 bits and half of that for each
    (quantize_4bit in backends/default/ops.py)."""
    widened = 0 if weight.dtype is torch.float32 else 4
    return int((widened + 9.5) * weight.numel())


def _round_to_8_bits(device: Device, input: Tensor, threshold: float = 0.0) -> int:
    """On a processor the input over its scales in fp32, twice; with a threshold a byte for each value, and on a card their
    sizes (int8_vectorwise_quant in backends/default/ops.py and backends/cuda/ops.py)."""
    marks = input.numel() if threshold else 0
    sizes = input.nbytes if threshold else 0
    return marks + (8 * input.numel() if isinstance(device, Cpu) else sizes)


def _product_8_bit(
    device: Device,
    input: Tensor,
    packed: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """The product in 32-bit integers, and on a card in fp16 where the result has another type; on a processor two more in fp32, or
    before that both factors and their product in fp32 (int8_linear_matmul and int8_mm_dequant in the two backends).

    A card multiplies in fp32 too where the number of inputs is not divisible by 4, and turns the product into integers twice
    (_int8_linear_matmul_impl in backends/cuda/ops.py).
    """
    results = input.numel() // input.shape[-1] * packed.shape[0]
    if isinstance(device, Cuda) and input.shape[-1] % 4 == 0:
        return (4 if dtype is torch.float16 else 6) * results
    return max(12 * results, 4 * (input.numel() + packed.numel()) + 8 * results)


def _mixed_product_8_bit(device: Device, input: Tensor, rounded: Tensor, packed: Tensor, *scales: Any) -> int:
    row_scales, column_scales, *_ = scales
    return _product_8_bit(device, rounded, packed, row_scales, column_scales, None, input.dtype)


# By name, since they exist only once the library is loaded.
SCRATCH: dict[str, Callable[..., int]] = {
    "bitsandbytes::gemm_4bit": _product_4_bit,
    "bitsandbytes::int8_vectorwise_quant": _round_to_8_bits,
    "bitsandbytes::int8_scaled_mm": _product_8_bit,
    "bitsandbytes::int8_mixed_scaled_mm": _mixed_product_8_bit,
}
SCRATCH_CPU: dict[str, Callable[..., int]] = {**SCRATCH, "bitsandbytes::quantize_4bit": _pack_4_bit_cpu}

# ---------------------------------------------------------------------- results that depend on values

SPLIT_BY_SIZE = ("bitsandbytes::int8_vectorwise_quant", "bitsandbytes::int8_mixed_scaled_mm")
NO_OUTLIERS = "of the inputs of 8-bit layers none was taken to reach the threshold"


def outliers_unknown(operator: Any, args: Any, kwargs: Any) -> Any:
    """The data-less result of an operator of 8-bit products that splits its input by size, with no value that is large; None for
    every other operator.

    Each column of large values would add 2 bytes a row to what is saved for backward, and 2 a row of the weight while multiplied.
    """
    name = operator.name()
    if name == "bitsandbytes::int8_vectorwise_quant":
        given = args[0]
        threshold = args[1] if len(args) > 1 else kwargs.get("threshold", 0.0)
        if threshold:
            rows = given.numel() // given.shape[-1]
            return (
                torch.empty(given.shape, dtype=torch.int8, device="meta"),
                torch.empty(rows, dtype=torch.float32, device="meta"),
                torch.empty(0, dtype=torch.int64, device="meta"),
            )
    if name == "bitsandbytes::int8_mixed_scaled_mm":
        given, packed = args[0], args[2]
        return (
            torch.empty((*given.shape[:-1], packed.shape[0]), dtype=given.dtype, device="meta"),
            torch.empty(0, dtype=given.dtype, device="meta"),
        )
    return None


# ---------------------------------------------------------------------- the path of a processor


@contextmanager
def products_of(device: Device) -> Iterator[None]:
    """Let 8-bit layers take the path of a processor inside, where the device is one: in training they unpack the weight.

    Source: matmul in autograd/_functions.py, which asks the input for the name of its device.
    """
    library: Any = sys.modules.get("bitsandbytes")
    if library is None or not isinstance(device, Cpu):
        yield
        return
    functions = sys.modules["bitsandbytes.autograd._functions"]
    matmul = library.matmul

    def as_on_a_processor(input: Tensor, weight: Tensor, out: Any = None, state: Any = None, bias: Any = None) -> Tensor:
        unpacks = input.is_meta and state.is_training
        taken = functions.MatMul8bitFp if unpacks else functions.MatMul8bitLt
        product: Tensor = taken.apply(input, weight, out, bias, state)
        return product

    library.matmul = as_on_a_processor
    try:
        yield
    finally:
        library.matmul = matmul


# ---------------------------------------------------------------------- a user's packed weights without data


def packed_without_data(module: torch.nn.Module) -> dict[int, Any]:
    """What a data-less copy has in place of packed layers' tensors, by the identity of each.

    These layers are where they are trained already, which is said here: loading moves all but them.
    """
    made: dict[int, Any] = {}
    layers: list[Any] = [layer for layer in module.modules() if is_packed(layer)]
    with placed(DEVICE):
        for layer in layers:
            _pack_without_data(layer, made)
    return made


def _pack_without_data(layer: Any, made: dict[int, Any]) -> None:
    library, weight, state = sys.modules["bitsandbytes"].nn, layer.weight, getattr(layer, "state", None)
    data = torch.empty_like(weight.data, device="meta")
    if layer.bias is not None:
        made[id(layer.bias)] = torch.nn.Parameter(torch.empty_like(layer.bias, device="meta"), layer.bias.requires_grad)
    if state is None:
        made[id(weight.quant_state)] = scales = _state_without_data(weight.quant_state, made)
        settings = {
            name: getattr(weight, name)
            for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized")
        }
        made[id(weight)] = library.Params4bit(data, requires_grad=False, quant_state=scales, **settings)
        return
    for holder in (weight, state):
        # The bytes of the weight itself, and its scales, which go from one to the other at the first forward.
        if holder.CB is not None:
            made[id(holder.CB)] = data
        if holder.SCB is not None:
            made[id(holder.SCB)] = torch.empty_like(holder.SCB, device="meta")
    held = {name: made.get(id(getattr(weight, name))) for name in ("CB", "SCB")}
    made[id(weight)] = library.Int8Params(data, requires_grad=False, has_fp16_weights=weight.has_fp16_weights, **held)


def _state_without_data(state: Any, made: dict[int, Any]) -> Any:
    if state is None:
        return None
    copied = copy.copy(state)
    for name in ("absmax", "code", "offset"):
        if isinstance(value := getattr(state, name), Tensor):
            # All states with packed scales have one table of their values in common.
            if id(value) not in made:
                made[id(value)] = torch.empty_like(value, device="meta")
            setattr(copied, name, made[id(value)])
    copied.state2 = _state_without_data(state.state2, made)
    return copied
