"""The models and plans under which ``oom_injection.py`` lets memory run out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

LENGTH = 64
LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Blocks(nn.Module):
    """Two blocks between a table and a head; with batch norm, which counts each forward in its running statistics, or without."""

    def __init__(self, *, normalised: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 80), nn.BatchNorm1d(80) if normalised else nn.GELU(), nn.Linear(80, 64))
            for _ in range(2)
        )
        self.head = nn.Linear(64, 100)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a batch of shape (rows, length)."""
        x = self.table(input_ids).flatten(0, 1)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), labels.flatten())


@dataclass(frozen=True)
class Case:
    """A plan that a run begins with.

    Attributes:
        settings: what a Trainer is given beside what all have.
        model: makes the model.
        recovers: whether a smaller plan is left to go on with.
        copies: whether checkpoints are copied in memory first, as they are beside a card, and memory runs out in saving alone:
            a process that is forked later loses the thread that writes the copy.
        weights_within: by how much weights may differ.
        measured: whether the profiler watches the steps that it does in any run.
        stays: whether smaller micro-batches are left, for the failures that stay.
    """

    settings: Mapping[str, Any]
    model: Callable[[], Any] = Blocks
    recovers: bool = True
    copies: bool = False
    weights_within: float = 1e-5
    measured: bool = False
    stays: bool = False

    @property
    def loads_again(self) -> bool:
        """Whether the model can be had again as it was at first."""
        return self.model is not Blocks


def _plan(size: int, **fields: Any) -> dict[str, Any]:
    return {"constraints": {"micro_batch_size": size, **fields}}


def cases() -> dict[str, Case]:
    """The plans by name."""
    from memtrain.job import Approximation
    from memtrain.method import Lora

    eight_bit = {**_plan(4, optimizer_state="eight_bit"), "allow": (Approximation.EIGHT_BIT_STATE,)}
    chunks = {"policy": "chunked_logits", "chunk_tokens": 256}
    return {
        "fused update": Case(_plan(8, optimizer_kernel="fused"), measured=True, stays=True),
        "foreach update": Case(_plan(8, optimizer_kernel="foreach")),
        "checkpoints copied first": Case(_plan(8), copies=True),
        "two micro-batches": Case(_plan(4), stays=True),
        "recomputed": Case(_plan(8, activations="recompute")),
        "during backward": Case({"constraints": {"update": "during_backward"}, "max_grad_norm": None}),
        # Rounding may turn a state to the next of its 256 values.
        "8-bit state": Case(eight_bit, weights_within=1e-3),
        "batch norm": Case({}, lambda: Blocks(normalised=True), recovers=False),
        "logits in chunks": Case(_plan(8, loss=chunks), lambda: dict(LLAMA)),
        "adapters": Case({**_plan(8), "method": Lora(rank=2)}, lambda: dict(LLAMA)),
    }
