"""Callbacks: functions that see what happens in a run as plain numbers, and may ask for something."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from memtrain.require import require

Event = Literal["begin", "step", "evaluation", "checkpoint", "end"]


class Action(StrEnum):
    """What a callback may ask for: the end of the run after this step, a checkpoint, or an evaluation, now."""

    STOP = "stop"
    SAVE = "save"
    EVALUATE = "evaluate"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What happened.

    Attributes:
        event: a run that goes on from a checkpoint begins too, and shows the evaluations before it again.
        step, steps: steps taken, and those of the whole run.
        epoch: how often each row has been seen.
        metrics: what was logged of it, by name.
    """

    event: Event
    step: int
    steps: int
    epoch: float
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))


Callback = Callable[[Record], Action | None]


class Callbacks:
    """Several callbacks as one."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def tell(self, record: Record) -> frozenset[Action]:
        """Show a record to all of them; what they ask for.

        Raises:
            ValueError: one asks for something that there is not.
        """
        asked = set()
        for callback in self._callbacks:
            answer = callback(record)
            if answer is not None:
                named = getattr(callback, "__qualname__", type(callback).__qualname__)
                require(
                    answer in set(Action), f"what callback {named} asked for", answer, f"one of {', '.join(Action)}, or None"
                )
                asked.add(Action(answer))
        return frozenset(asked)


class EarlyStopping:
    """Asks for the end of the run when so many evaluations in a row have brought nothing better.

    It goes by the records alone, so that a run that resumes ends where it would have ended.
    """

    def __init__(
        self, patience: int = 3, *, metric: str = "eval_loss", min_delta: float = 0.0, greater_is_better: bool = False
    ) -> None:
        """
        Args:
            patience: evaluations without a better value.
            metric: which of the logged numbers.
            min_delta: by how much one has to be better; in the unit of the metric.
            greater_is_better: whether more is better.
        """
        require(patience >= 1, "patience", patience, "1 or more evaluations")
        require(min_delta >= 0, "min_delta", min_delta, "0 or more")
        self._patience, self._metric, self._min_delta = patience, metric, min_delta
        self._sign = 1.0 if greater_is_better else -1.0
        self._best, self._waited = -math.inf, 0

    def __call__(self, record: Record) -> Action | None:
        """Look at an evaluation."""
        if record.event == "begin":
            self._best, self._waited = -math.inf, 0
        if record.event != "evaluation":
            return None
        if self._metric not in record.metrics:
            raise ValueError(
                f"early stopping looks at {self._metric!r}, and an evaluation has {', '.join(record.metrics)}: name one of these."
            )
        value = self._sign * record.metrics[self._metric]
        if value > self._best + self._min_delta:
            self._best, self._waited = value, 0
            return None
        self._waited += 1
        return Action.STOP if self._waited >= self._patience else None
