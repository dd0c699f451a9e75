"""What a storage holds: said by a tag, by its shape, or by how long it lives."""

from __future__ import annotations

import pytest
import torch
from test_record import B, S, TwoBlocks, W, births, described, step
from torch import nn

from memtrain.trace.event import Kind, Phase, Trace
from memtrain.trace.record import Recorder


def test_weights_are_tracked_with_their_module_and_shared_ones_once() -> None:
    model = TwoBlocks()
    model.second.linear.weight = model.first.linear.weight
    model.second.register_buffer("offset", torch.zeros(7))
    with Recorder(model) as recorder:
        with recorder.phase(Phase.LOAD):
            recorder.track_weights()
        recorder.track_weights()
    assert described(recorder.trace()) == [
        ("load", "first.linear", "given", W, "weight"),
        ("load", "first.linear", "given", B, "weight"),
        ("load", "second.linear", "given", B, "weight"),
        ("load", "second", "given", 28, "weight"),
    ]


def test_the_kind_of_higher_precedence_stays_whichever_is_said_first() -> None:
    with Recorder(nn.Identity()) as recorder:
        one, other, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
        recorder.tag(one, Kind.INPUT)
        recorder.tag(one, Kind.GRADIENT)
        recorder.tag(other, Kind.GRADIENT)
        recorder.tag(other, Kind.INPUT)
        recorder.tag(third, Kind.INPUT)
        recorder.tag(third[:1], Kind.WEIGHT)
    assert [event.kind for event in births(recorder.trace())] == [Kind.GRADIENT, Kind.GRADIENT, Kind.WEIGHT]


def test_a_tag_for_a_storage_that_is_not_tracked_does_nothing() -> None:
    outside = torch.zeros(1)
    with Recorder(nn.Identity()) as recorder:
        recorder.tag(outside, Kind.INPUT)
        assert recorder.trace().events == ()
        recorder.track(outside)
        recorder.track(outside[:], Kind.INPUT, path="here")
    # Where it belongs may be said later, too.
    assert described(recorder.trace()) == [("forward", "here", "given", 4, "input")]


def test_logits_are_known_by_the_width_of_the_vocabulary() -> None:
    with Recorder(nn.Identity(), vocabulary=5) as recorder:
        logits, hidden, one_row = torch.zeros(2, 5), torch.zeros(5, 2), torch.zeros(5)
        recorder.tag(torch.ones(1, 5), Kind.INPUT)
        del logits, hidden, one_row
    kinds = [event.kind for event in births(recorder.trace())]
    assert kinds == [Kind.LOGITS, Kind.TEMPORARY, Kind.TEMPORARY, Kind.INPUT]


def test_without_a_vocabulary_nothing_is_logits() -> None:
    with Recorder(nn.Identity()) as recorder:
        torch.zeros(3)
        torch.zeros(2, 0)
        torch.zeros(2, 5)
    assert [event.kind for event in births(recorder.trace())] == [Kind.TEMPORARY, Kind.TEMPORARY]


def test_what_forward_makes_and_leaves_is_a_saved_activation() -> None:
    with Recorder(nn.Identity()) as recorder:
        kept, dropped = torch.zeros(1), torch.zeros(2)
        del dropped
        with recorder.phase(Phase.BACKWARD):
            late = torch.zeros(3)
        del kept, late
    assert {event.bytes // 4: event.kind for event in births(recorder.trace())} == {
        1: Kind.SAVED_ACTIVATION,
        2: Kind.TEMPORARY,
        3: Kind.TEMPORARY,
    }


def trained(micro_batches: int, *, fused: bool = True) -> Trace:
    model = TwoBlocks()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)
    with Recorder(model) as recorder:
        for number in (1, 2):
            recorder.mark(f"step {number}")
            for _ in range(micro_batches):
                step(model)
            optimizer.step()
            recorder.first_step_done()
            optimizer.zero_grad(set_to_none=True)
    trace: Trace = recorder.trace()
    return trace


def section(trace: Trace, name: str) -> Trace:
    start, stop = trace.section(name)
    return Trace(trace.events[start:stop])


# Without fused, the step count is made below dispatch, where only the recorder's hook finds it.
@pytest.mark.parametrize(("fused", "operators"), [(True, {"zeros", "zeros_like"}), (False, {"given", "zeros_like"})])
def test_the_first_update_creates_the_optimizer_state_and_no_other_does(fused: bool, operators: set[str]) -> None:
    trace = trained(micro_batches=1, fused=fused)
    state = births(section(trace, "step 1"), Kind.OPTIMIZER_STATE)
    # Two moments and a step count for each of two weights and two biases.
    assert sorted(event.bytes for event in state) == sorted(2 * [W, W, B, B, S, S])
    assert {event.phase for event in state} == {Phase.FIRST_UPDATE}
    assert {event.operator for event in state} == operators
    assert births(section(trace, "step 2"), Kind.OPTIMIZER_STATE) == []


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_gradients_are_those_that_are_updated_with_whatever_the_micro_batches(micro_batches: int) -> None:
    trace = trained(micro_batches)
    for name in ("step 1", "step 2"):
        events = section(trace, name).events
        gradients = [event for event in events if event.kind is Kind.GRADIENT]
        assert [(event.module, event.bytes) for event in gradients if event.bytes > 0] == [
            ("second.linear", W),
            ("second.linear", B),
            ("first.linear", W),
            ("first.linear", B),
        ]
        # A later micro-batch's own gradients are added to these and are temporary.
        temporary = [event for event in births(section(trace, name), Kind.TEMPORARY) if event.bytes == W]
        assert len(temporary) == 2 * (micro_batches - 1)
        assert {event.phase for event in gradients if event.bytes > 0} == {Phase.BACKWARD}
        assert sum(event.bytes for event in gradients) == 0


def test_a_gradient_is_one_as_soon_as_it_is_there_whether_or_not_it_is_updated_with() -> None:
    model = TwoBlocks()
    with Recorder(model) as recorder:
        step(model)
    assert [event.bytes for event in births(recorder.trace(), Kind.GRADIENT)] == [W, B, W, B]


def test_a_gradient_of_what_is_no_weight_is_temporary() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    with Recorder(nn.Identity()) as recorder:
        (x * 2).sum().backward()
    assert births(recorder.trace(), Kind.GRADIENT) == []
    assert x.grad is not None
