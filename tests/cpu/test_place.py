"""Where a storage lies: said by place.py, asked by the recorder, and one tensor at a time when a module moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memtrain.place import host_like, move_to_device_, placed, said_place, to_host
from memtrain.trace.event import DEVICE, HOST, MANAGED, Kind, Phase, Place
from memtrain.trace.record import Recorder


def places(recorder: Recorder) -> list[tuple[int, Place]]:
    """Bytes and place of each allocation."""
    return [(event.bytes, event.place) for event in recorder.trace().events if event.bytes > 0]


# ---------------------------------------------------------------------------------------------- what is said


def test_a_place_is_said_inside_only_and_the_innermost_counts() -> None:
    assert said_place() is None
    with placed(HOST):
        with placed(MANAGED):
            assert said_place() == MANAGED
        assert said_place() == HOST
    assert said_place() is None


def test_an_error_takes_the_place_back() -> None:
    with pytest.raises(KeyError), placed(HOST):
        raise KeyError("stop")
    assert said_place() is None


def test_what_is_made_lies_where_it_is_said_to() -> None:
    with Recorder() as recorder:
        kept = [torch.zeros(1)]
        for number, place in enumerate((HOST, MANAGED, DEVICE), start=2):
            with placed(place):
                kept.append(torch.zeros(number))
    assert places(recorder) == [(4, DEVICE), (8, HOST), (12, MANAGED), (16, DEVICE)]
    del kept


# ---------------------------------------------------------------------------------------------- what is computed


def test_a_result_lies_on_the_host_where_all_that_it_is_computed_from_does() -> None:
    with Recorder() as recorder:
        with placed(HOST):
            one, other = torch.ones(2), torch.ones(2)
        beside = torch.ones(2)
        made = [
            one + other,
            torch.cat([one, other, one]),
            torch._foreach_mul([one, other], 2.0),
            one + beside,
            torch.stack([beside, one]),
            beside * 2,
            torch.zeros(5),
        ]
    host, device = HOST, DEVICE
    expected = [(8, host), (24, host), (8, host), (8, host), (8, device), (16, device), (8, device), (20, device)]
    assert places(recorder)[3:] == expected
    del made


def test_a_result_of_managed_memory_lies_on_the_device() -> None:
    with Recorder() as recorder:
        with placed(MANAGED):
            paged = torch.ones(2)
        doubled = paged * 2
    assert places(recorder) == [(8, MANAGED), (8, DEVICE)]
    del doubled


def test_once_nothing_is_left_elsewhere_results_lie_on_the_device() -> None:
    with Recorder() as recorder:
        with placed(HOST):
            one = torch.ones(2)
        two = one + 1
        del one, two
        three = torch.ones(2) + 1
    assert places(recorder) == [(8, HOST), (8, HOST), (8, DEVICE), (8, DEVICE)]
    del three


def test_work_on_the_host_is_no_work_of_the_device() -> None:
    with Recorder() as recorder:
        with placed(HOST):
            one = torch.ones(2)
        torch.ones(2)
    assert recorder.trace().work[Phase.FORWARD].operators == 1
    del one


# ---------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_on_the_host_has_the_tensors_shape_type_and_layout(device: str, dtype: torch.dtype) -> None:
    given = torch.arange(6, dtype=dtype, device=device).view(2, 3).t()
    with Recorder() as recorder:
        copy, empty = to_host(given), host_like(given)
    for made in (copy, empty):
        assert (made.shape, made.stride(), made.dtype, made.device) == ((3, 2), (1, 3), dtype, given.device)
    assert places(recorder) == 2 * [(6 * dtype.itemsize, HOST)]
    if device == "cpu":
        assert torch.equal(copy, given)
        assert copy.data_ptr() != given.data_ptr()


# ---------------------------------------------------------------------------------------------- a module that moves


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a frozen weight, and buffers, of which one is shared and one is none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.register_buffer("mask", torch.arange(4))
        self.register_buffer("absent", None)
        self.inner = nn.Module()
        self.inner.register_buffer("mask", self.mask)
        self.inner.register_buffer("passing", torch.ones(2, dtype=torch.bfloat16), persistent=False)


def test_a_moved_module_has_the_same_values_in_the_same_parameters() -> None:
    module = Tied()
    parameters = list(module.parameters())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    addresses = {name: value.data_ptr() for name, value in module.state_dict().items()}
    assert move_to_device_(module, "cpu") is module
    assert [id(parameter) for parameter in module.parameters()] == [id(parameter) for parameter in parameters]
    assert module.head.weight is module.embedding.weight
    assert module.inner.mask is module.mask
    assert module.absent is None
    assert [parameter.requires_grad for parameter in module.parameters()] == [False, True, True]
    after = module.state_dict()
    assert after.keys() == before.keys() >= {"mask", "inner.mask", "frozen"}
    for name, value in before.items():
        assert torch.equal(after[name], value)
        assert after[name].data_ptr() != addresses[name]
    assert module.inner.passing.dtype == torch.bfloat16
    assert "inner.passing" not in after


def test_a_module_is_moved_tensor_by_tensor_and_what_is_shared_once() -> None:
    with Recorder() as recorder:
        with placed(HOST):
            module = Tied()
            # What two modules hold goes with the second of them.
            del module.inner._buffers["mask"]
        recorder.mark("move")
        move_to_device_(module, "cpu")
    start, stop = recorder.trace().section("move")
    moved = [(event.bytes, event.place) for event in recorder.trace().events[start:stop]]
    # Each is made on the device and gone from the host before the next: what the module itself holds, then its parts.
    sizes = [28, 32, 60, 20, 4]
    assert moved == [step for size in sizes for step in ((size, DEVICE), (-size, HOST))]


def test_what_moves_is_no_work_of_the_device() -> None:
    with placed(HOST):
        module = nn.Linear(2, 2)
    with Recorder() as recorder:
        move_to_device_(module, "cpu")
    assert recorder.trace().work == {}


def test_a_tracked_weight_that_moved_is_a_weight_of_its_module() -> None:
    recorder = Recorder()
    with recorder, recorder.phase(Phase.LOAD):
        with placed(HOST):
            module = nn.Sequential(nn.Linear(2, 3))
        move_to_device_(module, "cpu")
    recorder.watch(module)
    with recorder, recorder.phase(Phase.LOAD):
        recorder.track_weights()
    on_device = [event for event in recorder.trace().events if event.place == DEVICE]
    assert [(event.bytes, event.kind, event.module) for event in on_device] == [
        (24, Kind.WEIGHT, "0"),
        (12, Kind.WEIGHT, "0"),
    ]


def tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_a_data_less_module_moves_to_where_no_data_is() -> None:
    with torch.device("meta"):
        module = Tied()
    move_to_device_(module, "meta")
    assert all(tensor.is_meta for tensor in tensors(module))
    assert module.head.weight is module.embedding.weight
