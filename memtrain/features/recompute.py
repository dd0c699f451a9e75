"""Activation recomputation: run chosen blocks again in backward instead of keeping what they saved in forward.

Frees the saved activations of the chosen blocks except their inputs; costs one more forward of each. Exact: the random
state is restored, so dropout draws the same mask. Source: Chen et al. 2016, arXiv 1604.06174; torch.utils.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from memtrain.features.replace import replace_


def recompute_blocks_(blocks: Sequence[nn.Module], every: int = 1) -> Callable[[], None]:
    """Recompute every ``every``-th of ``blocks`` (1: all) in backward. In place; returns the undoing.

    Raises:
        ValueError: there are no blocks, or fewer than ``every``.
    """
    if every > len(blocks):
        raise ValueError(
            f"recompute every {every} finds no block to recompute among the {len(blocks)} of the model: "
            f"choose 1 to {len(blocks)}."
            if blocks
            else "the model has no repeated blocks to recompute: keep the activations."
        )
    undo = [
        replace_(block, "forward", partial(checkpoint, block.forward, use_reentrant=False))
        for block in blocks[every - 1 :: every]
    ]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all
