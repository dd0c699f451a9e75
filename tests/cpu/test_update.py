"""Updates after and during backward, the optimizers they use, and attributes that are replaced for a while."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain.features.optimizers import adamw
from memtrain.features.replace import replace_
from memtrain.features.update import one_by_one, update_after_backward, update_during_backward_


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))


def optimizer_of(model: nn.Module, *, fused: bool = True, learning_rate: float = 0.1) -> torch.optim.AdamW:
    return adamw(model.parameters(), learning_rate=learning_rate, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.3, fused=fused)


def loss_of(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    out: Tensor = model(torch.randn(5, 3, generator=generator)).square().mean()
    return out


# ---------------------------------------------------------------------------------------------- adamw


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_decays_matrices_only_and_leaves_frozen_weights_out(fused: bool) -> None:
    model = network()
    model[3].weight.requires_grad_(False)  # type: ignore[index]
    optimizer = optimizer_of(model, fused=fused)
    matrices, vectors = optimizer.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(parameter)] for parameter in matrices["params"]] == ["0.weight"]
    assert [names[id(parameter)] for parameter in vectors["params"]] == ["0.bias", "1.weight", "1.bias", "3.bias"]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.9, 0.99), 1e-6)
        assert (group["fused"], group["foreach"]) == (fused, not fused)


@pytest.mark.parametrize(
    "parameters", [[nn.Parameter(torch.ones(2))], [nn.Parameter(torch.ones(2, 2))]], ids=["vector", "matrix"]
)
def test_adamw_makes_no_empty_group(parameters: list[nn.Parameter]) -> None:
    optimizer = adamw(iter(parameters), learning_rate=1.0, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, fused=True)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


@pytest.mark.parametrize("fused", [True, False])
def test_one_step_is_that_of_the_paper(fused: bool) -> None:
    """In the first step both moments, corrected, are the gradient and its square: the step is the sign of the gradient."""
    weight = nn.Parameter(torch.tensor([[2.0, -1.0]]))
    optimizer = adamw([weight], learning_rate=0.5, betas=(0.9, 0.99), eps=1e-12, weight_decay=0.1, fused=fused)
    weight.grad = torch.tensor([[0.3, -0.7]])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([[2.0 * 0.95 - 0.5, -1.0 * 0.95 + 0.5]]))


# ---------------------------------------------------------------------------------------------- after backward


def test_an_update_clips_by_the_norm_of_all_gradients_as_one_vector_and_frees_them() -> None:
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 1))]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    update = update_after_backward(optimizer, max_grad_norm=1.0)
    weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([[-4.0]])
    norm, updated = update()
    assert norm is not None
    assert (norm.shape, norm.item(), updated) == ((), 5.0, True)
    torch.testing.assert_close(torch.cat([weight.detach().view(1) for weight in weights]), torch.tensor([-0.6, 0.8]))
    assert [weight.grad for weight in weights] == [None, None]


def test_a_gradient_within_the_norm_is_left() -> None:
    weight = nn.Parameter(torch.zeros(2))
    update = update_after_backward(torch.optim.SGD([weight], lr=1.0), max_grad_norm=10.0)
    weight.grad = torch.tensor([3.0, 4.0])
    assert update() == (5.0, True)
    assert weight.tolist() == [-3.0, -4.0]


def test_without_a_bound_nothing_is_clipped_and_no_norm_is_told() -> None:
    weight = nn.Parameter(torch.zeros(1))
    update = update_after_backward(torch.optim.SGD([weight], lr=1.0), max_grad_norm=None)
    weight.grad = torch.tensor([1e6])
    assert update() == (None, True)
    assert weight.item() == -1e6
    assert weight.grad is None


def test_a_weight_without_a_gradient_stays() -> None:
    weights = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    update = update_after_backward(torch.optim.SGD(weights, lr=1.0), max_grad_norm=1.0)
    weights[0].grad = torch.tensor([0.5])
    assert update() == (0.5, True)
    assert [weight.item() for weight in weights] == [0.5, 1.0]


# ---------------------------------------------------------------------------------------------- during backward


def trained(prepare: Callable[[torch.optim.AdamW], Callable[[], Any]], *, fused: bool) -> tuple[nn.Module, torch.optim.AdamW]:
    model = network()
    optimizer = optimizer_of(model, fused=fused)
    update = prepare(optimizer)
    for number in range(3):
        # As a schedule does it.
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
        loss_of(model, number).backward()
        update()
    return model, optimizer


def during(optimizer: torch.optim.AdamW) -> Callable[[], Any]:
    update_during_backward_(optimizer)
    return lambda: None


@pytest.mark.parametrize("fused", [True, False])
def test_updating_during_backward_is_exact_under_a_schedule_and_keeps_one_state(fused: bool) -> None:
    model, optimizer = trained(during, fused=fused)
    plain, plain_optimizer = trained(lambda one: update_after_backward(one, None), fused=fused)
    for weight, same in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, same)
        assert weight.grad is None
    state, plain_state = optimizer.state_dict(), plain_optimizer.state_dict()
    assert state["param_groups"] == plain_state["param_groups"]
    assert state["state"].keys() == plain_state["state"].keys()
    for number, values in state["state"].items():
        assert all(torch.equal(value, plain_state["state"][number][name]) for name, value in values.items())


def test_one_parameter_after_the_other_is_the_optimizers_only_one_with_its_groups_settings_of_the_moment() -> None:
    model = network()
    optimizer = optimizer_of(model)
    groups = optimizer.param_groups
    listed = list(one_by_one(optimizer))
    assert [id(parameter) for parameter, _ in listed] == [id(one) for group in groups for one in group["params"]]
    groups[1]["lr"] = 0.7
    parameter, alone = listed[-1]
    with alone():
        assert [[id(one) for one in group["params"]] for group in optimizer.param_groups] == [[id(parameter)]]
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.7, 0.0)
    assert optimizer.param_groups is groups


def test_a_step_of_ones_own_is_taken_with_each_parameter_alone() -> None:
    model = network()
    optimizer = optimizer_of(model)
    taken = []

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        assert [id(one) for group in optimizer.param_groups for one in group["params"]] == [id(parameter)]
        taken.append(id(parameter))

    before = copy.deepcopy(model.state_dict())
    update_during_backward_(optimizer, step)
    loss_of(model, 0).backward()
    assert sorted(taken) == sorted(id(parameter) for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_at_most_one_gradient_exists_at_a_time() -> None:
    model = network()
    optimizer = optimizer_of(model)
    most = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: most.append(sum(parameter.grad is not None for parameter in model.parameters()))
        )
    update_during_backward_(optimizer)
    loss_of(model, 0).backward()
    assert most == [1] * len(list(model.parameters()))


def test_undoing_leaves_gradients_alone_again() -> None:
    model = network()
    undo = update_during_backward_(optimizer_of(model))
    undo()
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_step_that_raises_gives_the_optimizer_its_groups_back() -> None:
    model = network()
    optimizer = optimizer_of(model)
    groups = optimizer.param_groups

    def failing(*_: Any) -> None:
        raise ArithmeticError("no step")

    optimizer.register_step_pre_hook(failing)
    update_during_backward_(optimizer)
    with pytest.raises(ArithmeticError, match="no step"):
        loss_of(model, 0).backward()
    assert optimizer.param_groups is groups


def test_a_frozen_weight_is_not_updated_during_backward() -> None:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index]
    before = copy.deepcopy(model.state_dict())
    update_during_backward_(optimizer_of(model))
    loss_of(model, 0).backward()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["1.weight", "1.bias", "3.weight", "3.bias"]


# ---------------------------------------------------------------------------------------------- replace


def test_a_replaced_attribute_belongs_to_one_instance_until_it_is_given_back() -> None:
    one, other = nn.Tanh(), nn.Tanh()
    undo = replace_(one, "forward", lambda x: x + 1)
    assert (one(torch.ones(1)).item(), other(torch.ones(1)).item()) == (2.0, pytest.approx(math.tanh(1)))
    undo()
    assert one(torch.ones(1)).item() == pytest.approx(math.tanh(1))
    assert one.__dict__.keys() == other.__dict__.keys()


def test_an_attribute_that_the_instance_had_comes_back() -> None:
    module = nn.Linear(2, 2)
    undo = replace_(module, "in_features", 7)
    assert module.in_features == 7
    undo()
    assert module.in_features == 2


def test_replacements_undone_in_reverse_give_each_former_value_back() -> None:
    module = nn.Linear(2, 2)
    first, second = replace_(module, "in_features", 7), replace_(module, "in_features", 8)
    second()
    assert module.in_features == 7
    first()
    assert module.in_features == 2


def test_undoing_twice_is_undoing_once() -> None:
    module = nn.Tanh()
    undo = replace_(module, "forward", lambda x: x)
    undo()
    undo()
    assert "forward" not in module.__dict__
