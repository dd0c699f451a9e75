"""bitsandbytes' AdamW over our parameter groups: what it computes, and what its state holds."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from memtrain.features.bitsandbytes_adamw import bitsandbytes_adamw, embedding_weights
from memtrain.features.optimizers import adamw
from memtrain.features.update import update_after_backward, update_during_backward_

bitsandbytes = pytest.importorskip("bitsandbytes")

RULE: dict[str, Any] = {"learning_rate": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.3}


def network() -> nn.Sequential:
    """Two weights of 4096 elements, the least that takes 8 bits, and smaller ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64))


def loss_of(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, 16, 64, generator=generator)
    out: Tensor = (model(x) - y.cumsum(-1).tanh()).square().mean()
    return out


def on_device(parameters: Any, bits: Literal[8, 32], **changed: Any) -> torch.optim.Optimizer:
    return bitsandbytes_adamw(parameters, **{**RULE, **changed}, bits=bits, memory="device")


def trained(
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], steps: int, *, during_backward: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    model = network()
    optimizer = optimizer_of(model)
    update = update_after_backward(optimizer, None)
    if during_backward:
        update_during_backward_(optimizer)
    losses = []
    for number in range(steps):
        # As a schedule does it.
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + 0.1 * number)
        loss = loss_of(model, number % 4)
        loss.backward()
        losses.append(loss.item())
        if not during_backward:
            update()
    return model, optimizer, losses


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    storages = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    }
    return sum(storages.values())


# ---------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize("bits", [32, 8])
def test_the_groups_are_those_of_torchs_optimizer(bits: Literal[8, 32]) -> None:
    model = network()
    model[3].weight.requires_grad_(False)
    groups = on_device(model.parameters(), bits).param_groups
    expected = adamw(model.parameters(), **RULE, fused=True).param_groups
    for group, other in zip(groups, expected, strict=True):
        assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in other["params"]]
        assert all(group[name] == other[name] for name in ("lr", "betas", "eps", "weight_decay"))


def test_32_bits_train_what_torchs_adamw_trains() -> None:
    """Up to the rounding of another order of the same operations, over ten steps of a schedule."""
    model, _, losses = trained(lambda model: on_device(model.parameters(), 32), steps=10)
    same, _, same_losses = trained(lambda model: adamw(model.parameters(), **RULE, fused=True), steps=10)
    assert losses == pytest.approx(same_losses, rel=1e-6)
    for weight, other in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-6)


def test_8_bits_let_the_loss_fall_alike() -> None:
    """Not exact: after 40 steps each weight is off by less than 5 percent of its way, and each loss by less than 1."""
    start = network()
    model, _, losses = trained(lambda model: on_device(model.parameters(), 8), steps=40)
    whole, _, whole_losses = trained(lambda model: adamw(model.parameters(), **RULE, fused=True), steps=40)
    assert losses[-1] < 0.2 * losses[0]
    assert losses == pytest.approx(whole_losses, rel=0.01)
    assert losses != whole_losses
    for weight, other, before in zip(model.parameters(), whole.parameters(), start.parameters(), strict=True):
        assert (weight - other).norm() < 0.05 * (other - before).norm()


@pytest.mark.parametrize("bits", [32, 8])
def test_weight_decay_is_decoupled(bits: Literal[8, 32]) -> None:
    weights = [nn.Parameter(torch.full((64, 64), 2.0)), nn.Parameter(torch.full((4096,), 2.0))]
    optimizer = on_device(weights, bits, learning_rate=0.5, weight_decay=0.5)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert [weight.unique().tolist() for weight in weights] == [[1.5], [2.0]]


@pytest.mark.parametrize("bits", [32, 8])
def test_a_learning_rate_of_zero_leaves_the_weights(bits: Literal[8, 32]) -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = on_device([weight], bits)
    optimizer.param_groups[0]["lr"] = 0.0
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weight, torch.ones(64, 64))


# ---------------------------------------------------------------------------------------------- the state


def test_8_bit_state_is_two_bytes_and_two_scales_per_256_values() -> None:
    weight, bias = nn.Parameter(torch.zeros(64, 100)), nn.Parameter(torch.zeros(4095))
    optimizer = on_device([weight, bias], 8)
    for parameter in (weight, bias):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = {name: (value.dtype, tuple(value.shape)) for name, value in optimizer.state[weight].items() if name != "step"}
    table = (torch.float32, (256,))
    assert held == {
        "state1": (torch.uint8, (64, 100)),
        "state2": (torch.uint8, (64, 100)),
        "absmax1": (torch.float32, (25,)),
        "absmax2": (torch.float32, (25,)),
        "qmap1": table,
        "qmap2": table,
    }
    assert optimizer.state[bias]["state1"].dtype == optimizer.state[bias]["state2"].dtype == torch.float32
    # The two tables are shared by all parameters, and parameters below 4096 elements keep 32 bits.
    assert state_bytes(optimizer) == 2 * 6400 + 2 * 4 * 25 + 2 * 4 * 256 + 8 * 4095


def test_32_bit_state_is_8_bytes_whatever_the_weights_type() -> None:
    weight = nn.Parameter(torch.zeros(64, 100, dtype=torch.bfloat16))
    optimizer = on_device([weight], 32)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert state_bytes(optimizer) == 8 * 6400


def test_named_parameters_keep_32_bits() -> None:
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False))
    optimizer = on_device(model.parameters(), 8, in_32_bits=embedding_weights(model))
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    table, matrix = model.parameters()
    assert optimizer.state[table]["state1"].dtype == torch.float32
    assert optimizer.state[matrix]["state1"].dtype == torch.uint8


def test_a_tied_head_is_the_weight_of_the_embedding() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
    model["head"].weight = model["embedding"].weight
    assert [id(weight) for weight in embedding_weights(model)] == [id(model["head"].weight)]


def test_what_others_said_in_this_process_does_not_reach_the_optimizer() -> None:
    """The library's own list is met by any parameter at the same place in its groups, or at the same address."""
    weight = nn.Parameter(torch.zeros(64, 64))
    shared = bitsandbytes.optim.GlobalOptimManager.get_instance()
    before = copy.copy(shared.__dict__)
    shared.pid2config, shared.index2config = {id(weight): {"optim_bits": 32}}, {(0, 0): {"optim_bits": 32}}
    try:
        optimizer = on_device([weight], 8, in_32_bits=[nn.Parameter(torch.zeros(1))])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert len(shared.pid2config) == 1
    finally:
        shared.__dict__.update(before)
    assert optimizer.state[weight]["state1"].dtype == torch.uint8


@pytest.mark.parametrize("bits", [32, 8])
def test_updating_during_backward_is_exact_and_keeps_one_state(bits: Literal[8, 32]) -> None:
    def kept(model: nn.Module) -> torch.optim.Optimizer:
        return on_device(model.parameters(), bits, in_32_bits=[model[3].weight])  # type: ignore[index]

    model, optimizer, losses = trained(kept, steps=3, during_backward=True)
    plain, plain_optimizer, plain_losses = trained(kept, steps=3)
    assert losses == plain_losses
    for weight, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, other)
        assert weight.grad is None
        state, other_state = optimizer.state[weight], plain_optimizer.state[other]
        assert state.keys() == other_state.keys()
        assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(other_state[name])) for name, value in state.items())


@pytest.mark.parametrize("bits", [32, 8])
def test_a_state_that_was_saved_goes_on_where_it_was(bits: Literal[8, 32]) -> None:
    model, optimizer, _ = trained(lambda model: on_device(model.parameters(), bits), steps=2)
    resumed = copy.deepcopy(model)
    loaded = on_device(resumed.parameters(), bits)
    loaded.load_state_dict(optimizer.state_dict())
    for continued, its in ((model, optimizer), (resumed, loaded)):
        loss_of(continued, 2).backward()
        its.step()
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


def test_a_missing_library_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"^8-bit and paged optimizer state need bitsandbytes, .*: pip install bitsandbytes"):
        on_device([nn.Parameter(torch.zeros(1))], 8)
