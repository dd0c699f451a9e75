"""Writing checkpoints beside the run: it waits for a copy in host memory, and a thread brings the copy to the disk."""

from __future__ import annotations

import atexit
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

    def __init__(self, folder: Path, keep: int, *, copy_bytes: int = 0) -> None:
        """
        Args:
            keep: so many of the latest checkpoints stay, at least 1.
            copy_bytes: host memory that copies may take. Where that is as much as the tensors, :meth:`save` waits for the copy
                alone, and a thread writes it; where it is less, nothing is copied, and it waits for the disk.
        """
        self._folder = folder
        self._keep = keep
        self._copy_bytes = copy_bytes
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
        size = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values())
        copies = _copies(groups) if size <= self._copy_bytes else None
        if copies is None:
            self._write(step, groups, plain, {step, *also})
            return " ".join(filter(None, (before, self.wait()))) or None
        # A program that ends waits for a checkpoint, unless it was told to end at once.
        atexit.register(self._join)
        self._thread = threading.Thread(
            target=self._write, args=(step, copies, plain, {step, *also}), name="checkpoint", daemon=True
        )
        self._thread.start()
        return before

    def _write(self, step: int, groups: Groups, facts: Mapping[str, Any], kept: Collection[int]) -> None:
        try:
            write(self._folder, step, groups, facts)
            remove_older(self._folder, self._keep, kept)
        except Exception as error:
            self._wrong = error

    @property
    def is_writing(self) -> bool:
        """Whether a copy is on its way to the disk."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait until what was saved is on the disk; why it could not be written, if so.

        What is no trouble of the disk is raised as it is.
        """
        self._join()
        wrong, self._wrong = self._wrong, None
        if wrong is not None and not isinstance(wrong, NotWritten | NotReadable):
            raise wrong
        return None if wrong is None else str(wrong)

    def abandon(self) -> None:
        """Let what is being written be cut off by the end of the program; the checkpoints before it stay."""
        atexit.unregister(self._join)
        self._thread = None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            # Its copies go with it.
            self._thread = None
            atexit.unregister(self._join)


def _copies(groups: Groups) -> Groups | None:
    """Copies in host memory; None where they have no room there, and what was copied is gone again."""
    try:
        return {group: {path: to_host(one.detach()) for path, one in tensors.items()} for group, tensors in groups.items()}
    except (MemoryError, RuntimeError):  # torch says a full host with a plain RuntimeError
        return None
