"""Trackers: metrics also go to TensorBoard, Weights & Biases and MLflow, through accelerate's trackers.

They are shown what callbacks are shown, each record under its step, in a thread of their own, so that a network that is slow or gone
holds no step up. What goes wrong once the run has begun is told, and ends no run: ``metrics.jsonl`` has everything.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

from memtrain.callbacks import Record
from memtrain.metrics import RunFolder
from memtrain.require import require

PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "mlflow_skinny"),
}
"""The trackers, each with the packages of which one is needed."""

_PROJECT: Final = "memtrain"
# So long a run waits for its last metrics to be sent.
_PATIENCE_SECONDS: Final = 30.0
_RUNS: Final = "trackers.json"


def check_trackers(names: Iterable[str], *, has_folder: bool) -> None:
    """Refuse trackers that there are not, before anything is loaded.

    Args:
        has_folder: whether the run has a folder, by whose name it is called.

    Raises:
        ValueError: one is not known, its package is missing, or there is no folder.
    """
    for name in names:
        require(name in PACKAGES, "trackers", name, f"of {', '.join(PACKAGES)}")
        if not any(find_spec(package) for package in PACKAGES[name]):
            package = PACKAGES[name][0]
            raise ValueError(f"trackers has {name}, and the package {package} is not installed: pip install {package}.")
        if not has_folder:
            raise ValueError(f"trackers has {name}, and a run is called by its folder there: give run_dir.")


class Tracking:
    """A callback that logs to trackers. :meth:`close` ends it."""

    def __init__(
        self, names: Sequence[str], folder: RunFolder, settings: Mapping[str, Any], tell: Callable[[str], object]
    ) -> None:
        """
        Args:
            names: of trackers, which :func:`check_trackers` has passed.
            folder: of the run; remembers under which names it is known to them.
            settings: of the run, in any depth.
            tell: takes a sentence about what goes wrong.
        """
        self._names, self._folder, self._tell = names, folder, tell
        self._settings = dict(_flat(settings))
        self._trackers: dict[str, Any] = {}
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._first = 0

    def __call__(self, record: Record) -> None:
        """Log a step or an evaluation.

        Raises:
            ValueError: at the beginning of the run, a tracker cannot begin.
        """
        if record.event == "begin":
            # Evaluations before are shown again, and are there.
            self._first = record.step
            if self._thread is None:
                self._begin(record.step)
        elif record.event in ("step", "evaluation") and record.step >= self._first:
            metrics = dict(record.metrics) | {"epoch": record.epoch}
            self._work.put(lambda: self._log(metrics, record.step))

    def close(self) -> None:
        """Send what is left, and end."""
        if self._thread is None:
            return
        self._work.put(lambda: self._each(lambda tracker: tracker.finish()))
        self._work.put(None)
        self._thread.join(_PATIENCE_SECONDS)
        if self._thread.is_alive():
            self._tell(f"{' and '.join(self._trackers)} did not take all metrics within {_PATIENCE_SECONDS:.0f} seconds.")

    def _begin(self, step: int) -> None:
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        self._thread.start()
        failed: list[BaseException] = []
        begun = threading.Event()

        def begin() -> None:
            try:
                self._start(step)
            except BaseException as error:
                failed.append(error)
            finally:
                begun.set()

        self._work.put(begin)
        begun.wait()
        if failed:
            raise failed[0]

    def _run(self) -> None:
        # All in one thread: MLflow keeps the run under way for each thread.
        while (work := self._work.get()) is not None:
            work()

    def _start(self, step: int) -> None:
        known = self._known()
        for name in self._names:
            is_new = name not in known
            try:
                tracker = _made(name, self._folder, known.get(name), step)
                tracker.start()
                if is_new:
                    tracker.store_init_configuration(self._settings)
            except Exception as error:
                raise ValueError(
                    f"tracker {name} cannot begin ({_first_line(error)}): look at its settings and the connection, or leave it out."
                ) from error
            self._trackers[name] = tracker
            known[name] = _run_of(tracker)
        self._folder.write_json(_RUNS, known)

    def _known(self) -> dict[str, str]:
        """Under which name each tracker knows the run."""
        try:
            known: dict[str, str] = json.loads((self._folder.path / _RUNS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self._each(lambda tracker: tracker.log(metrics, step=step))

    def _each(self, work: Callable[[Any], object]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                work(tracker)
            except Exception as error:
                del self._trackers[name]
                self._tell(
                    f"Tracker {name} failed and gets no more metrics ({_first_line(error)}); metrics.jsonl has all of them."
                )


def _made(name: str, folder: RunFolder, run: str | None, step: int) -> Any:
    """A tracker that goes on with a run where one is known."""
    from accelerate import tracking

    match name:
        case "tensorboard":
            # What a run that was killed has logged beyond its checkpoint is hidden.
            return tracking.TensorBoardTracker("tensorboard", folder.path, purge_step=None if run is None else step + 1)
        case "wandb":
            project = os.environ.get("WANDB_PROJECT", _PROJECT)
            return tracking.WandBTracker(project, name=folder.path.name, id=run, resume="allow", dir=str(folder.path))
        case _:
            return tracking.MLflowTracker(_PROJECT, run_id=run, run_name=folder.path.name)


def _run_of(tracker: Any) -> str:
    """The name under which a tracker that has begun knows its run."""
    match tracker.name:
        case "wandb":
            return str(tracker.run.id)
        case "mlflow":
            return str(tracker.active_run.info.run_id)
        case _:
            return str(tracker.run_name)


def _flat(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The settings by dotted names, as what trackers take: numbers, text, and text of all else."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, settings if isinstance(settings, int | float | str) else str(settings)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
