"""The plans that are considered: all of them once, and only those that a constraint leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cards import CARD, CPU
from hypothesis import given
from hypothesis import strategies as st

from memtrain.job import Approximation, Job
from memtrain.plan import (
    POLICIES,
    Activations,
    AfterBackward,
    ChunkedLogits,
    DuringBackward,
    EightBit,
    Foreach,
    Fused,
    Keep,
    OnDevice,
    OnHost,
    OptimizerState,
    Paged,
    PagedEightBit,
    Plan,
    Recompute,
    RecomputeAttention,
    RecomputeFirst,
    RecomputeMlp,
    RecomputeSelective,
    WholeLogits,
)
from memtrain.planner.candidates import candidates
from memtrain.precision import Bf16, Fp32

JOB = Job(model="tiny", global_batch_size=6, steps=1)
ALLOWED = frozenset({Approximation.EIGHT_BIT_STATE})


@given(rows=st.integers(1, 24), blocks=st.integers(0, 9))
def test_no_plan_is_considered_twice(rows: int, blocks: int) -> None:
    plans = list(candidates(Job(model="tiny", global_batch_size=rows, steps=1), blocks, {}, CPU))
    assert len(set(plans)) == len(plans)


@pytest.mark.parametrize(
    ("blocks", "recomputed"),
    [
        (0, []),
        (1, [Recompute(), RecomputeSelective()]),
        (2, [Recompute(), RecomputeFirst(1), RecomputeSelective()]),
        (4, [Recompute(), RecomputeFirst(1), RecomputeFirst(2), RecomputeFirst(3), RecomputeSelective()]),
    ],
)
def test_all_blocks_are_recomputed_or_all_but_their_products_or_any_number_of_the_first(
    blocks: int, recomputed: list[Activations]
) -> None:
    found = dict.fromkeys(plan.activations for plan in candidates(JOB, blocks, {}, CPU))
    assert list(found) == [Keep(), *recomputed]


@pytest.mark.parametrize(
    ("parts", "recomputed"),
    [
        ((), set()),
        (("attention",), {RecomputeAttention()}),
        (("mlp",), {RecomputeMlp()}),
        (("attention", "mlp"), {RecomputeAttention(), RecomputeMlp()}),
    ],
)
def test_parts_of_blocks_are_recomputed_where_they_can_be_told(parts: tuple[str, ...], recomputed: set[Activations]) -> None:
    found = {plan.activations for plan in candidates(JOB, 1, {}, CPU, parts)}
    assert found == {Keep(), Recompute(), RecomputeSelective()} | recomputed


def test_every_divisor_of_the_batch_and_every_other_policy_is_considered() -> None:
    plans = list(candidates(JOB, 1, {}, CPU))
    assert {plan.micro_batch_size for plan in plans} == {1, 2, 3, 6}
    assert {plan.loss for plan in plans} == {WholeLogits(), ChunkedLogits()}
    assert {plan.update for plan in plans} == {AfterBackward(), DuringBackward()}
    assert len(plans) == 4 * 3 * 2 * 2


def test_foreach_updates_are_considered_only_where_asked_for() -> None:
    assert {plan.optimizer_kernel for plan in candidates(JOB, 1, {}, CPU)} == {Fused()}
    assert {plan.optimizer_kernel for plan in candidates(JOB, 1, {"optimizer_kernel": Foreach()}, CPU)} == {Foreach()}


@pytest.mark.parametrize(
    ("precision", "allow", "states"),
    [
        (Fp32(), frozenset(), [OnDevice(), OnHost(), Paged()]),
        (Bf16(), frozenset(), [OnDevice(), OnHost()]),
        (Fp32(), ALLOWED, [OnDevice(), OnHost(), Paged(), EightBit(), PagedEightBit()]),
        (Bf16(), ALLOWED, [OnDevice(), OnHost(), EightBit(), PagedEightBit()]),
    ],
)
def test_beside_a_card_the_state_may_lie_elsewhere_and_have_8_bits_where_the_job_allows(
    precision: Fp32 | Bf16, allow: frozenset[Approximation], states: list[OptimizerState]
) -> None:
    job = replace(JOB, precision=precision, allow=allow)
    assert list(dict.fromkeys(plan.optimizer_state for plan in candidates(job, 1, {}, CARD))) == states
    on_a_processor = [OnDevice(), EightBit()] if allow else [OnDevice()]
    assert list(dict.fromkeys(plan.optimizer_state for plan in candidates(job, 1, {}, CPU))) == on_a_processor
    plans = list(candidates(job, 1, {}, CARD))
    assert len(plans) == len(set(plans)) == 4 * 3 * 2 * 2 * len(states)


def test_a_state_that_is_asked_for_is_the_only_one_also_where_it_will_be_refused() -> None:
    assert {plan.optimizer_state for plan in candidates(JOB, 1, {"optimizer_state": EightBit()}, CPU)} == {EightBit()}


@pytest.mark.parametrize(
    "constraints",
    [
        {"micro_batch_size": 3},
        {"activations": Recompute(5)},
        {"loss": ChunkedLogits(7)},
        {"update": DuringBackward()},
        {"loss": WholeLogits(), "activations": Keep()},
    ],
)
def test_a_constraint_holds_in_every_plan_and_leaves_the_other_fields_free(constraints: dict[str, Any]) -> None:
    plans = list(candidates(JOB, 2, constraints, CPU))
    for field in ("micro_batch_size", *POLICIES):
        found = {getattr(plan, field) for plan in plans}
        free = {getattr(plan, field) for plan in candidates(JOB, 2, {}, CPU)}
        assert found == ({constraints[field]} if field in constraints else free)


def test_constraints_on_every_field_leave_one_plan() -> None:
    plan = Plan(micro_batch_size=2, activations=Recompute(2))
    fields = ("micro_batch_size", *POLICIES)
    assert list(candidates(JOB, 2, {field: getattr(plan, field) for field in fields}, CPU)) == [plan]
