"""Optimizer state in host memory: gradients leave as backward produces them, and the update runs on the host.

Frees the optimizer's state and the gradients on the device; costs a copy of each gradient to the host per micro-batch, and
per step one copy of each weight there and back and an update at the speed of the host's memory. Gradients add up on the
host, so clipping and accumulation work as they do on the device. Exact against the same kernel of the processor.
Source: Rajbhandari et al. 2021, arXiv 2104.07857; Ren et al. 2021, arXiv 2101.06840.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from memtrain.features.update import Update, is_finite, one_by_one
from memtrain.place import placed, to_host
from memtrain.trace.event import HOST


def update_on_host_(
    optimizer: torch.optim.Optimizer, max_grad_norm: float | None, step: Callable[[Tensor], object] | None = None
) -> tuple[Callable[[], Update], Callable[[], None]]:
    """Let backward send each gradient to the host, and return the update there and the undoing. In place.

    The update clips, changes all weights unless the norm is not finite, frees the gradients and tells their 2-norm before
    clipping, a scalar on the host. No gradient is left on the device after backward.

    Args:
        max_grad_norm: as :func:`memtrain.features.update.update_after_backward` takes it.
        step: updates one parameter, which is the optimizer's only one meanwhile; by default the optimizer's own step.
    """
    gradients: dict[Tensor, Tensor] = {}

    def send(parameter: Tensor) -> None:
        assert parameter.grad is not None
        sent, parameter.grad = to_host(parameter.grad), None
        if parameter in gradients:
            gradients[parameter].add_(sent)
        else:
            gradients[parameter] = sent

    def update() -> Update:
        # In the optimizer's order, in which the device would add up the norm.
        trained = [(parameter, alone) for parameter, alone in one_by_one(optimizer) if parameter in gradients]
        norm = None
        if max_grad_norm is not None:
            norm = _clip_([gradients[parameter] for parameter, _ in trained], max_grad_norm)
        finite = is_finite(norm)
        for parameter, alone in trained if finite else ():
            with alone():
                _step(optimizer, parameter, gradients.pop(parameter), step)
        gradients.clear()
        return Update(norm, finite)

    hooks = [
        parameter.register_post_accumulate_grad_hook(send) for group in optimizer.param_groups for parameter in group["params"]
    ]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return update, undo


def step_on_host(optimizer: torch.optim.Optimizer, step: Callable[[Tensor], object] | None = None) -> Callable[[Tensor], None]:
    """A function that updates one parameter, the optimizer's only one, on the host, wherever its gradient is."""

    def send_and_step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        sent, parameter.grad = to_host(parameter.grad), None
        _step(optimizer, parameter, sent, step)

    return send_and_step


def _step(
    optimizer: torch.optim.Optimizer, parameter: Tensor, gradient: Tensor, step: Callable[[Tensor], object] | None
) -> None:
    """One optimizer step of ``parameter`` with a gradient that is on the host.

    For its time the parameter lies on the host, so the state that the step makes or finds does too.
    """
    on_device = parameter.data
    parameter.data = to_host(on_device)
    parameter.grad = gradient
    try:
        with placed(HOST):
            optimizer.step() if step is None else step(parameter)
        updated = parameter.data
    finally:
        # Also after an interruption: the weight is on the device, and nothing of it elsewhere.
        parameter.grad = None
        parameter.data = on_device
    with torch.no_grad():
        # Into the parameter and not its data, so that autograd knows that it has changed.
        parameter.copy_(updated)


def _clip_(gradients: list[Tensor], max_grad_norm: float) -> Tensor:
    """Scale gradients to a common 2-norm of at most ``max_grad_norm``; the norm before it.

    What ``torch.nn.utils.clip_grad_norm_`` does, for gradients that no parameter holds.
    """
    norm = nn.utils.get_total_norm(gradients, foreach=True)
    if max_grad_norm == math.inf:
        return norm
    torch._foreach_mul_(gradients, torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0))
    return norm
