"""Field reports about accumulating gradients: what the loss is divided by, and when the schedule moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.fixtures import (
    LN4,
    BiasLM,
    ConstGrad,
    UnshiftedBiasLM,
    column,
    factors,
    labelled,
    run,
    weights,
)
from torch import Tensor, nn

from memtrain.data.rows import IGNORED
from memtrain.job import Job, Linear, Sgd
from memtrain.models.objective import objective
from memtrain.plan import Plan
from memtrain.run import prepare

TWO_ROWS = [labelled(0, 1, 2, 3, 0), labelled(0, 1, 2, 3, 0)]


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# ---------------------------------------------------------------------- ga-03


@pytest.mark.parametrize(
    ("model", "rows", "denominator"),
    [
        (BiasLM, TWO_ROWS, 8),
        (BiasLM, [labelled(0, 1, 2, 3, 0, 1, 2, 3, 0, 1)], 9),
        (UnshiftedBiasLM, [labelled(0, 1, 2, 3, 0, 1, 2, 3, 0, 1)], 10),
    ],
)
def test_the_loss_is_a_mean_over_the_labels_that_are_left_after_the_shift(
    model: type[BiasLM], rows: list[dict[str, Tensor]], denominator: int
) -> None:
    """ga-03: 8, 9 and 10 counted labels; over all ten labels the first loss would be 1.109035."""
    assert objective(model()).count(stacked(rows)).item() == denominator
    job = Job(model="BiasLM", global_batch_size=len(rows), steps=1, max_grad_norm=None)
    made = prepare(job, Plan(micro_batch_size=1), model())
    loss = made.forward_backward([stacked([row]) for row in rows])
    assert loss.item() == pytest.approx(LN4, abs=1e-6)
    # The mean of 0.25 - onehot(y) over the counted labels y.
    counted = [label for row in rows for label in row["labels"].tolist()[1 if model is BiasLM else 0 :]]
    expected = [0.25 - counted.count(y) / denominator for y in range(4)]
    assert made.model.b.grad.tolist() == pytest.approx(expected, abs=1e-6)  # type: ignore[union-attr]


def test_short_rows_weigh_by_the_labels_that_they_count_after_the_shift() -> None:
    """ga-03: of four counted ones and one that counts once, where five and two before the shift would weigh 5/7 and 2/7."""
    long, short = labelled(0, 1, 1, 1, 1), labelled(0, 2, IGNORED, IGNORED, IGNORED)
    _, made = run(BiasLM(), [long, short], micro_batch_size=1, global_batch_size=2, steps=1)
    # b moves by -(0.25 - 4/5 onehot(1) - 1/5 onehot(2)).
    assert weights(made)["b"].tolist() == pytest.approx([-0.25, 0.55, -0.05, -0.25], abs=1e-6)


class ShiftsItself(nn.Module):
    """BiasLM as people write it, of which nothing says that it shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.b.expand(*input_ids.shape, 4)[:, :-1]
        return nn.functional.cross_entropy(logits.reshape(-1, 4), labels[:, 1:].reshape(-1), ignore_index=IGNORED)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_module_that_shifts_its_labels_itself_needs_a_first_label_that_does_not_count(micro_batch_size: int) -> None:
    """ga-03: then four and one are counted, and micro-batches of one row train what one of both does."""
    rows = [labelled(IGNORED, 1, 1, 1, 1), labelled(IGNORED, 2, IGNORED, IGNORED, IGNORED)]
    _, made = run(ShiftsItself(), rows, micro_batch_size=micro_batch_size, global_batch_size=2, steps=1)
    assert weights(made)["b"].tolist() == pytest.approx([-0.25, 0.55, -0.05, -0.25], abs=1e-6)


# ---------------------------------------------------------------------- ga-05


def test_the_schedule_moves_once_per_step_however_many_micro_batches_it_has() -> None:
    """ga-05: 12 micro-batches, 4 to a step, and a line from 0.3; per micro-batch it would be at 0 after the first step."""
    given: dict[str, Any] = {"optimizer": Sgd(learning_rate=0.3, momentum=0.0), "schedule": Linear()}
    result, made = run(ConstGrad(), factors(*[1.0] * 12), micro_batch_size=1, global_batch_size=4, epochs=1, **given)
    assert column(result, "learning_rate") == pytest.approx([0.3, 0.2, 0.1], abs=1e-12)
    # What each step has really moved by.
    assert weights(made)["w"].item() == pytest.approx(-0.6, abs=1e-6)
