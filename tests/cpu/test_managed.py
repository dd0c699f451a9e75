"""bitsandbytes' optimizer on data-less tensors: where its state lies, in exact bytes, and that all is undone."""

from __future__ import annotations

import sys
from typing import Literal

import pytest
import torch
from torch import nn

from memtrain.device import Cpu
from memtrain.features.bitsandbytes_adamw import bitsandbytes_adamw
from memtrain.trace.event import DEVICE, MANAGED, Event, Kind, Phase
from memtrain.trace.managed import paged_state
from memtrain.trace.record import Recorder
from memtrain.trace.simulate import DatalessRecorder

bitsandbytes = pytest.importorskip("bitsandbytes")

PROCESSOR = Cpu(name="cpu", threads=2, flops_per_second=1e11, bytes_per_second=2e10, operator_seconds=1e-5)


def optimizer_of(
    parameters: list[nn.Parameter], bits: Literal[8, 32], memory: Literal["device", "managed"]
) -> torch.optim.Optimizer:
    return bitsandbytes_adamw(
        parameters, learning_rate=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, bits=bits, memory=memory
    )


def updates(
    parameters: list[nn.Parameter], bits: Literal[8, 32], memory: Literal["device", "managed"], *, steps: int = 2
) -> tuple[Event, ...]:
    """What the updates of these parameters do to memory; the gradients are made one after the other, before each update."""
    model = nn.Module()
    model.weights = nn.ParameterList(parameters)
    recorder = DatalessRecorder(PROCESSOR, model) if parameters[0].is_meta else Recorder(model)
    optimizer = optimizer_of(parameters, bits, memory)
    with paged_state(), recorder:
        with recorder.phase(Phase.LOAD):
            recorder.track_weights()
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            with recorder.phase(Phase.UPDATE):
                optimizer.step()
            optimizer.zero_grad()
    return recorder.trace().events


def weights_of(device: str, *shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]


def state(events: tuple[Event, ...]) -> list[tuple[int, object]]:
    return [(event.bytes, event.place) for event in events if event.kind is Kind.OPTIMIZER_STATE and event.bytes > 0]


TABLES = [(1024, DEVICE), (1024, DEVICE)]


def test_32_bit_state_is_paged_from_100_000_elements_on() -> None:
    events = updates(weights_of("meta", (99_999,), (400, 250)), 32, "managed")
    # Groups come in the order of decay: the matrix first.
    assert state(events) == [(400_000, MANAGED), (400_000, MANAGED), (399_996, DEVICE), (399_996, DEVICE)]


def test_8_bit_state_is_paged_without_its_scales() -> None:
    events = updates(weights_of("meta", (64, 64), (400, 250)), 8, "managed")
    small = [(4096, DEVICE), (4096, DEVICE), (64, DEVICE), (64, DEVICE)]
    large = [(100_000, MANAGED), (100_000, MANAGED), (4 * 391, DEVICE), (4 * 391, DEVICE)]
    assert state(events) == [*small, *large, *TABLES]


def test_state_that_is_not_paged_lies_on_the_device() -> None:
    events = updates(weights_of("meta", (400, 250)), 8, "device")
    assert state(events) == [(100_000, DEVICE), (100_000, DEVICE), (4 * 391, DEVICE), (4 * 391, DEVICE), *TABLES]


@pytest.mark.parametrize("memory", ["device", "managed"])
@pytest.mark.parametrize("bits", [32, 8])
def test_an_update_makes_the_state_once_and_nothing_else(bits: Literal[8, 32], memory: Literal["device", "managed"]) -> None:
    events = updates(weights_of("meta", (400, 250), (300,)), bits, memory)
    made = [event for event in events if event.phase not in (Phase.LOAD, Phase.FORWARD) and event.bytes > 0]
    seen = [event for event in made if event.kind is not Kind.WORKSPACE]
    assert {event.kind for event in seen} == {Kind.OPTIMIZER_STATE}
    assert len({event.phase for event in seen}) == 1


@pytest.mark.parametrize("bits", [32, 8])
def test_data_less_updates_allocate_what_real_ones_do(bits: Literal[8, 32]) -> None:
    shapes = ((400, 250), (64, 64), (4095,), (3, 5))
    real, simulated = (updates(weights_of(device, *shapes), bits, "device") for device in ("cpu", "meta"))
    seen = [event for event in simulated if event.kind is not Kind.WORKSPACE]
    assert [(event.bytes, event.operator, event.kind, event.phase) for event in real] == [
        (event.bytes, event.operator, event.kind, event.phase) for event in seen
    ]


def test_everything_is_undone_also_after_an_error() -> None:
    functional = bitsandbytes.functional
    functions = [functional.get_paged, functional.fill, functional.prefetch_tensor]
    buffers = functional.GlobalPageManager.get_instance().paged_tensors
    of_another_run = torch.zeros(1)
    (weight,) = weights_of("meta", (400, 250))

    def failing() -> None:
        with paged_state():
            optimizer = optimizer_of([weight], 32, "managed")
            weight.grad = torch.empty_like(weight)
            optimizer.step()
            assert len(buffers) == 3
            raise ArithmeticError("after a step")

    buffers.append(of_another_run)
    try:
        with pytest.raises(ArithmeticError, match="after a step"):
            failing()
        assert [functional.get_paged, functional.fill, functional.prefetch_tensor] == functions
        assert [id(buffer) for buffer in buffers] == [id(of_another_run)]
    finally:
        buffers.clear()


def test_an_optimizer_of_torchs_neither_changes_nor_loads_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional")
    (weight,) = weights_of("cpu", (2, 2))
    with paged_state():
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight]).step()
    assert "bitsandbytes.functional" not in sys.modules
