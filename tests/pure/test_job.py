"""The job and the budget refuse what cannot be trained or fitted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.job import (
    Adafactor,
    Adam,
    AdamW,
    Approximation,
    Budget,
    Constant,
    Cosine,
    Job,
    Limit,
    Linear,
    Lion,
    Muon,
    NotFinite,
    Sgd,
    not_finite,
)
from memtrain.precision import Bf16, Fp32

JOB = Job(model="tiny", global_batch_size=8, steps=10)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: AdamW(learning_rate=0.0), "learning_rate is 0.0, and it must be above 0 and finite."),
        (lambda: AdamW(learning_rate=math.inf), "learning_rate is inf, and it must be above 0 and finite."),
        (lambda: AdamW(learning_rate=math.nan), "learning_rate is nan, and it must be above 0 and finite."),
        (lambda: AdamW(betas=(0.9, 1.0)), "betas is (0.9, 1.0), and it must be two numbers from 0 up to, not including, 1."),
        (lambda: AdamW(betas=(-0.1, 0.9)), "betas is (-0.1, 0.9), and it must be two numbers from 0 up to, not including, 1."),
        (
            lambda: AdamW(betas=(0.9,)),  # type: ignore[arg-type]
            "betas is (0.9,), and it must be two numbers from 0 up to, not including, 1.",
        ),
        (lambda: AdamW(eps=0.0), "eps is 0.0, and it must be above 0."),
        (lambda: AdamW(weight_decay=-0.1), "weight_decay is -0.1, and it must be 0 or more."),
        (lambda: AdamW(weight_decay=math.inf), "weight_decay is inf, and it must be 0 or more."),
        *[
            (lambda rule=rule: rule(learning_rate=0.0), "learning_rate is 0.0, and it must be above 0 and finite.")
            for rule in (Adam, Sgd, Adafactor, Lion, Muon)
        ],
        *[
            (lambda rule=rule: rule(weight_decay=-0.1), "weight_decay is -0.1, and it must be 0 or more.")
            for rule in (Adam, Sgd, Adafactor, Lion, Muon)
        ],
        *[
            (
                lambda rule=rule: rule(betas=(0.9, 1.0)),
                "betas is (0.9, 1.0), and it must be two numbers from 0 up to, not including, 1.",
            )
            for rule in (Adam, Lion, Muon)
        ],
        *[(lambda rule=rule: rule(eps=0.0), "eps is 0.0, and it must be above 0.") for rule in (Adam, Muon)],
        *[
            (lambda rule=rule: rule(momentum=1.0), "momentum is 1.0, and it must be from 0 up to, not including, 1.")
            for rule in (Sgd, Muon)
        ],
        (lambda: Adafactor(beta2_decay=0.1), "beta2_decay is 0.1, and it must be from -1 to 0."),
        (lambda: Adafactor(beta2_decay=-1.1), "beta2_decay is -1.1, and it must be from -1 to 0."),
        (lambda: Adafactor(min_scale=0.0), "min_scale is 0.0, and it must be above 0."),
        (lambda: Adafactor(clip_threshold=0.5), "clip_threshold is 0.5, and it must be 1 or more."),
        (
            lambda: replace(JOB, optimizer="sgd"),
            "optimizer is 'sgd', and it must be an AdamW of memtrain or another optimizer of its job module, such as "
            "AdamW(learning_rate=5e-5).",
        ),
        (lambda: Cosine(final_fraction=1.1), "final_fraction is 1.1, and it must be from 0 to 1."),
        (lambda: Cosine(final_fraction=-0.1), "final_fraction is -0.1, and it must be from 0 to 1."),
        (lambda: Linear(final_fraction=-0.1), "final_fraction is -0.1, and it must be from 0 to 1."),
        (
            lambda: replace(JOB, schedule="linear"),
            "schedule is 'linear', and it must be a Constant, a Cosine or a Linear of memtrain.",
        ),
        (
            lambda: replace(JOB, loss="mse"),
            "loss is 'mse', and it must be a function of what the model returns and of the batch.",
        ),
        (lambda: replace(JOB, global_batch_size=0), "global_batch_size is 0, and it must be a whole number of 1 or more."),
        (lambda: replace(JOB, global_batch_size=2.5), "global_batch_size is 2.5, and it must be a whole number of 1 or more."),
        (lambda: replace(JOB, steps=0), "steps is 0, and it must be a whole number of 1 or more."),
        (
            lambda: replace(JOB, schedule=Constant(warmup_steps=-1)),
            "warmup_steps is -1, and it must be a whole number of 0 or more.",
        ),
        (
            lambda: replace(JOB, schedule=Cosine(warmup_steps=-2)),
            "warmup_steps is -2, and it must be a whole number of 0 or more.",
        ),
        (
            lambda: replace(JOB, schedule=Linear(warmup_steps=1.5)),
            "warmup_steps is 1.5, and it must be a whole number of 0 or more.",
        ),
        (
            lambda: replace(JOB, max_grad_norm=0.0),
            "max_grad_norm is 0.0, and it must be above 0, or null for no clipping.",
        ),
        (lambda: replace(JOB, on_not_finite="ignore"), "on_not_finite is 'ignore', and it must be stop or skip."),
        (lambda: replace(JOB, precision="bf16"), "precision is 'bf16', and it must be one of memtrain's, such as Bf16()."),
        (
            lambda: replace(JOB, allow=frozenset({"four_bit_state"})),
            "allow has 'four_bit_state', which is none of the approximations that there are: eight_bit_state.",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_the_rule(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        make()


def test_the_edges_of_the_rules_are_allowed() -> None:
    AdamW(betas=(0.0, 0.0), weight_decay=0.0)
    Sgd(momentum=0.0)
    Adafactor(beta2_decay=-1.0, clip_threshold=1.0)
    Adafactor(beta2_decay=0.0)
    Cosine(final_fraction=0.0)
    Cosine(final_fraction=1.0)
    Job(model="tiny", global_batch_size=1, steps=1, max_grad_norm=None)


def test_a_step_that_is_not_finite_ends_the_run_unless_the_job_says_otherwise() -> None:
    assert JOB.on_not_finite is NotFinite.STOP
    assert [not_finite(name) for name in ("stop", "skip")] == list(NotFinite)


def test_a_job_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(FrozenInstanceError):
        JOB.steps = 0  # type: ignore[misc]


def test_a_budget_is_its_smallest_limit_less_the_headroom() -> None:
    asked, free = Limit("asked for", 1000), Limit("free now", 800)
    budget = Budget(limits=(asked, free), headroom_bytes=300)
    assert budget.tightest is free
    assert budget.device_bytes == 500


@given(sizes=st.lists(st.integers(1, 2**50), min_size=1, max_size=4), more=st.integers(1, 2**50))
def test_another_limit_never_raises_a_budget(sizes: list[int], more: int) -> None:
    limits = tuple(Limit("limit", size) for size in sizes)
    assert Budget(limits=(*limits, Limit("more", more))).device_bytes <= Budget(limits=limits).device_bytes


def test_a_budget_is_read_from_text() -> None:
    asked = Limit("asked for", 2 * 2**20)
    assert Budget.of("2MiB") == Budget(limits=(asked,))
    assert Budget.of("2MiB", host="1GiB") == Budget(limits=(asked,), host_limits=(Limit("asked for", 2**30),))


def test_the_host_is_bounded_by_its_own_smallest_limit() -> None:
    device, host = (Limit("asked for", 1000),), (Limit("asked for", 900), Limit("free now", 700))
    budget = Budget(limits=device, headroom_bytes=300, host_limits=host)
    assert (budget.device_bytes, budget.host_bytes) == (700, 700)
    assert Budget(limits=device).host_bytes is None


def test_without_a_word_a_job_is_in_fp32_and_allows_nothing() -> None:
    assert (JOB.precision, JOB.allow) == (Fp32(), frozenset())
    changed = replace(JOB, precision=Bf16(), allow=frozenset(Approximation))
    assert (changed.precision, changed.allow) == (Bf16(), {"eight_bit_state"})


@pytest.mark.parametrize("headroom", [2**20, 2**20 + 1])
def test_a_headroom_as_large_as_the_budget_is_refused(headroom: int) -> None:
    sentence = "headroom 1.00 MiB leaves nothing of the 1.00 MiB that are free now: lower the headroom or raise the budget."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Budget(limits=(Limit("asked for", 2**30), Limit("free now", 2**20)), headroom_bytes=headroom)
