"""Muon for the matrices of hidden layers and AdamW for every other parameter, as one optimizer.

torch's Muon takes matrices alone, and a run has one optimizer, whose groups carry the learning rate and whose state is saved
and moved. So both of torch's optimizers are held in one, which shares its groups and its state with them.

State is one momentum per hidden matrix (4 bytes per fp32 parameter) and two moments elsewhere (8). An update takes
temporaries of a few times the largest matrix, in bf16, and some 30 floating-point operations per element and row of the
matrix's short side. Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memtrain.features.optimizers import adamw, decay_groups


class MuonWithAdamW(torch.optim.Optimizer):
    """Two of torch's optimizers that step as one.

    Each group says in ``rule`` which of the two updates it, so that it is known of a group that was copied or loaded too.
    """

    def __init__(self, rules: dict[str, torch.optim.Optimizer]) -> None:
        self.rules = rules
        super().__init__([{**group, "rule": rule} for rule, held in rules.items() for group in held.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a run has computed its loss, so there is no closure."""
        for rule, held in self.rules.items():
            held.param_groups = [group for group in self.param_groups if group["rule"] == rule]
            # Loading a state puts another in its place.
            held.state = self.state
            held.step()


def muon(
    model: nn.Module,
    *,
    learning_rate: float,
    momentum: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """Muon over the trainable matrices of the model's hidden layers, fused AdamW over its other trainable parameters."""
    chosen = {id(matrix) for matrix in hidden_matrices(model)}
    hidden = [parameter for parameter in model.parameters() if id(parameter) in chosen and parameter.requires_grad]
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen and parameter.requires_grad]
    rules: dict[str, torch.optim.Optimizer] = {}
    if hidden:
        groups = decay_groups(hidden, weight_decay)
        rules["muon"] = torch.optim.Muon(groups, lr=learning_rate, momentum=momentum, adjust_lr_fn="match_rms_adamw")
    if others:
        rules["adamw"] = adamw(others, learning_rate=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    return MuonWithAdamW(rules)


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """The parameters of two dimensions that belong to no embedding and not to the output layer that the model names.

    A plain module names none: what it ends with is a hidden layer here.
    """
    ends = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    named = getattr(model, "get_output_embeddings", None)
    head = named() if named is not None else None
    if head is not None:
        ends |= {id(parameter) for parameter in head.parameters()}
    return [parameter for parameter in model.parameters() if parameter.dim() == 2 and id(parameter) not in ends]
