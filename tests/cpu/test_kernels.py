"""The kernel table put in force, and attention on a processor: it is right, and it is still needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from test_parity import events
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.device import Cpu
from memtrain.trace.kernels import _KERNELS, kernels_of
from memtrain.trace.record import Recorder
from memtrain.trace.simulate import DatalessRecorder

aten = torch.ops.aten
CPU = Cpu(name="cpu", threads=torch.get_num_threads(), flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-5)
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
        recorder.mark("step 1")
        run(*inputs)
    return events(recorder.trace())


def simulated(run: Callable[..., object], inputs: list[Any], *, kernels: bool = True) -> Listed:
    """What ``run`` allocates and frees without data, with the kernel table or without."""
    bare = [dataless(value) for value in inputs]
    with kernels_of(CPU) if kernels else contextlib.nullcontext(), DatalessRecorder(CPU, nn.Identity()) as recorder:
        recorder.mark("step 1")
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


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 asks for the least and the largest one by one")
def test_one_hot_is_scattered_as_on_a_processor() -> None:
    def encode(classes: Tensor) -> None:
        nn.functional.one_hot(classes, num_classes=40)

    classes = [torch.arange(24).view(4, 6) % 5]
    real = recorded(encode, classes)
    assert [operator for size, operator in real if size > 0] == ["aminmax", "aminmax", "zeros"]
    assert simulated(encode, classes) == real
    # The row is needed.
    assert simulated(encode, classes, kernels=False) != real


def test_one_hot_of_nothing_is_as_wide_as_the_classes() -> None:
    with kernels_of(CPU):
        encoded = nn.functional.one_hot(torch.empty(0, 3, dtype=torch.int64, device="meta"), num_classes=5)
    assert encoded.shape == (0, 3, 5)


def test_every_kernel_has_a_test() -> None:
    assert set(_KERNELS["cpu"]) == {aten.scaled_dot_product_attention.default, aten.one_hot.default}
