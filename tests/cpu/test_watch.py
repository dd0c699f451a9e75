"""The recorder and a model that is built under it, loses its gradients to a feature, and is updated more than once."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_record import (
    BACKWARD_OF_FIRST,
    BACKWARD_OF_SECOND,
    CPU,
    FORWARD,
    B,
    S,
    TwoBlocks,
    W,
    births,
    described,
    step,
)
from torch import Tensor

from memtrain.trace.event import Kind, Phase
from memtrain.trace.record import Recorder
from memtrain.trace.simulate import DatalessRecorder


def test_updates_are_the_first_ones_until_that_is_said_to_be_done() -> None:
    model = TwoBlocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Recorder(model) as recorder:
        for number in (1, 2, 3):
            recorder.mark(f"step {number}")
            step(model)
            with recorder.phase(Phase.UPDATE):
                torch.zeros(number)
                optimizer.step()
            if number == 2:
                recorder.first_step_done()
            optimizer.zero_grad()
    trace = recorder.trace()
    updates = (Phase.FIRST_UPDATE, Phase.UPDATE)
    seen = [{event.phase for event in trace.events[slice(*trace.section(f"step {n}"))]} & {*updates} for n in (1, 2, 3)]
    assert seen == [{Phase.FIRST_UPDATE}, {Phase.FIRST_UPDATE}, {Phase.UPDATE}]
    # Steps are alike, so the work of those until then stands for all.
    assert trace.work[Phase.FIRST_UPDATE].operators > 0
    assert Phase.UPDATE not in trace.work


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_is_built_under_the_recorder_is_its_weights_once_it_is_watched(device: str) -> None:
    recorder = DatalessRecorder(CPU) if device == "meta" else Recorder()
    with recorder, recorder.phase(Phase.LOAD), torch.device(device):
        recorder.mark("load")
        temporary = torch.zeros(100)
        model = TwoBlocks()
        del temporary
    recorder.watch(model, vocabulary=1)
    with recorder, torch.device(device):
        with recorder.phase(Phase.LOAD):
            recorder.track_weights()
        recorder.mark("step 1")
        step(model)
    trace = recorder.trace()
    start, stop = trace.section("load")
    # Counted where it was made, with the module that it belongs to, and not again.
    made = [(event.bytes, event.kind.value, event.module) for event in births(trace)[:5]]
    weights = [(size, "weight", f"{block}.linear") for block in ("first", "second") for size in (W, B)]
    assert made == [(400, "temporary", ""), *weights]
    assert max(itertools.accumulate(event.bytes for event in trace.events[start:stop])) == 400 + 2 * (W + B)
    assert [entry for entry in described(trace) if entry[0] != "load"] == [*FORWARD, *BACKWARD_OF_SECOND, *BACKWARD_OF_FIRST]


def test_a_gradient_that_a_feature_takes_away_was_a_gradient() -> None:
    model = TwoBlocks()
    recorder = Recorder(model)
    taken = []

    def take(parameter: Tensor) -> None:
        taken.append(parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    with recorder:
        step(model)
    assert [event.bytes for event in births(recorder.trace(), Kind.GRADIENT)] == [W, B, W, B]
    assert len(taken) == 4


def test_the_frozen_weights_of_a_watched_model_have_no_gradient() -> None:
    model = TwoBlocks()
    model.first.requires_grad_(False)
    with Recorder(model) as recorder:
        step(model)
    assert {event.module for event in births(recorder.trace(), Kind.GRADIENT)} == {"second.linear"}


def test_the_state_of_an_update_is_that_of_its_weights_module() -> None:
    """Beside a card what an update of one module touches decides how much managed memory is at work."""
    model = TwoBlocks()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Recorder(model) as recorder:
        step(model)
        optimizer.step()
    state = births(recorder.trace(), Kind.OPTIMIZER_STATE)
    held: dict[str, int] = {}
    for event in state:
        held[event.module] = held.get(event.module, 0) + event.bytes
    assert held == dict.fromkeys(("first.linear", "second.linear"), 2 * (W + B + S))
