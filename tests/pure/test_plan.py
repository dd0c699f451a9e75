"""The plan: what a policy is called, how a plan is written down, and which plans a job refuses."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_args, get_type_hints

import pytest
from cards import CARD, CPU
from hypothesis import given
from hypothesis import strategies as st

from memtrain.check import PlanRefused, check, micro_batch_sizes
from memtrain.device import Device
from memtrain.job import Approximation, Job
from memtrain.plan import (
    POLICIES,
    ChunkedLogits,
    DuringBackward,
    EightBit,
    Foreach,
    Keep,
    OnDevice,
    OnHost,
    OptimizerState,
    Paged,
    PagedEightBit,
    Plan,
    Recompute,
    RecomputeFirst,
    from_dict,
    parse_policy,
    policy_name,
    to_dict,
)
from memtrain.precision import Bf16, Fp32

EVERY_POLICY = [(field, policy) for field, classes in POLICIES.items() for policy in classes]


def job(global_batch_size: int, max_grad_norm: float | None = 1.0) -> Job:
    return Job(model="tiny", global_batch_size=global_batch_size, steps=1, max_grad_norm=max_grad_norm)


def settings(policy: type) -> list[str]:
    """The settings of a policy, all of which are whole numbers of 1 or more."""
    assert set(get_type_hints(policy).values()) <= {int}
    return list(get_type_hints(policy))


def test_the_table_of_policies_holds_every_field_that_is_a_choice() -> None:
    types = get_type_hints(Plan)
    fields = [field.name for field in dataclasses.fields(Plan)]
    assert fields == ["micro_batch_size", *POLICIES]
    assert {field: get_args(types[field]) for field in POLICIES} == POLICIES


def test_every_default_is_one_of_the_policies_of_its_field() -> None:
    plan = Plan(micro_batch_size=1)
    assert all(type(getattr(plan, field)) in classes for field, classes in POLICIES.items())


def test_policies_of_a_field_have_different_names_and_words() -> None:
    for classes in POLICIES.values():
        assert len({policy_name(policy) for policy in classes}) == len(classes)
        assert len({str(policy()) for policy in classes}) == len(classes)


def test_a_policy_is_called_as_its_class_in_snake_case() -> None:
    names = {field: [policy_name(policy) for policy in classes] for field, classes in POLICIES.items()}
    assert names == {
        "activations": [
            "keep",
            "recompute",
            "recompute_first",
            "recompute_selective",
            "recompute_attention",
            "recompute_mlp",
        ],
        "loss": ["whole_logits", "chunked_logits"],
        "update": ["after_backward", "during_backward"],
        "optimizer_kernel": ["fused", "foreach"],
        "optimizer_state": ["on_device", "on_host", "paged", "eight_bit", "paged_eight_bit"],
        "attention": ["model_default", "eager", "sdpa", "flash_attention"],
        "sharding": ["single", "data_parallel"],
    }


def test_a_plan_prints_as_one_sentence() -> None:
    plan = Plan(micro_batch_size=4, activations=Recompute(), loss=ChunkedLogits(256), update=DuringBackward())
    assert str(plan) == "micro-batch 4, recompute every block, logits in chunks of 256 tokens, fused update during backward"
    assert str(Plan(micro_batch_size=1)) == "micro-batch 1, keep, whole logits, fused update after backward"
    assert str(Recompute(3)) == "recompute one block in 3"
    assert [str(RecomputeFirst(count)) for count in (1, 2)] == ["recompute the first block", "recompute the first 2 blocks"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (OnDevice(), ""),
        (OnHost(), ", optimizer state on the host"),
        (Paged(), ", optimizer state paged"),
        (EightBit(), ", optimizer state in 8 bits"),
        (PagedEightBit(), ", optimizer state in 8 bits, paged"),
    ],
)
def test_a_plan_says_where_the_optimizer_state_is_unless_it_is_on_the_device(state: OptimizerState, words: str) -> None:
    plain = "micro-batch 2, keep, whole logits, fused update after backward"
    assert str(Plan(micro_batch_size=2, optimizer_state=state)) == plain + words


@pytest.mark.parametrize("policy", [policy for classes in POLICIES.values() for policy in classes], ids=policy_name)
def test_every_plan_reads_back_as_it_was_written(policy: type) -> None:
    (field,) = (field for field, classes in POLICIES.items() if policy in classes)
    # Settings other than the defaults, so that one that is not written cannot come back by itself.
    plan = Plan(micro_batch_size=3, **{field: policy(**dict.fromkeys(settings(policy), 7))})
    assert from_dict(to_dict(plan)) == plan


def test_a_written_plan_holds_nothing_but_names_and_numbers() -> None:
    assert to_dict(Plan(micro_batch_size=2, activations=Recompute(3))) == {
        "micro_batch_size": 2,
        "activations": {"policy": "recompute", "every": 3},
        "loss": {"policy": "whole_logits"},
        "update": {"policy": "after_backward"},
        "optimizer_kernel": {"policy": "fused"},
        "optimizer_state": {"policy": "on_device"},
        "attention": {"policy": "model_default"},
        "sharding": {"policy": "single"},
    }


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        ({"activation": {"policy": "keep"}}, "unknown here: ['activation'], missing: []."),
        ({"loss": None, "micro_batch_size": None}, "unknown here: [], missing: ['loss', 'micro_batch_size']."),
    ],
)
def test_unknown_and_missing_keys_of_a_written_plan_are_named(changes: dict[str, Any], ending: str) -> None:
    written = {**to_dict(Plan(micro_batch_size=2)), **changes}
    beginning = (
        "a plan has the keys micro_batch_size, activations, loss, update, optimizer_kernel, optimizer_state, "
        "attention, sharding; "
    )
    with pytest.raises(ValueError, match=f"^{re.escape(beginning + ending)}$"):
        from_dict({key: value for key, value in written.items() if value is not None})


@pytest.mark.parametrize(("field", "policy"), EVERY_POLICY)
def test_a_policy_without_settings_written_has_its_defaults(field: str, policy: type) -> None:
    assert parse_policy(field, {"policy": policy_name(policy)}) == policy()


@pytest.mark.parametrize(
    ("field", "written", "sentence"),
    [
        (
            "activations",
            {"policy": "kept"},
            "plan.activations is 'kept', and it must be one of keep, recompute, recompute_first, "
            "recompute_selective, recompute_attention, recompute_mlp.",
        ),
        ("update", {}, "plan.update is None, and it must be one of after_backward, during_backward."),
        ("activations", {"policy": "recompute", "evry": 2}, "plan.activations: recompute has no setting 'evry'; it has every."),
        ("activations", {"policy": "keep", "every": 2}, "plan.activations: keep has no setting 'every'; it has none."),
    ],
)
def test_an_unknown_policy_or_setting_is_refused_with_the_known_ones(
    field: str, written: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        parse_policy(field, written)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_a_size_that_is_no_positive_whole_number_is_refused(value: Any) -> None:
    rule = re.escape(f" is {value!r}, and it must be a whole number of 1 or more.")
    with pytest.raises(ValueError, match=f"^micro_batch_size{rule}$"):
        Plan(micro_batch_size=value)
    with pytest.raises(ValueError, match=rf"^activations\.every{rule}$"):
        Recompute(every=value)
    with pytest.raises(ValueError, match=rf"^activations\.blocks{rule}$"):
        RecomputeFirst(blocks=value)
    with pytest.raises(ValueError, match=rf"^loss\.chunk_tokens{rule}$"):
        ChunkedLogits(chunk_tokens=value)


@pytest.mark.parametrize("policy", [policy for _, policy in EVERY_POLICY if dataclasses.fields(policy)])
def test_every_setting_of_every_policy_refuses_zero(policy: type) -> None:
    for setting in settings(policy):
        with pytest.raises(ValueError, match=rf"\.{setting} is 0, and it must be"):
            policy(**{setting: 0})


@pytest.mark.parametrize("size", [4, 5, 12])
def test_a_micro_batch_that_does_not_divide_the_batch_is_refused_with_those_that_do(size: int) -> None:
    sentence = f"micro_batch_size {size} does not divide global_batch_size 6: choose one of 6, 3, 2, 1."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        check(Plan(micro_batch_size=size), job(6))


def test_an_update_during_backward_is_refused_where_the_gradient_is_clipped() -> None:
    sentence = (
        "an update during backward never has the whole gradient that max_grad_norm 0.5 bounds: "
        "set max_grad_norm to null or update after backward."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        check(Plan(micro_batch_size=6, update=DuringBackward()), job(6, max_grad_norm=0.5))


def test_an_update_during_backward_is_refused_where_gradients_accumulate() -> None:
    sentence = (
        "an update during backward needs the whole batch in one backward, and micro_batch_size 2 takes 3: "
        "set micro_batch_size to 6 or update after backward."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        check(Plan(micro_batch_size=2, update=DuringBackward()), job(6, max_grad_norm=None))


def test_an_update_during_backward_is_allowed_on_the_whole_unclipped_batch() -> None:
    check(Plan(micro_batch_size=6, update=DuringBackward()), job(6, max_grad_norm=None))


# ---------------------------------------------------------------------------------------------- optimizer state

ALLOWED = frozenset({Approximation.EIGHT_BIT_STATE})


@pytest.mark.parametrize(
    ("plan", "changes", "device", "sentence"),
    [
        *(
            (
                Plan(micro_batch_size=6, optimizer_state=state),
                {"allow": ALLOWED},
                CPU,
                f"optimizer state {state} frees nothing on a processor, whose memory is the host's: "
                f"set optimizer_state to on_device.",
            )
            for state in (OnHost(), Paged(), PagedEightBit())
        ),
        *(
            (
                Plan(micro_batch_size=6, optimizer_state=state, optimizer_kernel=Foreach()),
                {"allow": ALLOWED},
                CARD,
                f"optimizer state {state} is updated weight by weight, and a foreach update takes all weights at once: "
                f"set optimizer_kernel to fused.",
            )
            for state in (OnHost(), Paged(), EightBit(), PagedEightBit())
        ),
        *(
            (
                Plan(micro_batch_size=6, optimizer_state=state),
                {},
                CARD,
                f"optimizer_state {name} rounds the optimizer's state to 8 bits, which the job does not allow: "
                f"add eight_bit_state to allow, or keep the state whole.",
            )
            for state, name in ((EightBit(), "eight_bit"), (PagedEightBit(), "paged_eight_bit"))
        ),
        (
            Plan(micro_batch_size=6, optimizer_state=Paged()),
            {"precision": Bf16()},
            CARD,
            "paged state has 32 bits and what is trained has 16: "
            "set optimizer_state to on_host, or to paged_eight_bit where the job allows that.",
        ),
    ],
)
def test_optimizer_state_that_does_not_suit_job_kernel_or_device_is_refused(
    plan: Plan, changes: dict[str, Any], device: Device, sentence: str
) -> None:
    with pytest.raises(PlanRefused, match=f"^{re.escape(sentence)}$"):
        check(plan, dataclasses.replace(job(6), **changes), device)


def accepted(device: Device | None, **changes: Any) -> set[type]:
    """The policies for the optimizer's state that a job may have on a device."""
    found = set()
    for policy in POLICIES["optimizer_state"]:
        try:
            check(Plan(micro_batch_size=6, optimizer_state=policy()), dataclasses.replace(job(6), **changes), device)
        except PlanRefused:
            continue
        found.add(policy)
    return found


@pytest.mark.parametrize("precision", [Fp32(), Bf16()])
@pytest.mark.parametrize("allow", [frozenset(), ALLOWED])
def test_every_other_optimizer_state_is_accepted(precision: Fp32 | Bf16, allow: frozenset[Approximation]) -> None:
    rounding = {EightBit, PagedEightBit} if allow else set()
    whole = {OnDevice, OnHost} | ({Paged} if precision == Fp32() else set())
    assert accepted(CARD, precision=precision, allow=allow) == whole | rounding
    # What only makes no sense on a processor is the planner's to know; the step itself runs anywhere.
    assert accepted(None, precision=precision, allow=allow) == whole | rounding
    assert accepted(CPU, precision=precision, allow=allow) == {OnDevice} | (rounding - {PagedEightBit})


@pytest.mark.parametrize("state", [OnHost(), Paged(), EightBit(), PagedEightBit()])
def test_any_optimizer_state_may_be_updated_during_backward(state: OptimizerState) -> None:
    plan = Plan(micro_batch_size=6, update=DuringBackward(), optimizer_state=state)
    check(plan, dataclasses.replace(job(6, max_grad_norm=None), allow=ALLOWED), CARD)


# ---------------------------------------------------------------------------------------------- sizes


@given(rows=st.integers(1, 500))
def test_every_micro_batch_size_on_offer_is_accepted_and_no_other_is(rows: int) -> None:
    sizes = micro_batch_sizes(job(rows))
    assert sizes == tuple(sorted(sizes, reverse=True))
    for size in range(1, rows + 2):
        if size in sizes:
            check(Plan(micro_batch_size=size, activations=Keep()), job(rows))
        else:
            with pytest.raises(ValueError, match="does not divide"):
                check(Plan(micro_batch_size=size), job(rows))
