"""Records: rows as a source holds them, each with the place that it comes from, and rows that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row stands.

    Attributes:
        source: a file's path, a dataset's name, or the name of an argument.
        number: of the row: lines are counted from 1, rows from 0.
        unit: what is counted, ``"line"`` or ``"row"``.
    """

    source: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.source}, {self.unit} {self.number}"


@dataclass(frozen=True, slots=True)
class Record:
    """A row as its source holds it: column to value."""

    values: Mapping[str, Any]
    origin: Origin


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        reason: goes on the sentence that begins with the origin: ``"is no valid JSON (Expecting value at column 9)"``.
    """

    origin: Origin
    reason: str

    def __str__(self) -> str:
        return f"{self.origin}, {self.reason}"


class RowRefused(ValueError):
    """A record from which no row can be made; the message is the reason of a :class:`BadRow`."""
