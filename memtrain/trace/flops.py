"""Floating-point operations of an operator: torch's formulas, and those of attention where torch has none or another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry


def flop_formula(func: Any, name: str) -> Callable[..., float] | None:
    """The formula of an operator, called with its arguments and ``out_val``; None where nothing is counted."""
    if name.startswith("_scaled_dot_product"):
        return _backward_flops if name.endswith("backward") else _attention_flops
    if name == "_grouped_mm":
        return _grouped_flops
    if name.startswith("flash_attn."):
        return _package_backward_flops if name.endswith("backward") else _package_flops
    return flop_registry.get(func._overloadpacket)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    """Scores and their product with the values, each query head by itself: torch's own formula, before 2.12 without groups."""
    scores = query.shape[:-1].numel() * key.shape[-2]
    return 2.0 * scores * (query.shape[-1] + value.shape[-1])


def _grouped_flops(first: Tensor, second: Tensor, *_: Any, **__: Any) -> float:
    """Of experts: each row times the matrix of its own expert, and in the gradient of the matrices each row once as well.

    Where both have three dimensions, the matrices of the one are multiplied with those of the other.
    """
    groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return 2.0 * groups * first.shape[-2:].numel() * second.shape[-1]


def _backward_flops(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> float:
    """Scores again and the gradients of scores, queries, keys and values."""
    scores = query.shape[:-1].numel() * key.shape[-2]
    return 2.0 * scores * (3 * query.shape[-1] + 2 * value.shape[-1])


def _package_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> float:
    """Of the flash-attn package, with heads behind tokens; of sequences in a row it is told the longest."""
    keys = key.shape[1] if query.dim() == 4 else rest[3]
    return 2.0 * query.shape[:-1].numel() * keys * (query.shape[-1] + value.shape[-1])


def _package_backward_flops(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **__: Any) -> float:
    keys = key.shape[1] if query.dim() == 4 else rest[8]
    return 2.0 * query.shape[:-1].numel() * keys * (3 * query.shape[-1] + 2 * value.shape[-1])
