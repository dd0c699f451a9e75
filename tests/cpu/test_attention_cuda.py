"""Attention on NVIDIA cards: which kernel is taken, what it keeps and what it allocates, worked out from torch's source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_kernels_cuda import (
    A10,
    A100,
    B200,
    EFFICIENT,
    EFFICIENT_BACKWARD,
    FLASH,
    FLASH_BACKWARD,
    FP16,
    FP32,
    H100,
    HALF,
    RTX5090,
    T4,
    allocated,
    card,
    empty,
    scratch,
)
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import VOCABULARY

from memtrain.models.build import source
from memtrain.trace.attention_cuda import Call, attention_kernel, collect_why_math, refusals, why_math
from memtrain.trace.kernels import kernels_of
from memtrain.trace.simulate import DatalessRecorder

GROUPED_EFFICIENT = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)

# ---------------------------------------------------------------------------------------------- which attention


def choice(
    capability: tuple[int, int] = A100,
    dtype: torch.dtype = HALF,
    *,
    heads: tuple[int, int] = (4, 4),
    lengths: tuple[int, int] = (64, 64),
    widths: tuple[int, int] = (64, 64),
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    grouped: bool = False,
    grad: bool = True,
) -> str:
    query = empty(2, heads[0], lengths[0], widths[0], dtype=dtype, grad=grad)
    key, value = (empty(2, heads[1], lengths[1], width, dtype=dtype) for width in widths)
    return attention_kernel(card(capability), Call(query, key, value, mask, dropout, causal, grouped))


def boolean(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("capability", "by_type"),
    [
        (T4, {FP32: "efficient", FP16: "efficient", HALF: "math", torch.float64: "math"}),
        (A100, {FP32: "efficient", FP16: "flash", HALF: "flash", torch.float64: "math"}),
        (A10, {FP32: "efficient", FP16: "flash", HALF: "flash"}),
        (H100, {FP32: "efficient", FP16: "cudnn", HALF: "cudnn"}),
        (B200, {FP32: "efficient", FP16: "cudnn", HALF: "cudnn"}),
        (RTX5090, {FP32: "efficient", FP16: "flash", HALF: "flash"}),
    ],
)
def test_attention_depends_on_the_card_and_the_data_type(capability: tuple[int, int], by_type: dict[torch.dtype, str]) -> None:
    assert {dtype: choice(capability, dtype, causal=True) for dtype in by_type} == by_type


def test_a_mask_goes_to_the_memory_efficient_kernel_or_to_cudnn() -> None:
    masks = [boolean(2, 1, 64, 64), boolean(64, 64), boolean(1, 64, 64), empty(2, 4, 64, 64, dtype=HALF)]
    assert [choice(mask=mask) for mask in masks] == ["efficient"] * 4
    # cuDNN takes two or four dimensions.
    assert [choice(H100, mask=mask) for mask in masks] == ["cudnn", "cudnn", "efficient", "cudnn"]
    learnt = empty(2, 4, 64, 64, dtype=HALF, grad=True)
    assert [choice(capability, mask=learnt) for capability in (A100, H100)] == ["efficient", "efficient"]
    assert choice(mask=boolean(64, 1).expand(64, 64)) == "math"


def test_head_sizes_have_bounds_and_multiples() -> None:
    assert [choice(widths=(w, w)) for w in (1, 5, 60, 256, 257, 264)] == ["flash"] * 4 + ["math", "efficient"]
    assert [choice(dtype=FP32, widths=(w, w)) for w in (2, 4, 260)] == ["math", "efficient", "efficient"]
    assert [choice(T4, FP32, widths=(w, w)) for w in (1, 2, 5)] == ["efficient"] * 3
    assert [choice(T4, FP16, widths=(w, w)) for w in (4, 8)] == ["math", "efficient"]
    assert [choice(H100, widths=(w, w)) for w in (60, 128, 136)] == ["flash", "cudnn", "flash"]
    assert [choice(c, widths=(64, 32)) for c in (A100, H100)] == ["efficient", "cudnn"]


def test_wide_heads_do_not_train_in_flash_on_cards_with_little_shared_memory() -> None:
    wide = {"widths": (200, 200)}
    assert [choice(capability, **wide) for capability in (A100, A10, RTX5090)] == ["flash", "efficient", "efficient"]
    assert choice(A10, **wide, grad=False) == "flash"
    assert [choice(A10, widths=(256, 256), dropout=p) for p in (0.0, 0.1)] == ["flash", "efficient"]


def test_causal_attention_over_other_numbers_of_keys_is_not_flash() -> None:
    assert [choice(lengths=(64, 32), causal=causal) for causal in (False, True)] == ["flash", "efficient"]


def test_grouped_heads() -> None:
    groups: dict[str, Any] = {"heads": (4, 2), "grouped": True}
    assert [choice(capability, **groups) for capability in (A100, H100)] == ["flash", "cudnn"]
    # Before torch 2.14 the memory-efficient kernel took none, and the scores are kept.
    efficient = "efficient" if GROUPED_EFFICIENT else "math"
    assert [choice(dtype=FP32, **groups), choice(T4, FP16, **groups)] == [efficient, efficient]
    assert choice(heads=(4, 2)) == "math"
    assert choice(heads=(4, 1)) == ("flash" if GROUPED_EFFICIENT else "math")
    assert choice(heads=(4, 3), grouped=True) == "math"


def test_dropout_of_cudnn_comes_in_sixteenths() -> None:
    assert [choice(H100, dropout=p) for p in (0.0625, 0.125, 0.1)] == ["cudnn", "cudnn", "flash"]


def test_three_dimensions_and_no_tokens() -> None:
    three = empty(4, 64, 64, dtype=HALF)
    expected = "flash" if GROUPED_EFFICIENT else "math"
    assert attention_kernel(card(), Call(three, three, three)) == expected
    assert choice(lengths=(64, 0)) == "math"


def test_a_kernel_that_is_switched_off_is_not_taken() -> None:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert [choice(), choice(H100)] == ["efficient", "efficient"]
    with sdpa_kernel(SDPBackend.MATH):
        assert choice() == "math"


# ---------------------------------------------------------------------------------------------- why none

SPLIT_HEADS = "takes as many heads of keys and values as of queries"


def test_the_mathematical_form_says_why_of_each_kernel() -> None:
    def why(capability: tuple[int, int], dtype: torch.dtype, mask: Tensor | None = None, *, wide: bool = False) -> str:
        one = empty(2, 4, 64, 300 if wide else 64, dtype=dtype)
        return why_math(card(capability), Call(one, one, one, mask))

    assert why(T4, HALF) == (
        "no fused kernel takes bfloat16 on a100: cuDNN is for cards of compute capability 9 and 10, "
        "flash needs compute capability 8.0, memory-efficient takes float32 and float16 only"
    )
    assert why(H100, HALF, boolean(1, 64, 64), wide=True) == (
        "no fused kernel takes bfloat16 with this mask on a100: cuDNN takes heads of multiples of 8 up to 128, "
        "flash takes no mask, memory-efficient takes heads of multiples of 8"
    )
    assert why(A100, torch.float64).endswith(
        "flash takes float16 and bfloat16 only, memory-efficient takes float32 and float16 and bfloat16 only"
    )


def test_what_no_kernel_takes_is_said_once() -> None:
    none = empty(2, 4, 0, 64, dtype=HALF)
    assert why_math(card(), Call(none, none, none)) == "no fused kernel takes bfloat16 on a100: each takes one token or more"


def test_ungrouped_and_grouped_heads_have_their_own_words() -> None:
    few, many = empty(2, 3, 64, 64, dtype=HALF), empty(2, 4, 64, 64, dtype=HALF)
    assert refusals(card(H100), Call(many, few, few)) == dict.fromkeys(("cudnn", "flash", "efficient"), SPLIT_HEADS)
    grouped = refusals(card(H100), Call(many, few, few, grouped=True))
    assert [grouped["cudnn"], grouped["flash"]] == ["takes heads of queries in equal groups"] * 2


def test_a_kernel_that_is_switched_off_says_so() -> None:
    one = empty(2, 4, 64, 64, dtype=HALF)
    with sdpa_kernel(SDPBackend.MATH):
        assert refusals(card(H100), Call(one, one, one)) == dict.fromkeys(("cudnn", "flash", "efficient"), "is switched off")


def test_the_reasons_of_a_run_are_collected_once_each() -> None:
    inputs, double = [empty(2, 4, 40, 64) for _ in range(3)], [empty(2, 4, 40, 64, dtype=torch.float64) for _ in range(3)]
    with collect_why_math() as reasons:
        allocated(lambda: [attend(*inputs), attend(*double), attend(*double)])
    assert [reason.partition(":")[0] for reason in reasons] == ["no fused kernel takes float64 on a100"]
    allocated(lambda: attend(*(tensor.half().double() for tensor in inputs)))
    assert len(reasons) == 1


# ---------------------------------------------------------------------------------------------- what attention keeps


def attend(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, **settings)


def test_flash_keeps_its_output_a_number_per_query_and_its_seed() -> None:
    inputs = [empty(2, 4, 40, 64, dtype=HALF, grad=True) for _ in range(3)]
    name = "_scaled_dot_product_flash_attention"
    assert allocated(lambda: attend(*inputs, is_causal=True)) == [
        (name, 2 * 4 * 40 * 64 * 2),
        (name, 2 * 4 * 40 * 4),
        (name, 16),
        (name, 8),
    ]


def test_flash_pads_heads_to_a_multiple_of_8() -> None:
    inputs = [empty(2, 4, 40, 60, dtype=HALF) for _ in range(3)]
    out: list[Tensor] = []
    seen = allocated(lambda: out.append(attend(*inputs)))
    assert seen[:4] == [("constant_pad_nd", 2 * 4 * 40 * 64 * 2)] * 3 + [
        ("_scaled_dot_product_flash_attention", 2 * 4 * 40 * 64 * 2)
    ]
    assert out[0].shape == (2, 4, 40, 60)


def test_memory_efficient_rounds_the_number_of_queries_up_to_32_and_keeps_its_seed_on_the_host() -> None:
    inputs = [empty(2, 4, 40, 64, grad=True) for _ in range(3)]
    name = "_scaled_dot_product_efficient_attention"
    assert allocated(lambda: attend(*inputs)) == [(name, 2 * 4 * 40 * 64 * 4), (name, 2 * 4 * 64 * 4)]
    with torch.no_grad():
        assert allocated(lambda: attend(*inputs)) == [(name, 2 * 4 * 40 * 64 * 4)]


@pytest.mark.parametrize(("length", "padded"), [(64, 0), (60, 64), (63, 64)])
def test_a_boolean_mask_becomes_an_additive_one_with_rows_of_a_multiple_of_8(length: int, padded: int) -> None:
    inputs, mask = [empty(2, 4, 64, 64), empty(2, 4, length, 64), empty(2, 4, length, 64)], boolean(2, 1, 64, length)
    seen = allocated(lambda: attend(*inputs, attn_mask=mask))
    assert seen[:3] == [("scalar_tensor", 4), ("scalar_tensor", 4), ("where", 2 * 64 * length * 4)]
    assert [bytes_ for name, bytes_ in seen if name == "constant_pad_nd"] == ([2 * 64 * padded * 4] if padded else [])


def test_cudnn_keeps_its_output_a_number_per_query_and_its_seed() -> None:
    inputs = [empty(2, 4, 40, 64, dtype=HALF, grad=True) for _ in range(3)]
    name = "_scaled_dot_product_cudnn_attention"
    expected = [(name, 2 * 4 * 40 * 64 * 2), (name, 2 * 4 * 40 * 4), (name, 8), (name, 8)]
    assert allocated(lambda: attend(*inputs), H100) == expected


# ---------------------------------------------------------------------------------------------- scratch memory


def heads(count: int, length: int, width: int, dtype: torch.dtype = HALF, *, rows: int = 1, beside: bool = True) -> Tensor:
    """Heads beside each other, as models lay them out, or one after the other."""
    if beside:
        return empty(rows, length, count, width, dtype=dtype).transpose(1, 2)
    return empty(rows, count, length, width, dtype=dtype)


def test_flash_forward_splits_the_keys_only_where_the_card_would_idle() -> None:
    full = heads(32, 8192, 128)
    assert scratch(FLASH, full, full, full) == 0
    # 2 heads of 16 blocks of queries leave 216 half processors idle: 4 splits of 8 blocks of keys are the most that have
    # other numbers of blocks (1, 2, 3, 4, 8 are tried), and 32 * 8 / 216 is the fullest wave: 1.185 / 2 = 0.59 against
    # 32 * 4 / 216 = 0.593, which is smaller and good enough.
    few = heads(2, 1024, 128)
    assert scratch(FLASH, few, few, few) == 4 * (4 * 2 * 1024 * (1 + 128))
    assert scratch(FLASH, few, few, few, 0.1) == 0
    assert scratch(FLASH, heads(2, 64, 128), heads(2, 64, 128), heads(2, 64, 128)) == 0


def test_flash_backward_accumulates_in_single_precision() -> None:
    def backward(queries: Tensor, keys: Tensor, grad: Tensor) -> int:
        return scratch(FLASH_BACKWARD, grad, queries, keys, keys, torch.empty_like(queries))

    # 8192 queries of 32 heads of 128: 128 MiB and a number per query.
    full = heads(32, 8192, 128)
    assert backward(full, full, full) == 128 * 2**20 + 4 * 32 * 8192
    # 130 queries are rounded up to 256, a head of 72 to 96, one of 200 to 256.
    assert backward(heads(4, 130, 72), heads(4, 130, 72), heads(4, 130, 72)) == 4 * 4 * 256 * (96 + 1)
    assert backward(heads(4, 128, 200), heads(4, 128, 200), heads(4, 128, 200)) == 4 * 4 * 128 * (256 + 1)
    # Grouped heads: gradients of keys and values for each head of the queries.
    grouped = backward(heads(4, 128, 64), heads(2, 128, 64), heads(4, 128, 64))
    assert grouped == 4 * 4 * 128 * (64 + 1) + 2 * (4 * 128 * 64 * 2)
    # A gradient and an output with heads one after the other are copied.
    after = heads(4, 128, 64, beside=False)
    assert backward(after, after, after) == 4 * 4 * 128 * (64 + 1) + 2 * (4 * 128 * 64 * 2)


def test_memory_efficient_forward_accumulates_only_wide_heads() -> None:
    for width, dtype, expected in ((128, HALF, 0), (136, HALF, 4 * 40 * 136 * 4), (136, FP32, 0)):
        one = heads(4, 40, width, dtype)
        assert scratch(EFFICIENT, one, one, one, None, True) == expected


def test_memory_efficient_backward_has_a_workspace() -> None:
    def backward(one: Tensor, *, capability: tuple[int, int] = A100, dropout: float = 0.0) -> int:
        number = empty(1)
        return scratch(
            EFFICIENT_BACKWARD, one, one, one, one, None, one, number, number, number, dropout, capability=capability
        )

    # fp32: tiles of 64 x 64 and a header of 16 bytes each; for heads of 128 tiles of 128 x 64 on an A100.
    delta = 4 * 4 * 130
    assert backward(heads(4, 130, 64, FP32)) == delta + 4 * 3 * (64 * 64 + 4) * 4
    assert backward(heads(4, 130, 36, FP32)) == delta + 4 * 3 * (64 * 64 + 4) * 4
    assert backward(heads(4, 130, 128, FP32)) == delta + 4 * (2 * 2) * (128 * 64 + 4) * 4
    assert backward(heads(4, 130, 128, FP32), capability=A10) == delta + 4 * (3 * 2) * (64 * 64 + 4) * 4
    # Where the queries fill their tiles, the product of output and gradient, and its sum, are more.
    delta = 4 * 4 * 128
    assert backward(heads(4, 128, 64, FP32)) == 4 * 4 * 128 * 64 + 2 * delta
    # fp16 on a T4, heads of 64: the keys' and values' gradients stay in registers.
    assert backward(heads(4, 128, 64, FP16), capability=T4) == delta + 4 * 2 * (64 * 64 + 4) * 4
    # Heads of 128 there, and of 256 anywhere: keys and values in memory, split in 2 over the 200 blocks that 4 heads leave.
    small = delta + 4 * (2 * 64 * (128 + 128) + 4 * (64 * 64 + 4)) * 4
    assert backward(heads(4, 128, 128, FP16), capability=T4) == small
    assert backward(heads(4, 128, 256)) == delta + 4 * (2 * 64 * (256 + 256) + 4 * (128 * 64 + 4)) * 4
    # bfloat16, heads of 128: the large tile on an A100; on an A10 the small one, with keys and values in memory, split in 2.
    assert backward(heads(4, 128, 128)) == delta + 4 * (128 * 128 + 4) * 4
    assert backward(heads(4, 128, 128), capability=A10) == small
    assert backward(heads(4, 128, 96), capability=A10) == delta + 4 * 2 * (128 * 64 + 4) * 4
    copied = heads(4, 128, 64, FP16, beside=False)
    assert backward(copied, capability=T4) == 4 * 128 * 64 * 2 + delta + 4 * 2 * (64 * 64 + 4) * 4


class Operator:
    """An operator of a library that is not loaded."""

    namespace = "flash_attn"

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return f"{self.namespace}::{self._name}"


def test_the_package_splits_its_keys_as_torch_does() -> None:
    few = heads(2, 1024, 128)
    assert scratch(FLASH, few, few, few) > 0
    beside = few.transpose(1, 2)
    assert scratch(Operator("_flash_attn_forward"), beside, beside, beside, 0.0) == scratch(FLASH, few, few, few)
    assert scratch(Operator("_flash_attn_forward"), beside, beside, beside, 0.1) == 0
    # A head of 136 is rounded to 192 there, and to 160 in torch; its keys come in 16 blocks of 64 and 6 splits.
    wide = empty(1, 1024, 2, 136, dtype=HALF)
    assert scratch(Operator("_flash_attn_forward"), wide, wide, wide, 0.0) == 6 * 4 * 2 * 1024 * (1 + 192)


def test_the_package_accumulates_the_gradient_of_the_queries_in_single_precision() -> None:
    backward, varlen = Operator("_flash_attn_backward"), Operator("_flash_attn_varlen_backward")

    def one(queries: Tensor, keys: Tensor) -> int:
        return scratch(backward, queries, queries, keys, keys, queries, empty(1))

    # 130 queries are rounded up to 256, a head of 72 to 96, one of 200 to 256; the sum per query is a result.
    assert one(empty(2, 130, 4, 72, dtype=HALF), empty(2, 130, 4, 72, dtype=HALF)) == 4 * 2 * 256 * 4 * 96
    assert one(empty(1, 128, 4, 200, dtype=HALF), empty(1, 128, 4, 200, dtype=HALF)) == 4 * 128 * 4 * 256
    # Grouped heads: gradients of keys and values for each head of the queries.
    grouped = one(empty(2, 128, 4, 64, dtype=HALF), empty(2, 96, 2, 64, dtype=HALF))
    assert grouped == 4 * 2 * 128 * 4 * 64 + 2 * (2 * 96 * 4 * 64 * 2)
    # Three sequences in a row of 300 tokens, with room for 128 more of each.
    queries, keys, starts = (empty(300, 4, 64, dtype=HALF), empty(300, 2, 64, dtype=HALF), empty(4, dtype=torch.int32))
    rest = (queries, empty(4, 300), queries, keys, keys, starts, starts, 128, 128)
    found = scratch(varlen, queries, queries, keys, keys, *rest)
    assert found == 4 * (300 + 3 * 128) * 4 * 64 + 2 * (300 * 4 * 64 * 2)


# ---------------------------------------------------------------------------------------------- whole steps


def scores_kept(dtype: torch.dtype, capability: tuple[int, int], key_value_heads: int) -> int:
    """Storages as large as the attention scores in a training step of a tiny Llama."""
    model = source(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": key_value_heads,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    )
    with torch.device("meta"):
        network = model.build().to(dtype).train()
    device = card(capability)
    ids = torch.empty(2, 40, dtype=torch.int64, device="meta")
    with kernels_of(device), DatalessRecorder(device, network) as recorder:
        network(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    sizes = {2 * 8 * 40 * 40 * width for width in (2, 4)}
    return sum(event.bytes in sizes for event in recorder.trace().events)


@pytest.mark.parametrize(
    ("dtype", "capability", "key_value_heads"),
    [(FP32, A100, 8), (HALF, A100, 8), (HALF, A100, 2), (HALF, H100, 2), (FP16, T4, 8), (FP32, T4, 8)],
)
def test_a_training_step_keeps_no_attention_scores(
    dtype: torch.dtype, capability: tuple[int, int], key_value_heads: int
) -> None:
    assert scores_kept(dtype, capability, key_value_heads) == 0


def test_a_training_step_with_grouped_heads_in_fp32_keeps_them_before_torch_2_14() -> None:
    assert (scores_kept(FP32, A100, 2) > 0) == (not GROUPED_EFFICIENT)
