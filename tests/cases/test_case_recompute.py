"""Field reports about recomputing activations: under dropout the second forward is the first one again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.fixtures import tiny_llama, tokens
from torch import Tensor, nn

from memtrain.job import Job
from memtrain.method import Lora
from memtrain.models.load import load_model
from memtrain.plan import Activations, Keep, Plan, Recompute, RecomputeFirst, RecomputeSelective
from memtrain.run import prepare


class Block(nn.Module):
    """A linear layer and dropout of one half."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(self.layer(x))
        return dropped


class Blocks(nn.Module):
    """Two of them, since what is recomputed are blocks that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def blocks() -> tuple[Job, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Job(model="Blocks", global_batch_size=4, steps=1, max_grad_norm=None), Blocks(), {"x": torch.randn(4, 16)}


def adapted() -> tuple[Job, nn.Module, dict[str, Tensor]]:
    """A language model with dropout of one half in its attention and in its adapters."""
    lora = Lora(rank=4, dropout=0.5, target_modules=("q_proj", "v_proj"))
    job = Job(model="TinyLlama", global_batch_size=1, steps=1, max_grad_norm=None, method=lora)
    torch.manual_seed(0)
    model = load_model(tiny_llama(attention_dropout=0.5), job)
    for path, parameter in model.named_parameters():
        if "lora_B" in path:
            # At zero they would give the other half of the adapters no gradient.
            nn.init.normal_(parameter)
    return job, model, {name: tensor.unsqueeze(0) for name, tensor in tokens(16).items()}


def stepped(made: Any, activations: Activations) -> tuple[dict[str, Tensor], Tensor, float]:
    """Gradients, the state of the generator afterwards, and the loss."""
    job, model, batch = made()
    run = prepare(job, Plan(micro_batch_size=job.global_batch_size, activations=activations), model)
    torch.manual_seed(1)
    loss = run.forward_backward([batch]).item()
    gradients = {path: one.grad.clone() for path, one in model.named_parameters() if one.grad is not None}
    return gradients, torch.get_rng_state(), loss


@pytest.mark.parametrize("activations", [Recompute(), RecomputeFirst(1), RecomputeSelective()], ids=str)
@pytest.mark.parametrize("made", [blocks, adapted])
def test_a_recomputed_block_drops_what_it_has_dropped_before(made: Any, activations: Activations) -> None:
    """gc-02: with other masks the gradient is that of another loss, of norm 69.284 where it is 112.719."""
    kept, state, loss = stepped(made, Keep())
    again, state_after, loss_again = stepped(made, activations)
    assert loss_again == loss
    assert kept.keys() == again.keys()
    assert len(kept) == (4 if made is blocks else 8)
    for path, gradient in kept.items():
        assert gradient.norm() > 0, path
        assert torch.equal(again[path], gradient), path
    # What comes after the step draws the same numbers.
    assert torch.equal(state_after, state)


def test_other_masks_would_be_noticed() -> None:
    """gc-02: the gradients that are compared depend on the masks."""
    kept, _, _ = stepped(blocks, Keep())
    job, model, batch = blocks()
    run = prepare(job, Plan(micro_batch_size=4), model)
    torch.manual_seed(2)
    run.forward_backward([batch])
    assert not torch.equal(model.get_parameter("blocks.0.layer.weight").grad, kept["blocks.0.layer.weight"])  # type: ignore[arg-type]
