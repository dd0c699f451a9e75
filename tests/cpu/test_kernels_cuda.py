"""The kernel table of NVIDIA cards: each row against numbers worked out by hand from torch's source."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_kernels_bitsandbytes import TESTED
from torch import Tensor, nn
from torch.nn import functional as F

from memtrain.device import Cuda
from memtrain.trace.event import Kind
from memtrain.trace.kernels import _KERNELS, _RESULTS, _SCRATCH, as_laid_out, kernels_of, scratch_bytes, unknown_scratch
from memtrain.trace.kernels_cuda import cublas_workspace_bytes, uses_cublas
from memtrain.trace.simulate import DatalessRecorder

aten = torch.ops.aten
HALF, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def card(capability: tuple[int, int] = (8, 0), multiprocessors: int = 108) -> Cuda:
    """An A100, or a card of another generation."""
    return Cuda(
        name="a100",
        compute_capability=capability,
        multiprocessors=multiprocessors,
        usable_bytes=84_987_740_160,
        context_bytes=500 << 20,
        flops_per_second={"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
        bytes_per_second=2e12,
        operator_seconds=1e-5,
        link_bytes_per_second=2.5e10,
        host_bytes_per_second=5e10,
    )


A100, A10, T4, H100, B200, RTX5090 = (8, 0), (8, 6), (7, 5), (9, 0), (10, 0), (12, 0)


def empty(*shape: int, dtype: torch.dtype = FP32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def allocated(run: Any, capability: tuple[int, int] = A100) -> list[tuple[str, int]]:
    """Operator and bytes of each allocation, scratch memory left out."""
    with kernels_of(card(capability)), DatalessRecorder(card(capability)) as recorder:
        run()
    return [(e.operator, e.bytes) for e in recorder.trace().events if e.bytes > 0 and e.kind is not Kind.WORKSPACE]


FLASH, FLASH_BACKWARD = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default


def scratch(operator: Any, *args: Any, capability: tuple[int, int] = A100) -> int:
    return scratch_bytes(card(capability), operator, args, {})


# ---------------------------------------------------------------------------------------------- other kernels


def test_dropout_keeps_a_byte_per_element() -> None:
    x = empty(4, 8, grad=True)
    assert allocated(lambda: F.dropout(x, 0.1)) == [("native_dropout", 128), ("native_dropout", 32)]
    assert allocated(lambda: F.dropout(x, 0.1, training=False)) == []
    assert allocated(lambda: F.dropout(x, 0.0)) == []
    assert "native_dropout" not in dict(allocated(lambda: F.dropout(x, 1.0)))


def test_rms_norm_keeps_its_input_and_a_number_per_row() -> None:
    norm, x = nn.RMSNorm(8, device="meta", dtype=HALF), empty(2, 5, 8, dtype=HALF, grad=True)
    fused, backward = "_fused_rms_norm", "_fused_rms_norm_backward"
    seen = allocated(lambda: norm(x).backward(empty(2, 5, 8, dtype=HALF)))
    assert seen[:2] == [(fused, 2 * 5 * 8 * 2), (fused, 2 * 5 * 4)]
    assert [entry for entry in seen if entry[0] == backward] == [(backward, 2 * 5 * 8 * 2), (backward, 8 * 2)]
    assert x.grad is not None
    assert norm.weight.grad is not None
    with torch.no_grad():
        assert allocated(lambda: norm(x)) == [(fused, 160), (fused, 40)]


def test_rms_norm_of_other_types_than_its_weight_is_composed() -> None:
    norm, x = nn.RMSNorm(8, device="meta"), empty(2, 5, 8, dtype=HALF)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        assert "_fused_rms_norm" not in dict(allocated(lambda: norm(x)))


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_softmax_widens_fp16_as_it_goes(function: str) -> None:
    def run(dtype: torch.dtype) -> list[tuple[str, int]]:
        return allocated(lambda: getattr(F, function)(empty(4, 8, dtype=dtype), -1, dtype=FP32))

    assert run(FP16) == [("empty", 64), (f"_{function}", 128)]
    assert run(HALF) == [("empty", 64), ("_to_copy", 128), (f"_{function}", 128)]


# ---------------------------------------------------------------------------------------------- results


def test_gradients_of_norms_are_contiguous() -> None:
    across = empty(3, 6, 5).transpose(1, 2)
    weight, mean = empty(6), empty(3, 5, 1)
    cases = [
        (aten.native_layer_norm_backward.default, (across, across, [6], mean, mean, weight, weight, [True, True, True])),
        (aten._fused_rms_norm_backward.default, (across, across, [6], mean, weight, [True, True])),
        (aten._fused_rms_norm.default, (across, [6], weight, 1e-5)),
    ]
    for operator, args in cases:
        out = operator(*args)
        assert as_laid_out(card(), operator, out, args)[0].stride() == (30, 6, 1)


# ---------------------------------------------------------------------------------------------- scratch memory


def test_the_mathematical_form_marks_hidden_scores() -> None:
    assert scratch(aten._safe_softmax.default, empty(2, 4, 8, 16), -1) == 2 * 4 * 8 * 16 + 2 * 4 * 8 + 4


def test_softmax_and_norms_copy_what_is_not_contiguous() -> None:
    across, plain, weight, mean = empty(3, 6, 5).transpose(1, 2), empty(3, 5, 6), empty(6), empty(3, 5, 1)
    one = 3 * 5 * 6 * 4
    for name in ("_softmax", "_log_softmax"):
        assert [scratch(getattr(aten, name).default, x, -1, False) for x in (across, plain)] == [one, 0]
        backward = getattr(aten, f"{name}_backward_data").default
        assert [scratch(backward, x, y, -1, FP32) for x, y in ((across, across), (plain, across), (plain, plain))] == [
            2 * one,
            one,
            0,
        ]
    layer_norm, rms_norm = aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default
    assert scratch(aten.native_layer_norm.default, across, [6], weight, weight, 1e-5) == one
    assert scratch(aten._fused_rms_norm.default, across, [6], weight, 1e-5) == one
    assert scratch(layer_norm, across, across, [6], mean, mean, weight, weight, [True] * 3) == 2 * one
    assert scratch(rms_norm, across, plain, [6], mean, weight, [True] * 2) == one


def test_norms_of_very_many_narrow_rows_sum_their_weights_in_two_steps() -> None:
    layer_norm, rms_norm = aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default
    weight, mean = empty(1024, dtype=HALF), empty(1)

    def partials(rows: int, wanted: list[bool], capability: tuple[int, int] = A100) -> int:
        x = empty(rows, 1024, dtype=HALF)
        return scratch(layer_norm, x, x, [1024], mean, mean, weight, weight, wanted, capability=capability)

    # 32 blocks across leave 1024 down.
    assert partials(65_537, [True, True, True]) == 2 * 1024 * 1024 * 2
    assert partials(65_537, [True, True, False]) == 1024 * 1024 * 2
    assert partials(65_537, [True, False, False]) == 0
    assert partials(65_536, [True, True, True]) == 0
    x = empty(65_537, 1024, dtype=HALF)
    assert scratch(rms_norm, x, x, [1024], mean, weight, [True, True]) == 1024 * 1024 * 2
    # A width of 54 blocks occupies half of the processors.
    wide = empty(65_537, 54 * 32, dtype=HALF)
    assert scratch(rms_norm, wide, wide, [54 * 32], mean, empty(54 * 32, dtype=HALF), [True, True]) == 0


def test_the_gradient_of_an_embedding_sorts_its_indices() -> None:
    def backward(count: int, rows: int, dtype: torch.dtype = HALF) -> int:
        indices = torch.empty(count, dtype=torch.int64, device="meta")
        return scratch(aten.embedding_dense_backward.default, empty(count, 16, dtype=dtype), indices, rows, -1, False)

    assert backward(3072, 100_000) == 0
    # 4000 indices: at most 4000 runs, 4400 partial gradients in fp32.
    assert backward(4000, 100_000) == 8 * (3 * 4000 + 2 * 4000 + 4400) + 16 + 4400 * 16 * 4
    assert backward(4000, 500) == 8 * (3 * 4000 + 2 * 500 + 900) + 16 + 900 * 16 * 4
    assert backward(4000, 500, torch.float64) == 8 * (3 * 4000 + 2 * 500 + 900) + 16 + 900 * 16 * 8


def test_a_sum_of_exponentials_holds_the_maxima_and_the_input_less_them() -> None:
    assert scratch(aten.logsumexp.default, empty(6, 10), [-1]) == 4 * 60 + 4 * 6
    assert scratch(aten.logsumexp.default, empty(6, 10, dtype=HALF), [0, 1]) == 2 * 60 + 2
    assert scratch(aten.logsumexp.default, empty(), [0]) == 4 + 4


def test_counting_what_is_not_zero_adds_up_integers() -> None:
    assert scratch(aten.count_nonzero.default, empty(6, 10)) == (1 + 8) * 60
    assert scratch(aten.count_nonzero.dim_IntList, empty(6, 10), [0]) == (1 + 8) * 60


def test_one_hot_on_a_card_scatters_without_looking() -> None:
    classes = empty(3, dtype=torch.int64)
    assert allocated(lambda: F.one_hot(classes, num_classes=5)) == [("zeros", 8 * 15)]


# ---------------------------------------------------------------------------------------------- cuBLAS


def test_the_workspace_of_cublas_depends_on_the_generation() -> None:
    sizes = {capability: cublas_workspace_bytes(card(capability)) for capability in (T4, A100, A10, H100, B200, RTX5090)}
    assert sizes == {T4: 8_519_680, A100: 8_519_680, A10: 8_519_680, H100: 33_554_432, B200: 33_554_432, RTX5090: 33_554_432}


def test_matrix_products_use_cublas() -> None:
    assert all(
        map(
            uses_cublas, (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default)
        )
    )
    assert not any(map(uses_cublas, (aten.add.Tensor, aten.mm.out, FLASH, aten.embedding_dense_backward.default)))


# ---------------------------------------------------------------------------------------------- completeness

TESTED_KERNELS = {
    "scaled_dot_product_attention.default",
    "dropout.default",
    "rms_norm.default",
    "softmax.int",
    "log_softmax.int",
    "one_hot.default",
}
TESTED_RESULTS = {
    "native_layer_norm_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    EFFICIENT.overloadpacket.__name__,
}


def test_every_row_has_a_test() -> None:
    assert {operator.__name__ for operator in _KERNELS["cuda"]} == TESTED_KERNELS
    assert {packet.__name__ for packet in _RESULTS["cuda"]} == TESTED_RESULTS
    norms = {aten.native_layer_norm, aten.native_layer_norm_backward, aten._fused_rms_norm, aten._fused_rms_norm_backward}
    softmaxes = {aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data}
    rest = {
        aten._safe_softmax.default,
        aten.embedding_dense_backward.default,
        aten.logsumexp.default,
        aten.count_nonzero.default,
        aten.count_nonzero.dim_IntList,
        FLASH,
        FLASH_BACKWARD,
        EFFICIENT,
        EFFICIENT_BACKWARD,
    }
    package = {f"flash_attn::_flash_attn_{name}" for name in ("forward", "backward", "varlen_backward")}
    assert set(_SCRATCH["cuda"]) == package | rest | TESTED | {packet.default for packet in norms | softmaxes}


def test_convolutions_on_a_card_say_that_their_workspaces_are_not_predicted() -> None:
    sentence = unknown_scratch(card(A100), aten.convolution.default, ())
    assert sentence is not None
    assert sentence.startswith("the workspaces of convolutions are not in the prediction")
    assert unknown_scratch(card(A100), aten.convolution_backward.default, ()) == sentence
    assert unknown_scratch(card(A100), aten.mm.default, ()) is None
    with kernels_of(card(A100)), DatalessRecorder(card(A100)) as recorder:
        F.conv2d(empty(1, 3, 8, 8), empty(16, 3, 3, 3))
    assert recorder.trace().assumed == (sentence,)
