"""The learning rate: exact values where the formula has them, and its shape everywhere."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.job import AdamW, Constant, Cosine, Job, Linear, Schedule
from memtrain.schedule import learning_rate

PEAK = 3e-4


def job(steps: int, schedule: Schedule) -> Job:
    return Job(model="tiny", global_batch_size=1, steps=steps, optimizer=AdamW(learning_rate=PEAK), schedule=schedule)


def rates(steps: int, schedule: Schedule) -> list[float]:
    return [learning_rate(job(steps, schedule), step) for step in range(steps)]


def test_warmup_begins_above_zero_and_ends_at_the_full_peak() -> None:
    assert rates(6, Constant(warmup_steps=4)) == [PEAK * 0.25, PEAK * 0.5, PEAK * 0.75, PEAK, PEAK, PEAK]


def test_constant_without_warmup_is_the_peak_from_the_first_step() -> None:
    assert rates(3, Constant()) == [PEAK, PEAK, PEAK]


def test_cosine_without_warmup_begins_at_the_peak_and_ends_at_the_final_fraction() -> None:
    decay = rates(5, Cosine(final_fraction=0.1))
    assert decay[0] == PEAK
    assert decay[2] == pytest.approx(PEAK * 0.55, rel=1e-15)
    assert decay[4] == PEAK * 0.1


def test_cosine_follows_the_formula_between_the_peak_and_the_last_step() -> None:
    decay = rates(8, Cosine(warmup_steps=2))
    assert decay[:2] == [PEAK / 2, PEAK]
    for step in range(2, 7):
        assert decay[step] == pytest.approx(PEAK * (1 + math.cos(math.pi * (step - 1) / 6)) / 2, rel=1e-15)
    assert decay[7] == 0.0


def test_warmup_of_one_step_is_no_warmup() -> None:
    assert rates(5, Cosine(warmup_steps=1)) == rates(5, Cosine())


def test_warmup_over_all_steps_ends_at_the_peak() -> None:
    assert rates(4, Cosine(warmup_steps=4)) == [PEAK * 0.25, PEAK * 0.5, PEAK * 0.75, PEAK]


def test_linear_without_warmup_reaches_the_final_fraction_after_the_last_step() -> None:
    assert rates(4, Linear()) == [PEAK, PEAK * 0.75, PEAK * 0.5, PEAK * 0.25]
    assert rates(4, Linear(final_fraction=0.5)) == [PEAK, PEAK * 0.875, PEAK * 0.75, PEAK * 0.625]
    assert rates(10, Linear()) == pytest.approx([PEAK * tenths / 10 for tenths in range(10, 0, -1)], rel=1e-15)


def test_linear_with_warmup_falls_from_the_step_that_has_the_peak() -> None:
    assert rates(6, Linear(warmup_steps=3)) == pytest.approx(
        [PEAK / 3, PEAK * 2 / 3, PEAK, PEAK * 3 / 4, PEAK * 2 / 4, PEAK / 4], rel=1e-15
    )
    assert rates(5, Linear(warmup_steps=1)) == rates(5, Linear())
    assert rates(4, Linear(warmup_steps=4)) == rates(4, Cosine(warmup_steps=4))


@pytest.mark.parametrize(
    "schedule",
    [
        Constant(),
        Constant(warmup_steps=1),
        Cosine(),
        Cosine(warmup_steps=1),
        Linear(),
        Linear(warmup_steps=1, final_fraction=0.5),
    ],
)
def test_a_run_of_one_step_trains_with_the_peak(schedule: Schedule) -> None:
    assert rates(1, schedule) == [PEAK]


def test_a_final_fraction_of_one_never_decays() -> None:
    assert rates(5, Cosine(final_fraction=1.0)) == [PEAK] * 5
    assert rates(5, Linear(final_fraction=1.0)) == [PEAK] * 5


@given(data=st.data(), steps=st.integers(2, 60), final_fraction=st.floats(0, 1))
def test_cosine_rises_to_the_peak_then_falls_to_the_final_fraction(
    data: st.DataObject, steps: int, final_fraction: float
) -> None:
    warmup_steps = data.draw(st.integers(0, steps - 1))
    values = rates(steps, Cosine(warmup_steps=warmup_steps, final_fraction=final_fraction))
    at_peak = max(warmup_steps - 1, 0)
    assert values[at_peak] == max(values) == PEAK
    assert all(before < after for before, after in pairwise(values[: at_peak + 1]))
    assert all(before >= after for before, after in pairwise(values[at_peak:]))
    assert values[-1] == PEAK * final_fraction


@given(data=st.data(), steps=st.integers(2, 60), final_fraction=st.floats(0, 1))
def test_linear_rises_to_the_peak_then_falls_by_equal_steps_and_none_trains_with_0(
    data: st.DataObject, steps: int, final_fraction: float
) -> None:
    warmup_steps = data.draw(st.integers(0, steps - 1))
    values = rates(steps, Linear(warmup_steps=warmup_steps, final_fraction=final_fraction))
    at_peak = max(warmup_steps - 1, 0)
    assert values[at_peak] == max(values) == PEAK
    falls = [before - after for before, after in pairwise([*values[at_peak:], PEAK * final_fraction])]
    assert falls == pytest.approx([PEAK * (1 - final_fraction) / (steps - at_peak)] * len(falls), rel=1e-9, abs=1e-18)
    assert min(values) > 0


@given(first=st.integers(0, 9), second=st.integers(0, 9))
def test_the_rate_of_a_step_does_not_depend_on_the_steps_before_it(first: int, second: int) -> None:
    run = job(10, Cosine(warmup_steps=3))
    expected = learning_rate(run, second)
    learning_rate(run, first)
    assert learning_rate(run, second) == expected
