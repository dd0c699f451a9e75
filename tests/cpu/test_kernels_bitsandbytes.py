"""The rows of bitsandbytes' products with packed weights: measured on a processor, and for cards worked out from the library's source."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_load import CARD
from test_parity import PROCESSOR
from test_quantize import allocated

from memtrain.device import Cpu, Cuda
from memtrain.trace import kernels_bitsandbytes as kernels
from memtrain.trace.kernels import scratch_bytes

# On both kinds of device; packing 4 bits takes memory inside a processor's kernel alone.
PRODUCTS = {"gemm_4bit", "int8_vectorwise_quant", "int8_scaled_mm", "int8_mixed_scaled_mm"}
TESTED = {f"bitsandbytes::{name}" for name in PRODUCTS}
TESTED_CPU = TESTED | {"bitsandbytes::quantize_4bit"}


def test_every_row_has_a_test() -> None:
    assert set(kernels.SCRATCH) == TESTED
    assert set(kernels.SCRATCH_CPU) == TESTED_CPU


def scratch(device: Cpu | Cuda, name: str, *args: Any, **kwargs: Any) -> int:
    import bitsandbytes  # noqa: F401

    return scratch_bytes(device, getattr(torch.ops.bitsandbytes, name).default, args, kwargs)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# ---------------------------------------------------------------------------------------------- by the source

TOKENS, INPUTS, OUTPUTS = 32, 128, 64
WEIGHTS, SCALES, RESULTS = INPUTS * OUTPUTS, INPUTS * OUTPUTS // 64, TOKENS * OUTPUTS


@pytest.mark.parametrize(
    ("device", "nested", "size"),
    [
        (CARD, False, 2 * WEIGHTS),
        # The scales without their mean, and with it.
        (CARD, True, 2 * WEIGHTS + 2 * 4 * SCALES),
        (PROCESSOR, False, 2 * WEIGHTS),
        (PROCESSOR, True, 2 * WEIGHTS + 4 * SCALES),
    ],
)
def test_a_product_in_4_bits_unpacks_the_weight_and_its_scales(device: Cpu | Cuda, nested: bool, size: int) -> None:
    given, packed = empty(TOKENS, INPUTS, dtype=torch.bfloat16), empty(WEIGHTS // 2, 1, dtype=torch.uint8)
    scales = {"absmax_8bit": empty(SCALES, dtype=torch.uint8)} if nested else {}
    assert scratch(device, "gemm_4bit", given, packed, [OUTPUTS, INPUTS], empty(2), 64, "nf4", **scales) == size


@pytest.mark.parametrize(
    ("device", "threshold", "size"),
    [
        (CARD, 0.0, 0),
        # Each input's size in fp16, and whether it is large.
        (CARD, 6.0, (2 + 1) * TOKENS * INPUTS),
        (PROCESSOR, 0.0, 8 * TOKENS * INPUTS),
        (PROCESSOR, 6.0, (8 + 1) * TOKENS * INPUTS),
    ],
)
def test_rounding_inputs_to_8_bits_takes_their_sizes_where_large_ones_are_kept_apart(
    device: Cpu | Cuda, threshold: float, size: int
) -> None:
    assert scratch(device, "int8_vectorwise_quant", empty(TOKENS, INPUTS, dtype=torch.float16), threshold) == size


@pytest.mark.parametrize(
    ("device", "dtype", "inputs", "size"),
    [
        (CARD, torch.float16, INPUTS, 4 * RESULTS),
        (CARD, torch.bfloat16, INPUTS, 6 * RESULTS),
        # In fp32, beside the integers that it is copied to.
        (CARD, torch.bfloat16, 130, 4 * 130 * (TOKENS + OUTPUTS) + 8 * RESULTS),
        (CARD, torch.float16, 2, 12 * RESULTS),
        (PROCESSOR, torch.bfloat16, INPUTS, 4 * INPUTS * (TOKENS + OUTPUTS) + 8 * RESULTS),
        (PROCESSOR, torch.bfloat16, 4, 12 * RESULTS),
    ],
)
def test_a_product_in_8_bits_takes_its_integers_inside(device: Cpu | Cuda, dtype: torch.dtype, inputs: int, size: int) -> None:
    given, packed = empty(TOKENS, inputs, dtype=torch.int8), empty(OUTPUTS, inputs, dtype=torch.int8)
    rows, columns = empty(TOKENS), empty(OUTPUTS)
    assert scratch(device, "int8_scaled_mm", given, packed, rows, columns, None, dtype) == size
    whole = empty(TOKENS, inputs, dtype=dtype)
    assert scratch(device, "int8_mixed_scaled_mm", whole, given, packed, rows, columns) == size


# ---------------------------------------------------------------------------------------------- measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_kernels_of_a_processor_take_inside_is_in_the_table(dtype: torch.dtype) -> None:
    import bitsandbytes

    operators, functional = torch.ops.bitsandbytes, bitsandbytes.functional
    weight, given = torch.randn(64, 128).to(dtype), torch.randn(32, 128).to(dtype)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    operators.quantize_4bit(weight, 64, "nf4", torch.uint8)
    inside = taken_inside(lambda: operators.quantize_4bit(weight, 64, "nf4", torch.uint8))
    assert inside == kernels.SCRATCH_CPU["bitsandbytes::quantize_4bit"](PROCESSOR, weight)
    arguments = (given, packed, state.shape, state.state2.absmax, 64, "nf4")
    nested = {"absmax_8bit": state.absmax, "absmax_code": state.state2.code, "absmax_offset": state.offset}
    inside = taken_inside(lambda: operators.gemm_4bit(*arguments, **nested))
    expected = kernels.SCRATCH_CPU["bitsandbytes::gemm_4bit"](PROCESSOR, *arguments, **nested)
    assert expected == weight.nbytes + 4 * weight.numel() // 64
    # A product of bfloat16 takes what oneDNN takes besides.
    assert inside == expected if dtype is torch.float32 else inside >= expected
    rounded, row_scales, _ = operators.int8_vectorwise_quant(given.half())
    packed, column_scales, _ = operators.int8_vectorwise_quant(weight.half())
    small = given.half() * 0.1
    for threshold in (0.0, 6.0):
        inside = taken_inside(partial(operators.int8_vectorwise_quant, small, threshold))
        assert inside <= kernels.SCRATCH_CPU["bitsandbytes::int8_vectorwise_quant"](PROCESSOR, small, threshold)
    inside = taken_inside(lambda: operators.int8_scaled_mm(rounded, packed, row_scales, column_scales, None, dtype))
    expected = kernels.SCRATCH_CPU["bitsandbytes::int8_scaled_mm"](
        PROCESSOR, rounded, packed, row_scales, column_scales, None, dtype
    )
    assert inside <= expected


def taken_inside(operator: Callable[[], Any]) -> int:
    """Bytes at the operator's peak above its results."""
    peak, returned = allocated(operator)
    results = returned if isinstance(returned, tuple) else (returned,)
    return peak - sum(one.nbytes for one in results if one is not None)
