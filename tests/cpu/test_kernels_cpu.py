"""The kernel table of processors: each result and each piece of scratch memory is right, and its row is still needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_kernels import CPU, HEADS, ROWS, dataless, heads, three
from test_kernels_bitsandbytes import TESTED_CPU
from torch import nn
from torch.profiler import ProfilerActivity, profile

from memtrain.device import Cpu
from memtrain.trace.event import Kind
from memtrain.trace.kernels import _RESULTS, _SCRATCH, as_laid_out, kernels_of, scratch_bytes, unknown_scratch
from memtrain.trace.simulate import DatalessRecorder

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------- results

INPUT, ACROSS = torch.randn(3, 5, 6), torch.randn(3, 6, 5).transpose(1, 2)
MEAN = torch.zeros(3, 5, 1)
WEIGHT = torch.randn(6)
IMAGE, LAST = torch.randn(2, 6, 5, 5), torch.randn(2, 6, 5, 5).to(memory_format=torch.channels_last)
GROUPS = (torch.zeros(2, 3), torch.ones(2, 3), WEIGHT, 2, 6, 25, 3)
CHANCES, ZERO_OR_ONE = torch.rand(4, 7), torch.ones(4, 7)
# Per row, arguments for which meta lays the result out in another way than the processor.
HALF = INPUT.bfloat16()
RESULTS: dict[Any, dict[str, tuple[Any, ...]]] = {
    aten.native_batch_norm: {
        "in evaluation": (IMAGE, WEIGHT, WEIGHT, WEIGHT, torch.ones(6), False, 0.1, 1e-5),
        "in evaluation, in 16 bits": (IMAGE.bfloat16(), WEIGHT, WEIGHT, WEIGHT, torch.ones(6), False, 0.1, 1e-5),
        "all in 16 bits": (IMAGE.bfloat16(), *(torch.ones(6, dtype=torch.bfloat16) for _ in range(4)), True, 0.1, 1e-5),
        "in 16 bits without weights": (IMAGE.bfloat16(), None, None, None, None, True, 0.1, 1e-5),
    },
    aten.native_layer_norm: {
        "in 16 bits": (HALF, [6], WEIGHT.bfloat16(), WEIGHT.bfloat16(), 1e-5),
        "without weights": (HALF, [6], None, None, 1e-5),
    },
    aten.native_layer_norm_backward: {
        "input across": (ACROSS, ACROSS, [6], MEAN, MEAN, WEIGHT, WEIGHT, [True, True, True]),
        "only the input's gradient": (ACROSS, ACROSS, [6], MEAN, MEAN, WEIGHT, WEIGHT, [True, False, False]),
    },
    aten.native_group_norm: {"in 16 bits with a weight of 32": (IMAGE.bfloat16(), WEIGHT, WEIGHT, 2, 6, 25, 3, 1e-5)},
    aten.native_group_norm_backward: {
        "gradient with channels last": (LAST, IMAGE, *GROUPS, [True, True, True]),
        "input with channels last": (IMAGE, LAST, *GROUPS, [True, False, False]),
    },
    aten.mse_loss: {"mean": (INPUT, ACROSS), "sum": (INPUT, INPUT, 2), "broadcast": (INPUT, INPUT[:1])},
    aten.smooth_l1_loss: {"mean": (INPUT, INPUT), "sum": (INPUT, INPUT, 2), "broadcast": (INPUT, INPUT[:1])},
    aten.binary_cross_entropy: {
        "mean": (CHANCES, ZERO_OR_ONE),
        "sum": (CHANCES, ZERO_OR_ONE, None, 2),
        "weighted": (CHANCES, ZERO_OR_ONE, CHANCES),
    },
    aten.soft_margin_loss: {"mean": (CHANCES, ZERO_OR_ONE), "sum": (CHANCES, ZERO_OR_ONE, 2)},
}
# Arguments for which meta is right, which the rows must leave right.
PLAIN_RESULTS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.native_batch_norm, (IMAGE, WEIGHT, WEIGHT, torch.zeros(6), torch.ones(6), True, 0.1, 1e-5)),
    (aten.native_batch_norm, (IMAGE.bfloat16(), WEIGHT, WEIGHT, torch.zeros(6), torch.ones(6), True, 0.1, 1e-5)),
    (aten.native_layer_norm, (INPUT, [6], WEIGHT, WEIGHT, 1e-5)),
    (aten.native_layer_norm, (HALF, [6], WEIGHT, WEIGHT, 1e-5)),
    (aten.native_layer_norm_backward, (INPUT, INPUT, [6], MEAN, MEAN, WEIGHT, WEIGHT, [True, True, True])),
    (aten.native_layer_norm_backward, (INPUT, ACROSS, [6], MEAN, MEAN, WEIGHT, WEIGHT, [False, True, True])),
    (aten.native_group_norm, (IMAGE, WEIGHT, WEIGHT, 2, 6, 25, 3, 1e-5)),
    (aten.native_group_norm, (IMAGE.bfloat16(), None, None, 2, 6, 25, 3, 1e-5)),
    (aten.native_group_norm_backward, (IMAGE, IMAGE, *GROUPS, [True, True, True])),
    (aten.native_group_norm_backward, (LAST, IMAGE, *GROUPS, [False, True, True])),
    (aten.mse_loss, (INPUT, INPUT, 0)),
    (aten.smooth_l1_loss, (INPUT, INPUT, 0)),
    (aten.binary_cross_entropy, (CHANCES, ZERO_OR_ONE, None, 0)),
    (aten.soft_margin_loss, (CHANCES, ZERO_OR_ONE, 0)),
]


def layout(out: Any) -> list[tuple[tuple[int, ...], tuple[int, ...], int] | None]:
    """Shape, strides and storage bytes of each result."""
    results = out if isinstance(out, tuple) else (out,)
    return [None if t is None else (tuple(t.shape), t.stride(), t.untyped_storage().nbytes()) for t in results]


@pytest.mark.parametrize(
    ("packet", "args"),
    [pytest.param(packet, args, id=f"{packet} {name}") for packet, cases in RESULTS.items() for name, args in cases.items()],
)
def test_a_result_is_laid_out_as_the_processor_does_it_and_the_row_is_needed(packet: Any, args: tuple[Any, ...]) -> None:
    real = layout(packet.default(*args))
    bare = tuple(map(dataless, args))
    on_meta = packet.default(*bare)
    assert layout(on_meta) != real
    assert layout(as_laid_out(CPU, packet.default, on_meta, bare)) == real


@pytest.mark.parametrize(("packet", "args"), PLAIN_RESULTS)
def test_a_row_leaves_a_result_that_is_right(packet: Any, args: tuple[Any, ...]) -> None:
    bare = tuple(map(dataless, args))
    on_meta = packet.default(*bare)
    real = layout(packet.default(*args))
    assert layout(on_meta) == real
    assert layout(as_laid_out(CPU, packet.default, on_meta, bare)) == real


def test_every_result_row_has_a_test() -> None:
    assert set(_RESULTS["cpu"]) == set(RESULTS)


# ---------------------------------------------------------------------------------------------- scratch memory

FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def allocated_inside(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, made_first: bool = True) -> int:
    """Bytes that the kernel allocates besides its results: peak of the allocator's events, without those of the results.

    Where the results are not made first, what is freed before them is in their place: it is the peak with them, less them.
    """
    # A first call may create what stays, such as a library's own buffers.
    operator(*args, **kwargs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        out = operator(*args, **kwargs)
    tensors = out if isinstance(out, tuple) else (out,)
    results = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    timed = []
    while pending:
        node = pending.pop()
        pending.extend(reversed(node.children))
        # A number that meets a tensor is a small tensor for a moment.
        known = node.name != "[memory]" or abs(node.extra_fields.alloc_size) <= 8
        if not known and not (made_first and node.extra_fields.ptr in results):
            timed.append((node.start_time_ns, node.extra_fields.alloc_size))
    live = peak = 0
    for _, size in sorted(timed, key=lambda event: event[0]):
        live += size
        peak = max(peak, live)
    return peak if made_first else peak - sum(results.values())


def attention_forward(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for inputs in (three(length), [heads(length), heads(37), heads(37)], [heads(9), heads(length), heads(length)]):
        bare = [part.detach() for part in inputs]
        yield (*bare, 0.0, False), {}
        yield (*bare, 0.0, True), {}
        yield (*bare, 0.0, False), {"attn_mask": torch.zeros(1, 1, bare[0].shape[2], bare[1].shape[2])}

    for dtype in (torch.bfloat16, torch.float16):
        yield (*(part.detach().to(dtype) for part in three(length)), 0.0, True), {}


def attention_backward(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for args, kwargs in attention_forward(length):
        if args[0].dtype is torch.bfloat16:
            # oneDNN multiplies these, and takes memory of its own as the processor suggests.
            continue
        out, sums = FLASH(*args, **kwargs)
        # As it comes from a model that puts heads beside each other, from one that does not, and from a sum.
        for grad in (
            torch.randn(out.transpose(1, 2).shape, dtype=out.dtype).transpose(1, 2),
            torch.randn(out.shape, dtype=out.dtype),
            out.new_ones(()).expand_as(out),
        ):
            yield (grad, *args[:3], out, sums, *args[3:]), kwargs


def layer_norm_forward(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    weight = torch.ones(24)
    # Rows of more than one matrix, since transposing a single large one copies it by way of a block of 14 KB.
    for inputs in (
        torch.randn(2, length, 24),
        torch.randn(2, 24, length).transpose(1, 2),
        torch.randn(2, length, 48)[..., :24],
    ):
        yield (inputs, [24], weight, weight, 1e-5), {}
        yield (inputs, [24], None, None, 1e-5), {}


def layer_norm_backward(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for (inputs, shape, weight, bias, eps), _ in layer_norm_forward(length):
        out, mean, rstd = aten.native_layer_norm(inputs, shape, weight, bias, eps)
        for grad in (torch.randn(out.shape), torch.randn(out.mT.shape).mT):
            wanted = [[True, True, True], [True, True, False], [False, False, True]] if weight is not None else []
            for mask in ([True, False, False], *wanted):
                yield (grad, inputs, shape, mean, rstd, weight, bias, mask), {}


def group_norm_forward(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for image in (torch.randn(2, 6, length, 5), torch.randn(2, 6, length, 5).to(memory_format=torch.channels_last)):
        yield (image, WEIGHT, WEIGHT, 2, 6, length * 5, 3, 1e-5), {}


def group_norm_backward(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for (image, weight, _, *sizes, _), _ in group_norm_forward(length):
        for wanted in ([True, True, True], [True, False, False]):
            yield (image, image, *GROUPS[:2], weight, *sizes, wanted), {}


def losses(weighted: bool) -> Callable[[int], Iterator[tuple[tuple[Any, ...], dict[str, Any]]]]:
    def inputs(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        logits = torch.randn(3, length)
        for weights in [(None, None), (logits, None), (None, logits), (None, logits[0])] if weighted else [()]:
            # Unreduced, the result takes the place of what was freed before it.
            for reduction in (1, 2) if weighted else (0, 1, 2):
                yield (logits, logits, *weights, reduction), {}

    return inputs


def mixed(in_place: bool) -> Callable[[int], Iterator[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Operands of two types, each of which may be the wider, and a number that has none."""

    def inputs(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        wide, narrow = torch.rand(3, length) + 1, (torch.rand(3, length) + 1).bfloat16()
        yield (wide.clone(), narrow), {}
        yield (wide.clone(), wide), {}
        yield (narrow.clone(), torch.tensor(2.0)), {}
        if not in_place:
            yield (narrow, wide), {}

    return inputs


def reductions(*dims: list[int]) -> Callable[[int], Iterator[tuple[tuple[Any, ...], dict[str, Any]]]]:
    def made(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        for over in dims:
            yield (torch.randn(length, 70), over), {}

    return made


SCRATCH: dict[Any, Callable[[int], Iterator[tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    FLASH: attention_forward,
    FLASH_BACKWARD: attention_backward,
    aten.native_layer_norm.default: layer_norm_forward,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.native_group_norm.default: group_norm_forward,
    aten.native_group_norm_backward.default: group_norm_backward,
    **{getattr(aten, name).Tensor: mixed(in_place=False) for name in ("add", "sub", "mul", "div")},
    **{getattr(aten, f"{name}_").Tensor: mixed(in_place=True) for name in ("add", "sub", "mul", "div")},
    aten.huber_loss.default: losses(weighted=False),
    aten.binary_cross_entropy_with_logits.default: losses(weighted=True),
    aten.logsumexp.default: reductions([-1], [0]),
    aten.count_nonzero.dim_IntList: reductions([-1], [0]),
}


def convolutions(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """With channels that fill oneDNN's blocks, whatever a processor's are."""
    for inputs, outputs, size, stride in ((16, 32, 3, 1), (32, 16, 5, 1), (32, 32, 3, 2)):
        image, weight = torch.randn(2, inputs, length, 30), torch.randn(outputs, inputs, size, size)
        yield (image, weight, None, [stride, stride], [size // 2, size // 2], [1, 1], False, [0, 0], 1), {}


def convolutions_backward(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for (image, weight, _, *settings), _ in convolutions(length):
        out = aten.convolution(image, weight, None, *settings)
        for wanted in ([True, True, False], [True, False, False], [False, True, False]):
            yield (torch.randn(out.shape), image, weight, None, *settings, wanted), {}


CONVOLUTIONS = {
    aten.convolution.default: convolutions,
    aten.convolution_backward.default: convolutions_backward,
}


# What a row counts is oneDNN's choice on these processors.
WIDE = any(capability in torch.backends.cpu.get_cpu_capability() for capability in ("AVX2", "AVX512"))


@pytest.mark.skipif(not (WIDE and torch.backends.mkldnn.is_available()), reason="oneDNN takes other kernels here")
@pytest.mark.parametrize("operator", CONVOLUTIONS, ids=str)
def test_a_convolution_allocates_inside_itself_what_the_row_says(operator: Any) -> None:
    for args, kwargs in CONVOLUTIONS[operator](40):
        bare = tuple(map(dataless, args))
        assert scratch_bytes(CPU, operator, bare, kwargs) == allocated_inside(operator, args, kwargs, made_first=False) > 0


@pytest.mark.parametrize(
    ("changed", "known"),
    [
        ({}, True),
        ({"dtype": torch.float64}, False),
        ({"stride": 16}, False),
        ({"groups": 16}, False),
        ({"transposed": True}, False),
        ({"size": 1}, True),
    ],
)
def test_convolutions_of_other_kinds_are_said_to_be_missing(changed: dict[str, Any], known: bool) -> None:
    given = {"dtype": torch.float32, "stride": 1, "groups": 1, "transposed": False, "size": 3, **changed}
    image = torch.empty(2, 16, 20, 20, dtype=given["dtype"], device="meta")
    weight = torch.empty(16, 16 // given["groups"], given["size"], given["size"], dtype=given["dtype"], device="meta")
    settings = ([given["stride"]] * 2, [0, 0], [1, 1], given["transposed"], [0, 0], given["groups"])
    assert (unknown_scratch(CPU, aten.convolution.default, (image, weight, None, *settings)) is None) is known
    out = torch.empty(2, 16, 18, 18, dtype=given["dtype"], device="meta")
    backward = (out, image, weight, None, *settings, [True, True, False])
    assert (unknown_scratch(CPU, aten.convolution_backward.default, backward) is None) is known
    taken = scratch_bytes(CPU, aten.convolution_backward.default, backward, {})
    assert (taken > 0) is (known and given["size"] > 1)


def test_the_blocks_of_a_convolution_are_filled_up_but_for_an_image() -> None:
    image, weight = torch.empty(2, 3, 10, 10, device="meta"), torch.empty(24, 3, 3, 3, device="meta")
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out, filled = 4 * 2 * 24 * 10 * 10, 4 * 2 * 32 * 10 * 10
    forward = scratch_bytes(CPU, aten.convolution.default, (image, weight, None, *settings), {})
    # The weight and the result, 16 channels for 3 and 32 for 24, of which the result comes again.
    assert forward == max(4 * 32 * 16 * 9 + filled - out, filled) == 25600
    arguments = (torch.empty(2, 24, 10, 10, device="meta"), image, weight, None, *settings)
    backward = aten.convolution_backward.default
    assert scratch_bytes(CPU, backward, (*arguments, [False, True, False]), {}) == filled
    assert scratch_bytes(CPU, backward, (*arguments, [False, False, True]), {}) == 0


def updates(bits: int) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """bitsandbytes' update of a weight in 32 and in 16 bits, with the arguments of its AdamW."""
    import bitsandbytes.functional as library

    for dtype in (torch.float32, torch.bfloat16):
        weight, gradient = torch.randn(64, 80, dtype=dtype), torch.randn(64, 80, dtype=dtype)
        if bits == 32:
            moments = [torch.zeros(64, 80), torch.zeros(64, 80)]
            rule = (None, 0.0, 0.0, 0.9, 0.99, 0.0, 0.0, 1e-8, 0.1, 1, 1e-3, 1.0, False)
            yield torch.ops.bitsandbytes.optimizer_update_32bit.default, ("adam", gradient, weight, *moments, *rule)
            continue
        tables = [library.create_dynamic_map(signed=signed) for signed in (True, False)]
        moments = [torch.zeros(64, 80, dtype=torch.uint8) for _ in range(2)]
        scales = [torch.zeros(64 * 80 // 256) for _ in range(2)]
        rule = (0.9, 0.99, 0.0, 0.0, 1e-8, 1, 1e-3)
        arguments = ("adam", gradient, weight, *moments, *rule, *tables, *scales, 0.1, 1.0, False)
        yield torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.default, arguments


# By name, since they exist once the library is loaded.
UPDATES = {"bitsandbytes::optimizer_update_32bit": 32, "bitsandbytes::optimizer_update_8bit_blockwise": 8}


@pytest.mark.parametrize(("name", "bits"), UPDATES.items())
def test_an_update_of_bitsandbytes_allocates_inside_itself_what_the_row_says(name: str, bits: int) -> None:
    for operator, args in updates(bits):
        assert operator.name() == name
        assert scratch_bytes(CPU, operator, tuple(map(dataless, args)), {}) == allocated_inside(operator, args, {}) > 0


@pytest.mark.parametrize("length", [100, 200, 800])
@pytest.mark.parametrize("operator", SCRATCH, ids=str)
def test_a_kernel_allocates_inside_itself_what_the_row_says(operator: Any, length: int) -> None:
    some = 0
    for args, kwargs in SCRATCH[operator](length):
        bare = tuple(map(dataless, args))
        bare_kwargs = {name: dataless(value) for name, value in kwargs.items()}
        measured = allocated_inside(operator, args, kwargs)
        assert scratch_bytes(CPU, operator, bare, bare_kwargs) == measured
        some += measured
    assert some > 0, "the row is not needed any more"


def test_scratch_memory_is_in_proportion_to_the_threads() -> None:
    """Except what one thread sums queries into in backward: the profiler sees no allocation of another thread."""
    threads = torch.get_num_threads()
    two = Cpu(name="cpu", threads=2, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-5)
    torch.set_num_threads(2)
    try:
        args, kwargs = next(attention_forward(200))
        assert allocated_inside(FLASH, args, kwargs) == scratch_bytes(two, FLASH, args, kwargs)
        args, kwargs = next(attention_backward(200))
        unseen = 4 * 64
        assert allocated_inside(FLASH_BACKWARD, args, kwargs) == scratch_bytes(two, FLASH_BACKWARD, args, kwargs) - unseen
        operator = aten.native_layer_norm_backward.default
        args, kwargs = list(layer_norm_backward(200))[1]
        assert allocated_inside(operator, args, kwargs) == scratch_bytes(two, operator, args, kwargs) > 0
    finally:
        torch.set_num_threads(threads)


def test_an_operator_without_a_row_has_no_scratch_memory() -> None:
    assert scratch_bytes(CPU, aten.mm.default, (INPUT[0], INPUT[0].t()), {}) == 0


def test_every_scratch_row_has_a_test() -> None:
    assert set(_SCRATCH["cpu"]) == {*SCRATCH, *CONVOLUTIONS, *UPDATES, *TESTED_CPU}


def test_scratch_memory_comes_and_goes_as_a_workspace_after_the_results() -> None:
    inputs = [dataless(part.detach()) for part in three(16)]
    with kernels_of(CPU), DatalessRecorder(CPU, nn.Identity()) as recorder:
        out = nn.functional.scaled_dot_product_attention(*inputs)
        happened = [(event.kind is Kind.WORKSPACE, event.bytes) for event in recorder.trace().events]
    size = scratch_bytes(CPU, FLASH, inputs, {})
    # The second result, one number per query, is gone when attention has returned its first.
    sums = 4 * ROWS * HEADS * 16
    assert happened == [(False, 4 * out.numel()), (False, sums), (True, size), (True, -size), (False, -sums)]
