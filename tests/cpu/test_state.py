"""A run that is stopped between two steps, written, read and put into a new run trains what it would have trained."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy
import pytest
import torch
from test_parity import cases as plans_and_jobs
from torch import Tensor, nn
from toys import CASES, batch

from memtrain.job import Approximation, Job, Optimizer
from memtrain.method import Lora, Nf4
from memtrain.models.load import load_model
from memtrain.plan import EightBit, OnHost, Plan
from memtrain.precision import AutocastFp16, Bf16, Bf16Master, Rounding
from memtrain.run import Run, prepare
from memtrain.state import OtherRun, restore_, state_of

# It drops, so that a generator that was not put back would be seen, and its tables are large enough for 8 bits.
CASE = CASES["gpt2_with_dropout"]


def started(job: Job, plan: Plan, seed: int = 0) -> Run:
    torch.manual_seed(seed)
    return prepare(job, plan, load_model(CASE.build(), job))


def step(run: Run, job: Job, plan: Plan, number: int) -> float:
    size = plan.micro_batch_size
    starts = range(number * job.global_batch_size, (number + 1) * job.global_batch_size, size)
    return run.step([batch(CASE, size, start) for start in starts]).loss.item()


def read_back(run: Run) -> tuple[dict[str, list[tuple[str, Tensor]]], Any]:
    """The state as it is after it was written: copies, and facts through JSON."""
    state = state_of(run)
    copies = {group: [(name, one.detach().cpu().clone()) for name, one in held.items()] for group, held in state.groups.items()}
    return copies, json.loads(json.dumps(state.facts))


def weights(model: nn.Module) -> Mapping[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_goes_on(job: Job, plan: Plan, *, seed: int = 1) -> None:
    """Two steps, another run that takes over, and two more of each are the same to the bit."""
    undisturbed = started(job, plan)
    for number in range(2):
        step(undisturbed, job, plan, number)
    groups, facts = read_back(undisturbed)
    expected = [step(undisturbed, job, plan, number) for number in (2, 3)]
    # Frozen weights are the same from the start; what trains is not.
    resumed = started(job, plan, 0 if isinstance(job.method, Lora) else seed)
    torch.manual_seed(99)
    restore_(resumed, groups, facts, state_on_host=isinstance(plan.optimizer_state, OnHost))
    assert [step(resumed, job, plan, number) for number in (2, 3)] == expected
    for path, weight in weights(undisturbed.model).items():
        assert torch.equal(weights(resumed.model)[path], weight), path


@pytest.mark.parametrize(("plan", "job"), list(plans_and_jobs()))
def test_with_every_plan_a_run_goes_on_as_if_undisturbed(plan: Plan, job: Job) -> None:
    if plan.ranks > 1:
        pytest.skip("takes several processes")
    assert_goes_on(replace(job, steps=4), plan)


def optimizers() -> Iterator[Any]:
    for rule in get_args(Optimizer):
        yield pytest.param(rule(), id=rule.__name__)


@pytest.mark.parametrize("optimizer", list(optimizers()))
def test_with_every_optimizer_a_run_goes_on(optimizer: Any) -> None:
    assert_goes_on(Job(model="toy", global_batch_size=4, steps=4, optimizer=optimizer), Plan(micro_batch_size=2))


@pytest.mark.parametrize(
    "precision", [AutocastFp16(initial_scale=64.0, growth_interval=2), Bf16Master(), *map(Bf16, Rounding)], ids=str
)
def test_in_every_precision_with_state_of_its_own_a_run_goes_on(precision: Any) -> None:
    assert_goes_on(Job(model="toy", global_batch_size=4, steps=4, precision=precision), Plan(micro_batch_size=2))


@pytest.mark.parametrize(
    "job",
    [
        Job(model="toy", global_batch_size=4, steps=4, method=Lora(rank=2, dropout=0.1)),
        Job(model="toy", global_batch_size=4, steps=4, method=Lora(rank=2), quantization=Nf4()),
    ],
    ids=["adapters", "adapters on packed weights"],
)
def test_adapters_go_on_and_frozen_weights_are_not_written(job: Job) -> None:
    plan = Plan(micro_batch_size=2)
    assert_goes_on(job, plan)
    assert all("lora_" in name for name in state_of(started(job, plan)).groups["model"])


def test_tied_weights_are_written_once() -> None:
    job = Job(model="toy", global_batch_size=4, steps=4)
    run = started(job, Plan(micro_batch_size=4))
    assert len(state_of(run).groups["model"]) == len({id(one) for one in run.model.parameters()})


def test_another_micro_batch_and_another_place_of_the_state_go_on_up_to_rounding() -> None:
    job = Job(model="toy", global_batch_size=4, steps=4)
    case_without_dropout = CASES["llama"]

    def begun(plan: Plan) -> Run:
        torch.manual_seed(0)
        return prepare(job, plan, load_model(case_without_dropout.build(), job))

    def stepped(run: Run, plan: Plan, number: int) -> float:
        starts = range(4 * number, 4 * number + 4, plan.micro_batch_size)
        return run.step([batch(case_without_dropout, plan.micro_batch_size, start) for start in starts]).loss.item()

    whole, halves = Plan(micro_batch_size=4), Plan(micro_batch_size=2, optimizer_state=OnHost())
    undisturbed = begun(whole)
    for number in (0, 1):
        stepped(undisturbed, whole, number)
    groups, facts = read_back(undisturbed)
    resumed = begun(halves)
    restore_(resumed, groups, facts, state_on_host=True)
    for number in (2, 3):
        assert stepped(resumed, halves, number) == pytest.approx(stepped(undisturbed, whole, number), rel=1e-6)


def test_the_scale_of_the_loss_goes_on() -> None:
    job = Job(model="toy", global_batch_size=4, steps=4, precision=AutocastFp16(initial_scale=64.0, growth_interval=2))
    plan = Plan(micro_batch_size=4)
    run = started(job, plan)
    for number in range(3):
        step(run, job, plan, number)
    groups, facts = read_back(run)
    resumed = started(job, plan)
    restore_(resumed, groups, facts)
    assert resumed.scaler.get_scale() == run.scaler.get_scale() == 128.0
    assert resumed.scaler.state_dict() == run.scaler.state_dict()


def test_generators_of_python_and_numpy_go_on() -> None:
    job, plan = Job(model="toy", global_batch_size=4, steps=4), Plan(micro_batch_size=4)
    groups, facts = read_back(started(job, plan))
    expected = random.random(), numpy.random.random()
    random.seed(5)
    numpy.random.seed(5)
    restore_(started(job, plan), groups, facts)
    assert (random.random(), numpy.random.random()) == expected


def test_what_another_run_wrote_is_refused_with_what_differs() -> None:
    job, plan = Job(model="toy", global_batch_size=4, steps=4), Plan(micro_batch_size=4)
    run = started(job, plan)
    step(run, job, plan, 0)
    groups, facts = read_back(run)

    def restored(changed: Mapping[str, Any], other: Any = facts, into: Run | None = None) -> None:
        restore_(into or started(job, plan), {**groups, **changed}, other)

    name, tensor = groups["model"][0]
    with pytest.raises(OtherRun, match=rf"{name} was written as \(1,\) torch.float32, and .* is here: give the same model"):
        restored({"model": [(name, torch.zeros(1))]})
    with pytest.raises(OtherRun, match=r"more was written as .*, and no such tensor is here: give the same model"):
        restored({"model": [*groups["model"], ("more", tensor)]})
    with pytest.raises(OtherRun, match="is here and was not written: give the same model"):
        restored({"model": groups["model"][1:]})
    with pytest.raises(OtherRun, match="state was written of other, and the model has no such weight: give the same model"):
        restored({"optimizer": [("other/exp_avg", tensor)]})
    eight = replace(plan, optimizer_state=EightBit())
    allowing = replace(job, allow=frozenset(Approximation))
    with pytest.raises(OtherRun, match="written by torch AdamW, and this plan makes bitsandbytes AdamW in 8 bits: resume with"):
        restored({}, into=started(allowing, eight))
    with pytest.raises(
        OtherRun, match="frozen weights are not those that were trained beside: give the model that the run began"
    ):
        restored({}, {**facts, "frozen": "another"})
