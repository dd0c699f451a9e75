"""Optimizer state on the host, in anyone's loop: the same numbers as on the device, and no gradient left there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_update import loss_of, network, optimizer_of
from torch import nn

from memtrain.features.host_state import step_on_host, update_on_host_
from memtrain.features.update import Update, nothing_left, update_after_backward, update_during_backward_

Prepare = Callable[[torch.optim.Optimizer], Callable[[], Update]]


def on_host(max_grad_norm: float | None) -> Prepare:
    return lambda optimizer: update_on_host_(optimizer, max_grad_norm)[0]


def on_device(max_grad_norm: float | None) -> Prepare:
    return lambda optimizer: update_after_backward(optimizer, max_grad_norm)


def trained(prepare: Prepare, *, micro_batches: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, list[float | None]]:
    """The model after three steps of a schedule, its optimizer, and the norms."""
    model = network()
    optimizer = optimizer_of(model)
    update = prepare(optimizer)
    norms = []
    for number in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
        for part in range(micro_batches):
            (loss_of(model, 10 * number + part) / micro_batches).backward()
        norm = update().grad_norm
        norms.append(None if norm is None else norm.item())
    return model, optimizer, norms


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    state, other_state = one.state_dict(), other.state_dict()
    assert state["param_groups"] == other_state["param_groups"]
    assert state["state"].keys() == other_state["state"].keys()
    for number, values in state["state"].items():
        assert values.keys() == other_state["state"][number].keys()
        assert all(torch.equal(value, other_state["state"][number][name]) for name, value in values.items())


# ---------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("max_grad_norm", [None, 0.01, 1e6])
def test_an_update_on_the_host_is_exact(max_grad_norm: float | None, micro_batches: int) -> None:
    model, optimizer, norms = trained(on_host(max_grad_norm), micro_batches=micro_batches)
    plain, plain_optimizer, plain_norms = trained(on_device(max_grad_norm), micro_batches=micro_batches)
    assert norms == plain_norms
    assert (norms == [None] * 3) is (max_grad_norm is None)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert_same_state(optimizer, plain_optimizer)


def test_a_step_on_the_host_during_backward_is_exact() -> None:
    def during(step: Callable[[torch.optim.Optimizer], Any]) -> Prepare:
        def prepare(optimizer: torch.optim.Optimizer) -> Callable[[], Update]:
            update_during_backward_(optimizer, step(optimizer))
            return nothing_left

        return prepare

    model, optimizer, _ = trained(during(step_on_host))
    plain, plain_optimizer, _ = trained(during(lambda _: None))
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert [weight.grad for weight in model.parameters()] == [None] * 6
    assert_same_state(optimizer, plain_optimizer)


def test_an_update_clips_by_the_norm_of_all_gradients_as_one_vector() -> None:
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 1))]
    update, _ = update_on_host_(torch.optim.SGD(weights, lr=1.0), max_grad_norm=1.0)
    (3.0 * weights[0].sum() - 4.0 * weights[1].sum()).backward()
    norm, updated = update()
    assert norm is not None
    assert (norm.shape, norm.item(), updated) == ((), 5.0, True)
    torch.testing.assert_close(torch.cat([weight.detach().view(1) for weight in weights]), torch.tensor([-0.6, 0.8]))


# ---------------------------------------------------------------------------------------------- what is left where


def test_no_gradient_is_left_after_backward_and_none_after_the_update() -> None:
    model = network()
    update, _ = update_on_host_(optimizer_of(model), 1.0)
    for number in range(2):
        loss_of(model, number).backward()
        assert [weight.grad for weight in model.parameters()] == [None] * 6
    update()
    assert [weight.grad for weight in model.parameters()] == [None] * 6


def test_a_weight_stays_the_same_tensor_in_the_same_memory() -> None:
    model = network()
    optimizer = optimizer_of(model)
    update, _ = update_on_host_(optimizer, None)
    addresses = [weight.data_ptr() for weight in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 0).backward()
    update()
    assert [weight.data_ptr() for weight in model.parameters()] == addresses
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6


def test_a_weight_without_a_gradient_and_a_frozen_one_stay() -> None:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index]
    unused = nn.Parameter(torch.ones(2))
    model.register_parameter("unused", unused)
    update, _ = update_on_host_(optimizer_of(model), 1.0)
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 0).backward()
    update()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["1.weight", "1.bias", "3.weight", "3.bias"]


def test_gradients_of_one_step_are_gone_in_the_next() -> None:
    weight = nn.Parameter(torch.zeros(1))
    update, _ = update_on_host_(torch.optim.SGD([weight], lr=1.0), None)
    for expected in (-2.0, -4.0, -6.0):
        (2.0 * weight.sum()).backward()
        update()
        assert weight.item() == expected


def test_undoing_leaves_gradients_on_the_device_again() -> None:
    model = network()
    _, undo = update_on_host_(optimizer_of(model), None)
    undo()
    loss_of(model, 0).backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_step_that_raises_gives_the_weight_and_the_optimizer_its_groups_back() -> None:
    model = network()
    optimizer = optimizer_of(model)
    groups = optimizer.param_groups
    addresses = [weight.data_ptr() for weight in model.parameters()]

    def failing(*_: Any) -> None:
        raise ArithmeticError("no step")

    optimizer.register_step_pre_hook(failing)
    update, _ = update_on_host_(optimizer, None)
    loss_of(model, 0).backward()
    with pytest.raises(ArithmeticError, match="no step"):
        update()
    assert optimizer.param_groups is groups
    assert [weight.data_ptr() for weight in model.parameters()] == addresses
