"""fp16 with a scaled loss: small gradients survive, an overflow costs nothing but its time, and the run says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from toys import CASES, Mlp, batch

from memtrain import recovery
from memtrain.job import AdamW, Cosine, Job, Optimizer
from memtrain.plan import Plan
from memtrain.precision import AutocastFp16
from memtrain.run import Run, prepare
from memtrain.schedule import learning_rate
from memtrain.trainer import Trainer

LLAMA = CASES["llama"]
ROWS = [LLAMA.row(number) for number in range(8)]


def run_of(precision: AutocastFp16, max_grad_norm: float | None = 1.0) -> Run:
    torch.manual_seed(0)
    job = Job(model="toy", global_batch_size=4, steps=9, precision=precision, max_grad_norm=max_grad_norm)
    return prepare(job, Plan(micro_batch_size=2), LLAMA.build().load())


def micro_batches() -> list[dict[str, torch.Tensor]]:
    return [batch(LLAMA, 2), batch(LLAMA, 2, first=2)]


def weights(run: Run) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in run.model.parameters()]


def test_the_norm_that_is_clipped_is_that_of_the_gradient_without_the_scale() -> None:
    norms = [run_of(AutocastFp16(initial_scale=scale)).step(micro_batches()).grad_norm for scale in (1.0, 1024.0)]
    # A power of two leaves mantissas alone, and what is too small for float16 is not what the norm is made of.
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=0)


def test_a_small_gradient_is_0_without_the_scale_and_there_with_it() -> None:
    found = []
    for scale in (1.0, 65536.0):
        torch.manual_seed(0)
        model = Mlp()
        run = prepare(
            Job(model="toy", global_batch_size=1, steps=9, precision=AutocastFp16(initial_scale=scale), max_grad_norm=None),
            Plan(micro_batch_size=1),
            model,
        )
        # Far below the smallest number of float16, 6e-8, once it reaches the last product.
        x = torch.randn(1, 4, 24, generator=torch.Generator().manual_seed(0))
        loss = run.objective.loss(run.model, {"x": x, "target": x.flip(-1)}) * 1e-8
        run.scaler.scale(loss).backward()
        gradient = model.blocks[0][0].weight.grad
        assert gradient is not None
        found.append(gradient.abs().max().item())
    assert found[0] == 0.0
    assert found[1] > 0.0


@pytest.mark.parametrize("rule", get_args(Optimizer))
def test_after_an_overflow_every_rule_goes_on_as_if_there_had_been_none(rule: type[Optimizer]) -> None:
    trained = []
    for scale in (2.0**32, 256.0):
        torch.manual_seed(0)
        precision = AutocastFp16(initial_scale=scale)
        job = Job(model="toy", global_batch_size=4, steps=9, precision=precision, optimizer=rule())
        run = prepare(job, Plan(micro_batch_size=4), LLAMA.build().load())
        tries = [recovery.step_until_finite(run, lambda: [batch(LLAMA, 4)])[1] for _ in range(2)]
        assert (tries[0] > 0) == (scale > 256.0)
        trained.append(weights(run))
    for after, never in zip(*trained, strict=True):
        # Another scale rounds other gradients to 0.
        torch.testing.assert_close(after, never, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_an_overflow_changes_neither_weights_nor_state_and_halves_the_scale(max_grad_norm: float | None) -> None:
    run = run_of(AutocastFp16(initial_scale=2.0**32), max_grad_norm)
    before = weights(run)
    run.step(micro_batches())
    assert run.scaler.get_scale() == 2.0**31
    assert all(map(torch.equal, before, weights(run)))
    assert not run.optimizer.state
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_the_scale_grows_after_so_many_steps() -> None:
    run = run_of(AutocastFp16(initial_scale=8.0, growth_interval=2))
    scales = []
    for _ in range(4):
        run.step(micro_batches())
        scales.append(run.scaler.get_scale())
    assert scales == [8.0, 16.0, 16.0, 32.0]


def test_the_scale_goes_on_where_it_was() -> None:
    first = run_of(AutocastFp16(initial_scale=8.0, growth_interval=2))
    first.step(micro_batches())
    second = run_of(AutocastFp16(initial_scale=8.0, growth_interval=2))
    second.scaler.load_state_dict(first.scaler.state_dict())
    second.step(micro_batches())
    assert second.scaler.get_scale() == 16.0


def trainer(precision: AutocastFp16, folder: Path | None = None) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        model=LLAMA.build().load(),
        data=ROWS,
        budget="64MiB",
        global_batch_size=4,
        steps=3,
        optimizer=AdamW(learning_rate=1e-3),
        schedule=Cosine(warmup_steps=2),
        precision=precision,
        run_dir=folder,
        progress=False,
    )


def test_an_overflow_is_tried_again_with_the_same_rows_and_moves_neither_step_nor_schedule(tmp_path: Path) -> None:
    found = trainer(AutocastFp16(initial_scale=2.0**24), tmp_path / "high")
    high, fitting = found.train().metrics, trainer(AutocastFp16(initial_scale=1024.0)).train().metrics
    assert high[0]["overflows"] > 0
    assert [row["step"] for row in high] == [1, 2, 3]
    assert [row["learning_rate"] for row in high] == [learning_rate(found.job, step) for step in range(3)]
    assert [row["overflows"] for row in fitting] == [0, 0, 0]
    assert [row["loss"] for row in high] == pytest.approx([row["loss"] for row in fitting], rel=1e-3)
    logged = [json.loads(line) for line in (tmp_path / "high" / "metrics.jsonl").read_text().splitlines()]
    assert logged[0]["loss_scale"] == 2.0 ** (24 - high[0]["overflows"])


def test_a_gradient_that_overflows_at_every_scale_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MOST_TRIES", 3)
    sentence = (
        "the gradient of step 1 is not finite at a loss scale of 5.36871e+08, after 3 tries; no weight was changed; the loss of each "
        "of its rows alone is finite, so the gradient overflows: look at rows ["
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        trainer(AutocastFp16(initial_scale=2.0**32)).train()
