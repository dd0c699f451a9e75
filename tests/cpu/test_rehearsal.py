"""Two steps at a learning rate of 0 before the first leave everything as it was, whatever the plan and the rule (rule 7)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_parity import cases as plans_and_jobs
from test_state import optimizers, started, step, weights

from memtrain.job import Job
from memtrain.plan import Plan
from memtrain.precision import AutocastFp16, Bf16, Bf16Master, Rounding
from memtrain.run import Run
from memtrain.state import persistent_buffers, remember


def rehearse(run: Run, job: Job, plan: Plan) -> None:
    put_back = remember(run, persistent_buffers(run.model))
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(2):
        step(run, job, plan, 0)
    run.optimizer.state.clear()
    put_back()


def assert_changes_nothing(job: Job, plan: Plan) -> None:
    plain, rehearsed = started(job, plan), started(job, plan)
    results = []
    for run in (plain, rehearsed):
        torch.manual_seed(5)
        if run is rehearsed:
            rehearse(run, job, plan)
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-2
        results.append([step(run, job, plan, number) for number in range(2)])
    assert results[0] == results[1]
    for path, weight in weights(plain.model).items():
        assert torch.equal(weights(rehearsed.model)[path], weight), path


@pytest.mark.parametrize(("plan", "job"), list(plans_and_jobs()))
def test_with_every_plan(plan: Plan, job: Job) -> None:
    if plan.ranks > 1:
        pytest.skip("takes several processes")
    assert_changes_nothing(replace(job, steps=4), plan)


@pytest.mark.parametrize("optimizer", list(optimizers()))
def test_with_every_optimizer(optimizer: Any) -> None:
    assert_changes_nothing(Job(model="toy", global_batch_size=4, steps=4, optimizer=optimizer), Plan(micro_batch_size=2))


@pytest.mark.parametrize(
    "precision", [AutocastFp16(initial_scale=64.0, growth_interval=2), Bf16Master(), *map(Bf16, Rounding)], ids=str
)
def test_in_every_precision_with_state_of_its_own(precision: Any) -> None:
    assert_changes_nothing(Job(model="toy", global_batch_size=4, steps=4, precision=precision), Plan(micro_batch_size=2))
