"""The choice, with a predictor whose plans take what the test says: no model is built and nothing is simulated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.check import PlanRefused, check
from memtrain.device import Cpu, Device
from memtrain.job import Budget, Job, Limit
from memtrain.memory.footprint import Footprint, footprint
from memtrain.plan import (
    AfterBackward,
    ChunkedLogits,
    DuringBackward,
    Keep,
    Plan,
    Recompute,
    RecomputeFirst,
    RecomputeSelective,
    WholeLogits,
)
from memtrain.planner.candidates import candidates
from memtrain.planner.choice import NoPlanFits
from memtrain.planner.cost import CostModel
from memtrain.planner.predict import Predictor
from memtrain.planner.search import choose
from memtrain.trace.event import HOST, Event, Kind, Phase, Trace, Work
from memtrain.units import format_bytes

DEVICE = Cpu(name="told", threads=1, flops_per_second=1.0, bytes_per_second=1.0, operator_seconds=1.0)

Takes = Callable[[Plan], int]


# What is not a number of first blocks.
WHOLE = (Keep(), Recompute(), RecomputeSelective())


def nothing(plan: Plan) -> int:
    return 0


def trace_of(peak_bytes: int, host_bytes: int = 0) -> Trace:
    """A weight of half the peak and, beside it, a temporary that reaches it; and state on the host."""
    weight = peak_bytes // 2
    state = Event(2, host_bytes, Kind.OPTIMIZER_STATE, Phase.FIRST_UPDATE, "empty", place=HOST)
    return Trace(
        (
            Event(0, weight, Kind.WEIGHT, Phase.LOAD, "empty"),
            Event(1, peak_bytes - weight, Kind.TEMPORARY, Phase.FORWARD, "mm"),
            Event(1, weight - peak_bytes, Kind.TEMPORARY, Phase.FORWARD, "free"),
            *((state,) if host_bytes else ()),
        )
    )


class Told(Predictor):
    """Predicts the peak that ``takes`` tells, and a cost in which fewer and larger micro-batches are faster.

    One row takes 1 s each way and a micro-batch 1 s more each way; recomputing all blocks takes forward once again, a chunk
    of the loss 16 s, and an update 7 s and 1 s per launch. ``at_least`` tells the bounds, ``on_host`` the host's bytes.
    """

    def __init__(
        self,
        job: Job,
        takes: Takes,
        *,
        infers: Takes | None = None,
        at_least: Takes = nothing,
        on_host: Takes = nothing,
        on_host_at_least: Takes = nothing,
        blocks: int = 2,
        device: Device = DEVICE,
        changes: Sequence[tuple[str, Predictor, Plan]] = (),
    ) -> None:
        self.job = job
        self.allocator, self.weight_bytes = "", 0
        self.device = device
        self.blocks, self.parts = blocks, ()
        self.takes, self._infers, self.on_host = takes, infers or takes, on_host
        self._at_least, self._on_host_at_least = at_least, on_host_at_least
        self._changes = changes
        self.asked: list[Plan] = []

    def footprint(self, trace: Trace) -> Footprint:
        # Byte by byte also beside a card, whose allocator takes whole segments.
        return footprint(trace)

    def trace(self, plan: Plan) -> Trace:
        self.asked.append(plan)
        return trace_of(self.takes(plan), self.on_host(plan))

    def inferred(self, plan: Plan) -> Trace:
        self.asked.append(plan)
        return trace_of(self._infers(plan), self.on_host(plan))

    def least_bytes(self, plan: Plan) -> int:
        return self._at_least(plan)

    def least_host_bytes(self, plan: Plan) -> int:
        return self._on_host_at_least(plan)

    def cheaper_jobs(self, plan: Plan) -> Iterator[tuple[str, Predictor, Plan]]:
        return iter(self._changes)

    def cost_model(self, plain: Callable[[int], Plan], sizes: Sequence[int]) -> CostModel:
        def work(rows: float) -> dict[Phase, Work]:
            return {phase: Work(rows, 0.0, 1.0) for phase in (Phase.FORWARD, Phase.BACKWARD)}

        return CostModel(
            job=self.job,
            device=self.device,
            small=work(1.0),
            small_size=1,
            large=work(2.0),
            large_size=2,
            tokens_per_row=1,
            blocks=4,
            parameters=3,
            parameter_bytes=1,
            elements=1,
        )


def job(rows: int = 4, max_grad_norm: float | None = None) -> Job:
    return Job(model="tiny", global_batch_size=rows, steps=1, max_grad_norm=max_grad_norm)


def budget(size: int) -> Budget:
    return Budget(limits=(Limit("asked for", size),))


def possible(predictor: Predictor) -> list[Plan]:
    """The candidates that ``check`` allows."""
    allowed = []
    for plan in candidates(predictor.job, predictor.blocks, {}, predictor.device):
        try:
            check(plan, predictor.job, predictor.device)
        except ValueError:
            continue
        allowed.append(plan)
    return allowed


def seconds(predictor: Predictor, plan: Plan) -> float:
    return predictor.cost_model(lambda size: Plan(micro_batch_size=size), [1, 2]).step_seconds(plan)


def least(predictor: Told) -> int:
    """The smallest peak of any plan that trains the job."""
    return min(map(predictor.takes, possible(predictor)))


@st.composite
def predictors(draw: st.DrawFn) -> Told:
    """Peaks that are random between policies, grow with the micro-batch, and hold a gradient more where it accumulates."""
    asked = job(draw(st.integers(1, 12)), draw(st.sampled_from([None, 1.0])))
    blocks, gradient = draw(st.integers(0, 3)), draw(st.integers(0, 200))
    plans = list(candidates(asked, blocks, {}, DEVICE))
    policies = {replace(plan, micro_batch_size=1): None for plan in plans}
    line = st.tuples(st.integers(200, 400), st.integers(0, 20))
    lines = dict(zip(policies, draw(st.lists(line, min_size=len(policies), max_size=len(policies))), strict=True))

    def takes(plan: Plan) -> int:
        fixed, per_row = lines[replace(plan, micro_batch_size=1)]
        accumulates = plan.micro_batch_size < asked.global_batch_size
        return fixed + per_row * plan.micro_batch_size + gradient * accumulates

    return Told(asked, takes, blocks=blocks)


@given(predictor=predictors(), spare=st.integers(0, 200))
def test_the_choice_is_the_fastest_of_the_plans_that_fit(predictor: Told, spare: int) -> None:
    size = least(predictor) + spare
    choice = choose(predictor, budget(size))
    assert choice.footprint.peak_allocated_bytes == predictor.takes(choice.plan) <= size
    fitting = [plan for plan in possible(predictor) if predictor.takes(plan) <= size]
    assert choice.step_seconds == seconds(predictor, choice.plan) == min(seconds(predictor, plan) for plan in fitting)


@given(predictor=predictors(), spare=st.integers(0, 200), more=st.integers(0, 200))
def test_a_larger_budget_never_gives_a_slower_plan(predictor: Told, spare: int, more: int) -> None:
    size = least(predictor) + spare
    assert choose(predictor, budget(size + more)).step_seconds <= choose(predictor, budget(size)).step_seconds


@given(predictor=predictors(), missing=st.integers(1, 199))
def test_no_plan_fits_is_said_where_none_does_with_the_bytes_that_are_missing(predictor: Told, missing: int) -> None:
    size = least(predictor) - missing
    with pytest.raises(NoPlanFits, match=rf"\({missing} bytes\) more"):
        choose(predictor, budget(size))


@given(predictor=predictors(), spare=st.integers(0, 200))
def test_every_faster_plan_was_rejected_for_the_bytes_it_is_over(predictor: Told, spare: int) -> None:
    size = least(predictor) + spare
    choice = choose(predictor, budget(size))
    costs = [seconds(predictor, rejected.plan) for rejected in choice.rejected]
    assert costs == sorted(costs)
    assert all(cost <= choice.step_seconds for cost in costs)
    tried = [other for other in choice.rejected if other.total_device_bytes is not None]
    for other in tried:
        peak = predictor.takes(other.plan)
        assert (other.total_device_bytes, other.reason) == (peak, f"{format_bytes(peak - size)} over the budget")
    faster = {plan for plan in possible(predictor) if seconds(predictor, plan) < choice.step_seconds}
    # Of some first blocks the most are told, which are the nearest.
    untold = faster - {other.plan for other in tried}
    assert all(isinstance(plan.activations, RecomputeFirst) for plan in untold)
    alike = [replace(other.plan, activations=RecomputeFirst()) for other in tried if other.plan.activations not in WHOLE]
    assert {replace(plan, activations=RecomputeFirst()) for plan in untold} <= set(alike)
    assert len(alike) == len(set(alike))


def test_the_whole_batch_is_chosen_where_accumulating_a_part_of_it_takes_more() -> None:
    predictor = Told(job(4), lambda plan: 10 * plan.micro_batch_size + 100 * (plan.micro_batch_size < 4))
    assert choose(predictor, budget(40)).plan.micro_batch_size == 4


def test_an_update_during_backward_is_chosen_where_nothing_else_fits() -> None:
    predictor = Told(job(4), lambda plan: 60 if plan.update == DuringBackward() else 100 + plan.micro_batch_size)
    assert choose(predictor, budget(60)).plan.update == DuringBackward()


def per_row(plan: Plan) -> int:
    """10 B a row, less where activations are recomputed or logits chunked, and 1000 B of weights."""
    spared = isinstance(plan.activations, Recompute) + 2 * isinstance(plan.loss, ChunkedLogits)
    return 1000 + (10 - spared) * plan.micro_batch_size


def test_a_choice_holds_what_was_asked_and_what_was_predicted() -> None:
    predictor = Told(job(4, max_grad_norm=1.0), per_row)
    choice = choose(predictor, budget(1030))
    assert choice.plan == Plan(micro_batch_size=2)
    assert (choice.job, choice.budget, choice.device) == (predictor.job, budget(1030), predictor.device)
    assert choice.trace == predictor.trace(choice.plan)
    assert choice.footprint.by_kind == {Kind.WEIGHT: 510, Kind.TEMPORARY: 510}
    assert choice.step_seconds == 2 * 6 + 8
    assert choice.planning_seconds >= 0


def test_the_plan_that_fits_to_the_byte_is_chosen_and_with_one_byte_less_it_is_not() -> None:
    predictor = Told(job(4), per_row)
    assert choose(predictor, budget(1040)).plan == Plan(micro_batch_size=4)
    assert choose(predictor, budget(1039)).rejected[0].reason == "1 B over the budget"


def test_a_constraint_holds_in_the_choice() -> None:
    choice = choose(Told(job(4), per_row), budget(10**6), {"micro_batch_size": 2, "loss": ChunkedLogits(3)})
    assert choice.plan == Plan(micro_batch_size=2, loss=ChunkedLogits(3))


def test_the_message_that_no_plan_fits_has_every_number() -> None:
    predictor = Told(job(2, max_grad_norm=1.0), lambda plan: 2**20 * per_row(plan))
    message = (
        "no plan fits the budget of 1000 MiB (1,048,576,000 bytes): the smallest found (micro-batch 1, recompute every block, "
        "logits in chunks of 1024 tokens, fused update after backward) needs 1007 MiB (1,055,916,032 bytes), "
        "7.00 MiB (7,340,032 bytes) more; raise the budget, shorten the rows or take a smaller model."
    )
    with pytest.raises(NoPlanFits, match=f"^{re.escape(message)}$"):
        choose(predictor, budget(1000 * 2**20))


@pytest.mark.parametrize(
    ("constraints", "reason"),
    [
        ({"micro_batch_size": 3}, r"^micro_batch_size 3 does not divide global_batch_size 4: choose one of 4, 2, 1\.$"),
        ({"update": DuringBackward()}, r"^an update during backward never has the whole gradient that max_grad_norm 1\.0"),
    ],
)
def test_constraints_that_no_plan_meets_are_refused_with_the_rule(constraints: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        choose(Told(job(4, max_grad_norm=1.0), per_row), budget(10**6), constraints)


def test_a_model_that_suits_no_plan_is_refused_with_the_reason() -> None:
    def takes(plan: Plan) -> int:
        raise PlanRefused("this model returns no loss.")

    with pytest.raises(ValueError, match=r"^this model returns no loss\.$"):
        choose(Told(job(4), takes), budget(10**6))


def test_a_reason_is_given_once_with_the_fastest_plan_it_refuses() -> None:
    def takes(plan: Plan) -> int:
        if not isinstance(plan.activations, Keep):
            raise PlanRefused(f"micro-batch {plan.micro_batch_size} cannot be recomputed.")
        return per_row(plan)

    constraints = {"loss": WholeLogits(), "update": AfterBackward()}
    choice = choose(Told(job(4), takes), budget(1010), constraints)
    assert choice.plan == Plan(micro_batch_size=1)
    assert [(other.plan, other.reason, other.total_device_bytes) for other in choice.rejected] == [
        (Plan(micro_batch_size=4), "30 B over the budget", 1040),
        (Plan(micro_batch_size=4, activations=RecomputeSelective()), "micro-batch 4 cannot be recomputed.", None),
        (Plan(micro_batch_size=2), "10 B over the budget", 1020),
    ]


def test_what_check_refuses_is_rejected_with_the_rule_where_it_would_be_faster() -> None:
    fixed = {"activations": Keep(), "loss": WholeLogits()}
    rule = "an update during backward never has the whole gradient that max_grad_norm 1.0 bounds"
    choice = choose(Told(job(4, max_grad_norm=1.0), per_row), budget(1010), fixed)
    assert [(other.plan.micro_batch_size, other.plan.update, other.reason.split(":")[0]) for other in choice.rejected] == [
        (4, AfterBackward(), "30 B over the budget"),
        (2, AfterBackward(), "10 B over the budget"),
        (4, DuringBackward(), rule),
    ]
    # Of two rows an update during backward would be as slow as the choice.
    as_slow = choose(Told(job(2, max_grad_norm=1.0), per_row), budget(1010), fixed)
    assert [other.reason for other in as_slow.rejected] == ["10 B over the budget"]


def test_what_was_inferred_too_small_is_simulated_and_the_next_plan_is_taken() -> None:
    predictor = Told(job(4), per_row, infers=lambda plan: per_row(plan) - 1)
    fixed = {"activations": Keep(), "loss": WholeLogits(), "update": AfterBackward()}
    choice = choose(predictor, budget(per_row(Plan(micro_batch_size=4)) - 1), fixed)
    assert choice.plan.micro_batch_size == 2
    assert choice.footprint.peak_allocated_bytes == per_row(choice.plan)
    assert [other.reason for other in choice.rejected if other.total_device_bytes] == ["1 B over the budget"]


def test_a_predictor_that_changes_its_mind_stops_the_choice() -> None:
    answers = iter([1])
    predictor = Told(job(1), per_row, infers=lambda plan: next(answers, 10**6))
    with pytest.raises(AssertionError, match="a plan fitted when the smallest were tried and no longer does"):
        choose(predictor, budget(100))
