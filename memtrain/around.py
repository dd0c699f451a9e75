"""What a training run talks to, and how it leaves its course."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from memtrain.callbacks import Callbacks
from memtrain.keeper import Keeper
from memtrain.metrics import RunFolder, RunLog
from memtrain.report.tell import Tell
from memtrain.report.terminal import TrainingProgress
from memtrain.resume import Start
from memtrain.signals import Requests
from memtrain.watchdog import Watchdog


class Stopped(Exception):
    """A signal has asked the run to stop, and it is between two micro-batches or two batches of an evaluation.

    Attributes:
        by: the signal.
    """

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by.name)
        self.by = by


class WentBack(Exception):
    """The run begins again, and what was about to be done is to be decided anew.

    Attributes:
        start: where.
    """

    def __init__(self, start: Start) -> None:
        super().__init__("the run begins again")
        self.start = start


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a run talks to.

    Attributes:
        log: the rows of metrics so far.
        folder: where plan and prediction go when they change; None for nowhere.
        keeper: its checkpoints.
        requests: what signals ask for.
        watchdog: tells of a step that takes too long.
        tell: takes a sentence for the person who reads.
        bar: shows how far it is.
        callbacks: see what happens and may ask for something; those of the first process.
    """

    log: RunLog
    folder: RunFolder | None
    keeper: Keeper
    requests: Requests
    watchdog: Watchdog
    tell: Tell
    bar: TrainingProgress
    callbacks: Callbacks
