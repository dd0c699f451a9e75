"""The choice: the fastest plan that fits.

Plans are ranked by the cost model, which knows nothing of the budget, and tried in that order until one fits; so a larger
budget never gives a slower plan. The plan that is chosen is simulated whole, whatever was inferred before.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from memtrain.job import Budget, Job
from memtrain.memory.footprint import Footprint, footprint
from memtrain.plan import ChunkedLogits, DuringBackward, Plan, PlanRefused, Recompute, check
from memtrain.planner.candidates import candidates
from memtrain.planner.choice import Choice, NoPlanFits, Rejected
from memtrain.planner.predict import Predictor
from memtrain.units import format_bytes


def choose(predictor: Predictor, budget: Budget, constraints: Mapping[str, Any] | None = None) -> Choice:
    """The fastest plan of the predictor's job that fits the budget.

    Args:
        constraints: plan fields that are fixed: ``micro_batch_size`` as a number, the others as policies.

    Raises:
        NoPlanFits: with the smallest plan and the bytes that are missing.
        PlanRefused: the constraints leave no plan that trains the job.
    """
    started = time.perf_counter()
    cost = predictor.cost_model(lambda size: Plan(micro_batch_size=size))
    ranked = sorted(candidates(predictor.job, predictor.blocks, constraints or {}), key=cost.step_seconds)
    possible, refusals = _possible(ranked, predictor.job)
    if not possible:
        raise PlanRefused(next(iter(refusals.values())).reason)
    _require_a_plan_that_fits(possible, predictor, budget)

    rejected: list[Rejected] = []
    for plan in possible:
        try:
            predicted = footprint(predictor.inferred(plan))
        except PlanRefused as refusal:
            _add_refusal(refusals, plan, str(refusal))
            continue
        if predicted.fits(budget):
            # What was inferred proves itself: the chosen plan is simulated whole, and only that counts.
            predicted = footprint(predictor.trace(plan))
        if predicted.fits(budget):
            break
        over = format_bytes(predicted.missing_bytes(budget))
        rejected.append(
            Rejected(plan=plan, reason=f"{over} over the budget", peak_allocated_bytes=predicted.peak_allocated_bytes)
        )
    else:
        raise AssertionError("a plan fitted when the smallest were tried and no longer does")

    faster = {other: position for position, other in enumerate(ranked[: ranked.index(plan)])}
    rejected += [refused for refused in refusals.values() if refused.plan in faster]
    return Choice(
        job=predictor.job,
        budget=budget,
        device=predictor.device,
        plan=plan,
        footprint=predicted,
        trace=predictor.trace(plan),
        step_seconds=cost.step_seconds(plan),
        rejected=tuple(sorted(rejected, key=lambda entry: faster[entry.plan])),
        planning_seconds=time.perf_counter() - started,
    )


def _possible(ranked: Sequence[Plan], job: Job) -> tuple[list[Plan], dict[str, Rejected]]:
    """The plans that train the job, and for each reason the fastest plan that is refused for it."""
    possible: list[Plan] = []
    refusals: dict[str, Rejected] = {}
    for plan in ranked:
        try:
            check(plan, job)
        except PlanRefused as refusal:
            _add_refusal(refusals, plan, str(refusal))
        else:
            possible.append(plan)
    return possible, refusals


def _add_refusal(refusals: dict[str, Rejected], plan: Plan, reason: str) -> None:
    """One entry per reason: reasons that differ only in numbers say the same about many plans."""
    refusals.setdefault(re.sub(r"\d+", "#", reason), Rejected(plan=plan, reason=reason))


def _require_a_plan_that_fits(possible: Sequence[Plan], predictor: Predictor, budget: Budget) -> None:
    """Raise NoPlanFits now, from the micro-batches that can take least, rather than after every plan was tried.

    Those are the smallest, and the whole batch at once: it accumulates no gradients and alone allows an update during
    backward. Between them memory grows with the micro-batch.
    """
    sizes = [plan.micro_batch_size for plan in possible]
    extremes = {min(sizes), max(sizes)}
    smallest: tuple[Footprint, Plan] | None = None
    for plan in sorted((plan for plan in possible if plan.micro_batch_size in extremes), key=_thrift):
        try:
            predicted = footprint(predictor.inferred(plan))
        except PlanRefused as refusal:
            reason = str(refusal)
            continue
        if predicted.fits(budget):
            return
        if smallest is None or predicted.peak_allocated_bytes < smallest[0].peak_allocated_bytes:
            smallest = predicted, plan
    if smallest is None:
        raise PlanRefused(reason)
    predicted, plan = smallest
    missing = predicted.missing_bytes(budget)
    raise NoPlanFits(
        f"no plan fits the budget of {format_bytes(budget.device_bytes)} ({budget.device_bytes:,} bytes{_origin(budget)}): the smallest found "
        f"({plan}) needs {format_bytes(predicted.peak_allocated_bytes)} ({predicted.peak_allocated_bytes:,} bytes), "
        f"{format_bytes(missing)} ({missing:,} bytes) more; raise the budget, shorten the rows or take a smaller model."
    )


def _origin(budget: Budget) -> str:
    """Where a budget comes from that is not just the number asked for."""
    less = f" less {format_bytes(budget.headroom_bytes)} of headroom" if budget.headroom_bytes else ""
    asked = budget.tightest.source == "asked for"
    return f", {format_bytes(budget.tightest.bytes)} {budget.tightest.source}{less}" if less or not asked else ""


def _thrift(plan: Plan) -> tuple[int, int, bool, bool]:
    """A guess at which plans take least, to try those first: the order decides nothing but how soon one is found."""
    blocks_kept_per_recomputed = plan.activations.every if isinstance(plan.activations, Recompute) else sys.maxsize
    return (
        plan.micro_batch_size,
        blocks_kept_per_recomputed,
        not isinstance(plan.loss, ChunkedLogits),
        not isinstance(plan.update, DuringBackward),
    )
