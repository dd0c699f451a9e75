"""Packed rows under the flash-attn package, in micro-batches of any size.

transformers finds packed rows by their positions and then calls the kernel for sequences of several lengths, but only where the
batch is one row (``_is_packed_sequence`` in modeling_flash_attention_utils.py); in a larger one the rows see each other, without
a word. Here each forward is told where its rows begin, so that any micro-batch takes that kernel. It frees and costs nothing beside
it; the count of rows is asked of the device once in a forward. Exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.features.replace import replace_


def separate_rows_(model: nn.Module) -> Callable[[], None]:
    """Let attention of flash-attn keep packed rows apart wherever forward gets ``position_ids``. In place; returns the undoing.

    Positions are of shape (rows, tokens); a row of a pack begins where they do not go on by one. Other implementations of attention
    take no notice.
    """
    forward: Any = model.forward

    @functools.wraps(forward)
    def separated(*args: Any, **kwargs: Any) -> Any:
        positions = kwargs.get("position_ids")
        # Models of images count in three dimensions, (3, rows, tokens), and take no packed rows.
        if isinstance(positions, Tensor) and positions.dim() == 2:
            kwargs |= _sequences(positions)
        return forward(*args, **kwargs)

    return replace_(model, "forward", separated)


def _sequences(positions: Tensor) -> dict[str, Any]:
    """What transformers hands to the kernel: where each sequence begins and ends among the tokens of all rows, and the longest.

    As the longest a whole row is given, which bounds a grid and no memory, and needs no answer of the device.
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff() != 1
    starts = begins.flatten().nonzero().flatten()
    # (sequences + 1,), from 0 to the number of all tokens.
    bounds = torch.nn.functional.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)
    longest = positions.shape[1]
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
