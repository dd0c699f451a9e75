"""Products in 16 bits beside weights in 32 (torch.autocast), and in TF32.

Autocast changes what is trained, so it is a fact of the job: products, attention and what follows them are computed in
bfloat16 or float16, losses in float32, from weights, gradients and optimizer state that stay in float32. Frees about half
of the saved activations; costs a copy in 16 bits of each weight that is multiplied, from its forward to its backward.

torch keeps these copies in a cache for as long as the outermost autocast lasts, here one forward with its loss. After it
the graph alone holds those that backward needs, and recomputation, which enters autocast by itself, makes its own; so none
is left when the weights are updated. Source: Micikevicius et al. 2018, arXiv 1710.03740; torch.amp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memtrain.features.replace import replace_


def autocast_(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Run the forward of ``model``, with its loss, under torch.autocast to ``dtype``. In place; returns the undoing.

    It goes around what else wraps the forward of the whole model, and comes after it: what is tried out when a loss is
    chunked stays in float32.

    Args:
        dtype: bfloat16 or float16. Gradients in float16 need a scaled loss, or small ones are rounded to 0.
    """
    forward = model.forward

    @functools.wraps(forward)
    def in_lower_precision(*args: Any, **kwargs: Any) -> Any:
        # Asked at each call, since a model may be moved; backward runs outside, as torch wants it.
        with torch.autocast(next(model.parameters()).device.type, dtype=dtype):
            return forward(*args, **kwargs)

    return replace_(model, "forward", in_lower_precision)


def tf32_() -> Callable[[], None]:
    """Let cards round the inputs of fp32 products and convolutions to TF32. For this process; returns the undoing.

    torch allows it for convolutions from the start. Where its newer settings and its older ones (``allow_tf32``) disagree,
    as they may in between, it refuses to read the older.
    """
    cudnn: Any = torch.backends.cudnn
    chosen = [torch.backends.cuda.matmul, cudnn.conv]
    before = [backend.fp32_precision for backend in chosen]
    for backend in chosen:
        backend.fp32_precision = "tf32"

    def undo() -> None:
        for backend, precision in zip(chosen, before, strict=True):
            backend.fp32_precision = precision

    return undo
