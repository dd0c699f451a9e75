"""What Liger's fused norms, MLPs and losses keep, put into a transformers model.

The kernels themselves are Triton's. What they allocate stands in their Python: a norm keeps its input and one number a token, and
writes the gradient over the one that comes in (ops/rms_norm.py); SwiGLU keeps gate and up, and writes both gradients over them
(ops/swiglu.py); the fused head and loss takes as many tokens at once as make the chunk's logits about as large as the hidden
states (ops/fused_linear_cross_entropy.py), all of linkedin/Liger-Kernel.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def chunk_tokens(tokens: int, hidden: int, vocabulary: int) -> int:
    """Tokens whose logits exist at once.

    >>> chunk_tokens(4096, 4096, 128256)
    128
    """
    parts = -(-vocabulary // hidden)
    return int(1 << (-(-tokens // parts) - 1).bit_length())


def fuse_(model: Any, words: str) -> None:
    """Replace the norms and the gated MLPs that the words of a loss name. In place."""
    named = words.lower()
    for module in model.modules():
        if re.search(r"rms ?norm", named) and type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight"):
            _swap_(module, _norm)
        elif "swiglu" in named and all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            _swap_(module, _mlp)


def _swap_(module: Any, forward: Any) -> None:
    """Give one module another forward by another class, so that a copy of it has that too."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def _norm(self: Any, hidden: Tensor) -> Tensor:
    import torch

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor, weight: Tensor) -> Tensor:
            inverse = given.new_empty(given.shape[:-1], dtype=torch.float32)
            ctx.save_for_backward(given, inverse)
            ctx.weight = weight
            return torch.empty_like(given)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
            _ = ctx.saved_tensors
            wanted = torch.empty_like(ctx.weight) if ctx.weight.requires_grad else None
            return gradients[0], wanted

    found: Tensor = Norm.apply(hidden, self.weight)
    return found


def _mlp(self: Any, hidden: Tensor) -> Tensor:
    import torch

    class Gated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
            ctx.save_for_backward(gate, up)
            return torch.empty_like(gate)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            gate, up = ctx.saved_tensors
            return gate, up

    found: Tensor = self.down_proj(Gated.apply(self.gate_proj(hidden), self.up_proj(hidden)))
    return found
