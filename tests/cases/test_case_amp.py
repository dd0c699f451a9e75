"""Field reports about scaled losses and numbers that are not finite: what is left out, clipped and logged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.fixtures import NAN, ConstGrad, column, factors, in_order, run, trainer, weights
from torch import Tensor, nn

from memtrain.job import AdamW, Linear
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Fp32

FP16 = AutocastFp16(initial_scale=65536.0)
TEN_STEPS: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 1, "epochs": 1, "precision": FP16}
LINE = [1 - step / 10 for step in range(10)]
"""A rate of 1.0 that falls by 0.1 a step."""


class HalfProduct(nn.Module):
    """One weight of 1.0 in a product of half precision: its gradient there is the loss scale times the row's factor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        product = self.layer(torch.ones_like(x).unsqueeze(-1))
        return (product.float().squeeze(-1) * x).mean()


# ---------------------------------------------------------------------- amp-01


def test_a_gradient_that_overflows_costs_neither_the_step_nor_a_step_of_the_schedule() -> None:
    """amp-01: 65536 is no number of float16, and 32768 is, at which the same rows are taken again."""
    rows = in_order(factors(1.0, *[2.0**-10] * 9))
    result, made = run(HalfProduct(), rows, schedule=Linear(), **TEN_STEPS)
    assert column(result, "learning_rate") == pytest.approx(LINE, abs=1e-12)
    assert column(result, "overflows") == [1, *[0] * 9]
    assert column(result, "loss_scale") == [32768] * 10
    assert not any("skipped" in row for row in result.metrics)
    # All ten updates were made, each at its own rate: 1 - 1 x 1 - 4.5 / 1024. Left out, the first would give 0.9956.
    assert weights(made)["layer.weight"].item() == pytest.approx(-4.5 / 1024, abs=1e-7)


def test_a_loss_that_is_infinite_is_left_out_with_all_that_belongs_to_it(caplog: pytest.LogCaptureFixture) -> None:
    """amp-01: the step is counted and told; weights, state and the scale, in which the fault does not lie, are as before."""
    given: dict[str, Any] = {**TEN_STEPS, "optimizer": AdamW(learning_rate=0.1), "on_not_finite": "skip"}
    rows = in_order(factors(math.inf, *[0.001] * 9))
    result, made = run(ConstGrad(1.0), rows, **given)
    # The state was not touched either: Adam counts nine steps, and its moments are those of nine gradients.
    _, without = run(ConstGrad(1.0), factors(*[0.001] * 9), **given)
    assert torch.equal(made.model.get_parameter("w"), without.model.get_parameter("w"))
    assert [row.get("skipped") for row in result.metrics] == [1, *[None] * 9]
    assert column(result, "loss")[0] == math.inf
    assert column(result, "loss_scale") == [65536] * 10
    assert "1 of 10 steps were left out, since they were not finite." in caplog.text


def test_a_step_that_is_left_out_takes_its_place_in_the_schedule() -> None:
    """amp-01: the rate follows the number of the step, so that it reaches its end with the run whatever is left out."""
    rows = in_order(factors(math.inf, *[0.001] * 9))
    result, made = run(ConstGrad(1.0), rows, schedule=Linear(), on_not_finite="skip", **TEN_STEPS)
    assert column(result, "learning_rate") == pytest.approx(LINE, abs=1e-12)
    assert weights(made)["w"].item() == pytest.approx(1 - 0.001 * sum(LINE[1:]), abs=1e-6)


# ---------------------------------------------------------------------- amp-02


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(("gradient", "moved"), [(0.5, 0.5), (4.0, 1.0)])
def test_a_gradient_is_clipped_and_logged_as_it_is_without_the_scale(gradient: float, moved: float, accumulated: int) -> None:
    """amp-02: with the scale the norm would be 32768, and the weight would move by 1.5e-05."""
    given = {**TEN_STEPS, "global_batch_size": accumulated, "max_grad_norm": 1.0}
    result, made = run(ConstGrad(), factors(*[gradient] * accumulated), **given)
    assert column(result, "grad_norm") == [gradient]
    assert weights(made)["w"].item() == pytest.approx(-moved, abs=1e-5)


# ---------------------------------------------------------------------- amp-04

NOT_FINITE_IN_STEP_2 = (1.0, NAN, 1.0, 1.0)


@pytest.mark.parametrize("precision", [Fp32(), AutocastBf16(), Bf16()], ids=str)
def test_a_loss_that_is_no_number_is_logged_as_such_and_changes_no_weight(precision: Any, tmp_path: Path) -> None:
    """amp-04, setting A: w is -1, -1, -2, -3 after the four updates."""
    model, after = in_type(precision), list[float]()
    result, _ = run(
        model,
        in_order(factors(*NOT_FINITE_IN_STEP_2)),
        **{**TEN_STEPS, "precision": precision},
        on_not_finite="skip",
        run_dir=tmp_path / "run",
        callbacks=[lambda record: after.append(model.w.item()) if record.event == "step" else None],
    )
    assert after == [-1, -1, -2, -3]
    # The loss is the weight before the step.
    assert [str(loss) for loss in column(result, "loss")] == ["0.0", "nan", "-1.0", "-2.0"]
    assert [row.get("skipped") for row in result.metrics] == [None, 1, None, None]
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # JSON knows no NaN.
    assert [row["loss"] for row in written] == [0.0, None, -1.0, -2.0]


@pytest.mark.parametrize("precision", [Fp32(), AutocastBf16(), Bf16()], ids=str)
def test_a_loss_that_is_no_number_ends_the_run_before_it_changes_a_weight(precision: Any) -> None:
    """amp-04, setting B, which is the default where the gradient is clipped."""
    model = in_type(precision)
    made = trainer(model, in_order(factors(*NOT_FINITE_IN_STEP_2)), **{**TEN_STEPS, "precision": precision}, max_grad_norm=9.0)
    with pytest.raises(ValueError, match=r"^the loss of step 2 is nan; no weight was changed; the loss of row \d alone"):
        made.train()
    assert model.w.item() == -1


def in_type(precision: Any) -> ConstGrad:
    return ConstGrad().to(torch.bfloat16 if isinstance(precision, Bf16) else torch.float32)
