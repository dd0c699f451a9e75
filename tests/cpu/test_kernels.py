"""Each row of the kernel tables: it is right, and it is still needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from test_parity import events
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.device import Device
from memtrain.trace.event import Kind
from memtrain.trace.kernels import _KERNELS, _RESULTS, _SCRATCH, as_laid_out, kernels_of, scratch_bytes
from memtrain.trace.record import Recorder
from memtrain.trace.simulate import DatalessRecorder

aten = torch.ops.aten
CPU = Device(
    name="cpu", kind="cpu", threads=torch.get_num_threads(), flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-5
)
LENGTHS = (16, 200, 800)

Listed = list[tuple[int, str]]


def dataless(value: Any) -> Any:
    """The same strides without data; what is no tensor is itself."""
    if not isinstance(value, Tensor):
        return value
    bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return bare.requires_grad_(value.requires_grad)


def recorded(run: Callable[..., object], inputs: list[Any]) -> Listed:
    """What ``run`` allocates and frees, on data."""
    for tensor in inputs:
        if isinstance(tensor, Tensor):
            tensor.grad = None
    with Recorder(nn.Identity()) as recorder:
        run(*inputs)
    return events(recorder.trace())


def simulated(run: Callable[..., object], inputs: list[Any], *, kernels: bool = True) -> Listed:
    """What ``run`` allocates and frees without data, with the kernel table or without."""
    bare = [dataless(value) for value in inputs]
    with kernels_of(CPU) if kernels else contextlib.nullcontext(), DatalessRecorder(nn.Identity(), CPU) as recorder:
        run(*bare)
    return events(recorder.trace())


# ---------------------------------------------------------------------------------------------- kernels: attention

ROWS, HEADS, WIDTH = 2, 4, 8


def heads(length: int, *, rows: int = ROWS, count: int = HEADS, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, count, length, width).requires_grad_()


def three(length: int, **sizes: int) -> list[Tensor]:
    return [heads(length, **sizes) for _ in range(3)]


class Attention(NamedTuple):
    """Inputs of a length, settings, and whether the processor runs flash attention on them."""

    inputs: Callable[[int], list[Any]]
    settings: dict[str, Any] = {}  # noqa: RUF012  (read only)
    flash: bool = True


def some_hidden(*shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 3 > 0).reshape(shape)


ATTENTION = {
    "plain": Attention(three),
    "causal": Attention(three, {"is_causal": True}),
    "scaled": Attention(three, {"scale": 0.3}),
    "boolean mask": Attention(lambda n: [*three(n), some_hidden(ROWS, 1, n, n)]),
    "boolean mask of keys": Attention(lambda n: [*three(n), some_hidden(ROWS, 1, 1, n)]),
    "expanded boolean mask": Attention(lambda n: [*three(n), some_hidden(ROWS, 1, 1, n).expand(ROWS, 1, n, n)]),
    "boolean mask of two dimensions": Attention(lambda n: [*three(n), some_hidden(n, n)]),
    "float mask": Attention(lambda n: [*three(n), torch.zeros(ROWS, HEADS, n, n)]),
    "float mask of two dimensions": Attention(lambda n: [*three(n), torch.zeros(n, n)]),
    "float mask of three dimensions": Attention(lambda n: [*three(n), torch.zeros(1, n, n)], flash=False),
    "learnt mask": Attention(lambda n: [*three(n), torch.zeros(1, HEADS, n, n).requires_grad_()], flash=False),
    "grouped heads": Attention(lambda n: [heads(n), heads(n, count=2), heads(n, count=2)], {"enable_gqa": True}),
    "one head for all": Attention(lambda n: [heads(n), heads(n, count=1), heads(n, count=1)], flash=False),
    "one row of keys for all": Attention(lambda n: [heads(n), heads(n, rows=1), heads(n, rows=1)], flash=False),
    "dropout": Attention(three, {"dropout_p": 0.2}, flash=False),
    "dropout, causal": Attention(three, {"dropout_p": 0.2, "is_causal": True}, flash=False),
    "dropout, boolean mask": Attention(lambda n: [*three(n), some_hidden(ROWS, 1, n, n)], {"dropout_p": 0.2}, flash=False),
    "dropout, grouped heads": Attention(
        lambda n: [heads(n), heads(n, count=2), heads(n, count=2)], {"dropout_p": 0.2, "enable_gqa": True}, flash=False
    ),
    "wider values": Attention(lambda n: [heads(n), heads(n), heads(n, width=2 * WIDTH)], flash=False),
    "other number of keys": Attention(lambda n: [heads(n), heads(7), heads(7)]),
    "three dimensions": Attention(lambda n: [torch.randn(ROWS, n, WIDTH).requires_grad_() for _ in range(3)], flash=False),
    "heads beside each other": Attention(
        lambda n: [torch.randn(ROWS, n, HEADS, WIDTH).transpose(1, 2).requires_grad_() for _ in range(3)]
    ),
    "length before width": Attention(
        lambda n: [torch.randn(ROWS, HEADS, WIDTH, n).transpose(2, 3).requires_grad_() for _ in range(3)], flash=False
    ),
    "frozen keys": Attention(lambda n: [heads(n), heads(n).detach(), heads(n)]),
    "double precision": Attention(lambda n: [part.detach().double().requires_grad_() for part in three(n)]),
}


def attend(settings: dict[str, Any]) -> Callable[..., None]:
    def forward_and_backward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> None:
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **settings)
        # As models do it: heads beside each other, which copies where the kernel has not laid them out so.
        out.transpose(1, 2).contiguous().sum().backward()

    return forward_and_backward


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_takes_the_path_of_the_processor(name: str, length: int) -> None:
    if name == "double precision" and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 gives data-less tensors the log-sum-exp of double precision in single precision")
    case = ATTENTION[name]
    inputs = case.inputs(length)
    real = recorded(attend(case.settings), inputs)
    flash = any("flash" in operator for _, operator in real)
    # Which inputs a processor's flash attention takes differs between releases of torch; the row asks the one at hand.
    if torch.__version__.startswith("2.13."):
        assert flash == case.flash
    assert simulated(attend(case.settings), inputs) == real
    # The row is needed for what runs flash, and for nothing else.
    assert (simulated(attend(case.settings), inputs, kernels=False) != real) == flash


def test_attention_without_gradients_takes_the_path_of_the_processor() -> None:
    def forward(query: Tensor, key: Tensor, value: Tensor) -> None:
        with torch.no_grad():
            nn.functional.scaled_dot_product_attention(query, key, value)

    inputs = three(16)
    assert simulated(forward, inputs) == recorded(forward, inputs)


def test_attention_that_is_told_its_kernel_takes_that_one() -> None:
    def mathematical(*inputs: Tensor) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            attend({})(*inputs)

    inputs = three(16)
    real = recorded(mathematical, inputs)
    assert ["bmm" in operator for _, operator in real].count(True) == 6
    assert simulated(mathematical, inputs) == real


def test_attention_over_no_token_takes_the_path_of_the_processor() -> None:
    inputs = [heads(5), heads(0), heads(0)]
    assert simulated(attend({}), inputs) == recorded(attend({}), inputs)


def test_the_kernels_are_in_force_inside_only_and_for_data_less_tensors_only() -> None:
    operators: list[str] = []

    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def listed(inputs: list[Tensor]) -> list[str]:
        query, key, value = inputs
        operators.clear()
        with Listing():
            nn.functional.scaled_dot_product_attention(query, key, value)
        return operators.copy()

    real = [part.detach() for part in three(16)]
    bare = [dataless(part) for part in real]
    outside, on_data = listed(bare), listed(real)
    assert "bmm.default" in outside
    query, key, value = real
    masked = partial(nn.functional.scaled_dot_product_attention, query, key, value, attn_mask=some_hidden(16, 16))
    expected = masked()
    with kernels_of(CPU):
        with kernels_of(CPU):
            assert listed(bare) == ["_scaled_dot_product_flash_attention_for_cpu.default"]
        assert listed(bare) == ["_scaled_dot_product_flash_attention_for_cpu.default"]
        assert listed(real) == on_data
        assert torch.equal(masked(), expected)
    assert listed(bare) == outside
    with pytest.raises(KeyError, match="stop"), kernels_of(CPU):
        raise KeyError("stop")
    assert listed(bare) == outside


def test_every_kernel_has_a_test() -> None:
    assert {kind: set(table) for kind, table in _KERNELS.items()} == {"cpu": {"scaled_dot_product_attention"}}


# ---------------------------------------------------------------------------------------------- results

INPUT, ACROSS = torch.randn(3, 5, 6), torch.randn(3, 6, 5).transpose(1, 2)
MEAN = torch.zeros(3, 5, 1)
WEIGHT = torch.randn(6)
CHANCES, ZERO_OR_ONE = torch.rand(4, 7), torch.ones(4, 7)
# Per row, arguments for which meta lays the result out in another way than the processor.
RESULTS: dict[Any, dict[str, tuple[Any, ...]]] = {
    aten.native_layer_norm_backward: {
        "input across": (ACROSS, ACROSS, [6], MEAN, MEAN, WEIGHT, WEIGHT, [True, True, True]),
        "only the input's gradient": (ACROSS, ACROSS, [6], MEAN, MEAN, WEIGHT, WEIGHT, [True, False, False]),
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
    (aten.native_layer_norm_backward, (INPUT, INPUT, [6], MEAN, MEAN, WEIGHT, WEIGHT, [True, True, True])),
    (aten.native_layer_norm_backward, (INPUT, ACROSS, [6], MEAN, MEAN, WEIGHT, WEIGHT, [False, True, True])),
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
    assert {kind: set(table) for kind, table in _RESULTS.items()} == {"cpu": set(RESULTS)}


# ---------------------------------------------------------------------------------------------- scratch memory

FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def allocated_inside(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that the kernel allocates besides its results: peak of the allocator's events, without those of the results."""
    # A first call may create what stays, such as a library's own buffers.
    operator(*args, **kwargs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        out = operator(*args, **kwargs)
    results = {tensor.untyped_storage().data_ptr() for tensor in out if tensor is not None}
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    timed = []
    while pending:
        node = pending.pop()
        pending.extend(reversed(node.children))
        if node.name == "[memory]" and node.extra_fields.ptr not in results:
            timed.append((node.start_time_ns, node.extra_fields.alloc_size))
    live = peak = 0
    for _, size in sorted(timed, key=lambda event: event[0]):
        live += size
        peak = max(peak, live)
    return peak


def attention_forward(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for inputs in (three(length), [heads(length), heads(37), heads(37)], [heads(9), heads(length), heads(length)]):
        bare = [part.detach() for part in inputs]
        yield (*bare, 0.0, False), {}
        yield (*bare, 0.0, True), {}
        yield (*bare, 0.0, False), {"attn_mask": torch.zeros(1, 1, bare[0].shape[2], bare[1].shape[2])}


def attention_backward(length: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for args, kwargs in attention_forward(length):
        out, sums = FLASH(*args, **kwargs)
        # As it comes from a model that puts heads beside each other, from one that does not, and from a sum.
        for grad in (
            torch.randn(out.transpose(1, 2).shape).transpose(1, 2),
            torch.randn(out.shape),
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


SCRATCH: dict[Any, Callable[[int], Iterator[tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    FLASH: attention_forward,
    FLASH_BACKWARD: attention_backward,
    aten.native_layer_norm.default: layer_norm_forward,
    aten.native_layer_norm_backward.default: layer_norm_backward,
}


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
    two = Device(name="cpu", kind="cpu", threads=2, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-5)
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
    assert {kind: set(table) for kind, table in _SCRATCH.items()} == {"cpu": set(SCRATCH)}


def test_scratch_memory_comes_and_goes_as_a_workspace_after_the_results() -> None:
    inputs = [dataless(part.detach()) for part in three(16)]
    with kernels_of(CPU), DatalessRecorder(nn.Identity(), CPU) as recorder:
        out = nn.functional.scaled_dot_product_attention(*inputs)
        happened = [(event.kind is Kind.WORKSPACE, event.bytes) for event in recorder.trace().events]
    size = scratch_bytes(CPU, FLASH, inputs, {})
    # The second result, one number per query, is gone when attention has returned its first.
    sums = 4 * ROWS * HEADS * 16
    assert happened == [(False, 4 * out.numel()), (False, sums), (True, size), (True, -size), (False, -sums)]
