"""The next smaller plan: what a run goes on with when memory ran out under a plan that was predicted to fit.

The micro-batch is halved first, which leaves everything else as it was; then comes the fastest of the plans that take less.
The predicted bytes of the device fall from plan to plan, so a run goes down only so often, however far off a prediction was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from memtrain.check import PlanRefused, micro_batch_sizes
from memtrain.job import Budget
from memtrain.memory.footprint import Footprint
from memtrain.plan import EightBit, OnDevice, OnHost, OptimizerState, Paged, PagedEightBit, Plan
from memtrain.planner.candidates import candidates
from memtrain.planner.choice import Choice, NoPlanFits
from memtrain.planner.predict import Predictor
from memtrain.planner.search import changed_jobs, context_bytes, open_to_less, plainest, trainable
from memtrain.units import format_bytes

# Places of optimizer state that one library keeps in one form, so that the state of a run goes from one to the other.
SAME_FORM: tuple[tuple[type[OptimizerState], ...], ...] = ((OnDevice, OnHost), (Paged,), (EightBit, PagedEightBit))


def next_smaller(
    predictor: Predictor, choice: Choice, constraints: Mapping[str, Any], needed_bytes: int | None = None
) -> Choice:
    """The plan to go on with when a run with ``choice`` ran out of memory; it is predicted to take less of the device.

    The state of the run carries over: the processes stay as many, and the optimizer's state in its form.

    Args:
        constraints: plan fields that are fixed. A micro-batch is an upper bound here, since it changes no number.
        needed_bytes: what was held of the device when memory ran out, with what was asked for then, where that is known. If
            it is more than was predicted, plans that would miss the budget by as much come last.

    Raises:
        NoPlanFits: no plan takes less.
    """
    started = time.perf_counter()
    possible = _possible(predictor, choice.plan, constraints)
    cost = predictor.cost_model(plainest(possible), sorted({plan.micro_batch_size for plan in possible}))
    ordered = [*_halved(predictor, choice.plan), *sorted(possible, key=cost.step_seconds)]
    less = choice.footprint.total_device_bytes - 1
    enough = choice.budget.device_bytes - _missed(choice, needed_bytes)
    for bound in dict.fromkeys((min(less, enough), less)):
        for plan in ordered:
            if predicted := _within(bound, predictor, plan, choice.budget):
                return replace(
                    choice,
                    given=tuple(field for field, fixed in constraints.items() if getattr(plan, field) == fixed),
                    plan=plan,
                    resumed_step=None,
                    footprint=predicted,
                    trace=predictor.trace(plan),
                    step_seconds=cost.step_seconds(plan),
                    rejected=(),
                    planning_seconds=time.perf_counter() - started,
                )
    raise NoPlanFits(
        f"memory ran out with the smallest plan ({choice.plan}), and no other is predicted to take less than its "
        f"{format_bytes(choice.footprint.total_device_bytes)}: free memory on the device, or change the job."
    )


def ways_out(
    predictor: Predictor, choice: Choice, constraints: Mapping[str, Any], needed_bytes: int | None = None
) -> Iterator[tuple[str, int, bool]]:
    """What a person may change when :func:`next_smaller` finds nothing: its name, the bytes of the device, whether they do.

    Fields of the plan that are fixed come first, since the numbers trained stay; then the changes of the job that
    :func:`memtrain.planner.remedies.cheaper` names, in its order. Only what is predicted to take less than ``choice``; it
    does where it stays within the budget even if it is missed by as much as ``choice`` was.
    """
    found = []
    if fields := open_to_less(choice.plan, constraints):
        left = {field: fixed for field, fixed in constraints.items() if f"plan.{field}" not in fields}
        found.append((f"{' and '.join(fields)} left to the planner", _smallest(predictor, choice, left).footprint))
    found += changed_jobs(predictor, choice.plan)
    for change, footprint in found:
        takes = footprint.total_device_bytes
        if takes < choice.footprint.total_device_bytes and not footprint.missing_host_bytes(choice.budget):
            yield change, takes, takes + _missed(choice, needed_bytes) <= choice.budget.device_bytes


def _smallest(predictor: Predictor, choice: Choice, constraints: Mapping[str, Any]) -> Choice:
    """The last of the plans that a run goes down."""
    with suppress(NoPlanFits):
        while True:
            choice = next_smaller(predictor, choice, constraints)
    return choice


def _missed(choice: Choice, needed_bytes: int | None) -> int:
    """Bytes that the run needed more than was predicted, as far as is known."""
    return max(0, (needed_bytes or 0) - choice.footprint.total_device_bytes)


def _possible(predictor: Predictor, plan: Plan, constraints: Mapping[str, Any]) -> list[Plan]:
    """The plans that the constraints admit and the state of a run with ``plan`` carries over to; itself among them."""
    # Nothing is searched in these two, and other processes are not there.
    fixed = {**constraints, "attention": plan.attention, "sharding": plan.sharding}
    largest = fixed.pop("micro_batch_size", predictor.job.global_batch_size)
    form = next(form for form in SAME_FORM if isinstance(plan.optimizer_state, form))
    admitted = [
        other
        for other in candidates(predictor.job, predictor.blocks, fixed, predictor.device, predictor.parts)
        if other.micro_batch_size <= largest and isinstance(other.optimizer_state, form)
    ]
    return [plan, *trainable(admitted, predictor.job, predictor.device)[0]]


def _halved(predictor: Predictor, plan: Plan) -> Iterator[Plan]:
    """The plan with the next micro-batch of at most half its rows, where there is one and it trains the job."""
    sizes = micro_batch_sizes(predictor.job, plan.ranks)
    smaller = (replace(plan, micro_batch_size=size) for size in sizes if 2 * size <= plan.micro_batch_size)
    yield from trainable(list(smaller)[:1], predictor.job, predictor.device)[0]


def _within(bound: int, predictor: Predictor, plan: Plan, budget: Budget) -> Footprint | None:
    """What a plan takes, simulated whole, where that is at most ``bound`` of the device and the host has its part."""
    if predictor.least_bytes(plan) + context_bytes(predictor.device) > bound:
        return None
    try:
        if predictor.footprint(predictor.inferred(plan)).total_device_bytes > bound:
            return None
        found = predictor.footprint(predictor.trace(plan))
    except PlanRefused:
        return None
    return found if found.total_device_bytes <= bound and not found.missing_host_bytes(budget) else None
