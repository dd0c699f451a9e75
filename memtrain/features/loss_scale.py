"""A scaled loss, so that small gradients in float16 are not rounded to 0, and the update that knows about it.

The loss is multiplied before backward and the gradients divided after it, before they are clipped. A gradient that has
overflowed is not used: the update is skipped and the scale halved. Frees nothing; costs a scalar, one pass over the
gradients, and a wait for the device in each update, to know whether one has overflowed. Source: Micikevicius et al. 2018, arXiv 1710.03740; torch.amp.GradScaler, which does the work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from memtrain.features.update import Update, clip_, is_finite


def loss_scaler(model: nn.Module, *, initial_scale: float, growth_interval: int) -> torch.amp.GradScaler:
    """A scaler on the model's device, which doubles the scale after ``growth_interval`` updates without an overflow."""
    device = next(model.parameters()).device.type
    return torch.amp.GradScaler(device, init_scale=initial_scale, growth_interval=growth_interval)


def no_scaler() -> torch.amp.GradScaler:
    """A scaler that leaves losses and gradients alone, and whose scale is 1."""
    return torch.amp.GradScaler("cpu", enabled=False)


def loss_factor(scaler: torch.amp.GradScaler, model: nn.Module, share: float) -> Callable[[], Tensor] | None:
    """What a micro-batch's mean loss is multiplied by before backward, a scalar on the model's device; None without a scale.

    Args:
        share: of the micro-batch in the step's rows.
    """
    if not scaler.is_enabled():
        return None
    # The scaler's own way to its scale that does not wait for the device.
    return lambda: scaler.scale(torch.full((), share, device=next(model.parameters()).device))


def update_unscaled(
    optimizer: torch.optim.Optimizer, max_grad_norm: float | None, scaler: torch.amp.GradScaler
) -> Callable[[], Update]:
    """A function that divides the gradients by the scale, clips, updates unless one is not finite, and frees the gradients.

    The norm that it tells is not finite where the update was skipped. The scaler's scale is smaller afterwards where a gradient
    was not finite, and only there.

    Args:
        max_grad_norm: as :func:`memtrain.features.update.update_after_backward` takes it; the scaler looks at the gradients
            without a norm too.
    """
    # A fused step that is told of an overflow makes its momentum and does not write it (torch/optim/sgd.py, _fused_sgd), so the
    # scaler leaves the whole step out instead, which takes asking the device.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    def update() -> Update:
        scale = scaler.get_scale()
        # First, since a bound on the norm is one on the gradients' own.
        scaler.unscale_(optimizer)
        norm = clip_(optimizer, max_grad_norm)
        # Gradients that are finite can have a norm that is not; a smaller scale would not help, since they are divided by it.
        finite = is_finite(norm)
        if finite:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return Update(norm, finite and scaler.get_scale() >= scale)

    return update
