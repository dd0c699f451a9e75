"""Whether a model keeps rows apart that are packed into one: asked of the model itself, since nothing else tells.

Models of transformers tell packed rows by positions that begin anew, where they get neither a mask nor a cache. What mixes tokens
otherwise, such as a recurrence or a convolution over the row, does not.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from memtrain.models.objective import objective, predicts_next_token

# Relative to the largest logit. What is seen of another row changes them by a few hundredths at the least.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_IN_16_BITS = 0.05
_LENGTHS = (5, 7)


def check_can_pack(model: nn.Module) -> None:
    """Refuse packing for a model that is no causal language model or takes no positions; without running it.

    Raises:
        ValueError: with the remedy.
    """
    name = type(model).__name__
    if not predicts_next_token(model):
        raise ValueError(f"packing is true, and {name} is no causal language model: set packing to false.")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"packing is true, and {name} takes no position_ids, by which rows are kept apart: set packing to false."
        )


@torch.no_grad()
def check_separates(model: nn.Module) -> None:
    """Refuse a model in which the second of two packed rows has other logits than alone.

    Raises:
        ValueError: with the remedy.
    """
    device = next(model.parameters()).device
    vocabulary = int(getattr(model.config, "vocab_size", 16))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocabulary, (1, length), generator=generator).to(device) for length in _LENGTHS]
    positions = [torch.arange(length, device=device)[None] for length in _LENGTHS]
    settings = objective(model).settings
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        packed = model(input_ids=torch.cat(rows, 1), position_ids=torch.cat(positions, 1), **settings).logits
        alone = model(input_ids=rows[1], position_ids=positions[1], **settings).logits
    finally:
        for module, mode in modes:
            module.training = mode
    differs = (packed[:, _LENGTHS[0] :].float() - alone.float()).abs().max() / alone.float().abs().max()
    if differs > _TOLERANCE.get(next(model.parameters()).dtype, _TOLERANCE_IN_16_BITS):
        raise ValueError(
            f"packing is true, and in {type(model).__name__} packed rows see each other (logits differ by {float(differs):.0%} from "
            f"those of a row alone): set packing to false."
        )
