"""Callbacks see plain numbers that they cannot change, and early stopping goes by them alone."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from memtrain.callbacks import Action, Callbacks, EarlyStopping, Event, Record


def record(event: Event = "evaluation", step: int = 1, **metrics: float) -> Record:
    return Record(event=event, step=step, steps=9, epoch=0.5, metrics=metrics)


def test_a_record_cannot_be_changed() -> None:
    seen: Any = record(eval_loss=1.0)
    with pytest.raises(FrozenInstanceError):
        seen.step = 2
    with pytest.raises(TypeError):
        seen.metrics["eval_loss"] = 0.0


def test_what_several_ask_for_is_put_together() -> None:
    told: list[Record] = []
    callbacks = Callbacks([lambda _: Action.SAVE, lambda _: None, lambda one: told.append(one), lambda _: Action.STOP])
    assert callbacks.tell(record()) == {Action.SAVE, Action.STOP}
    assert told == [record()]


def test_something_that_there_is_not_is_refused() -> None:
    def asks(_: Record) -> Any:
        return "pause"

    with pytest.raises(
        ValueError, match=r"what callback .*asks asked for is 'pause', and it must be one of stop, save, evaluate"
    ):
        Callbacks([asks]).tell(record())


@pytest.mark.parametrize(
    ("losses", "stops"),
    [
        ([3.0, 2.0, 2.0, 2.5], [False, False, False, True]),
        ([3.0, 4.0, 2.9, 3.0, 2.95], [False, False, False, False, True]),
        ([3.0, math.nan, math.nan], [False, False, True]),
    ],
)
def test_a_run_ends_after_so_many_evaluations_without_a_better_one(losses: list[float], stops: list[bool]) -> None:
    stopping = EarlyStopping(patience=2)
    assert stopping(record("begin")) is None
    assert [stopping(record(eval_loss=loss)) is Action.STOP for loss in losses] == stops
    # A run that goes on shows its evaluations again.
    assert stopping(record("begin")) is None
    assert [stopping(record(eval_loss=loss)) is Action.STOP for loss in losses] == stops


def test_more_may_be_better_and_by_how_much_can_be_said() -> None:
    stopping = EarlyStopping(patience=1, metric="eval_f1", min_delta=0.1, greater_is_better=True)
    assert [stopping(record(eval_f1=value)) is Action.STOP for value in (0.5, 0.65, 0.7)] == [False, False, True]
    assert stopping(record("step", loss=1.0)) is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"patience": 0}, "patience is 0, and it must be 1 or more"),
        ({"min_delta": -1.0}, "min_delta is -1.0, and it must be 0 or"),
    ],
)
def test_what_never_stops_or_always_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EarlyStopping(**given)


def test_a_metric_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ValueError, match="early stopping looks at 'eval_f1', and an evaluation has eval_loss: name one of these"
    ):
        EarlyStopping(metric="eval_f1")(record(eval_loss=1.0))
