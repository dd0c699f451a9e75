"""The folder of a run: what was planned, what happened, and how the two compare."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# What says which job the folder's run is of; a run without it cannot be gone on with. Settings alone are no run yet.
IDENTITY = "job.json"
_FILES = (
    IDENTITY,
    "plan.yaml",
    "prediction.json",
    "metrics.jsonl",
    "metrics.csv",
    "comparison.json",
    "memory.png",
    "model",
    "optimizers.json",
    "checkpoints",
)


class RunFolder:
    """Writes one run's files; the folder is made with the first of them.

    Raises:
        ValueError: the folder holds a run already, and it is none to go on with.
    """

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        """
        Args:
            goes_on: whether a run that is there may be gone on with, if it says of which job it is.
        """
        self.path = path
        found = [name for name in _FILES if (path / name).exists()]
        if found and not (goes_on and IDENTITY in found):
            raise ValueError(f"run.dir {path} already holds a run ({', '.join(found)}): choose another folder or remove it.")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from training in this folder meanwhile, where the system has such locks.

        Raises:
            ValueError: another one does, or the folder cannot be written.
        """
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / "lock").open("a")
        except OSError as error:
            raise self._refusal(error) from error
        with file:
            try:
                # Of a process and not of its children, which may outlive it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process trains in run.dir {self.path}: wait for its end, or choose another folder."
                ) from None
            except OSError:
                # A file system without locks.
                pass
            yield

    def _refusal(self, error: OSError) -> ValueError:
        return ValueError(f"run.dir {self.path} cannot be written ({error.strerror}): choose another folder.")

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """Which job the run is of that is there; None where there is none.

        Raises:
            ValueError: it cannot be read.
        """
        try:
            written: Mapping[str, Any] = json.loads((self.path / IDENTITY).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path / IDENTITY} cannot be read ({error}): choose another run.dir.") from error
        return written

    def write_text(self, name: str, text: str) -> None:
        """Write a text file.

        Raises:
            ValueError: it cannot be written.
        """
        self._write(name, text, mode="w")

    def _write(self, name: str, text: str, mode: str) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if mode == "a":
                with (self.path / name).open("a+b") as file:
                    # A process that was killed may have left half a line.
                    if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                        text = "\n" + text
                    file.write(text.encode())
                return
            # Whole or not at all: a run may be killed at any moment and gone on with.
            partial = self.path / f"{name}.partial"
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path / name)
        except OSError as error:
            raise self._refusal(error) from error

    def write_yaml(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a YAML file, keys in the given order."""
        import yaml

        self.write_text(name, yaml.safe_dump(dict(content), sort_keys=False))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write an indented JSON file."""
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def log(self, row: Mapping[str, Any], name: str = "metrics.jsonl") -> None:
        """Add one line to ``metrics.jsonl``, or to another file.

        Raises:
            ValueError: it cannot be written.
        """
        self._write(name, _line(row), mode="a")

    def rows(self) -> list[Mapping[str, float]]:
        """The rows of ``metrics.jsonl``, without a line that was cut short.

        Raises:
            ValueError: it cannot be read.
        """
        try:
            lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path / 'metrics.jsonl'} cannot be read ({error}): choose another run.dir.") from error
        return [row for row in map(_row, lines) if row is not None]

    def rewrite(self, rows: Sequence[Mapping[str, float]], columns: Sequence[str]) -> None:
        """Write ``metrics.jsonl`` and ``metrics.csv`` anew.

        Raises:
            ValueError: they cannot be written.
        """
        if rows or (self.path / "metrics.jsonl").exists():
            self.write_text("metrics.jsonl", "".join(map(_line, rows)))
            self.write_text("metrics.csv", "".join([_cells(columns), *(_cells(map(row.get, columns)) for row in rows)]))

    def add(self, row: Mapping[str, float], columns: Sequence[str]) -> None:
        """Add a line to ``metrics.jsonl`` and ``metrics.csv``, which has these columns.

        Raises:
            ValueError: it cannot be written.
        """
        self.log(row)
        self._write("metrics.csv", _cells(map(row.get, columns)), mode="a")

    def sync(self) -> None:
        """Bring ``metrics.jsonl`` to the disk, if it is there."""
        with suppress(OSError), (self.path / "metrics.jsonl").open("rb") as file:
            os.fsync(file.fileno())


def _row(line: str) -> Mapping[str, float] | None:
    """The row of a line, None where a process was killed as it wrote it."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return {name: math.nan if value is None else value for name, value in row.items()}


def _cells(values: Iterable[object]) -> str:
    """A line of comma-separated values; nothing stands for None."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _line(row: Mapping[str, Any]) -> str:
    """A row as strict JSON, which knows no number that is not finite."""
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
    return json.dumps(finite) + "\n"


class RunLog:
    """The rows written so far, here and in the run folder.

    A row that cannot be written ends no run: it stays here, is told of once, and is written with a later one.

    Args:
        tell: takes a sentence.
    """

    def __init__(self, folder: RunFolder | None, tell: Callable[[str], None]) -> None:
        self.rows: list[Mapping[str, float]] = []
        self._folder = folder
        self._tell = tell
        self._behind = self._told = False
        # Of metrics.csv, which is written anew when a row has another.
        self._columns: list[str] = []

    def add(self, row: Mapping[str, float]) -> None:
        """Add a row, also to ``metrics.jsonl`` and ``metrics.csv``."""
        self.rows.append(row)
        if self._folder is None:
            return
        self._behind = self._behind or not row.keys() <= set(self._columns)
        self._written(self._rewrite if self._behind else lambda folder: folder.add(row, self._columns))

    def _rewrite(self, folder: RunFolder) -> None:
        self._columns = list(dict.fromkeys(name for row in self.rows for name in row))
        folder.rewrite(self.rows, self._columns)

    def cut_back(self, step: int) -> None:
        """Keep the rows up to a step, also in ``metrics.jsonl``; of a run that goes on they come from there.

        Raises:
            ValueError: the rows cannot be read.
        """
        rows = self.rows if self._folder is None or self._behind else self._folder.rows()
        self.rows = [row for row in rows if row["step"] <= step]
        self._behind = self._behind or len(self.rows) != len(rows)
        self.catch_up()

    def catch_up(self) -> None:
        """Write what could not be written before, and bring it to the disk, as far as that is possible now."""
        if self._folder is None:
            return
        if self._behind:
            self._written(self._rewrite)
        self._folder.sync()

    def _written(self, write: Callable[[RunFolder], None]) -> None:
        assert self._folder is not None
        try:
            write(self._folder)
        except ValueError as error:
            if not self._told:
                self._tell(f"{error} The run goes on, and its metrics are written when that is possible again.")
            self._told = self._behind = True
        else:
            self._told = self._behind = False

    @property
    def steps(self) -> list[Mapping[str, float]]:
        """The rows of optimizer steps."""
        return [row for row in self.rows if "loss" in row]

    @property
    def evaluation_rows(self) -> list[Mapping[str, float]]:
        """The rows of evaluations."""
        return [row for row in self.rows if "eval_loss" in row]

    @property
    def evaluations(self) -> tuple[tuple[int, float], ...]:
        """(step, loss) of each evaluation."""
        return tuple((int(row["step"]), row["eval_loss"]) for row in self.evaluation_rows)
