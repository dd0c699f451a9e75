"""The fixtures are what the field reports say they are."""

from __future__ import annotations

import math

import torch
from cases.fixtures import LN4, BiasLM, ConstGrad, labelled

LOSS_OF_ONE = {"x": torch.ones(2)}


def test_the_models_of_the_reports_have_the_losses_and_gradients_that_they_name() -> None:
    model, row = BiasLM(), labelled(0, 1)
    loss = model(**{name: tensor.unsqueeze(0) for name, tensor in row.items()})["loss"]
    loss.backward()
    assert loss.item() == torch.tensor(math.log(4)).item() == torch.tensor(LN4).item()
    assert model.b.grad is not None
    assert model.b.grad.tolist() == [0.25, -0.75, 0.25, 0.25]
    constant = ConstGrad()
    constant(**LOSS_OF_ONE).backward()
    assert constant.w.grad is not None
    assert (constant(**LOSS_OF_ONE).item(), constant.w.grad.item()) == (0.0, 1.0)
