"""Running out of memory is told from other errors by what the allocators really say, and nothing of what failed stays alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memtrain.out_of_memory import OutOfMemory, attempt, is_out_of_memory

# More than a processor of today can address, so no machine gives it however much it promises.
TOO_MUCH = 2**60


def ask_for_too_much() -> Tensor:
    return torch.empty(TOO_MUCH, dtype=torch.uint8)


def error_of(work: Callable[[], object]) -> BaseException:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        work()
    return caught.value


# ---------------------------------------------------------------------------------------------- which errors


@pytest.mark.parametrize(
    ("work", "raises"),
    [
        (ask_for_too_much, RuntimeError),
        (lambda: bytearray(TOO_MUCH), MemoryError),
        (lambda: numpy.empty(TOO_MUCH, dtype=numpy.uint8), MemoryError),
    ],
    ids=["torch", "Python", "NumPy"],
)
def test_what_allocators_of_the_host_really_raise_is_running_out(work: Callable[[], object], raises: type) -> None:
    error = error_of(work)
    assert isinstance(error, raises)
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 B"
        ),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=["the card's allocator", "Windows", "CUDA", "cuBLAS", "cuDNN"],
)
def test_what_a_card_or_another_system_says_is_running_out(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        error_of(lambda: torch.ones(2) @ torch.ones(3)),
        # A number of bytes that no machine can count is a mistake in the model.
        error_of(lambda: torch.empty(2**62, dtype=torch.float64)),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("DefaultCPUAllocator: can't allocate memory"),
        KeyboardInterrupt(),
    ],
    ids=["shapes", "overflow", "illegal access", "ValueError", "interrupted"],
)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


# ---------------------------------------------------------------------------------------------- attempting


def test_what_succeeds_returns_what_it_made() -> None:
    made = object()
    assert attempt(lambda: made) is made


def test_what_was_said_is_the_first_line_or_the_name_of_the_error() -> None:
    def fail(error: Exception) -> Any:
        raise error

    assert attempt(lambda: fail(torch.OutOfMemoryError("\nno room\nmore"))) == OutOfMemory("no room")
    assert attempt(lambda: fail(MemoryError())) == OutOfMemory("MemoryError")


def test_another_error_passes_as_it_is() -> None:
    error = RuntimeError("shapes do not match")

    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError) as caught:
        attempt(fail)
    assert caught.value is error


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """No collection but the one that is asked for, so that none happens by chance."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def failing_in(where: str, held: list[weakref.ref[Tensor]]) -> None:
    """Run out of memory with tensors held by frames only."""
    weight = torch.ones(3, requires_grad=True)

    def hold(tensor: Tensor) -> Tensor:
        held.append(weakref.ref(tensor))
        return tensor

    calls = 0

    def block(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        inner = hold(x * weight)
        if where == "a frame that keeps its error":
            kept = error_of(ask_for_too_much)
            raise kept
        if where == "forward" or calls == 2:
            ask_for_too_much()
        return hold(inner.exp())

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            hold(gradients[0] * ctx.saved_tensors[0])
            inner = hold(gradients[0] + 1)
            return inner + ask_for_too_much()

    x = hold(torch.ones(3))
    if where == "the engine":
        y = hold(Fails.apply(hold(block(x))))
    elif "checkpoint" in where:
        y = checkpoint(block, x.requires_grad_(), use_reentrant=where == "reentrant checkpoint")
    else:
        y = block(x)
    y.sum().backward()


@pytest.mark.parametrize(
    "where", ["forward", "the engine", "checkpoint", "reentrant checkpoint", "a frame that keeps its error"]
)
def test_no_tensor_of_what_failed_is_alive_afterwards(where: str) -> None:
    held: list[weakref.ref[Tensor]] = []
    with collected_by_hand():
        failure = attempt(lambda: failing_in(where, held))
        assert isinstance(failure, OutOfMemory)
        assert "can't allocate memory" in failure.said
        assert len(held) >= 2
        assert [reference() for reference in held] == [None] * len(held)


def test_an_error_that_is_held_keeps_the_tensors_of_what_failed_alive() -> None:
    held: list[weakref.ref[Tensor]] = []
    error = error_of(lambda: failing_in("forward", held))
    assert is_out_of_memory(error)
    assert all(reference() is not None for reference in held)
