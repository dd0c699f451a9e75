"""The choice: the fastest plan that fits.

Plans are ranked by the cost model, which knows nothing of the budget, and tried in that order until one fits; so a larger
budget never gives a slower plan. The plan that is chosen is simulated whole, whatever was inferred before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from memtrain.check import PlanRefused, check
from memtrain.device import Cuda, Device
from memtrain.job import Budget, Job, Limit
from memtrain.memory.footprint import Footprint
from memtrain.plan import (
    Activations,
    ChunkedLogits,
    DuringBackward,
    Keep,
    OnDevice,
    OnHost,
    Plan,
    Recompute,
    RecomputeFirst,
    WholeLogits,
)
from memtrain.planner.candidates import candidates
from memtrain.planner.choice import Choice, NoPlanFits, Rejected
from memtrain.planner.cost import CostModel
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
    plans = list(candidates(predictor.job, predictor.blocks, constraints or {}, predictor.device, predictor.parts))
    possible, refusals = trainable(plans, predictor.job, predictor.device)
    if not possible:
        raise PlanRefused(refusals[0].reason)
    thrifty = _a_plan_that_fits(possible, predictor, budget, constraints or {})
    cost = predictor.cost_model(plainest(possible), sorted({plan.micro_batch_size for plan in possible}))
    possible.sort(key=cost.step_seconds)

    rejected: list[Rejected] = []
    for plan in possible:
        if over := _over(*_least_missing(plan, predictor, budget)):
            least = predictor.least_bytes(plan) + context_bytes(predictor.device)
            rejected.append(Rejected(plan=plan, reason=f"at least {over}", total_device_bytes=least, is_bound=True))
            continue
        try:
            predicted = predictor.footprint(predictor.inferred(plan))
        except PlanRefused as refusal:
            refusals.append(Rejected(plan=plan, reason=str(refusal)))
            continue
        if predicted.fits(budget):
            # What was inferred proves itself: the chosen plan is simulated whole, and only that counts.
            predicted = predictor.footprint(predictor.trace(plan))
        if predicted.fits(budget):
            break
        reason = _over(*_missing(predicted, budget))
        rejected.append(Rejected(plan=plan, reason=reason, total_device_bytes=predicted.total_device_bytes))
    else:
        # A bound that was too high has left out every plan that fits but this one.
        plan, predicted = thrifty, predictor.footprint(predictor.trace(thrifty))
        assert predicted.fits(budget), "a plan fitted when the smallest were tried and no longer does"

    seconds = cost.step_seconds(plan)
    rejected = _nearest(rejected)
    rejected += _one_per_reason(refusals, cost, seconds)
    return Choice(
        job=predictor.job,
        budget=budget,
        device=predictor.device,
        allocator=predictor.allocator,
        given=tuple(constraints or ()),
        plan=plan,
        footprint=predicted,
        trace=predictor.trace(plan),
        step_seconds=seconds,
        rejected=tuple(sorted(rejected, key=lambda entry: cost.step_seconds(entry.plan))),
        planning_seconds=time.perf_counter() - started,
    )


def plainest(possible: Sequence[Plan]) -> Callable[[int], Plan]:
    """The plan of a micro-batch size whose work the cost model starts from: one that keeps its activations and logits.

    Its state is on the host where that is possible. The work is the same, and beside a card it is the plan that is most
    often simulated anyway.
    """

    def plain(size: int) -> Plan:
        alike = [plan for plan in possible if plan.micro_batch_size == size]
        chosen = next((plan for plan in alike if isinstance(plan.optimizer_state, OnHost)), alike[0])
        return replace(chosen, activations=Keep(), loss=WholeLogits())

    return plain


def _missing(predicted: Footprint, budget: Budget) -> tuple[int, int]:
    """Bytes that are missing on the device and on the host."""
    return predicted.missing_bytes(budget), predicted.missing_host_bytes(budget)


def _least_missing(plan: Plan, predictor: Predictor, budget: Budget) -> tuple[int, int]:
    """Bytes that are missing on the device and on the host at the least, by what is known without simulating the plan."""
    device = predictor.least_bytes(plan) + context_bytes(predictor.device) - budget.device_bytes
    host = 0 if budget.host_bytes is None else predictor.least_host_bytes(plan) - budget.host_bytes
    return max(0, device), max(0, host)


def context_bytes(device: Device) -> int:
    """Bytes that any plan takes of a device beside what it allocates: a card's context."""
    return device.context_bytes if isinstance(device, Cuda) else 0


def _may_be_smaller(plan: Plan, smallest: Footprint, predictor: Predictor, budget: Budget) -> bool:
    """Whether a plan may fit better than the smallest so far, by what is known without simulating it."""
    # The first blocks take less than all of them by the states of a generator at the most, which helps only if that is missing.
    hardly = isinstance(plan.activations, RecomputeFirst)
    if not hardly and smallest.missing_bytes(budget) and predictor.least_bytes(plan) < smallest.peak_allocated_bytes:
        return True
    # It may allocate more and still fit: blocks of other sizes leave other gaps.
    return not any(_least_missing(plan, predictor, budget))


def _over(device: int, host: int) -> str:
    """What is missing, in words; nothing where nothing is."""
    parts = [f"{format_bytes(device)} over the budget"] if device else []
    if host:
        parts.append(f"{format_bytes(host)} more than the host has")
    return " and ".join(parts)


def trainable(plans: Sequence[Plan], job: Job, device: Device) -> tuple[list[Plan], list[Rejected]]:
    """The plans that train the job, and those that do not with the reason."""
    possible: list[Plan] = []
    refusals: list[Rejected] = []
    for plan in plans:
        try:
            check(plan, job, device)
        except PlanRefused as refusal:
            refusals.append(Rejected(plan=plan, reason=str(refusal)))
        else:
            possible.append(plan)
    return possible, refusals


def _nearest(rejected: Sequence[Rejected]) -> list[Rejected]:
    """Of plans that recompute some first blocks and are otherwise alike, the one that recomputes the most."""
    nearest: dict[Plan, Rejected] = {}
    for other in rejected:
        some = isinstance(other.plan.activations, RecomputeFirst)
        nearest[replace(other.plan, activations=RecomputeFirst()) if some else other.plan] = other
    return list(nearest.values())


def _one_per_reason(refusals: Sequence[Rejected], cost: CostModel, seconds: float) -> list[Rejected]:
    """Of each reason the fastest plan, if it is faster than the chosen one; reasons that differ only in numbers are one."""
    first: dict[str, Rejected] = {}
    for refused in sorted(refusals, key=lambda refused: cost.step_seconds(refused.plan)):
        first.setdefault(re.sub(r"\d+", "#", refused.reason), refused)
    return [refused for refused in first.values() if cost.step_seconds(refused.plan) < seconds]


def _a_plan_that_fits(possible: Sequence[Plan], predictor: Predictor, budget: Budget, constraints: Mapping[str, Any]) -> Plan:
    """A plan that fits, or NoPlanFits now, from the micro-batches that can take least, rather than after every plan was tried.

    Those are the smallest, and the whole batch at once: it accumulates no gradients and alone allows an update during
    backward. Between them memory grows with the micro-batch.
    """
    sizes = [plan.micro_batch_size for plan in possible]
    extremes = {min(sizes), max(sizes)}
    smallest: tuple[Footprint, Plan] | None = None
    reason = ""
    for plan in sorted((plan for plan in possible if plan.micro_batch_size in extremes), key=_thrift):
        if smallest is not None and not _may_be_smaller(plan, smallest[0], predictor, budget):
            continue
        try:
            predicted = predictor.footprint(predictor.inferred(plan))
        except PlanRefused as refusal:
            reason = str(refusal)
            continue
        if predicted.fits(budget):
            return plan
        if smallest is None or _missing(predicted, budget) < _missing(smallest[0], budget):
            smallest = predicted, plan
    if smallest is None:
        raise PlanRefused(reason)
    raise NoPlanFits(_nothing_fits(*smallest, predictor, budget, constraints))


def _nothing_fits(smallest: Footprint, plan: Plan, predictor: Predictor, budget: Budget, constraints: Mapping[str, Any]) -> str:
    """What the smallest plan needs, what is missing on which side, and what would help."""
    device, host = _missing(smallest, budget)
    changes = f"{_to_leave_open(plan, constraints)}{_changes(smallest, plan, predictor, budget)}"
    if not device and budget.host_bytes is not None:
        return (
            f"no plan fits the host's {_exactly(budget.host_bytes)}: the smallest found ({plan}) fits the device and needs "
            f"{_exactly(smallest.host_bytes)} of the host, {_exactly(host)} more; "
            f"{_remedy(budget.host_limits, 'host_bytes')}{changes}."
        )
    alone = f"the weights alone are {format_bytes(predictor.weight_bytes)}"
    if context := context_bytes(predictor.device):
        alone += f" and the card's context {format_bytes(context)}"
    hopeless = f"; {alone}" if predictor.weight_bytes + context > budget.device_bytes else ""
    beside = f", and {_exactly(host)} more of the host" if host else ""
    return (
        f"no plan fits the budget of {_exactly(budget.device_bytes, _origin(budget))}: the smallest found "
        f"({plan}) needs {_exactly(smallest.total_device_bytes)}, {_exactly(device)} more{beside}{hopeless}; "
        f"{_remedy(budget.limits, 'the budget')}{changes}."
    )


def _to_leave_open(plan: Plan, constraints: Mapping[str, Any]) -> str:
    fields = open_to_less(plan, constraints)
    return f", leave {' and '.join(fields)} to the planner" if fields else ""


def open_to_less(plan: Plan, constraints: Mapping[str, Any]) -> list[str]:
    """The fields that are set, and not to what takes least."""
    least = (1, Recompute(), DuringBackward())
    return [
        f"plan.{field}"
        for field in constraints
        if getattr(plan, field) not in least and not isinstance(getattr(plan, field), ChunkedLogits)
    ]


def _changes(smallest: Footprint, plan: Plan, predictor: Predictor, budget: Budget) -> str:
    """What changes of the job would help and what each would need; they train something else, so nobody makes them unasked."""
    needs = []
    for change, found in changed_jobs(predictor, plan):
        if _helps(found, smallest, budget):
            host = f" and {format_bytes(found.host_bytes)} of the host" if found.host_bytes else ""
            enough = "" if found.fits(budget) else ", still too much"
            needs.append((bool(enough), f"{change} would need {format_bytes(found.total_device_bytes)}{host}{enough}"))
    listed = "; ".join(sentence for _, sentence in sorted(needs, key=lambda need: need[0]))
    return f", or change the job: {listed}" if needs else ", shorten the rows or take a smaller model"


def changed_jobs(predictor: Predictor, plan: Plan) -> Iterator[tuple[str, Footprint]]:
    """Changes of the job that people make when nothing fits, and what each takes with the plan."""
    for change, other, changed in predictor.cheaper_jobs(plan):
        # Where the model or the plan does not go with the change, it is none that helps.
        with suppress(ValueError):
            yield change, other.footprint(other.trace(changed))


def _helps(found: Footprint, smallest: Footprint, budget: Budget) -> bool:
    """Whether a change makes the job fit, or brings it nearer to that by more than a hundredth of what it needs."""
    if found.fits(budget):
        return True
    (device, host), (device_now, host_now) = _missing(found, budget), _missing(smallest, budget)
    if device_now:
        return device < device_now - smallest.total_device_bytes / 100
    return not device and host < host_now - smallest.host_bytes / 100


def _remedy(limits: Sequence[Limit], what: str) -> str:
    """What to do about the limit that binds."""
    tightest = min(limits, key=lambda limit: limit.bytes)
    if tightest.source == "asked for":
        return f"raise {what}"
    return "free memory" if tightest.source.startswith("free now") else "take a machine with more"


def _exactly(size: int, beside: str = "") -> str:
    return f"{format_bytes(size)} ({size:,} bytes{beside})"


def _origin(budget: Budget) -> str:
    """Where a budget comes from that is not just the number asked for."""
    less = f" less {format_bytes(budget.headroom_bytes)} of headroom" if budget.headroom_bytes else ""
    asked = budget.tightest.source == "asked for"
    return f", {format_bytes(budget.tightest.bytes)} {budget.tightest.source}{less}" if less or not asked else ""


def _thrift(plan: Plan) -> tuple[object, ...]:
    """A guess at which plans take least, to try those first: the order decides nothing but how soon one is found."""
    return (
        plan.micro_batch_size,
        _kept(plan.activations),
        not isinstance(plan.loss, ChunkedLogits),
        not isinstance(plan.update, DuringBackward),
        isinstance(plan.optimizer_state, OnDevice),
    )


def _kept(activations: Activations) -> tuple[int, int]:
    """A guess at how much stays, in an order: some of all blocks, of every k-th, of those behind the first n, of each, all."""
    match activations:
        case Recompute():
            return 0, activations.every
        case RecomputeFirst():
            return 1, -activations.blocks
        case Keep():
            return 3, 0
        case _:
            return 2, 0
