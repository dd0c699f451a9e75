"""When weights are updated: all together after backward, or each as soon as its gradient is there.

Updating during backward frees each gradient at once, so that gradients never exist together (Lv et al. 2023, arXiv
2306.09782). It is exact for rules that treat parameters one by one, and it needs the whole batch in one backward and no
clipping by the global norm.

An update after backward whose gradient has a norm that is not finite is left out, weights and state as they were. That takes a
norm: without one an infinity or a NaN goes into the weights, as it does during backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Update(NamedTuple):
    """What an update came to.

    Attributes:
        grad_norm: 2-norm of the whole gradient before clipping, a scalar; None where it was not computed.
        updated: whether weights were changed; an update is left out where the gradient is known not to be finite.
    """

    grad_norm: Tensor | None
    updated: bool


def update_after_backward(
    optimizer: torch.optim.Optimizer, max_grad_norm: float | None, step: Callable[[], object] | None = None
) -> Callable[[], Update]:
    """A function that clips, updates all weights unless the norm is not finite, and frees the gradients.

    Args:
        max_grad_norm: bound on the norm of all gradients as one vector (Pascanu et al. 2013, arXiv 1211.5063); infinite for
            the norm without clipping; None for neither, and an update by whatever the gradient is.
        step: updates all weights; by default the optimizer's own step.
    """

    def update() -> Update:
        norm = clip_(optimizer, max_grad_norm)
        finite = is_finite(norm)
        if finite:
            optimizer.step() if step is None else step()
        optimizer.zero_grad(set_to_none=True)
        return Update(norm, finite)

    return update


def is_finite(norm: Tensor | None) -> bool:
    """Whether a norm is finite, which waits for the device; nothing is known against one that was not computed."""
    # As a number, because a comparison on the device would allocate its result.
    return norm is None or math.isfinite(norm.item())


def clip_(optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor | None:
    """Scale the gradients of all parameters to a common 2-norm of at most ``max_grad_norm``; the norm before it, a scalar."""
    if max_grad_norm is None:
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if max_grad_norm == math.inf:
        return nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None], foreach=True)
    # foreach is said, not left to a default that differs between devices.
    return nn.utils.clip_grad_norm_(parameters, max_grad_norm, foreach=True)


def step_one_by_one(optimizer: torch.optim.Optimizer, step: Callable[[Tensor], object]) -> Callable[[], None]:
    """A function that updates every parameter with a gradient by ``step``, each the optimizer's only one meanwhile.

    The gradient of a parameter is gone before the next one is updated.
    """

    def step_all() -> None:
        for parameter, alone in one_by_one(optimizer):
            if parameter.grad is not None:
                with alone():
                    step(parameter)
                parameter.grad = None

    return step_all


def update_during_backward_(
    optimizer: torch.optim.Optimizer, step: Callable[[Tensor], object] | None = None
) -> Callable[[], None]:
    """Let backward update each weight of the optimizer and free its gradient. In place; returns the undoing.

    One optimizer stays in charge, so that schedules reach the weights and its state_dict is that of an update after
    backward.

    Args:
        step: updates one parameter, which is the optimizer's only one meanwhile; by default the optimizer's own step.
    """

    def update_one(alone: Callable[[], AbstractContextManager[None]], parameter: Tensor) -> None:
        # Fused kernels do not count their writes, and by the count a step that fails is known to have changed weights.
        torch.autograd.graph.increment_version(parameter)
        with alone():
            optimizer.step() if step is None else step(parameter)
        parameter.grad = None

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(update_one, alone)) for parameter, alone in one_by_one(optimizer)
    ]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def one_by_one(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Callable[[], AbstractContextManager[None]]]]:
    """Each parameter of the optimizer, with a context inside which it is the optimizer's only one."""

    @contextmanager
    def alone(group: dict[str, Any], parameter: Tensor) -> Iterator[None]:
        groups = optimizer.param_groups
        # The group is copied when it is used, so that it holds the learning rate of that step.
        optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            yield
        finally:
            optimizer.param_groups = groups

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, partial(alone, group, parameter)


def nothing_left() -> Update:
    """The update after a backward that has done it: none is left, and weights were changed by whatever the gradient was."""
    return Update(None, updated=True)
