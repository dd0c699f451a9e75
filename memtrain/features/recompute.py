"""Activation recomputation: run chosen modules again in backward instead of keeping what they saved in forward.

Frees the saved activations of the chosen modules except their inputs, or except the results of products as well; costs one
more forward of each, without these products where they are kept. Exact: the random state is restored, so dropout draws the
same mask. Source: Chen et al. 2016, arXiv 1604.06174; for what is worth keeping Korthikanti et al. 2022, arXiv 2205.05198;
torch.utils.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memtrain.features.replace import replace_

# What is kept of a selectively recomputed block: products with weights, and attention where one kernel does all of it.
# Products of two activations (bmm) are those of attention written out, whose scores are what should not be kept.
PRODUCTS = ("mm", "addmm", "_grouped_mm", "convolution")
_KEPT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        *PRODUCTS,
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)
# Those of the flash-attn package are there once it is loaded.
_KEPT_BY_NAME = ("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward")


class WritesInPlace(ValueError):
    """A block writes into a result that selective recomputation keeps."""


def recompute_blocks_(blocks: Sequence[nn.Module], every: int = 1) -> Callable[[], None]:
    """Recompute every ``every``-th of ``blocks`` (1: all) in backward. In place; returns the undoing.

    Raises:
        ValueError: there are no blocks, or fewer than ``every``.
    """
    _check_any(blocks)
    if every > len(blocks):
        raise ValueError(
            f"recompute every {every} finds no block to recompute among the {len(blocks)} of the model: "
            f"choose 1 to {len(blocks)}."
        )
    return _recompute_(blocks[every - 1 :: every])


def recompute_first_(blocks: Sequence[nn.Module], count: int) -> Callable[[], None]:
    """Recompute the first ``count`` of ``blocks`` in backward. In place; returns the undoing.

    For equally many blocks this frees no less than every k-th: the last block, whose backward comes when most is held, has
    not to be there twice.

    Raises:
        ValueError: there are no blocks, or fewer than ``count``.
    """
    _check_any(blocks)
    if count > len(blocks):
        raise ValueError(
            f"the model has {len(blocks)} blocks, too few to recompute the first {count}: choose 1 to {len(blocks)}."
        )
    return _recompute_(blocks[:count])


def recompute_selectively_(blocks: Sequence[nn.Module]) -> Callable[[], None]:
    """Recompute all of each block but its products with weights and its attention kernels. In place; returns the undoing.

    Raises:
        ValueError: there are no blocks. :class:`WritesInPlace`, in backward: a block changes a kept result in place.
    """
    _check_any(blocks)
    return _recompute_(blocks, context_fn=_contexts)


def _check_any(blocks: Sequence[nn.Module]) -> None:
    if not blocks:
        raise ValueError("the model has no repeated blocks to recompute: keep the activations.")


def _recompute_(modules: Sequence[nn.Module], **settings: Any) -> Callable[[], None]:
    undo = [
        replace_(module, "forward", partial(checkpoint, module.forward, use_reentrant=False, **settings)) for module in modules
    ]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What one forward of a block, and its recomputation, run within."""
    forward, again = create_selective_checkpoint_contexts(_policy)
    return forward, _TellingWrites(again)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = (operator in _KEPT or operator.name() in _KEPT_BY_NAME) and not _drops(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether an attention kernel draws its dropout itself: not run again, it would leave other numbers to the next dropout."""
    given = {argument.name: value for argument, value in zip(operator._schema.arguments, args, strict=False)}
    return bool({**given, **kwargs}.get("dropout_p"))


class _TellingWrites:
    """A context that tells a kept result which was changed since from other errors of recomputation."""

    def __init__(self, within: AbstractContextManager[Any]) -> None:
        self._within = within

    def __enter__(self) -> None:
        self._within.__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._within.__exit__(kind, error, traceback)
        if isinstance(error, RuntimeError) and "has been mutated" in str(error):
            raise WritesInPlace(
                "a block writes in place into the result of a product, which selective recomputation keeps: "
                "recompute whole blocks, or make the block with inplace=False."
            ) from error
