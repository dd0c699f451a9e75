"""The recorder: which storage is born and dies when, where and what for, on a toy whose every byte is known."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from memtrain.device import Cpu
from memtrain.features.recompute import recompute_blocks_
from memtrain.features.update import update_during_backward_
from memtrain.trace.event import DEVICE, HOST, Event, Kind, Phase, Trace
from memtrain.trace.record import Recorder
from memtrain.trace.simulate import DatalessRecorder

CPU = Cpu(name="cpu", threads=1, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-5)
ROWS, WIDTH = 3, 4
# Bytes of an activation, a weight, a bias and a scalar.
A, W, B, S = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH, 4 * WIDTH, 4


class Block(nn.Module):
    """A linear layer, and an operator of the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).relu()
        return out


class TwoBlocks(nn.Module):
    """Two blocks, and operators of the model's own between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x) * 2).sum()
        return out


def inputs() -> Tensor:
    return torch.ones(ROWS, WIDTH)


def step(model: nn.Module) -> None:
    model(inputs()).backward()


def births(trace: Trace, kind: Kind | None = None) -> list[Event]:
    return [event for event in trace.events if event.bytes > 0 and kind in (None, event.kind)]


def described(trace: Trace) -> list[tuple[str, str, str, int, str]]:
    """Phase, module, operator, bytes and kind of each allocation."""
    return [(e.phase.value, e.module, e.operator, e.bytes, e.kind.value) for e in births(trace)]


FORWARD = [
    ("forward", "", "ones", A, "saved activation"),
    ("forward", "first.linear", "addmm", A, "temporary"),
    ("forward", "first", "relu", A, "saved activation"),
    ("forward", "", "mul", A, "saved activation"),
    ("forward", "second.linear", "addmm", A, "temporary"),
    ("forward", "second", "relu", A, "saved activation"),
    ("forward", "", "sum", S, "saved activation"),
    # The gradient that backward starts from is made before it starts.
    ("forward", "", "ones_like", S, "saved activation"),
]
BACKWARD_OF_SECOND = [
    ("backward", "second", "threshold_backward", A, "temporary"),
    ("backward", "second.linear", "mm", A, "temporary"),
    ("backward", "second.linear", "mm", W, "gradient"),
    ("backward", "second.linear", "sum", B, "gradient"),
    ("backward", "", "mul", A, "temporary"),
]
# The model's input wants no gradient.
BACKWARD_OF_FIRST = [
    ("backward", "first", "threshold_backward", A, "temporary"),
    ("backward", "first.linear", "mm", W, "gradient"),
    ("backward", "first.linear", "sum", B, "gradient"),
]


def recomputed(block: str) -> list[tuple[str, str, str, int, str]]:
    return [
        ("recompute", f"{block}.linear", "addmm", A, "temporary"),
        ("recompute", block, "relu", A, "saved activation"),
    ]


# ---------------------------------------------------------------------------------------------- modules and phases


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_allocation_of_a_step_has_its_phase_module_and_kind(device: str) -> None:
    model = TwoBlocks().to(device)
    recorder = DatalessRecorder(CPU, model) if device == "meta" else Recorder(model)
    with recorder, torch.device(device):
        step(model)
    assert described(recorder.trace()) == [*FORWARD, *BACKWARD_OF_SECOND, *BACKWARD_OF_FIRST]


def test_what_is_made_where_a_gradient_arrives_is_its_modules() -> None:
    model = TwoBlocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update_during_backward_(optimizer)
    with Recorder(model) as recorder:
        # A sum's gradient is one number seen everywhere, so it is copied on arrival.
        (model.first.linear.weight.sum() + model.second.linear.bias.sum()).backward()
    made = {
        (event.module, event.kind.value, event.bytes) for event in births(recorder.trace()) if event.phase is not Phase.FORWARD
    }
    assert made == {
        ("first.linear", "gradient", W),
        ("first.linear", "optimizer state", W),
        ("second.linear", "gradient", B),
        ("second.linear", "optimizer state", B),
    }


def test_a_recomputed_block_is_attributed_like_the_block_and_its_temporaries_are_no_activations() -> None:
    model = TwoBlocks()
    recompute_blocks_([model.first, model.second])
    with Recorder(model) as recorder:
        step(model)
    # What the blocks make in forward is gone with it: only their inputs stay.
    expected = [(*entry[:4], "temporary") if entry[2] == "relu" else entry for entry in FORWARD]
    expected += [*recomputed("second"), *BACKWARD_OF_SECOND, *recomputed("first"), *BACKWARD_OF_FIRST]
    assert described(recorder.trace()) == expected


def test_two_steps_are_attributed_alike() -> None:
    model = TwoBlocks()
    with Recorder(model) as recorder:
        step(model)
        middle = len(births(recorder.trace()))
        model.zero_grad()
        step(model)
    once, twice = described(recorder.trace())[:middle], described(recorder.trace())[middle:]
    assert once == twice


def test_every_storage_that_dies_was_born_once_and_with_the_same_bytes_and_kind() -> None:
    model = TwoBlocks()
    with Recorder(model) as recorder:
        step(model)
    alive: dict[int, Event] = {}
    for event in recorder.trace().events:
        if event.bytes > 0:
            assert event.storage not in alive
            alive[event.storage] = event
        else:
            birth = alive.pop(event.storage)
            assert (birth.bytes, birth.kind, birth.module) == (-event.bytes, event.kind, event.module)
            assert event.operator == "free"
    # The gradients of two weights and two biases.
    assert sorted(event.bytes for event in alive.values()) == sorted([W, B, W, B])


def test_a_forward_that_raises_leaves_the_module_that_caught_it_in_charge() -> None:
    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError(x.shape)

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Identity(), Raising())

        def forward(self, x: Tensor) -> Tensor:
            try:
                out: Tensor = self.inner(x)
                return out
            except ArithmeticError:
                return x + 1

    model = nn.Sequential(Catching(), nn.Identity())
    with Recorder(model) as recorder:
        model(inputs())
        torch.zeros(1)
    assert [event.module for event in births(recorder.trace())] == ["", "0", ""]


def test_modules_of_another_model_own_nothing() -> None:
    model = nn.Sequential(nn.ReLU())
    other = nn.Sequential(nn.ReLU())
    with Recorder(model) as recorder:
        other(inputs())
        model(inputs())
    assert [event.module for event in births(recorder.trace()) if event.operator == "relu"] == ["", "0"]


def test_a_phase_that_is_said_holds_inside_only_and_nests() -> None:
    with Recorder(nn.Identity()) as recorder:
        with recorder.phase(Phase.LOAD):
            torch.zeros(1)
            with recorder.phase(Phase.EVALUATE):
                torch.zeros(2)
            torch.zeros(3)
        torch.zeros(4)
        recorder.inside(Phase.SAVE, lambda: torch.zeros(5))()
        with pytest.raises(KeyError), recorder.phase(Phase.LOAD):
            raise KeyError("nothing")
        torch.zeros(6)
    phases = {event.bytes // 4: event.phase for event in births(recorder.trace())}
    load, forward = Phase.LOAD, Phase.FORWARD
    assert phases == {1: load, 2: Phase.EVALUATE, 3: load, 4: forward, 5: Phase.SAVE, 6: forward}


def test_work_is_counted_by_phase() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    x = inputs()
    with Recorder(model) as recorder:
        out = model(x)
        out.backward(x)
    work = recorder.trace().work
    product = 2 * ROWS * WIDTH * WIDTH
    # One product in forward, and one in backward: the input wants no gradient.
    assert (work[Phase.FORWARD].flops, work[Phase.BACKWARD].flops) == (product, product)
    # bias, input, weight and result; transposing a weight is no work.
    assert (work[Phase.FORWARD].operators, work[Phase.FORWARD].bytes) == (1, B + A + W + A)
    assert set(work) == {Phase.FORWARD, Phase.BACKWARD}


# ---------------------------------------------------------------------------------------------- events


def test_marks_are_positions_among_the_events_without_storages_of_no_bytes() -> None:
    with Recorder(nn.Identity()) as recorder:
        recorder.mark("a")
        torch.empty(0)
        one = torch.zeros(1)
        recorder.mark("b")
        empty = torch.empty(0)
        recorder.mark("c")
        two = torch.zeros(2)
        del one, empty
        recorder.mark("d")
    trace = recorder.trace()
    assert trace.marks == (("a", 0), ("b", 1), ("c", 1), ("d", 3))
    assert [event.bytes for event in trace.events] == [4, 8, -4]
    assert [trace.section(name) for name in "abcd"] == [(0, 1), (1, 1), (1, 3), (3, 3)]
    del two


def test_views_and_updates_in_place_allocate_nothing() -> None:
    with Recorder(nn.Identity()) as recorder:
        tensor = inputs()
        tensor.view(-1)[1:].add_(1).t()
        tensor.mul_(2).detach()
    assert [(event.operator, event.bytes) for event in recorder.trace().events] == [("ones", A)]


def test_a_storage_dies_with_its_last_view() -> None:
    with Recorder(nn.Identity()) as recorder:
        tensor = inputs()
        view = tensor[0]
        del tensor
        assert [event.bytes for event in recorder.trace().events] == [A]
        del view
        assert [event.bytes for event in recorder.trace().events] == [A, -A]


def test_a_storage_that_outlives_the_recorder_dies_unseen_only_in_the_trace_before() -> None:
    with Recorder(nn.Identity()) as recorder:
        tensor = inputs()
        before = recorder.trace()
    del tensor
    assert [event.bytes for event in before.events] == [A]
    assert [event.bytes for event in recorder.trace().events] == [A, -A]


def test_a_workspace_comes_and_goes_after_the_results_of_its_operator_and_is_the_modules() -> None:
    class WithScratch(Recorder):
        def inside_kernel(self, func: Any, args: Any, kwargs: Any) -> None:
            if func is torch.ops.aten.addmm.default:
                self.workspace(100, func)

    model = TwoBlocks()
    with WithScratch(model) as recorder, torch.no_grad():
        model(inputs())
    events = [(event.bytes, event.kind.value, event.module) for event in recorder.trace().events[:5]]
    assert events == [
        (A, "temporary", ""),
        (A, "temporary", "first.linear"),
        (100, "workspace", "first.linear"),
        (-100, "workspace", "first.linear"),
        (A, "temporary", "first"),
    ]


def test_a_workspace_that_is_kept_stays_to_the_end() -> None:
    class WithWorkspace(Recorder):
        def inside_kernel(self, func: Any, args: Any, kwargs: Any) -> None:
            if func is torch.ops.aten.addmm.default and not self.workspaces:
                self.workspaces.append(1)
                self.workspace(100, func, kept=True)

        workspaces: ClassVar[list[int]] = []

    model = TwoBlocks()
    with WithWorkspace(model) as recorder, torch.no_grad():
        model(inputs())
    kept = [event for event in recorder.trace().events if event.kind is Kind.WORKSPACE]
    assert [(event.bytes, event.module, event.operator, event.place) for event in kept] == [
        (100, "first.linear", "addmm", DEVICE)
    ]


def test_memory_that_no_operator_allocates_is_held_inside() -> None:
    with Recorder() as recorder:
        with recorder.phase(Phase.SAVE), recorder.held([7, 5], "save", HOST):
            one = torch.zeros(1)
        del one
    assert [(event.bytes, event.operator, event.place, event.phase) for event in recorder.trace().events] == [
        (7, "save", HOST, Phase.SAVE),
        (5, "save", HOST, Phase.SAVE),
        (4, "zeros", DEVICE, Phase.SAVE),
        (-7, "free", HOST, Phase.SAVE),
        (-5, "free", HOST, Phase.SAVE),
        (-4, "free", DEVICE, Phase.FORWARD),
    ]


def test_operators_of_other_libraries_carry_their_name() -> None:
    with torch.library._scoped_library("memtrain_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x + x, "CompositeExplicitAutograd")
        with Recorder(nn.Identity()) as recorder:
            torch.ops.memtrain_test.double(inputs())
    assert [event.operator for event in births(recorder.trace())] == ["ones", "memtrain_test.double"]


# ---------------------------------------------------------------------------------------------- coming and going


def hooks() -> list[dict[Any, Any]]:
    names = [name for name in vars(module_hooks) if name.startswith("_global_") and isinstance(vars(module_hooks)[name], dict)]
    found = [dict(vars(module_hooks)[name]) for name in names]
    return [*found, dict(optimizer_hooks._global_optimizer_pre_hooks), dict(optimizer_hooks._global_optimizer_post_hooks)]


def test_the_recorder_leaves_no_hook_behind_even_after_an_error() -> None:
    before = hooks()
    assert len(before) > 6
    model = TwoBlocks()
    attributes = [copy.copy(module.__dict__) for module in model.modules()]
    with Recorder(model):
        assert hooks() != before
        step(model)
    assert hooks() == before

    def failing() -> None:
        with Recorder(model):
            model(torch.ones(2, WIDTH + 1))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        failing()
    assert hooks() == before
    assert [module.__dict__ for module in model.modules()] == attributes


def test_outside_the_recorder_nothing_is_recorded() -> None:
    recorder = Recorder(TwoBlocks())
    torch.zeros(1)
    with recorder:
        pass
    torch.zeros(1)
    assert recorder.trace() == Trace(())


def test_what_a_data_less_run_assumed_is_in_the_trace_once() -> None:
    with DatalessRecorder(CPU, nn.Identity()) as recorder:
        tensor = torch.empty(1, device="meta")
        assert [tensor.item(), tensor.item()] == [0.0, 0.0]
    assert recorder.trace().assumed == ("a float32 value that only data can tell was taken for 0.0",)
