"""Updates computed in fp32 for weights that are held in bfloat16, one parameter at a time.

In bfloat16 a weight has 8 bits of mantissa: an update below 1/256 of it is lost when it is rounded to nearest. Here the
optimizer's own rule runs on an fp32 copy of the weight and of its gradient, and what is stored keeps small changes:

- ``master``: the fp32 copies stay, with fp32 state: 12 bytes a parameter beside weight and gradient, as in mixed precision
  (Micikevicius et al. 2018, arXiv 1710.03740).
- ``compensated``: what rounding the weight leaves is kept in bfloat16 and added before the next update (Kahan 1965; Zamirai et
  al. 2020, arXiv 2010.06192): 2 bytes a parameter. State is rounded to nearest.
- ``stochastic``: weight and state are rounded up or down with a chance by the distance, so that the mean is right (the same
  paper): no memory that stays.

``load_state_dict`` of torch's optimizers casts state to the parameter's type, master copies too: load the state's values.

Costs fp32 copies of one parameter at a time, with its gradient and state, and the calls of an update parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

Store = Literal["master", "compensated", "stochastic"]


def wide_step(optimizer: torch.optim.Optimizer, store: Store) -> Callable[[Tensor], None]:
    """A function that updates one parameter, which is the optimizer's only one meanwhile, by its gradient.

    A parameter that is not in bfloat16 is updated as the optimizer does it. The state stays the parameter's in the optimizer,
    the master copy and what rounding left included.
    """
    keep = {"master": _keep_master, "compensated": _keep_remainder, "stochastic": _round_stochastically}[store]

    @torch.no_grad()
    def step(parameter: Tensor) -> None:
        if parameter.dtype is not torch.bfloat16:
            optimizer.step()
            return
        assert parameter.grad is not None
        state = optimizer.state.pop(parameter, {})
        wide = nn.Parameter(_wide_weight(parameter, state))
        wide.grad = parameter.grad.float()
        optimizer.state[wide] = {name: _widened(value) for name, value in state.items()}
        del state
        # A stand-in and not the parameter with other data, since data of another type takes autograd's hooks from it.
        (group,) = optimizer.param_groups
        group["params"] = [wide]
        try:
            optimizer.step()
        finally:
            # Also after an interruption: the state is the parameter's, and the master copy not lost.
            optimizer.state[parameter] = keep(parameter, wide.detach(), optimizer.state.pop(wide))

    return step


def _wide_weight(parameter: Tensor, state: dict[str, Any]) -> Tensor:
    """The weight in fp32, as exactly as it is known; what is kept of it leaves the state."""
    master = state.pop("master", None)
    if master is not None:
        found: Tensor = master
        return found
    wide = parameter.detach().float()
    remainder = state.pop("remainder", None)
    return wide if remainder is None else wide.add_(remainder)


def _keep_master(parameter: Tensor, wide: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    parameter.copy_(wide)
    return {**state, "master": wide}


def _keep_remainder(parameter: Tensor, wide: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    parameter.copy_(wide)
    stored = {name: _narrowed(value, Tensor.bfloat16) for name, value in state.items()}
    return {**stored, "remainder": wide.sub_(parameter).bfloat16()}


def _round_stochastically(parameter: Tensor, wide: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    parameter.copy_(stochastically_rounded(wide))
    return {name: _narrowed(value, stochastically_rounded) for name, value in state.items()}


def _widened(value: Any) -> Any:
    """State in fp32: a moment that is stored in bfloat16."""
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value


def _narrowed(value: Any, narrow: Callable[[Tensor], Tensor]) -> Any:
    """State as it is stored: moments in bfloat16, a count of steps as it is."""
    is_moment = isinstance(value, Tensor) and value.dtype is torch.float32 and value.dim() > 0
    return narrow(value) if is_moment else value


def stochastically_rounded(wide: Tensor) -> Tensor:
    """``wide`` (fp32, overwritten) in bfloat16: of the two neighbours each with a chance by its distance.

    bfloat16 is the upper half of fp32, so a random number below 2^16 is added to the bits and the lower half cut off.
    """
    bits = wide.view(torch.int32)
    bits.add_(torch.randint_like(bits, 1 << 16)).bitwise_and_(-(1 << 16))
    return wide.bfloat16()
