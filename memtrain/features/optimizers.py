"""Optimizers, built from plain numbers: which rule, and which of torch's implementations of it.

Weight decay acts on parameters of two or more dimensions everywhere. Where a rule has a ``fused`` argument, true runs one
kernel without temporaries, and false the foreach form, whose temporaries are as large as the parameters; they differ by
rounding. Lion and Muon, which torch has not or not whole, are in lion.py and muon.py.
"""

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
    """AdamW over the trainable parameters: two moments, 8 bytes per fp32 parameter. Source: arXiv 1711.05101."""
    groups = decay_groups(parameters, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=fused, foreach=not fused)


def adam(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    fused: bool,
) -> torch.optim.Adam:
    """Adam over the trainable parameters, weight decay in the gradient: 8 bytes per fp32 parameter. Source: arXiv 1412.6980."""
    groups = decay_groups(parameters, weight_decay)
    return torch.optim.Adam(groups, lr=learning_rate, betas=betas, eps=eps, fused=fused, foreach=not fused)


def sgd(
    parameters: Iterable[nn.Parameter], *, learning_rate: float, momentum: float, weight_decay: float, fused: bool
) -> torch.optim.SGD:
    """Gradient descent over the trainable parameters: 4 bytes per fp32 parameter with a momentum, none without.

    Source: Sutskever et al. 2013, in the form of torch, whose momentum is not scaled by the learning rate.
    """
    groups = decay_groups(parameters, weight_decay)
    return torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, fused=fused, foreach=not fused)


def adafactor(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    beta2_decay: float,
    min_scale: float,
    clip_threshold: float,
    weight_decay: float,
) -> torch.optim.Adafactor:
    """Adafactor over the trainable parameters: a row and a column of state per matrix, and all elements of a vector.

    Weight by weight, with a temporary as large as the weight; torch's foreach form takes as much for all weights at once,
    which is what this rule is there to save. Source: arXiv 1804.04235.
    """
    groups = decay_groups(parameters, weight_decay)
    return torch.optim.Adafactor(
        groups, lr=learning_rate, beta2_decay=beta2_decay, eps=(None, min_scale), d=clip_threshold, foreach=False
    )


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters as an optimizer's groups: those of two or more dimensions decay, the others do not."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
