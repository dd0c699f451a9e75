"""G3: a plan changes memory and speed, not what is trained: losses and weights are those of the plainest plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_parity import ELSEWHERE, UNSUITED, settings
from torch import nn
from toys import CASES, Case, batch, without_dropout

from memtrain.features.chunked_loss import refusal
from memtrain.job import AdamW, Constant, Job
from memtrain.plan import (
    POLICIES,
    Activations,
    ChunkedLogits,
    DuringBackward,
    Eager,
    EightBit,
    Foreach,
    OnHost,
    PagedEightBit,
    Plan,
    Recompute,
)
from memtrain.run import Run, prepare

ROWS = 6
JOB = Job(
    model="toy",
    global_batch_size=ROWS,
    steps=3,
    optimizer=AdamW(learning_rate=1e-2, weight_decay=0.1),
    schedule=Constant(),
    max_grad_norm=None,
)
PLAIN = Plan(micro_batch_size=ROWS)
# Everything that is not named here is exact to the bit.
ROUNDED = (ChunkedLogits, Eager, Foreach)
# 8-bit state changes the numbers beyond rounding, which is why a job has to allow it; by how much is held by
# tests/cpu/test_eight_bit_state.py.
APPROXIMATE = (EightBit, PagedEightBit)


def policies() -> Iterator[tuple[str, Any]]:
    """Each policy that leaves the numbers as they are, with its field."""
    for field, classes in POLICIES.items():
        for policy in classes:
            if policy not in APPROXIMATE:
                for chosen in settings(policy):
                    yield field, chosen


def cases() -> Iterator[Any]:
    """A policy and its field, skipped where no processor runs it."""
    for field, policy in policies():
        reason = ELSEWHERE.get(type(policy))
        yield pytest.param(field, policy, id=str(policy), marks=[pytest.mark.skip(reason)] if reason else [])


def trained(case: Case, job: Job, plan: Plan, *, dropout: bool = False) -> tuple[list[float], nn.Module]:
    """Losses of three steps on three different batches, and the model after them."""
    torch.manual_seed(0)
    model = case.build().load()
    if not dropout:
        without_dropout(model)
    run = prepare(job, plan, model)
    losses = [step(run, case, plan, first=number * ROWS) for number in range(3)]
    run.release()
    return losses, model


def step(run: Run, case: Case, plan: Plan, first: int) -> float:
    size = plan.micro_batch_size
    return run.step([batch(case, size, start) for start in range(first, first + ROWS, size)]).loss.item()


def assert_same(case: Case, job: Job, plan: Plan, *, exact: bool, plain: Plan = PLAIN) -> None:
    losses, model = trained(case, job, plan)
    plain_losses, plain_model = trained(case, job, plain)
    if exact:
        assert losses == plain_losses
    else:
        assert losses == pytest.approx(plain_losses, rel=1e-5)
    for (name, weight), same in zip(model.named_parameters(), plain_model.parameters(), strict=True):
        if exact:
            assert torch.equal(weight, same), name
        else:
            # AdamW divides by the root of the second moment, so a gradient near zero turns rounding into a part of a step.
            torch.testing.assert_close(weight, same, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("field", "policy"), list(cases()))
def test_a_policy_trains_the_same_numbers(name: str, field: str, policy: Any) -> None:
    case = CASES[name]
    if isinstance(policy, ChunkedLogits) and refusal(case.build().load()) is not None:
        pytest.skip(f"the loss of {name} is refused for chunking")
    if isinstance(policy, UNSUITED.get(name, ())):
        pytest.skip(f"no block of {name} has this part")
    plan = dataclasses.replace(PLAIN, **{field: policy})
    assert_same(case, JOB, plan, exact=not isinstance(policy, ROUNDED))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("size", "max_grad_norm", "changes"),
    [
        # A norm that each step exceeds, and one that none does.
        pytest.param(ROWS, 0.05, {}, id="clipped"),
        pytest.param(ROWS, 1e6, {}, id="not clipped"),
        pytest.param(2, None, {}, id="accumulated"),
        pytest.param(2, 0.05, {"activations": Recompute()}, id="accumulated, clipped and recomputed"),
        pytest.param(ROWS, None, {"update": DuringBackward()}, id="during backward"),
    ],
)
def test_an_update_on_the_host_is_that_on_the_device_to_the_bit(
    name: str, size: int, max_grad_norm: float | None, changes: dict[str, Any]
) -> None:
    plan = Plan(micro_batch_size=size, **changes)
    job = dataclasses.replace(JOB, max_grad_norm=max_grad_norm)
    assert_same(CASES[name], job, dataclasses.replace(plan, optimizer_state=OnHost()), exact=True, plain=plan)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_micro_batch_size_changes_rounding_only(name: str, size: int) -> None:
    assert_same(CASES[name], JOB, Plan(micro_batch_size=size), exact=False)


@pytest.mark.parametrize("name", ["gpt2_with_dropout", "t5"])
@pytest.mark.parametrize("activations", [policy for field, policy in policies() if field == "activations"], ids=str)
def test_recomputation_draws_the_same_dropout(name: str, activations: Activations) -> None:
    plan = dataclasses.replace(PLAIN, activations=activations)
    assert trained(CASES[name], JOB, plan, dropout=True)[0] == trained(CASES[name], JOB, PLAIN, dropout=True)[0]


def test_clipping_bounds_the_gradient_of_the_whole_batch() -> None:
    """The norm that is reported, and clipped by, is that of the accumulated gradient."""
    case, clipped = CASES["llama"], dataclasses.replace(JOB, max_grad_norm=0.1)
    norms = []
    for size in (ROWS, 2):
        torch.manual_seed(0)
        run = prepare(clipped, Plan(micro_batch_size=size), case.build().load())
        result = run.step([batch(case, size, first) for first in range(0, ROWS, size)])
        assert result.grad_norm is not None
        norms.append(result.grad_norm.item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0.1


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_mean_over_all_counted_items(name: str) -> None:
    """Against the model's own loss on one row at a time, weighted by what each row counts."""
    case = CASES[name]
    torch.manual_seed(0)
    model = without_dropout(case.build().load())
    run = prepare(JOB, Plan(micro_batch_size=2), model)
    total, counted = 0.0, 0
    with torch.no_grad():
        for number in range(ROWS):
            row = batch(case, 1, number)
            if name == "plain_module":
                items = 1
            elif name in ("llama", "gpt2_with_dropout", "qwen3"):
                items = int((row["labels"][:, 1:] != -100).sum())
            else:
                items = int((row["labels"] != -100).sum())
            output = model(**row)
            total += float(output if name == "plain_module" else output.loss) * items
            counted += items
    loss = run.step([batch(case, 2, first) for first in range(0, ROWS, 2)]).loss
    assert loss.item() == pytest.approx(total / counted, rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_evaluation_is_the_mean_over_all_counted_items_whatever_the_batch(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    run = prepare(JOB, PLAIN, case.build().load())
    whole = run.evaluate([batch(case, ROWS)])
    split = run.evaluate(batch(case, size, first) for first, size in ((0, 1), (1, 3), (4, 2)))
    assert split.item() == pytest.approx(whole.item(), rel=1e-5)
    assert run.model.training


@pytest.mark.parametrize(("field", "policy"), list(cases()))
def test_a_released_model_is_as_it_was_but_for_its_weights(field: str, policy: Any) -> None:
    case = CASES["llama"]
    torch.manual_seed(0)
    model = case.build().load()
    untouched = [set(module.__dict__) for module in model.modules()]
    run = prepare(JOB, dataclasses.replace(PLAIN, **{field: policy}), model)
    step(run, case, PLAIN, 0)
    run.release()
    for module, names in zip(model.modules(), untouched, strict=True):
        assert set(module.__dict__) == names
    weight = next(model.parameters())
    before = weight.detach().clone()
    model(**batch(case, 2)).loss.backward()
    assert torch.equal(weight, before), "a hook still updates the weights"
    assert weight.grad is not None
