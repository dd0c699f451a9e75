"""The choice beside a card: a budget on two sides, plans left out by what they take at the least, and what would help."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import Told, per_row, possible, seconds

from memtrain.check import PlanRefused
from memtrain.device import Cuda
from memtrain.job import Approximation, Budget, Job, Limit
from memtrain.memory.footprint import Footprint
from memtrain.plan import (
    AfterBackward,
    ChunkedLogits,
    EightBit,
    Keep,
    OnDevice,
    OnHost,
    Paged,
    PagedEightBit,
    Plan,
    Recompute,
    WholeLogits,
)
from memtrain.planner.candidates import candidates
from memtrain.planner.choice import NoPlanFits
from memtrain.planner.search import choose
from memtrain.trace.event import Trace

CARD = Cuda(
    name="told",
    compute_capability=(8, 0),
    multiprocessors=1,
    usable_bytes=2,
    context_bytes=1,
    flops_per_second={"float32": 1.0},
    bytes_per_second=1.0,
    operator_seconds=1.0,
    link_bytes_per_second=1.0,
    host_bytes_per_second=1.0,
)
JOB = Job(model="tiny", global_batch_size=4, steps=1, max_grad_norm=None)
PLAIN = {"activations": Keep(), "loss": WholeLogits(), "update": AfterBackward()}
MIB = 1 << 20


def budget(device: int, host: int | None = None) -> Budget:
    limits = () if host is None else (Limit("asked for", host),)
    return Budget(limits=(Limit("asked for", device),), host_limits=limits)


def fits(predictor: Told, plan: Plan, asked: Budget) -> bool:
    on_host = asked.host_bytes is None or predictor.on_host(plan) <= asked.host_bytes
    return predictor.takes(plan) <= asked.device_bytes and on_host


@st.composite
def predictors(draw: st.DrawFn) -> Told:
    """Bytes that are random between policies and grow with the micro-batch, on the host those of state that is not beside."""
    allow = draw(st.sampled_from([frozenset(), frozenset(Approximation)]))
    asked = replace(JOB, global_batch_size=draw(st.sampled_from([1, 2, 4, 6])), allow=allow)
    blocks = draw(st.integers(0, 2))
    policies = list(dict.fromkeys(replace(plan, micro_batch_size=1) for plan in candidates(asked, blocks, {}, CARD)))
    line = st.tuples(st.integers(200, 400), st.integers(0, 20), st.integers(1, 200))
    lines = dict(zip(policies, draw(st.lists(line, min_size=len(policies), max_size=len(policies))), strict=True))
    slack = draw(st.integers(0, 100))

    def takes(plan: Plan) -> int:
        fixed, row, _ = lines[replace(plan, micro_batch_size=1)]
        return fixed + row * plan.micro_batch_size

    def on_host(plan: Plan) -> int:
        beside = isinstance(plan.optimizer_state, OnDevice | EightBit)
        return 0 if beside else lines[replace(plan, micro_batch_size=1)][2]

    return Told(
        asked,
        takes,
        on_host=on_host,
        # The context takes one byte beside what is allocated, and the totals that are told have none.
        at_least=lambda plan: max(0, takes(plan) - 1 - slack),
        on_host_at_least=lambda plan: max(0, on_host(plan) - slack),
        blocks=blocks,
        device=CARD,
    )


def budget_of_one(predictor: Told, data: st.DataObject, spare: int) -> Budget:
    """A budget that one of the smallest micro-batches fits, and perhaps others."""
    smallest = [plan for plan in possible(predictor) if plan.micro_batch_size == 1]
    plan = data.draw(st.sampled_from(smallest))
    return budget(predictor.takes(plan) + spare, max(1, predictor.on_host(plan)) + spare)


@given(predictor=predictors(), data=st.data(), spare=st.integers(0, 100))
@settings(max_examples=60)
def test_the_choice_is_the_fastest_of_the_plans_that_fit_both_sides(predictor: Told, data: st.DataObject, spare: int) -> None:
    asked = budget_of_one(predictor, data, spare)
    choice = choose(predictor, asked)
    assert choice.footprint.fits(asked)
    assert choice.step_seconds == min(seconds(predictor, plan) for plan in possible(predictor) if fits(predictor, plan, asked))
    assert (choice.footprint.total_device_bytes, choice.footprint.host_bytes) == (
        predictor.takes(choice.plan),
        predictor.on_host(choice.plan),
    )


@given(
    predictor=predictors(), data=st.data(), more=st.integers(0, 200), more_of_the_host=st.one_of(st.none(), st.integers(0, 200))
)
@settings(max_examples=60)
def test_more_on_either_side_never_gives_a_slower_plan(
    predictor: Told, data: st.DataObject, more: int, more_of_the_host: int | None
) -> None:
    asked = budget_of_one(predictor, data, 0)
    assert asked.host_bytes is not None
    host = None if more_of_the_host is None else asked.host_bytes + more_of_the_host
    larger = budget(asked.device_bytes + more, host)
    assert choose(predictor, larger).step_seconds <= choose(predictor, asked).step_seconds


@given(predictor=predictors(), data=st.data(), spare=st.integers(0, 100))
@settings(max_examples=60)
def test_a_bound_that_is_too_low_changes_nothing_but_what_is_said(predictor: Told, data: st.DataObject, spare: int) -> None:
    asked = budget_of_one(predictor, data, spare)
    bounded = choose(predictor, asked)
    plain = choose(Told(predictor.job, predictor.takes, on_host=predictor.on_host, blocks=predictor.blocks, device=CARD), asked)
    assert (bounded.plan, bounded.footprint) == (plain.plan, plain.footprint)
    assert [other.plan for other in bounded.rejected] == [other.plan for other in plain.rejected]
    assert not any(other.is_bound for other in plain.rejected)


# ---------------------------------------------------------------------------------------------- bounds


def test_a_plan_that_takes_too_much_at_the_least_is_rejected_without_a_simulation() -> None:
    at_least = {4: 1035, 2: 1010, 1: 0}
    predictor = Told(JOB, per_row, at_least=lambda plan: at_least[plan.micro_batch_size])
    choice = choose(predictor, budget(1010), PLAIN)
    assert choice.plan == Plan(micro_batch_size=1)
    assert [
        (other.plan.micro_batch_size, other.reason, other.total_device_bytes, other.is_bound) for other in choice.rejected
    ] == [
        (4, "at least 25 B over the budget", 1035, True),
        (2, "10 B over the budget", 1020, False),
    ]
    assert Plan(micro_batch_size=4) not in predictor.asked
    # The smallest is asked for first, to see whether anything fits; then in order of speed; then the choice whole, and its trace.
    assert [plan.micro_batch_size for plan in predictor.asked] == [1, 2, 1, 1, 1]


def test_the_context_of_a_card_counts_beside_what_is_allocated_at_the_least() -> None:
    beside = replace(CARD, usable_bytes=2000, context_bytes=30)
    predictor = Told(JOB, per_row, at_least=per_row, device=beside)
    choice = choose(predictor, budget(1050), {**PLAIN, "optimizer_state": OnDevice()})
    assert [(other.total_device_bytes, other.reason) for other in choice.rejected] == [(1070, "at least 20 B over the budget")]


def test_a_plan_that_takes_too_much_of_the_host_at_the_least_is_rejected_without_a_simulation() -> None:
    def on_host(plan: Plan) -> int:
        return 60 * plan.micro_batch_size

    predictor = Told(
        replace(JOB, global_batch_size=2),
        per_row,
        on_host=on_host,
        on_host_at_least=lambda plan: on_host(plan) - 1,
        device=CARD,
    )
    choice = choose(predictor, budget(2000, host=60), {**PLAIN, "optimizer_state": OnHost()})
    assert [(other.reason, other.is_bound) for other in choice.rejected] == [("at least 59 B more than the host has", True)]
    assert {plan.micro_batch_size for plan in predictor.asked} == {1}


def test_where_nothing_fits_only_what_may_be_smaller_is_simulated() -> None:
    predictor = Told(JOB, per_row, at_least=lambda plan: per_row(plan) - 1)
    with pytest.raises(NoPlanFits, match="8 bytes\\) more"):
        choose(predictor, budget(999))
    # Recomputing with chunked logits is tried first; what is at least as large is left out.
    first = Plan(micro_batch_size=1, activations=Recompute(1), loss=ChunkedLogits())
    assert predictor.asked[0] == first
    assert all(per_row(plan) - 1 < per_row(first) for plan in predictor.asked)
    assert len(predictor.asked) < len(possible(predictor))


def test_a_plan_that_allocates_more_and_reserves_less_is_found() -> None:
    """What an allocator holds is not in proportion to what it hands out."""

    class Reserving(Told):
        def footprint(self, trace: Trace) -> Footprint:
            found = super().footprint(trace)
            return replace(found, total_device_bytes={100: 200, 120: 150}[found.peak_allocated_bytes])

    def takes(plan: Plan) -> int:
        return 100 if isinstance(plan.activations, Recompute) else 120

    predictor = Reserving(replace(JOB, global_batch_size=1), takes, at_least=takes, blocks=1)
    choice = choose(predictor, budget(160), {"loss": WholeLogits(), "update": AfterBackward()})
    assert choice.plan == Plan(micro_batch_size=1)


# ---------------------------------------------------------------------------------------------- the host


def on_host(plan: Plan) -> int:
    return {OnHost: 60, Paged: 50, PagedEightBit: 20}.get(type(plan.optimizer_state), 0)


def state_elsewhere(plan: Plan) -> int:
    """10 B a row, and 80 B of state on the device unless it is elsewhere or smaller."""
    return 10 * plan.micro_batch_size + {OnDevice: 80, EightBit: 30}.get(type(plan.optimizer_state), 0)


def test_a_plan_that_the_host_is_too_small_for_is_rejected_with_the_bytes_it_lacks() -> None:
    allowed = replace(JOB, global_batch_size=1, allow=frozenset(Approximation))
    predictor = Told(allowed, state_elsewhere, on_host=on_host, device=CARD)
    choice = choose(predictor, budget(20, host=20), PLAIN)
    assert choice.plan.optimizer_state == PagedEightBit()
    reasons = {type(other.plan.optimizer_state): other.reason for other in choice.rejected}
    assert reasons.items() >= {OnDevice: "70 B over the budget", EightBit: "20 B over the budget"}.items()
    # As fast as the cost model says, a plan on the host may come before the choice or after it.
    alone = choose(Told(allowed, state_elsewhere, on_host=on_host, device=CARD), budget(20, host=49), PLAIN)
    assert alone.plan.optimizer_state == PagedEightBit()


def test_both_sides_are_named_where_both_lack_bytes() -> None:
    predictor = Told(
        replace(JOB, global_batch_size=2), lambda plan: 100 if plan.micro_batch_size == 2 else 40, on_host=on_host, device=CARD
    )
    fixed = {**PLAIN, "optimizer_state": OnHost()}
    choice = choose(predictor, budget(50, host=60), fixed)
    assert [other.reason for other in choice.rejected] == ["50 B over the budget"]
    slower = Told(
        replace(JOB, global_batch_size=2),
        lambda plan: 100 if plan.micro_batch_size == 2 else 40,
        on_host=lambda plan: 60 * plan.micro_batch_size,
        device=CARD,
    )
    choice = choose(slower, budget(50, host=60), fixed)
    assert [other.reason for other in choice.rejected] == ["50 B over the budget and 60 B more than the host has"]
    choice = choose(slower, budget(100, host=60), fixed)
    assert [other.reason for other in choice.rejected] == ["60 B more than the host has"]


def test_where_only_the_host_is_too_small_that_is_said_with_its_numbers() -> None:
    predictor = Told(
        replace(JOB, global_batch_size=1),
        lambda plan: MIB * state_elsewhere(plan),
        on_host=lambda plan: MIB * on_host(plan),
        device=CARD,
    )
    message = (
        "no plan fits the host's 48.0 MiB (50,331,648 bytes): the smallest found (micro-batch 1, keep, whole logits, fused "
        "update after backward, optimizer state paged) fits the device and needs 50.0 MiB (52,428,800 bytes) of the host, "
        "2.00 MiB (2,097,152 bytes) more; raise host_bytes, leave plan.activations and plan.loss and plan.update to the planner, "
        "shorten the rows or take a smaller model."
    )
    with pytest.raises(NoPlanFits, match=f"^{re.escape(message)}$"):
        choose(predictor, budget(10 * MIB, host=48 * MIB), PLAIN)


def test_where_both_are_too_small_that_is_said_with_both_numbers() -> None:
    predictor = Told(
        replace(JOB, global_batch_size=1),
        lambda plan: MIB * state_elsewhere(plan),
        on_host=lambda plan: MIB * on_host(plan),
        device=CARD,
    )
    message = (
        "no plan fits the budget of 9.00 MiB (9,437,184 bytes): the smallest found (micro-batch 1, keep, whole logits, fused "
        "update after backward, optimizer state on the host) needs 10.0 MiB (10,485,760 bytes), 1.00 MiB (1,048,576 bytes) "
        "more, and 2.00 MiB (2,097,152 bytes) more of the host; raise the budget, "
        "leave plan.activations and plan.loss and plan.update and plan.optimizer_state to the planner, "
        "shorten the rows or take a smaller model."
    )
    with pytest.raises(NoPlanFits, match=f"^{re.escape(message)}$"):
        choose(predictor, budget(9 * MIB, host=58 * MIB), {**PLAIN, "optimizer_state": OnHost()})


def test_without_a_bound_on_the_host_only_the_device_counts() -> None:
    predictor = Told(replace(JOB, global_batch_size=1), state_elsewhere, on_host=lambda plan: 10**12, device=CARD)
    assert not isinstance(choose(predictor, budget(10), PLAIN).plan.optimizer_state, OnDevice)


# ---------------------------------------------------------------------------------------------- what would help


def test_the_message_says_what_changes_of_the_job_would_need() -> None:
    shorter = Told(JOB, lambda plan: 3 * MIB)
    adapted = Told(JOB, lambda plan: 5 * MIB, on_host=lambda plan: 2 * MIB)
    plan = Plan(micro_batch_size=1)
    changes = [("rows of 512 tokens", shorter, plan), ("adapters", adapted, replace(plan, optimizer_state=OnHost()))]
    predictor = Told(JOB, lambda plan: MIB * per_row(plan), changes=changes)
    ending = (
        "more; raise the budget, or change the job: rows of 512 tokens would need 3.00 MiB; "
        "adapters would need 5.00 MiB and 2.00 MiB of the host, still too much."
    )
    with pytest.raises(NoPlanFits, match=f"{re.escape(ending)}$"):
        choose(predictor, budget(3 * MIB))
    assert adapted.asked == [changes[1][2]]


def test_a_change_that_would_need_hardly_less_is_not_named() -> None:
    plan = Plan(micro_batch_size=1)
    predictor = Told(
        JOB, per_row, changes=[("a hundredth", Told(JOB, lambda _: 997), plan), ("more", Told(JOB, lambda _: 996), plan)]
    )
    with pytest.raises(NoPlanFits, match=r"raise the budget, or change the job: more would need 996 B\.$"):
        choose(predictor, budget(996))


def test_no_change_is_looked_for_where_something_fits() -> None:
    class Asked(Told):
        def cheaper_jobs(self, plan: Plan):  # type: ignore[no-untyped-def]
            raise AssertionError("nobody asked")

    assert choose(Asked(JOB, per_row), budget(10**6)).plan == Plan(micro_batch_size=4)


def test_a_constraint_that_makes_no_sense_on_the_device_is_refused_with_the_rule() -> None:
    with pytest.raises(PlanRefused, match=r"frees nothing on a processor.*set optimizer_state to on_device\.$"):
        choose(Told(JOB, per_row), budget(10**6), {"optimizer_state": OnHost()})


def test_the_work_is_measured_on_a_plan_that_keeps_all_and_whose_state_is_on_the_host_where_that_is_possible() -> None:
    measured = []

    class Asked(Told):
        def cost_model(self, plain, sizes):  # type: ignore[no-untyped-def]
            measured.extend(plain(size) for size in sizes)
            return super().cost_model(plain, sizes)

    choose(Asked(JOB, per_row, device=CARD), budget(10**6), {"activations": Recompute(1)})
    assert measured == [Plan(micro_batch_size=size, optimizer_state=OnHost()) for size in (1, 2, 4)]
    measured.clear()
    choose(Asked(JOB, per_row), budget(10**6))
    assert measured == [Plan(micro_batch_size=size) for size in (1, 2, 4)]
