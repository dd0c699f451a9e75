"""Lion: each weight moves by the learning rate, in the direction that the sign of a momentum says.

One momentum per parameter, half the state of AdamW; exact. Written here because torch has no Lion, and that of bitsandbytes
keeps 32 bits of state whatever the weights have. Source: Chen et al. 2023, arXiv 2302.06675, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.features.optimizers import decay_groups


class Lion(torch.optim.Optimizer):
    """Lion over groups of parameters, weight by weight, with a temporary as large as the weight."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a run has computed its loss, so there is no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    # In a function of its own, so that the temporary is gone before that of the next parameter is made.
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        in_step, in_momentum = group["betas"]
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"]
        direction = momentum.lerp(gradient, 1 - in_step).sign_()
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - in_momentum)


def lion(
    parameters: Iterable[nn.Parameter], *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """Lion over the trainable parameters: one momentum in the parameter's type, 4 bytes per fp32 parameter."""
    return Lion(decay_groups(parameters, weight_decay), {"lr": learning_rate, "betas": betas})
