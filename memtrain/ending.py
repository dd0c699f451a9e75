"""How a run ends: what is written, what is said, and how the program learns that it was stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from memtrain.around import Stopped
from memtrain.keeper import Keeper
from memtrain.metrics import RunFolder, RunLog
from memtrain.planner.choice import Choice, Comparison
from memtrain.report.plot import plot_run
from memtrain.report.tell import Tell
from memtrain.signals import exit_code
from memtrain.trace.event import Trace
from memtrain.training import Training


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


def write_comparison(
    comparison: Comparison, log: RunLog, choice: Choice, shown: Trace | None, folder: RunFolder | None, tell: Tell
) -> None:
    """Write how the prediction and the measurement compare, and the picture; what cannot be written is told.

    Args:
        shown: the measured step in the picture, where one is known.
    """
    if folder is None:
        return
    try:
        folder.write_json("comparison.json", comparison.to_dict())
        plot_run(folder.path / "memory.png", log.rows, choice, shown)
    except (OSError, ValueError) as error:
        tell(f"The comparison is not written ({error}).")
