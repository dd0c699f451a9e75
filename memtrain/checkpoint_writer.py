"""Writing checkpoints beside the run: it waits for a copy in host memory, and a thread brings the copy to the disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from memtrain.checkpoint import NotReadable, NotWritten, remove_older, write
from memtrain.place import to_host

Groups = Mapping[str, Mapping[str, Tensor]]


class Writer:
    """Writes the checkpoints of a run into a folder, one at a time, and removes older ones when a new one is complete.

    A checkpoint that cannot be written ends no run: what went wrong comes back as a sentence, told once.
    """

    def __init__(self, folder: Path, keep: int, *, asynchronous: bool = True) -> None:
        """
        Args:
            keep: so many of the latest checkpoints stay, at least 1.
            asynchronous: :meth:`save` waits for a copy in host memory alone, as large as the tensors, and a thread writes
                it. Otherwise nothing is copied, and it waits for the disk.
        """
        self._folder = folder
        self._keep = keep
        self._asynchronous = asynchronous
        self._thread: threading.Thread | None = None
        self._wrong: Exception | None = None

    def save(self, step: int, groups: Groups, facts: Mapping[str, Any], also: Collection[int] = ()) -> str | None:
        """Write a checkpoint, once the one before is written.

        Args:
            groups: as :func:`memtrain.checkpoint.write` takes them; they may change as soon as this returns.
            also: steps whose checkpoints stay beside the latest, such as the best.

        Returns:
            Why a checkpoint could not be written: the one before, or without a thread this one. None where all is well.
        """
        before = self.wait()
        # Plain data changes as the run goes on, too.
        plain = json.loads(json.dumps(dict(facts)))
        copies = _copies(groups) if self._asynchronous else None
        if copies is None:
            self._write(step, groups, plain, {step, *also})
            return " ".join(filter(None, (before, self.wait()))) or None
        # No daemon: a program that comes to its end waits for it.
        self._thread = threading.Thread(target=self._write, args=(step, copies, plain, {step, *also}), name="checkpoint")
        self._thread.start()
        return before

    def _write(self, step: int, groups: Groups, facts: Mapping[str, Any], kept: Collection[int]) -> None:
        try:
            write(self._folder, step, groups, facts)
            remove_older(self._folder, self._keep, kept)
        except Exception as error:
            self._wrong = error

    def wait(self) -> str | None:
        """Wait until what was saved is on the disk; why it could not be written, if so.

        What is no trouble of the disk is raised as it is.
        """
        if self._thread is not None:
            self._thread.join()
            # Its copies go with it.
            self._thread = None
        wrong, self._wrong = self._wrong, None
        if wrong is not None and not isinstance(wrong, NotWritten | NotReadable):
            raise wrong
        return None if wrong is None else str(wrong)

    def close(self) -> str | None:
        """Wait for the last checkpoint; as :meth:`wait`."""
        return self.wait()


def _copies(groups: Groups) -> Groups | None:
    """Copies in host memory; None where they have no room there, and what was copied is gone again."""
    try:
        return {group: {path: to_host(one.detach()) for path, one in tensors.items()} for group, tensors in groups.items()}
    except (MemoryError, RuntimeError):  # torch says a full host with a plain RuntimeError
        return None
