"""Places in which a process kills itself, for ``kill_test.py``: what a run does to its folder is watched from outside.

The functions of ``os`` and ``open`` that write, rename and remove are replaced for the rest of the process, which is one that
lives for a single attempt; memtrain's own functions are left alone.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any


class Place(StrEnum):
    """What a process is doing to the folder of its run."""

    OF_CHECKPOINT = "half-way through a file of a checkpoint"
    MANIFEST = "half-way through the manifest of a checkpoint"
    FSYNC = "before something is brought to the disk (fsync)"
    BEFORE = "before a checkpoint takes its name"
    AFTER = "after a checkpoint took its name"
    ASIDE = "between the renames by which one checkpoint follows another"
    BEFORE_OLDER = "before an older checkpoint loses its name"
    AFTER_OLDER = "after an older checkpoint lost its name"
    REMOVAL = "in the removal of a checkpoint's files"
    LINE = "half-way through a line of the metrics"
    NAMED = "before or after another file of the run takes its name"
    OTHER = "half-way through another file of the run"
    READING = "in the reading of a checkpoint"
    EVALUATION = "in an evaluation"


PLACES = tuple(Place)


class Aim:
    """Kills this process when it passes a place the n-th time.

    Args:
        place: one of :class:`Place`; another kills nobody.
        number: n, from 1.

    Attributes:
        passed: how often each place was passed.
    """

    def __init__(self, place: str, number: int) -> None:
        self._place = place
        self._number = number
        self.passed: Counter[str] = Counter()

    def hits(self, place: str) -> bool:
        """Count a place, and say whether this is where the process has to end."""
        self.passed[place] += 1
        return place == self._place and self.passed[place] == self._number

    def passes(self, place: str) -> None:
        """Count a place, and end the process if it is the one."""
        if self.hits(place):
            end()


def end() -> None:
    """End this process at once; no thread of it goes on."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class HalfWritten:
    """A file whose process ends half-way through a write: what came before is in the file, and so is half of this."""

    def __init__(self, stream: Any, aim: Aim, place: str) -> None:
        self._stream = stream
        self._aim = aim
        self._place = place

    def write(self, data: Any) -> Any:
        if self._aim.hits(self._place):
            self._stream.write(data[: len(data) // 2])
            self._stream.flush()
            end()
        return self._stream.write(data)

    def __enter__(self) -> HalfWritten:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._stream.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def aim_(aim: Aim, run: Path) -> None:
    """Watch what this process does to the folder of a run, for as long as it lives."""
    root = str(run.absolute())

    def opened(of: Callable[..., Any]) -> Callable[..., Any]:
        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            name = os.fspath(file) if isinstance(file, str | os.PathLike) else ""
            if not str(name).startswith(root):
                return of(file, mode, *args, **kwargs)
            writes = any(letter in mode for letter in "wxa+")
            place = _place_of(str(name)[len(root) :], mode) if writes else None
            if not writes and "checkpoints" in str(name):
                aim.passes(Place.READING)
            stream = of(file, mode, *args, **kwargs)
            return stream if place is None else HalfWritten(stream, aim, place)

        return open_

    def renamed(of: Callable[..., Any]) -> Callable[..., Any]:
        def rename(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            before, after = _around(str(os.fspath(source)), str(os.fspath(target)))
            aim.passes(before)
            done = of(source, target, *args, **kwargs)
            aim.passes(after)
            return done

        return rename

    def passing(of: Callable[..., Any], place: Place) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            aim.passes(place)
            return of(*args, **kwargs)

        return watched

    io.open = opened(io.open)  # pathlib's
    builtins.open = opened(builtins.open)
    os.rename, os.replace = renamed(os.rename), renamed(os.replace)
    os.fsync = passing(os.fsync, Place.FSYNC)
    os.unlink, os.rmdir = passing(os.unlink, Place.REMOVAL), passing(os.rmdir, Place.REMOVAL)


def _place_of(name: str, mode: str) -> Place:
    if name.startswith("/checkpoints"):
        return Place.OF_CHECKPOINT if name.endswith(".safetensors") else Place.MANIFEST
    return Place.LINE if "metrics" in name and "a" in mode else Place.OTHER


def _around(source: str, target: str) -> tuple[Place, Place]:
    """What it is called before and after a rename."""
    if "checkpoints" not in target:
        return Place.NAMED, Place.NAMED
    if target.endswith(".partial"):
        return Place.BEFORE_OLDER, Place.AFTER_OLDER
    if target.endswith("-replaced"):
        return Place.ASIDE, Place.ASIDE
    return Place.BEFORE, Place.AFTER
