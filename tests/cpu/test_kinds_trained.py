"""Models of every kind, trained by a Trainer: each step is that of the whole batch, written by hand, and takes what was predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_model_kinds import CLIP, IDS, IMAGES, MIXTRAL, PIXELS, SPECIAL, TAGS, TINY
from torch import Tensor, nn

from memtrain import Constant, Trainer
from memtrain.data.rows import IGNORED, Batch
from memtrain.job import Loss, Sgd
from memtrain.models.build import source
from memtrain.plan import Activations, Keep, Plan, Recompute, to_dict

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
CLASSES = torch.tensor([0, 1, 1, 0])


class Shared(nn.Module):
    """One block that is called twice, and a head that is the embedding; it returns its loss and its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(32, 8), nn.Linear(8, 8)
        self.again = self.block
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.again(self.block(self.embedding(input_ids)).tanh()))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Logits(nn.Module):
    """Returns its logits alone, for which there is a loss of the user's; it has no blocks that could be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(input_ids))
        return out


def tag_loss(output: Tensor, rows: Batch) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), rows["labels"].flatten(), ignore_index=IGNORED)


def without_recomputation() -> nn.Module:
    model: Any = language("llama")
    model.supports_gradient_checkpointing = False
    return model


def language(kind: str, task: str | None = None, **settings: Any) -> nn.Module:
    return source({"model_type": kind, **TINY, **SPECIAL, **settings}, task=task).build()


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model, the four rows of its batch, and how they are cut.

    Attributes:
        count: the counted items of each row.
    """

    build: Callable[[], nn.Module]
    rows: Batch
    count: tuple[int, int, int, int]
    micro_batch_size: int = 2
    loss: Loss | None = None
    activations: Activations = dataclasses.field(default_factory=Keep)


TEXT = {"input_ids": IDS, "labels": IDS.where(IDS != 8, IGNORED)}
KINDS = {
    "causal": Kind(lambda: language("llama"), TEXT, (2, 1, 2, 2)),
    "tied": Kind(lambda: language("llama", tie_word_embeddings=True), TEXT, (2, 1, 2, 2)),
    "masked": Kind(
        lambda: language("bert", **NO_DROPOUT), {"input_ids": IDS, "labels": IDS.where(IDS > 4, IGNORED)}, (1, 3, 1, 3)
    ),
    "seq2seq": Kind(lambda: source({"model_type": "t5", "vocab_size": 32, **T5}).build(), TEXT, (3, 2, 3, 3)),
    "classes": Kind(
        lambda: language("bert", "sequence_classification", **NO_DROPOUT), {"input_ids": IDS, "labels": CLASSES}, (1, 1, 1, 1)
    ),
    "tags": Kind(lambda: language("bert", "token_classification", **NO_DROPOUT), {"input_ids": IDS, "labels": TAGS}, (2, 1, 3, 2)),
    "images": Kind(
        lambda: source({"model_type": "vit", **IMAGES}, task="image_classification").build(), {**PIXELS, "labels": CLASSES}, (1, 1, 1, 1)
    ),
    "experts": Kind(lambda: language("mixtral", **MIXTRAL), TEXT, (2, 1, 2, 2)),
    "balanced experts": Kind(
        lambda: language("mixtral", **MIXTRAL, output_router_logits=True, router_aux_loss_coef=0.5), TEXT, (2, 1, 2, 2), micro_batch_size=4
    ),
    "pairs": Kind(
        lambda: source({"model_type": "clip", **CLIP, "architectures": ["CLIPModel"]}).build(),
        {"input_ids": IDS, **PIXELS},
        (1, 1, 1, 1),
        micro_batch_size=4,
    ),
    "shared": Kind(Shared, {"input_ids": IDS, "labels": IDS.where(IDS != 8, IGNORED)}, (3, 2, 3, 3)),
    "without recomputation of its own": Kind(without_recomputation, TEXT, (2, 1, 2, 2), activations=Recompute()),
    "no loss": Kind(Logits, {"input_ids": IDS, "labels": TAGS}, (2, 1, 3, 2), loss=tag_loss),
}  # fmt: skip
STEPS, RATE = 2, 0.1


def by_hand(model: nn.Module, kind: Kind) -> list[float]:
    """The loss of the whole batch before each step and after the last, which are steps of gradient descent."""
    losses = []
    asked = {"return_loss": True} if "labels" not in kind.rows else {}
    for step in range(STEPS + 1):
        if kind.loss is None:
            output: Any = model(**kind.rows, **asked)
            loss = output[0] if isinstance(output, tuple) else output.loss
        else:
            loss = kind.loss(model(kind.rows["input_ids"]), kind.rows)
        losses.append(loss.item())
        if step == STEPS:
            break
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= RATE * (0 if weight.grad is None else weight.grad)
    return losses


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_model_trains_as_the_whole_batch_does(name: str) -> None:
    kind = KINDS[name]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind.build().train())
    expected = by_hand(models[1], kind)
    assert expected[-1] < expected[0]
    rows = [{key: tensor[row] for key, tensor in kind.rows.items()} for row in range(4)]
    trainer = Trainer(
        model=models[0],
        data=rows,
        eval_data=rows,
        loss=kind.loss,
        budget="64MiB",
        global_batch_size=4,
        steps=STEPS,
        optimizer=Sgd(learning_rate=RATE, momentum=0.0),
        schedule=Constant(),
        max_grad_norm=None,
        constraints=to_dict(Plan(micro_batch_size=kind.micro_batch_size, activations=kind.activations)),
        progress=False,
    )
    result = trainer.train()
    losses = [row["loss"] for row in result.metrics if "loss" in row]
    assert [*losses, trainer.evaluate()["eval_loss"]] == pytest.approx(expected, rel=1e-5)
    assert result.evaluations[0][1] == pytest.approx(expected[0], rel=1e-5)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    comparison = result.comparison
    # Scalars are made below dispatch, where only the measurement sees them; and of a convolution as small as this one oneDNN's own
    # buffers count, which depend on the processor.
    limit = 1024 if name == "images" else 128
    assert abs(comparison.measured.peak_allocated_bytes - comparison.predicted.peak_allocated_bytes) <= limit
