"""What a run goes on with when memory ran out: the way down, with a predictor whose plans take what the test says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
from cards import CARD
from hypothesis import given
from test_parity import PROCESSOR, shapes_of
from test_search import Told, budget, job, least, per_row, predictors
from toys import CASES

from memtrain.check import PlanRefused
from memtrain.device import Device
from memtrain.job import Approximation, Job
from memtrain.models.load import load_model
from memtrain.plan import (
    POLICIES,
    AfterBackward,
    ChunkedLogits,
    DataParallel,
    DuringBackward,
    EightBit,
    Keep,
    OnDevice,
    OnHost,
    Paged,
    PagedEightBit,
    Plan,
    Recompute,
    RecomputeFirst,
    Sdpa,
    WholeLogits,
)
from memtrain.planner.choice import Choice, NoPlanFits, Rejected
from memtrain.planner.predict import Predictor
from memtrain.planner.search import choose
from memtrain.planner.smaller import SAME_FORM, next_smaller, ways_out
from memtrain.run import prepare
from memtrain.state import state_of

PLENTY = budget(2**40)
# Clipping leaves activations and the loss to the search.
CLIPPED = job(12, max_grad_norm=1.0)


def choice_of(predictor: Told, plan: Plan, size: int = 2**40, host: int | None = None) -> Choice:
    """The choice that a run with ``plan`` came from."""
    fixed = {"micro_batch_size": plan.micro_batch_size} | {field: getattr(plan, field) for field in POLICIES}
    chosen = choose(predictor, PLENTY, fixed)
    host_limits = () if host is None else budget(host).limits
    return replace(chosen, budget=replace(budget(size), host_limits=host_limits), given=())


def down(predictor: Predictor, choice: Choice, constraints: Mapping[str, Any]) -> Iterator[Choice]:
    """Every choice below one, to the end."""
    while True:
        try:
            smaller = next_smaller(predictor, choice, constraints)
        except NoPlanFits:
            return
        # A way that does not go down has no end.
        assert smaller.footprint.total_device_bytes < choice.footprint.total_device_bytes
        yield (choice := smaller)


def plans(predictor: Predictor, choice: Choice, constraints: Mapping[str, Any]) -> list[Plan]:
    return [smaller.plan for smaller in down(predictor, choice, constraints)]


# ---------------------------------------------------------------------------------------------- the way down


def test_the_micro_batch_is_halved_first_to_the_next_divisor_of_at_most_half_and_all_else_stays() -> None:
    begun = Plan(micro_batch_size=12, activations=RecomputeFirst(1), loss=ChunkedLogits(3), attention=Sdpa())
    predictor = Told(CLIPPED, per_row)
    found = plans(predictor, choice_of(predictor, begun), {"loss": ChunkedLogits(3)})
    assert found[:3] == [replace(begun, micro_batch_size=size) for size in (6, 3, 1)]
    assert {plan.attention for plan in found} == {Sdpa()}


def test_below_one_row_comes_the_fastest_plan_that_takes_less() -> None:
    # Every plan but this takes 1010 bytes or more.
    def takes(plan: Plan) -> int:
        return 1009 if plan == Plan(micro_batch_size=4, activations=Recompute()) else 1006 + 4 * plan.micro_batch_size

    predictor = Told(CLIPPED, takes)
    found = next_smaller(predictor, choice_of(predictor, Plan(micro_batch_size=1)), {})
    assert (found.plan, found.footprint.total_device_bytes) == (Plan(micro_batch_size=4, activations=Recompute()), 1009)
    # 3 micro-batches of 4 rows that run forward a second time, and the update.
    assert found.step_seconds == 3 * (5 + 5 + 5) + 8


@given(predictor=predictors())
def test_each_plan_takes_less_than_the_one_before_until_there_is_no_smaller(predictor: Told) -> None:
    begun = choose(predictor, PLENTY)
    found = [begun, *down(predictor, begun, {})]
    sizes = [choice.footprint.total_device_bytes for choice in found]
    assert sizes == [predictor.takes(choice.plan) for choice in found]
    assert all(after < before for before, after in pairwise(sizes))
    assert sizes[-1] == least(predictor)


def test_a_micro_batch_that_is_fixed_is_halved_and_never_exceeded() -> None:
    def takes(plan: Plan) -> int:
        return 100 if plan.micro_batch_size == 12 else per_row(plan)

    predictor = Told(CLIPPED, takes)
    begun = choice_of(predictor, Plan(micro_batch_size=2))
    found = list(down(predictor, begun, {"micro_batch_size": 2}))
    assert [choice.plan for choice in found] == [
        Plan(micro_batch_size=1),
        Plan(micro_batch_size=1, activations=Recompute()),
        Plan(micro_batch_size=1, loss=ChunkedLogits()),
        Plan(micro_batch_size=1, loss=ChunkedLogits(), activations=Recompute()),
    ]
    assert [choice.given for choice in found] == [(), (), (), ()]


def test_other_fields_that_are_fixed_stay_and_are_still_told_as_given() -> None:
    predictor = Told(CLIPPED, per_row)
    fixed = {"loss": WholeLogits()}
    found = list(down(predictor, choice_of(predictor, Plan(micro_batch_size=2)), fixed))
    assert [choice.plan for choice in found] == [
        Plan(micro_batch_size=1),
        Plan(micro_batch_size=1, activations=Recompute()),
    ]
    assert {choice.given for choice in found} == {("loss",)}


@pytest.mark.parametrize(
    ("takes", "begun"),
    [
        # Accumulated gradients take more than the rows that are spared.
        (lambda plan: 900 + 100 * (plan.micro_batch_size < 4) - (plan.activations == Recompute()), Plan(micro_batch_size=4)),
        # An update during backward has the whole batch.
        (lambda plan: 900 - (plan.activations == Recompute()), Plan(micro_batch_size=4, update=DuringBackward())),
    ],
    ids=["takes more", "refused by the plan's rules"],
)
def test_where_halving_does_not_help_the_next_plan_comes_at_once(takes: Any, begun: Plan) -> None:
    predictor = Told(job(4), takes)
    found = next_smaller(predictor, choice_of(predictor, begun), {"update": begun.update})
    assert found.plan == replace(begun, activations=Recompute())


def test_where_the_model_refuses_a_part_of_the_batch_the_next_plan_has_the_whole_one() -> None:
    def takes(plan: Plan) -> int:
        if plan.micro_batch_size < 4:
            raise PlanRefused("norm normalises over the micro-batch.")
        return per_row(plan)

    predictor = Told(job(4, max_grad_norm=1.0), takes)
    found = plans(predictor, choice_of(predictor, Plan(micro_batch_size=4)), {})
    assert found[0] == Plan(micro_batch_size=4, activations=Recompute())
    assert {plan.micro_batch_size for plan in found} == {4}


def test_what_was_inferred_too_small_is_simulated_and_passed_over() -> None:
    predictor = Told(CLIPPED, lambda plan: 1000, infers=lambda plan: 999)
    assert plans(predictor, choice_of(predictor, Plan(micro_batch_size=12)), {}) == []


def test_processes_stay_as_many_and_each_halves_its_share() -> None:
    begun = Plan(micro_batch_size=4, sharding=DataParallel(2))
    predictor = Told(job(8, max_grad_norm=1.0), per_row)
    found = plans(predictor, choice_of(predictor, begun), {})
    assert found[:2] == [replace(begun, micro_batch_size=size) for size in (2, 1)]
    assert {plan.sharding for plan in found} == {DataParallel(2)}


# ---------------------------------------------------------------------------------------------- a prediction that missed


def test_plans_that_would_miss_the_budget_by_as_much_come_last() -> None:
    predictor = Told(CLIPPED, lambda plan: 100 * plan.micro_batch_size)
    begun = choice_of(predictor, Plan(micro_batch_size=12), size=1250)
    # 700 more than was predicted: 600 would take 1300, and 400 take 1100.
    assert next_smaller(predictor, begun, {}, needed_bytes=1900).plan.micro_batch_size == 4
    # Nothing would be enough, so the next is tried all the same.
    assert next_smaller(predictor, begun, {}, needed_bytes=9999).plan.micro_batch_size == 6
    # It took no more than was predicted: something else has the memory, and nobody knows how much.
    assert next_smaller(predictor, begun, {}, needed_bytes=1000).plan.micro_batch_size == 6


# ---------------------------------------------------------------------------------------------- state that carries over


def by_state(plan: Plan) -> int:
    return {OnDevice: 1000, OnHost: 500, Paged: 400, EightBit: 300, PagedEightBit: 200}[type(plan.optimizer_state)]


ALLOWING = replace(job(1, max_grad_norm=1.0), allow=frozenset(Approximation))


@pytest.mark.parametrize(
    ("begun", "then"),
    [(OnDevice(), [OnHost()]), (OnHost(), []), (Paged(), []), (EightBit(), [PagedEightBit()]), (PagedEightBit(), [])],
)
def test_the_optimizers_state_moves_and_keeps_its_form(begun: Any, then: list[Any]) -> None:
    predictor = Told(ALLOWING, by_state, device=CARD)
    found = plans(predictor, choice_of(predictor, Plan(micro_batch_size=1, optimizer_state=begun)), {})
    assert [plan.optimizer_state for plan in found] == then


def test_the_host_is_not_filled_beyond_its_budget() -> None:
    predictor = Told(ALLOWING, by_state, device=CARD, on_host=lambda plan: 77 * isinstance(plan.optimizer_state, OnHost))
    begun = Plan(micro_batch_size=1)
    assert plans(predictor, choice_of(predictor, begun, host=76), {}) == []
    assert plans(predictor, choice_of(predictor, begun, host=77), {}) == [replace(begun, optimizer_state=OnHost())]


def test_what_keeps_its_form_is_what_can_be_put_back() -> None:
    pytest.importorskip("bitsandbytes")
    kinds: dict[str, set[type]] = {}
    case = CASES["llama"]
    toy = Job(model="toy", global_batch_size=1, steps=1, allow=frozenset(Approximation))
    for form in POLICIES["optimizer_state"]:
        run = prepare(toy, Plan(micro_batch_size=1, optimizer_state=form()), load_model(case.build(), toy))
        kinds.setdefault(state_of(run).facts["optimizer"]["kind"], set()).add(form)
        run.release()
    assert list(kinds.values()) == [set(form) for form in SAME_FORM]


# ---------------------------------------------------------------------------------------------- a real model


def test_the_result_is_a_whole_choice_that_was_simulated() -> None:
    case = CASES["llama"]
    asked = Job(model="tiny", global_batch_size=2, steps=2)
    predictor = Predictor(asked, case.build(), shapes_of(case), PROCESSOR)
    fixed = {"loss": WholeLogits(), "update": AfterBackward()}
    begun = replace(choose(predictor, PLENTY, fixed), rejected=(Rejected(plan=Plan(micro_batch_size=2), reason="slow"),))
    found = [begun, *islice(down(predictor, begun, fixed), 2)]
    assert [choice.plan.micro_batch_size for choice in found[:2]] == [2, 1]
    assert found[2].plan.activations != begun.plan.activations == found[1].plan.activations
    for choice in found[1:]:
        assert choice.footprint == predictor.footprint(predictor.trace(choice.plan))
        assert choice.trace == predictor.trace(choice.plan)
        assert (choice.job, choice.budget, choice.device, choice.rejected) == (asked, begun.budget, PROCESSOR, ())
        assert choice.planning_seconds > 0


# ---------------------------------------------------------------------------------------------- nothing is left


def test_the_end_is_said_with_the_smallest_plan_and_its_bytes() -> None:
    predictor = Told(job(1, max_grad_norm=1.0), lambda plan: 2**20)
    message = (
        "memory ran out with the smallest plan (micro-batch 1, keep, whole logits, fused update after backward), and no other is "
        "predicted to take less than its 1.00 MiB: free memory on the device, or change the job."
    )
    with pytest.raises(NoPlanFits, match=f"^{re.escape(message)}$"):
        next_smaller(predictor, choice_of(predictor, Plan(micro_batch_size=1)), {})


def changed(takes: int, on_host: int = 0, device: Device = CARD) -> tuple[Predictor, Plan]:
    return Told(job(1), lambda plan: takes, on_host=lambda plan: on_host, device=device), Plan(micro_batch_size=1)


def test_ways_out_are_fields_to_leave_open_and_then_changes_of_the_job_that_take_less() -> None:
    takes = {"halves": 990, "is as much": 1000, "is beyond the host": 500, "quarters": 250}
    changes = [(name, *changed(size, on_host=80 * name.endswith("host"))) for name, size in takes.items()]
    asked = job(1, max_grad_norm=1.0)

    def recomputing(plan: Plan) -> int:
        return 1000 if plan.activations == Keep() else 992 - isinstance(plan.loss, ChunkedLogits)

    predictor = Told(asked, recomputing, changes=changes, device=CARD)
    fixed = {"micro_batch_size": 1, "activations": Keep(), "optimizer_state": OnDevice()}
    choice = choice_of(predictor, Plan(micro_batch_size=1), size=1000, host=79)
    # It needed 9 bytes more than was predicted, so 991 would do.
    assert list(ways_out(predictor, choice, fixed, needed_bytes=1009)) == [
        ("plan.activations and plan.optimizer_state left to the planner", 991, True),
        ("halves", 990, True),
        ("quarters", 250, True),
    ]
    assert [does for *_, does in ways_out(predictor, choice, fixed, needed_bytes=1010)] == [False, True, True]
    assert [name for name, *_ in ways_out(predictor, choice, {})] == ["halves", "quarters"]


def test_a_change_that_fits_is_named_however_little_is_missing() -> None:
    predictor = Told(job(1, max_grad_norm=1.0), lambda plan: 1000, changes=[("shorter rows", *changed(400))], device=CARD)
    with pytest.raises(
        NoPlanFits, match=r"1 B \(1 bytes\) more; raise the budget, or change the job: shorter rows would need 400 B"
    ):
        choose(predictor, budget(999))
