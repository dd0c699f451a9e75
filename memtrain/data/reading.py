"""Reading: what the readers of all formats share, which is lines, whole files and the making of records.

A line ends at a newline byte and nowhere else. ``str.splitlines`` also splits at U+2028, U+0085, form feeds and others, all of
which may stand inside the strings of a row. A byte order mark at the start of a line is removed: it is no part of the text, and
files put together with ``cat`` have one where each of them began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final

from memtrain.data.records import BadRow, Origin, Record, RowRefused
from memtrain.units import format_bytes

Rows = Iterator[Record | BadRow]

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
LONGEST_LINE_BYTES: Final = 64 * 2**20
"""A longer line is a bad row, and is passed over without being held in memory."""
LARGEST_WHOLE_BYTES: Final = 2 * 2**30
"""What is read in one piece (.json, .txt and .md) may not be larger."""

_PIECE_BYTES: Final = 2**20


def as_record(values: object, origin: Origin) -> Record | BadRow:
    """A row, if it is a mapping with columns that are named."""
    if not isinstance(values, Mapping):
        return BadRow(
            origin, f'is a {type(values).__name__}, and a row must be a mapping of columns, such as {{"text": "..."}}'
        )
    if not values:
        return BadRow(origin, "is empty, and a row must have columns")
    for name in values:
        if not isinstance(name, str):
            return BadRow(origin, f"has the column {name!r}, and names of columns must be strings")
    return Record(values, origin)


class Lines:
    """The lines of a file, split at newline bytes alone; asked for one, it also says where it stands.

    Attributes:
        number: of the line last given, counted from 1.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.number = 0
        self._file = file
        # Of the line last given: where it begins in the file, its bytes there, and how many of them were a byte order mark.
        self._offset = self._length = self._removed = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """The next line.

        Raises:
            RowRefused: it is longer than :data:`LONGEST_LINE_BYTES`; the line after it can be asked for.
        """
        line = self._file.readline(LONGEST_LINE_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self._offset += self._length
        self._length = len(line)
        if len(line) > LONGEST_LINE_BYTES:
            while not line.endswith(b"\n") and (line := self._file.readline(_PIECE_BYTES)):
                self._length += len(line)
            raise RowRefused(
                f"is {format_bytes(self._length)} long, and a line may have {format_bytes(LONGEST_LINE_BYTES)}: "
                "split it, or look for newlines that are missing"
            )
        text = line.removeprefix(BYTE_ORDER_MARK)
        self._removed = len(line) - len(text)
        return text

    def text(self, line: bytes) -> str:
        """The line last given as text.

        Raises:
            RowRefused: it is not UTF-8 or holds a NUL byte.
        """
        at = line.find(b"\0")
        if at >= 0:
            raise RowRefused(f"holds a NUL byte ({self._place(at)}), and text has none: write the row again")
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            at = error.start
            raise RowRefused(f"is not UTF-8 (byte 0x{line[at]:02x} at {self._place(at)}): convert the file to UTF-8") from error

    def _place(self, at: int) -> str:
        at += self._removed
        return f"offset {at} of the line, {self._offset + at} of the file"


def whole(file: BinaryIO, source: str) -> bytearray:
    """All bytes of a file.

    Raises:
        ValueError: there are more than :data:`LARGEST_WHOLE_BYTES`.
    """
    data = bytearray()
    while piece := file.read(_PIECE_BYTES):
        data += piece
        if len(data) > LARGEST_WHOLE_BYTES:
            raise ValueError(
                f"{source} is larger than {format_bytes(LARGEST_WHOLE_BYTES)}, which would all be held in memory: write its "
                "rows as JSON Lines (.jsonl), which is read line by line."
            )
    return data


def whole_text(data: bytearray, source: str) -> str | BadRow:
    """The text of a whole file; if it is none, the line with what is wrong."""
    at = data.find(b"\0")
    removed = len(BYTE_ORDER_MARK) if data.startswith(BYTE_ORDER_MARK) else 0
    try:
        if at < 0:
            return str(memoryview(data)[removed:], "utf-8")
        reason = f"holds a NUL byte (at offset {at} of the file), and text has none: write the file again"
    except UnicodeDecodeError as error:
        at = error.start + removed
        reason = f"is not UTF-8 (byte 0x{data[at]:02x} at offset {at} of the file): convert the file to UTF-8"
    return BadRow(Origin(source, data.count(b"\n", 0, at) + 1), reason)
