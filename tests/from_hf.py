"""A model, rows and arguments as people bring them from transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

ROWS = [{"x": [1.0, 2.0], "label": 0, "source": "a"}] * 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(x), labels)


def arguments(**fields: Any) -> TrainingArguments:
    return TrainingArguments(**{"output_dir": "out", "use_cpu": True, **fields})


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=24,
        )
    )
