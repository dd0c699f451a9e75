"""Cross-entropy of a linear head over a few tokens' logits at a time, so that the whole logits never exist.

The logits of a causal language model are tokens × vocabulary in fp32, with their gradient as large again: often the peak
of the step. Here the head and the loss run together over chunks of tokens; each chunk's logits become its gradient in
place and are gone before the next chunk. Frees 2 to 3 × 4 B × tokens × vocabulary; costs no extra matrix product, since
the gradients are computed in forward, only the gradients of hidden states and head held from there to backward. Equal to
the whole form up to the rounding of sums. The idea is that of Liger (arXiv 2410.10989) and Cut Cross-Entropy (arXiv
2411.09009).

Under torch.autocast the products run in its type, as those of the whole form do. Each chunk's share of a gradient is rounded
to that type and added in the type of the tensor, so that many chunks round no more than one; this costs a read and a write of
the head's gradient for each chunk. A weight's gradient then differs from that of the whole form, in norm, by at most twice the
relative precision of the type. Gradients in float16 are computed at the size that backward gives them: see ``factor``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.data.rows import IGNORED
from memtrain.features.replace import replace_
from memtrain.models.objective import predicts_next_token

# Rows of the head's gradient that exist a second time, in the type of the products, where that is another.
_ROWS = 16384


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of ``hidden @ weight.T + bias`` against ``target``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (tokens, width)
        weight: Tensor,  # (vocabulary, width)
        bias: Tensor | None,  # (vocabulary,)
        target: Tensor,  # (tokens,), IGNORED where nothing counts
        chunk_tokens: int,
        differentiate: bool,
        factor: Tensor | None,  # scalar
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        wanted = [needed and differentiate for needed in ctx.needs_input_grad[:3]]
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(weight) if wanted[1] else None
        d_bias = torch.zeros_like(bias) if wanted[2] and bias is not None else None
        cast = _cast_of(hidden.device.type)
        weight, bias = cast(weight), None if bias is None else cast(bias)
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            d_chunk = None if d_hidden is None else d_hidden[chunk]
            total.add_(_add_chunk(cast(hidden[chunk]), weight, bias, target[chunk], factor, d_chunk, d_weight, d_bias))
        ctx.gradients, ctx.factor = (d_hidden, d_weight, d_bias), factor
        return total

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss frees its gradients in backward, so backward runs once: call forward again.")
        gradients, ctx.gradients = ctx.gradients, None
        rest = d_loss if ctx.factor is None else d_loss / ctx.factor
        return (*(None if gradient is None else gradient.mul_(rest) for gradient in gradients), None, None, None, None)


def _cast_of(device_type: str) -> Callable[[Tensor], Tensor]:
    """What autocast does to the inputs of a product: nothing where it is off."""
    if not (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return lambda tensor: tensor
    dtype = torch.get_autocast_dtype(device_type)
    return lambda tensor: tensor.to(dtype)


def _add_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    factor: Tensor | None,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
) -> Tensor:
    """The summed loss of one chunk, its gradients, times ``factor``, added to those given.

    A function of its own, so that the logits of one chunk are gone when those of the next are made.
    """
    logits = nn.functional.linear(hidden, weight, bias).float()
    counted = target != IGNORED
    # Only what is ignored is replaced: gather refuses any other label outside the vocabulary.
    label = target.masked_fill(~counted, 0).unsqueeze(-1)
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    picked = logits.gather(-1, label)
    normaliser = logits.exp_().sum(dim=-1, keepdim=True)
    loss = normaliser.log().sub_(picked).squeeze(-1).mul_(counted).sum()
    if d_hidden is None and d_weight is None and d_bias is None:
        return loss
    # From here on `logits` holds their own gradient: softmax - one_hot, 0 where nothing counts.
    size = counted if factor is None else counted * factor
    logits.div_(normaliser).scatter_add_(-1, label, torch.full_like(normaliser, -1.0)).mul_(size.unsqueeze(-1))
    d_logits = logits.to(hidden.dtype)
    if d_hidden is not None:
        if d_hidden.dtype == weight.dtype:
            torch.mm(d_logits, weight, out=d_hidden)
        else:
            d_hidden.copy_(torch.mm(d_logits, weight))
    if d_weight is not None:
        if d_weight.dtype == hidden.dtype:
            d_weight.addmm_(d_logits.t(), hidden)
        else:
            for rows, columns in zip(d_weight.split(_ROWS), d_logits.split(_ROWS, dim=1), strict=True):
                rows.add_(torch.mm(columns.t(), hidden))
    if d_bias is not None:
        d_bias.add_(d_logits.sum(dim=0, dtype=d_bias.dtype))
    return loss


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = 1024,
    factor: Tensor | None = None,
) -> Tensor:
    """The summed cross-entropy of a linear head, a scalar in fp32.

    Args:
        hidden: (tokens, width).
        weight: (vocabulary, width) of the head.
        target: (tokens,) int64 labels; IGNORED counts nothing.
        bias: (vocabulary,) of the head.
        chunk_tokens: tokens whose logits exist at once.
        factor: a scalar not 0, about the gradient that backward will bring. Gradients are computed in forward at this size
            instead of 1, so that in float16 small ones are not rounded to 0; the gradients that come out do not depend on it
            but for rounding.
    """
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, target, chunk_tokens, torch.is_grad_enabled(), factor)
    return loss


def chunk_loss_(model: nn.Module, chunk_tokens: int, factor: Callable[[], Tensor] | None = None) -> Callable[[], None]:
    """Compute the loss of a transformers causal language model in chunks wherever it is given labels. In place.

    Without labels the model answers with logits as before; with labels its ``logits`` are None. Returns the undoing.

    Args:
        factor: asked in each forward that wants gradients, what the mean loss will be multiplied by before backward, a
            scalar (a loss scale, the share of a micro-batch). With it, gradients in float16 are computed at the size that
            they have in the whole form; not needed for types of a wider range.

    Raises:
        ValueError: the model's loss is not that of a plain linear head (it says why); keep the whole logits.
    """
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"the loss of {type(model).__name__} cannot be chunked, {reason}: keep the whole logits.")
    return _chunk(model, chunk_tokens, factor)


def refusal(model: nn.Module) -> str | None:
    """Why the loss of ``model`` cannot be chunked, or None where it can.

    A head that caps its logits would train something else, so the part of the model between the hidden states and the
    loss has to prove itself: it runs both ways on a stand-in of its own head, 8 wide, and loss and gradients
    have to agree.
    """
    if not predicts_next_token(model):
        return "it is not a causal language model of transformers"
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__} and not an nn.Linear"
    try:
        whole, chunked = (_loss_of_stand_in(model, head, chunk) for chunk in (None, 2))
    except Exception as error:  # whatever a model's own forward may raise: no proof, no chunking
        return f"its head could not be tried out ({type(error).__name__}: {error})"
    if all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(whole, chunked, strict=True)):
        return None
    return "its head changes the logits before the loss (a cap, a scale) and the chunks would not"


def _chunk(model: Any, chunk_tokens: int, factor: Callable[[], Tensor] | None = None) -> Callable[[], None]:
    head: nn.Linear = model.get_output_embeddings()
    whole_forward = model.forward

    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        # The head is bypassed, so what arrives as logits are hidden states. Labels are shifted, not hidden states: a
        # shifted copy of these would be as large as one layer's activation.
        target = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
        hidden = logits.reshape(-1, logits.shape[-1])
        count = (target != IGNORED).sum()
        size = None if factor is None or not torch.is_grad_enabled() else factor() / count
        total = chunked_cross_entropy(hidden, head.weight, target, bias=head.bias, chunk_tokens=chunk_tokens, factor=size)
        return total / count

    @functools.wraps(whole_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is None:
            return whole_forward(*args, **kwargs)
        restore_head = replace_(head, "forward", lambda hidden: hidden)
        restore_loss = replace_(model, "_loss_function", loss_function)
        try:
            output = whole_forward(*args, **kwargs)
        finally:
            restore_loss()
            restore_head()
        output.logits = None
        return output

    return replace_(model, "forward", forward)


class _Answer(tuple[Tensor]):
    """What a base model returns, read by position or by name; everything but the hidden states is None."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _KnownHiddenStates(nn.Module):
    """Stands in for everything below the head."""

    def __init__(self, hidden: Tensor, parts: Iterable[str]) -> None:
        super().__init__()
        self.hidden = hidden
        # Some models call a part of the base model (OPT its decoder); each part answers like the whole.
        self.__dict__.update(dict.fromkeys(parts, self))

    def forward(self, *_: Any, **__: Any) -> _Answer:
        return _Answer((self.hidden,))


def _loss_of_stand_in(model: Any, head: nn.Linear, chunk_tokens: int | None) -> tuple[Tensor, ...]:
    """Loss and gradients of the model's own forward over a narrow head and random hidden states."""
    width, generator = 8, torch.Generator().manual_seed(0)
    stand_in = copy.copy(model)
    stand_in.__dict__["_modules"] = dict(model._modules)
    # Made without data, since its initialisation would draw from the generator that the training uses.
    narrow = nn.Linear(width, head.out_features, bias=head.bias is not None, device="meta")
    for name, parameter in tuple(narrow.named_parameters()):
        setattr(narrow, name, nn.Parameter(torch.randn(parameter.shape, generator=generator)))
    # Large enough that the usual caps (30 to 50) bend the logits.
    hidden = (20 * torch.randn(1, 6, width, generator=generator)).requires_grad_()
    (name,) = (name for name, child in model.named_children() if child is head)
    stand_in._modules[name] = narrow
    parts = [part for part, _ in model.base_model.named_children()]
    stand_in._modules[model.base_model_prefix] = _KnownHiddenStates(hidden, parts)
    stand_in.get_output_embeddings = lambda: narrow
    if chunk_tokens is not None:
        _chunk(stand_in, chunk_tokens)
    labels = torch.tensor([[1, 2, IGNORED, 3, 0, 2]]) % head.out_features
    labels[0, 2] = IGNORED
    # In fp32, whatever the caller trains in: 16 bits would hide a cap, or pass for one.
    with torch.autocast(hidden.device.type, enabled=False):
        loss = stand_in(input_ids=torch.zeros(1, 6, dtype=torch.long), labels=labels).loss
        loss.backward()
    found = tuple(tensor.detach() for tensor in (loss, hidden.grad, *(parameter.grad for parameter in narrow.parameters())))
    # A chunked forward holds the stand-in and the stand-in its forward: left so, it would live until Python next collects.
    stand_in.__dict__.clear()
    return found
