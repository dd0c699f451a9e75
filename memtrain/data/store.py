"""Rows of unequal length, held compactly: the numbers of a column end to end, and where each row ends.

Four bytes a number, and eight a row. Numbers beyond 256 MiB go to the disk, into a file without a name that is read as if it
were memory and is gone with the process. Processes that are forked share both; one that is spawned gets a copy of its own.
"""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Self

import numpy as np
import torch
from torch.utils.data import Dataset

from memtrain.data.rows import Batch
from memtrain.data.rowset import Lengths

_IN_MEMORY_BYTES: Final = 2**28

Numbers = Sequence[int] | Sequence[float] | int | float


@dataclass(frozen=True)
class _Column:
    """One column.

    Attributes:
        values: int32 or float32, of all rows end to end.
        ends: int64 of shape (rows + 1,), where each row ends and the next begins; None where rows are single numbers.
    """

    values: Any
    ends: Any

    def row(self, index: int) -> torch.Tensor:
        found = self.values[index] if self.ends is None else self.values[self.ends[index] : self.ends[index + 1]]
        return torch.from_numpy(np.array(found, dtype=np.float32 if self.values.dtype == np.float32 else np.int64))

    @property
    def longest(self) -> int | None:
        return None if self.ends is None else int(np.diff(self.ends).max(initial=0))


class _Gathering:
    """A column to which rows are added."""

    def __init__(self, name: str, value: Numbers, most_bytes: int) -> None:
        self._name, self._most_bytes = name, most_bytes
        self._is_scalar = isinstance(value, int | float)
        # An empty first row tells nothing: then the first number that comes does.
        self._typecode: str | None = None
        self._waiting: Any = array("i")
        self._ends = array("q", [0])
        self._count = 0
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256(f"{name} {self._is_scalar} ".encode())

    def add(self, value: Numbers, row: int) -> None:
        numbers = [value] if isinstance(value, int | float) else value
        if isinstance(value, int | float) != self._is_scalar:
            kinds = ("a sequence", "one number") if self._is_scalar else ("one number", "a sequence")
            raise ValueError(
                f"row {row} has {kinds[0]} in column {self._name!r} where row 0 has {kinds[1]}, and rows must be alike: give every "
                "row the same kind."
            )
        if self._typecode is None and len(numbers):
            self._typecode = "f" if isinstance(numbers[0], float) else "i"
            self._waiting = array(self._typecode)
        try:
            self._waiting.extend(numbers)
        except (TypeError, OverflowError) as error:
            raise ValueError(
                f"row {row} has numbers in column {self._name!r} that are no whole ones of 32 bits as those before them "
                f"({error}): give token ids and labels, or make all numbers of the column floats."
            ) from error
        self._count += len(numbers)
        self._ends.append(self._count)
        if len(self._waiting) * self._waiting.itemsize > self._most_bytes:
            self._write()

    def _write(self) -> None:
        self._digest.update(self._waiting)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="memtrain-rows-")  # noqa: SIM115, it is closed when it is mapped
            self._file.write(self._waiting)
            self._file.flush()
        except OSError as error:
            raise ValueError(
                f"the rows do not fit into the folder of temporary files, {tempfile.gettempdir()} ({error}): make room there, or set "
                "TMPDIR to a folder that has it."
            ) from error
        del self._waiting[:]

    def complete(self) -> tuple[_Column, str]:
        """The column, which is complete, and a digest of it."""
        dtype = np.dtype(np.float32 if self._typecode == "f" else np.int32)
        if self._file is None:
            self._digest.update(self._waiting)
            values = np.frombuffer(self._waiting, dtype=dtype)
        else:
            self._write()
            values = np.memmap(self._file, dtype=dtype, mode="r")
        self._digest.update(dtype.name.encode())
        self._digest.update(self._ends)
        ends = None if self._is_scalar else np.frombuffer(self._ends, dtype=np.int64)
        return _Column(values, ends), self._digest.hexdigest()

    def close(self) -> None:
        """Close the file; what is mapped of it stays."""
        if self._file is not None:
            # On a full disk it fails a second time, as it tries again to write what is left.
            with suppress(OSError):
                self._file.close()


class RaggedRows(Dataset[Batch]):
    """Rows of numbers whose lengths differ: ``{column: tensor}``, int64 or float32, of shape (length,), or () for one number.

    Attributes:
        digest: by which two stores tell whether they hold the same, 16 hexadecimal digits.
        longest: the most numbers that a row has in each column; None where each has one.
        lengths: tokens of each row, int64 of shape (rows,): of ``input_ids``, else of the column that has the longest row.
    """

    def __init__(self, columns: Mapping[str, _Column], count: int, digest: str) -> None:
        """Take columns that are complete; :meth:`of` makes them."""
        self._columns = dict(columns)
        self._count = count
        self.digest = digest
        self.longest: Mapping[str, int | None] = {name: column.longest for name, column in self._columns.items()}
        ragged = {name: longest for name, longest in self.longest.items() if longest is not None}
        of_tokens = "input_ids" if "input_ids" in ragged else max(ragged, key=lambda name: ragged[name], default=None)
        self.lengths: Lengths = np.ones(count, dtype=np.int64) if of_tokens is None else self.length_of(of_tokens)

    @classmethod
    def of(cls, examples: Iterable[Mapping[str, Numbers]]) -> Self:
        """Keep examples, read one at a time: column to numbers, or to one number.

        Raises:
            ValueError: an example has other columns than the first, or numbers of another kind in one; or the disk is full.
        """
        columns: dict[str, _Gathering] = {}
        count = 0
        try:
            for row, example in enumerate(examples):
                if not columns:
                    share = _IN_MEMORY_BYTES // max(1, len(example))
                    columns = {name: _Gathering(name, value, share) for name, value in example.items()}
                _check_columns(example, columns, row)
                for name, value in example.items():
                    columns[name].add(value, row)
                count = row + 1
            complete = {name: column.complete() for name, column in columns.items()}
        finally:
            for column in columns.values():
                column.close()
        digests = " ".join(digest for _, (_, digest) in sorted(complete.items()))
        digest = hashlib.sha256(f"{count} {digests}".encode()).hexdigest()[:16]
        return cls({name: column for name, (column, _) in complete.items()}, count, digest)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self._count:
            raise IndexError(f"row {index} of {self._count}")
        return {name: column.row(index) for name, column in self._columns.items()}

    def length_of(self, column: str) -> Lengths:
        """How many numbers each row has in a column of sequences, int64 of shape (rows,)."""
        lengths: Lengths = np.diff(self._columns[column].ends)
        return lengths


def _check_columns(example: Mapping[str, Numbers], columns: Mapping[str, object], row: int) -> None:
    for name in sorted(example.keys() ^ columns.keys()):
        here, there = ("no", "one") if name in columns else ("a", "none")
        raise ValueError(
            f"row {row} has {here} column {name!r} where row 0 has {there}, and rows must be alike: give every row the same columns."
        )
