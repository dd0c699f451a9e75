"""How a run ends: what is written, what is said, and how the program learns that it was stopped."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from memtrain.around import Stopped
from memtrain.keeper import Keeper
from memtrain.loop import Loop
from memtrain.metrics import RunFolder, RunLog
from memtrain.planner.choice import Comparison
from memtrain.planner.compare import compare
from memtrain.report.plot import plot_run
from memtrain.report.tell import Tell
from memtrain.report.terminal import comparison_view
from memtrain.session import Session
from memtrain.signals import exit_code
from memtrain.training import Training


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a training run came to.

    Attributes:
        comparison: predicted beside measured.
        evaluations: (step, mean loss over the evaluation rows) pairs, the first before training; empty without such rows.
        metrics: the rows of ``metrics.jsonl``.
    """

    comparison: Comparison
    evaluations: tuple[tuple[int, float], ...]
    metrics: tuple[Mapping[str, float], ...]


@contextmanager
def ending(training: Training, keeper: Keeper, folder: RunFolder | None, tell: Tell) -> Iterator[None]:
    """Say where a run that ends early goes on, and end the program as a signal says.

    Raises:
        KeyboardInterrupt: Ctrl-C asked the run to stop; it has an argument, as it has been told.
        SystemExit: SIGTERM did.
    """
    try:
        yield
    except Exception as ends:
        keeper.wait()
        if folder is not None and not isinstance(ends, Stopped):
            with suppress(ValueError):
                folder.log({"said": f"{type(ends).__name__}: {ends}"}, "events.jsonl")
        if keeper.has_folder or isinstance(ends, Stopped):
            tell(keeper.where_to_go_on(training.done))
        if not isinstance(ends, Stopped):
            raise
        if ends.by is signal.SIGINT:
            raise KeyboardInterrupt("stopped") from None
        raise SystemExit(exit_code(ends.by)) from None


def saving(save_model: Callable[[str | os.PathLike[str]], None], folder: RunFolder | None) -> Callable[[], None] | None:
    """What writes the trained model into the run folder; None where there is no folder.

    It raises ValueError, with one sentence, where the disk is full or the folder cannot be written.
    """
    if folder is None:
        return None
    place: Path = folder.path / "model"

    def save() -> None:
        from safetensors import SafetensorError

        try:
            save_model(place)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"the trained model cannot be written to {place} ({error}): free space there, and make the same call again, which "
                f"saves it from the last checkpoint."
            ) from error

    return save


def concluded(session: Session, loop: Loop, log: RunLog, folder: RunFolder | None, console: Console, tell: Tell) -> Result:
    """What the run came to, shown and written; what cannot be written is told."""
    choice = session.choice
    assert choice is not None
    # The profiler slows the steps that it watches; where there is no other, theirs is all there is.
    unwatched = [row for row in log.steps if not loop.watches(int(row["step"]) - 1)] or log.steps
    seconds = statistics.median(row["step_seconds"] for row in unwatched) if unwatched else 0.0
    comparison = compare(choice, session.meter.side(seconds))
    result = Result(comparison=comparison, evaluations=log.evaluations, metrics=tuple(log.rows))
    # A run that was complete already has been measured when it trained.
    if loop.first == loop.job.steps:
        return result
    if folder is not None:
        meter = session.meter
        shown = meter.trace("step 2 of the rehearsal") or meter.trace(f"step {min(loop.first + 2, loop.job.steps)}")
        try:
            folder.write_json("comparison.json", comparison.to_dict())
            plot_run(folder.path / "memory.png", log.rows, choice, shown)
        except (OSError, ValueError) as error:
            tell(f"The comparison is not written ({error}).")
    console.print("", comparison_view(comparison, session.given.budget, log.evaluation_rows))
    return result
