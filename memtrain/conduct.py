"""How a run is gone about: how often it is evaluated and saved, and who is told. None of it changes what is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memtrain.callbacks import Callback
from memtrain.require import require


@dataclass(frozen=True, kw_only=True)
class Conduct:
    """How a run is gone about.

    Attributes:
        evaluate_every: steps between evaluations; None for before and after the run.
        checkpoint_every: steps between checkpoints; None for none but that of a run that is stopped.
        keep_checkpoints: so many of the latest stay, and the one that was evaluated best.
        stop_seconds: how long a run that is told to stop may take to save; None for as long as it takes.
        workers: processes that make rows ahead of the step.
        callbacks: see what happens, and may ask for something.
        trackers: what else metrics go to.
    """

    evaluate_every: int | None
    checkpoint_every: int | None
    keep_checkpoints: int
    stop_seconds: float | None
    workers: int
    callbacks: tuple[Callback, ...] = ()
    trackers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "1 or more steps, or None")
        require(self.keep_checkpoints >= 1, "keep_checkpoints", self.keep_checkpoints, "1 or more")
        seconds = self.stop_seconds
        require(seconds is None or 0 < seconds < math.inf, "stop_seconds", seconds, "above 0 seconds, or None")
        whole = type(self.workers) is int
        require(whole and self.workers >= 0, "workers", self.workers, "a whole number of 0 or more")
        for callback in self.callbacks:
            require(callable(callback), "callbacks", callback, "functions of a Record")


def as_tuple(name: str, given: object) -> tuple[Any, ...]:
    """A list of several as a tuple.

    Raises:
        ValueError: it is one alone.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"{name} is {given!r}, and it must be a list: write [{given!r}].")
    return tuple(given)
