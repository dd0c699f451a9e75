"""Tiny models of every shape that the parity tests go through, each with rows that suit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.data.rows import IGNORED
from memtrain.data.tokenizer import train_tokenizer
from memtrain.models.build import ModelSource, source

VOCABULARY = 96

BYTES = train_tokenizer([], 259)
"""A tokenizer of one token per byte: text whose tokens can be counted by eye."""


@dataclass(frozen=True)
class Case:
    """A model and its rows.

    Attributes:
        build: makes the source anew, so that no test sees another's weights.
        row: makes row number i.
    """

    build: Callable[[], ModelSource]
    row: Callable[[int], dict[str, Tensor]]


class Mlp(nn.Module):
    """A plain module with a loss: six equal blocks, with dropout and a buffer."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))
            for _ in range(6)
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * self.scale
        return nn.functional.mse_loss(self.norm(x), target)


def _from_config(**config: Any) -> Callable[[], ModelSource]:
    return lambda: source(dict(config))


def _tokens(length: int, number: int, *, shift: int = 0) -> Tensor:
    return (torch.arange(length) * 7 + number * 13 + shift) % (VOCABULARY - 4) + 3


def _causal(number: int) -> dict[str, Tensor]:
    ids = _tokens(20, number)
    labels = ids.clone()
    # Rows count different numbers of tokens, so that averaging the means of micro-batches would be caught.
    labels[: 3 * (number % 5)] = IGNORED
    return {"input_ids": ids, "labels": labels}


def _masked(number: int) -> dict[str, Tensor]:
    ids = _tokens(20, number)
    labels = torch.where(torch.arange(20) % (2 + number % 3) == 0, ids, IGNORED)
    attention = (torch.arange(20) < 19 - number % 4).long()
    return {"input_ids": ids, "attention_mask": attention, "labels": labels.where(attention.bool(), IGNORED)}


def _translated(number: int) -> dict[str, Tensor]:
    labels = _tokens(12, number, shift=5)
    labels[12 - number % 4 :] = IGNORED
    attention = (torch.arange(20) < 19 - number % 3).long()
    return {"input_ids": _tokens(20, number), "attention_mask": attention, "labels": labels}


def _vectors(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(10, 24, generator=generator), "target": torch.randn(10, 24, generator=generator)}


_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    # The defaults lie outside this vocabulary, which transformers warns about.
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CASES: dict[str, Case] = {
    "llama": Case(_from_config(model_type="llama", num_key_value_heads=2, tie_word_embeddings=True, **_LLAMA), _causal),
    "gpt2_with_dropout": Case(_from_config(**_GPT2), _causal),
    "qwen3": Case(_from_config(model_type="qwen3", num_key_value_heads=2, head_dim=16, **_LLAMA), _causal),
    "bert_masked_lm": Case(_from_config(model_type="bert", **_LLAMA), _masked),
    "t5": Case(
        _from_config(
            model_type="t5",
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        _translated,
    ),
    "plain_module": Case(lambda: source(Mlp()), _vectors),
}


def batch(case: Case, count: int, first: int = 0) -> dict[str, Tensor]:
    """``count`` rows of a case, stacked."""
    rows = [case.row(number) for number in range(first, first + count)]
    return (
        {name: torch.stack([row[name] for row in rows]) for name in case.row(0)}
        if count
        else {name: tensor.new_empty((0, *tensor.shape)) for name, tensor in case.row(0).items()}
    )


def without_dropout(module: nn.Module) -> nn.Module:
    """The module with every dropout probability at 0."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("attn_dropout", "dropout", "attention_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module
