"""A vocabulary that is larger than the model's: rows are added to its embeddings and to its head, and none is taken away.

A tokenizer with a token more than the embeddings have rows fails at the first batch in which that token stands. One with fewer is
no fault: many models come with more rows than tokens, and rows that were trained must not vanish. Rows are added up to the next
multiple of 8, as matrix units like them, and each begins as the mean of those that are there, so that no new token is likelier
than the average (Hewitt, 2021, nlp.stanford.edu/~johnhew/vocab-expansion.html, without the noise that is drawn there).
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn

ROW_MULTIPLE: Final = 8


def tokens_of(tokenizer: Any) -> int:
    """How many rows a tokenizer needs: one more than its highest token, which may lie beyond the number of its tokens."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)


def rows_of(config: Any) -> int | None:
    """How many rows the embeddings of a configuration have; None where there is no vocabulary."""
    found = None if config is None else getattr(_text(config), "vocab_size", None)
    return found if isinstance(found, int) else None


def set_rows_(config: Any, rows: int) -> None:
    """Let a configuration have embeddings of so many rows. In place."""
    for one in (config, _text(config)):
        if getattr(one, "vocab_size", None) is not None:
            one.vocab_size = rows


def rows_for(tokens: int) -> int:
    """The rows that so many tokens get.

    >>> rows_for(1000), rows_for(1001)
    (1000, 1008)
    """
    return -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE


@torch.no_grad()
def grow_(model: nn.Module, rows: int) -> nn.Module:
    """Let the embeddings of a transformers model have at least so many rows, and its head as many. In place; ties stay.

    What is there keeps its bits. Tensors without data get the size. While a matrix grows, it exists twice.
    """
    there = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if rows <= there:
        return model
    resize: Any = model.resize_token_embeddings
    # MobileBERT's own does not know that rows could be drawn about the mean.
    about_mean = {"mean_resizing": False} if "mean_resizing" in inspect.signature(resize).parameters else {}
    resize(rows, **about_mean)
    for tensor in _by_token(model):
        tensor[there:] = tensor[:there].mean(dim=0, dtype=torch.float32).to(tensor.dtype)
    set_rows_(model.config, rows)
    return model


def _by_token(model: Any) -> list[Tensor]:
    """The embeddings, and the head with its bias, each once."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    found = [tensor for layer in layers if layer is not None for tensor in layer.parameters(recurse=False)]
    return list({id(tensor): tensor for tensor in found}.values())


def _text(config: Any) -> Any:
    find = getattr(config, "get_text_config", None)
    return config if find is None else find()
