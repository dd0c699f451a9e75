"""Whether a model keeps packed rows apart, which no configuration tells: it is run and asked.

transformers makes the mask of packed rows from the positions where a model passes them on to its masks, where no mask and no cache
is given. Not every model does: OPT and gpt-oss take positions and pass them on to no mask, BERT masks nothing, and a convolution or
a recurrence runs on from row to row. Nothing says so; the model trains, and its rows see each other.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from memtrain import generators
from memtrain.models.objective import objective, predicts_next_token

# Tokens of the two rows that are packed.
_FIRST, _SECOND = 5, 7
# How far logits of a row may lie from those of the row alone, relative in norm: rounding in 16 bits through many layers is less,
# other positions are more.
_OTHER_ROUNDING = 0.2


def check_packable(model: nn.Module) -> None:
    """Refuse a model that cannot keep packed rows apart, as its class tells; without data, and before anything is loaded.

    Raises:
        ValueError: it is no causal language model, or its forward takes no positions.
    """
    name = type(model).__name__
    if not predicts_next_token(model):
        raise ValueError(
            f"{name} is no causal language model of transformers, and rows are packed for those only: set packing to false."
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{name}.forward takes no position_ids, by which packed rows are kept apart: set packing to false, or take another model."
        )


def check_separates(model: nn.Module) -> None:
    """Refuse a model that lets packed rows see each other, with the attention and in the precision that it has now.

    Runs forward twice on two rows of 12 tokens, in evaluation mode and without gradients. Modes are put back, and so are the
    generators of random numbers.

    Raises:
        ValueError: as :func:`check_packable`, or what stands before a row changes its logits, or where it stands.
    """
    check_packable(model)
    modes = [(module, module.training) for module in model.modules()]
    put_back = generators.remember()
    try:
        model.eval()
        seen, moved, rounding = _differences(model)
    finally:
        for module, training in modes:
            module.training = training
        put_back()
    # Written so that what is not a number is refused too.
    if not seen <= rounding:
        raise ValueError(
            f"{type(model).__name__} lets packed rows see each other (another row before it changes a row's logits by {seen:.1e}): "
            f"set packing to false, or take another model."
        )
    if not moved <= _OTHER_ROUNDING:
        raise ValueError(
            f"{type(model).__name__} does not count positions anew in packed rows (a row's logits differ by {moved:.1e} from those "
            f"of the row alone): set packing to false, or take another model."
        )


def _differences(model: nn.Module) -> tuple[float, float, float]:
    """By how much a row's logits differ with another row before it and from those at the start of a row, and what rounding may do.

    Both rows of a batch are packed, in another order, as some implementations look at the first only.
    """
    device = next(model.parameters()).device
    first, second, other_first, other_second = _ids(model, device)
    counted = [torch.arange(length, device=device) for length in (_FIRST, _SECOND)]
    positions = torch.stack([torch.cat(counted), torch.cat(counted[::-1])])
    settings = objective(model).settings

    def logits(before: Tensor, above: Tensor) -> tuple[Tensor, ...]:
        ids = torch.stack([torch.cat([before, second]), torch.cat([above, first])])
        with torch.no_grad():
            output: Any = model(input_ids=ids, position_ids=positions, **settings)
        found: Tensor = output[0] if isinstance(output, tuple) else output.logits
        (start, packed), (other_start, other_packed) = found[0].split([_FIRST, _SECOND]), found[1].split([_SECOND, _FIRST])
        return start, packed, other_start, other_packed

    start, packed, other_start, other_packed = logits(first, second)
    _, packed_again, _, other_packed_again = logits(other_first, other_second)
    # The same kernels on the same shapes: but for sums whose order depends on the tokens, as of experts, the same bits.
    seen = max(_difference(packed_again, packed), _difference(other_packed_again, other_packed))
    moved = max(_difference(packed, other_start), _difference(other_packed, start))
    return seen, moved, max(torch.finfo(packed.dtype).eps / 8, 1e-5)


def _ids(model: Any, device: torch.device) -> tuple[Tensor, ...]:
    """Two rows of tokens, and two more of the same lengths, none of them a token that means something to the model."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    special = {value for name, value in vars(model.config).items() if name.endswith("_token_id") and isinstance(value, int)}
    known = torch.tensor([number for number in range(min(vocabulary, 4096)) if number not in special])
    chosen = known[torch.randint(len(known), (2 * (_FIRST + _SECOND),), generator=torch.Generator().manual_seed(0))]
    rows: tuple[Tensor, ...] = chosen.to(device).split([_FIRST, _SECOND, _FIRST, _SECOND])
    return rows


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())
