"""Optimizers, built from plain numbers: which rule, and which of torch's implementations of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    fused: bool,
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay acts on those of two or more dimensions.

    State is 8 bytes per fp32 parameter. ``fused`` runs one kernel without temporaries; otherwise the foreach form runs,
    whose temporaries are as large as the parameters. Both follow arXiv 1711.05101 and differ by rounding.
    """
    groups = decay_groups(parameters, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=fused, foreach=not fused)


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters as an optimizer's groups: those of two or more dimensions decay, the others do not."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
