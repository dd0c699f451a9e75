"""Updates in fp32 of weights in bfloat16: what is stored keeps what rounding to nearest loses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memtrain.features.optimizers import adamw, sgd
from memtrain.features.update import step_one_by_one, update_after_backward, update_during_backward_
from memtrain.features.wide_update import Store, stochastically_rounded, wide_step

ADAMW = {"learning_rate": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def weight(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.bfloat16))


def descend(parameter: nn.Parameter, store: Store | None, steps: int, gradient: float) -> None:
    """So many steps of plain gradient descent at a rate of 1e-4."""
    optimizer = sgd([parameter], learning_rate=1e-4, momentum=0.0, weight_decay=0.0, fused=True)
    step = None if store is None else step_one_by_one(optimizer, wide_step(optimizer, store))
    update = update_after_backward(optimizer, None, step)
    for _ in range(steps):
        parameter.grad = torch.full_like(parameter, gradient)
        update()


def test_small_steps_are_lost_to_nearest_and_kept_by_the_others() -> None:
    # The neighbours of 1 in bfloat16 are 1 - 1/256 and 1 + 1/128.
    nearest, compensated, master = weight(1.0), weight(1.0), weight(1.0)
    stochastic = nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    torch.manual_seed(0)
    descend(nearest, None, 1000, 1.0)
    descend(compensated, "compensated", 1000, 1.0)
    descend(master, "master", 1000, 1.0)
    descend(stochastic, "stochastic", 1000, 1.0)
    assert nearest.item() == 1.0
    # The neighbour of 0.9 in bfloat16, and with what a remainder of 8 bits loses itself the next one.
    assert master.item() == 0.8984375
    assert compensated.item() == 0.90234375
    assert stochastic.float().mean().item() == pytest.approx(0.9, abs=1e-3)


def test_master_weights_are_those_of_an_fp32_run_with_the_same_gradients() -> None:
    start = torch.linspace(-2, 2, 12).view(3, 4).bfloat16()
    parameter, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optimizer, reference = (adamw([one], **ADAMW, fused=True) for one in (parameter, wide))
    update = update_after_backward(optimizer, None, step_one_by_one(optimizer, wide_step(optimizer, "master")))
    for seed in range(5):
        parameter.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        wide.grad = parameter.grad.float()
        update()
        reference.step()
    assert torch.equal(optimizer.state[parameter]["master"], wide)
    assert torch.equal(parameter, wide.bfloat16())


@pytest.mark.parametrize(
    ("store", "dtypes"),
    [
        ("master", {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "master": torch.float32}),
        ("compensated", {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "remainder": torch.bfloat16}),
        ("stochastic", {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}),
    ],
)
def test_the_state_holds_what_the_page_says(store: Store, dtypes: dict[str, torch.dtype]) -> None:
    parameter = weight(1.0, 2.0)
    optimizer = adamw([parameter], **ADAMW, fused=True)
    parameter.grad = torch.ones_like(parameter)
    update_after_backward(optimizer, None, step_one_by_one(optimizer, wide_step(optimizer, store)))()
    assert list(optimizer.state) == [parameter]
    state = optimizer.state[parameter]
    assert {name: value.dtype for name, value in state.items() if name != "step"} == dtypes
    assert state["step"].item() == 1


@pytest.mark.parametrize("store", ["master", "compensated", "stochastic"])
def test_an_update_during_backward_is_that_after_it(store: Store) -> None:
    after, during = (nn.Linear(4, 4, bias=False).bfloat16() for _ in range(2))
    during.load_state_dict(after.state_dict())
    inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    trained = []
    for model in (after, during):
        torch.manual_seed(0)
        optimizer = adamw(model.parameters(), **ADAMW, fused=True)
        step = wide_step(optimizer, store)
        if model is during:
            update_during_backward_(optimizer, step)
        update = update_after_backward(optimizer, None, step_one_by_one(optimizer, step))
        for _ in range(3):
            model(inputs).square().sum().backward()
            if model is after:
                update()
        trained.append(model.weight)
    assert torch.equal(*trained)


def test_weights_in_fp32_are_updated_as_ever() -> None:
    plain, wide = (nn.Parameter(torch.ones(3)) for _ in range(2))
    for parameter in (plain, wide):
        optimizer = adamw([parameter], **ADAMW, fused=True)
        step = step_one_by_one(optimizer, wide_step(optimizer, "master")) if parameter is wide else None
        parameter.grad = torch.tensor([1.0, 2.0, 3.0])
        update_after_backward(optimizer, None, step)()
        assert optimizer.state[parameter].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(plain, wide)


def rounded(values: Tensor) -> Tensor:
    return stochastically_rounded(values.clone())


def test_stochastic_rounding_takes_a_neighbour_with_a_chance_by_the_distance() -> None:
    torch.manual_seed(0)
    # A quarter of the way from 1 to 1 + 1/128, and of the way from -1 to -1 - 1/128.
    for sign in (1.0, -1.0):
        found = rounded(torch.full((100_000,), sign * (1 + 1 / 512)))
        assert set(found.float().tolist()) == {sign * 1.0, sign * (1 + 1 / 128)}
        assert (found.float().abs() > 1).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_stochastic_rounding_leaves_what_bfloat16_has() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-126, float("inf"), -float("inf")])
    assert torch.equal(rounded(exact).float(), exact)
    assert rounded(torch.tensor([float("nan")])).isnan().all()
