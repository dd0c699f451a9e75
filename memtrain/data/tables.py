"""Tables: CSV and TSV through the ``csv`` module, Parquet and Arrow through pyarrow, all of them as streams."""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final

from memtrain.data import reading
from memtrain.data.reading import Lines, Rows, as_record
from memtrain.data.records import BadRow, Origin, Record, RowRefused
from memtrain.units import format_bytes

_ROWS_AT_ONCE: Final = 256


class _TextLines:
    """Lines as text for ``csv.reader``, which goes on after an exception only if what it reads does (a generator would not).

    Attributes:
        fault: what is wrong with the lines since it was last emptied.
    """

    def __init__(self, lines: Lines) -> None:
        self.fault = ""
        self._lines = lines

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        try:
            return self._lines.text(line)
        except RowRefused as error:
            self.fault = self.fault or str(error)
            return line.decode("utf-8", "replace")


def separated(delimiter: str) -> Callable[[BinaryIO, str], Rows]:
    """A reader of tables with a header, whose cells stand between ``delimiter``."""

    def read(file: BinaryIO, source: str) -> Rows:
        lines = Lines(file)
        texts = _TextLines(lines)
        try:
            header = next((text for text in texts if text.strip()), "")
        except RowRefused as error:
            header, texts.fault = "", str(error)
        if texts.fault:
            raise ValueError(f"{Origin(source, lines.number)}, {texts.fault}.")
        names, used = _columns(header, delimiter, Origin(source, lines.number))
        reader = csv.reader(texts, delimiter=used, strict=True)
        while True:
            origin = Origin(source, lines.number + 1)
            texts.fault = ""
            try:
                cells = _next_cells(reader)
            except StopIteration:
                return
            except (RowRefused, csv.Error) as error:
                yield BadRow(
                    origin, texts.fault or (_csv_fault(error, lines.number) if isinstance(error, csv.Error) else str(error))
                )
                continue
            if texts.fault:
                yield BadRow(origin, texts.fault)
            elif len(cells) == len(names):
                # The column without a name is the index that pandas writes.
                yield Record({name: cell for name, cell in zip(names, cells, strict=True) if name}, origin)
            elif cells:
                remedy = f"quote cells that hold {used!r}" if len(cells) > len(names) else "write the cells that are missing"
                has = f"{len(cells)} cell{'s' * (len(cells) > 1)}"
                yield BadRow(origin, f"has {has} where the header has {len(names)}: {remedy}")

    return read


def _columns(header: str, delimiter: str, origin: Origin) -> tuple[list[str], str]:
    """The names of the columns and what stands between them: a .csv of other countries or programs has ``;`` or tabs."""
    if delimiter not in header:
        delimiter = next((other for other in (";", "\t") if other in header), delimiter)
    try:
        names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter, strict=True), [])]
    except csv.Error as error:
        raise ValueError(f"{origin}, {_csv_fault(error, origin.number)}.") from error
    odd = [name for at, name in enumerate(names) if (not name and at) or len(name) > 100 or _is_number(name)]
    if odd:
        raise ValueError(
            f"{origin}, has {_short(odd[0])} where the name of a column should be, and a table begins with a header: "
            "name the columns in the first line."
        )
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise ValueError(f"{origin}, names the column {twice!r} twice, and only one can be read: rename or remove the other.")
    return names, delimiter


def _is_number(name: str) -> bool:
    return re.fullmatch(r"[+-]?\d+([.,]\d+)?", name) is not None


def _short(name: str) -> str:
    return repr(name if len(name) <= 40 else name[:40] + "...")


def _next_cells(reader: Iterator[list[str]]) -> list[str]:
    # csv has one limit for the process, of 128 KiB, which a document may well exceed.
    before = csv.field_size_limit(reading.LONGEST_LINE_BYTES)
    try:
        return next(reader)
    finally:
        csv.field_size_limit(before)


def _csv_fault(error: csv.Error, last: int) -> str:
    if "unexpected end" in str(error):
        return f"opens a quote that is not closed by the end of line {last}: close it, and write quotes of the text twice"
    if "field larger" in str(error):
        return f"has a cell of more than {format_bytes(reading.LONGEST_LINE_BYTES)}: look for a quote that is not closed"
    if "new-line character" in str(error):
        return "holds a carriage return outside quotes, and lines end at newlines: convert the ends of lines, or quote the cell"
    return f"is no valid CSV ({error}): write quotes of the text twice, inside a quoted cell"


# ------------------------------------------------------------------------------------------------------------ arrow


def library(name: str) -> Any:
    """A package of the ``data`` extra.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ValueError(
            f'these rows are read by {package}, which cannot be imported ({error}): pip install "memtrain[data]".'
        ) from error


def without_missing(values: Any) -> Any:
    """``values`` without the keys whose value is None, at any depth.

    Arrow gives every row all keys that occur in any row, and None where a row has no such key.
    """
    if isinstance(values, Mapping):
        return {name: without_missing(value) for name, value in values.items() if value is not None}
    if isinstance(values, list):
        return [without_missing(value) for value in values]
    return values


def parquet(file: BinaryIO, source: str) -> Rows:
    """The rows of a Parquet file, read in batches; keys that a row lacks are left out (:func:`without_missing`)."""
    _refuse_pipe(file, source)
    pyarrow = library("pyarrow")
    module = library("pyarrow.parquet")
    yield from _arrow_rows(lambda: _parquet_batches(module, file), source, "Parquet", pyarrow)


def arrow(file: BinaryIO, source: str) -> Rows:
    """The rows of an Arrow file in the file or the stream format, read in batches."""
    _refuse_pipe(file, source)
    pyarrow = library("pyarrow")
    yield from _arrow_rows(lambda: _ipc_batches(pyarrow, file), source, "Arrow", pyarrow)


def _refuse_pipe(file: BinaryIO, source: str) -> None:
    if not file.seekable():
        raise ValueError(f"{source} is a pipe, and this format is read from both ends: write it to a file first.")


def _parquet_batches(module: Any, file: BinaryIO) -> Iterator[Any]:
    yield from module.ParquetFile(file).iter_batches(batch_size=_ROWS_AT_ONCE)


def _ipc_batches(pyarrow: Any, file: BinaryIO) -> Iterator[Any]:
    in_file_format = file.read(6) == b"ARROW1"
    file.seek(0)
    if not in_file_format:
        yield from pyarrow.ipc.open_stream(file)
        return
    reader = pyarrow.ipc.open_file(file)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _arrow_rows(batches: Callable[[], Iterable[Any]], source: str, format_name: str, pyarrow: Any) -> Rows:
    number = 0
    try:
        for batch in batches():
            _check_offsets(batch, pyarrow)
            names = batch.schema.names
            if len(set(names)) < len(names):
                twice = next(name for at, name in enumerate(names) if name in names[:at])
                raise RowRefused(f"has two columns named {twice!r}, and only one can be read: rename or remove the other")
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                for values in _as_python(batch.slice(start, _ROWS_AT_ONCE)):
                    origin = Origin(source, number, "row")
                    number += 1
                    yield BadRow(origin, values) if isinstance(values, str) else as_record(without_missing(values), origin)
    except RowRefused as error:
        raise ValueError(f"{source} {error}.") from error
    # What Arrow says of names that are not UTF-8 is a ValueError.
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{source} cannot be read as {format_name} beyond row {number} ({reason}): download or write it again."
        ) from error


def _check_offsets(batch: Any, pyarrow: Any) -> None:
    """Refuse a damaged batch, of which Arrow would read what lies beyond its memory.

    Raises:
        ArrowInvalid: its offsets lead out of it.
    """
    try:
        batch.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        # A string that is no text spoils its row alone.
        for column in batch.columns:
            column.cast(_without_text(column.type, pyarrow)).validate(full=True)


def _without_text(kind: Any, pyarrow: Any) -> Any:
    """The same Arrow type with bytes in place of strings, which may be anything."""
    types = pyarrow.types
    if types.is_string(kind):
        return pyarrow.binary()
    if types.is_large_string(kind):
        return pyarrow.large_binary()
    if types.is_list(kind):
        return pyarrow.list_(_without_text(kind.value_type, pyarrow))
    if types.is_struct(kind):
        return pyarrow.struct(
            [(kind.field(at).name, _without_text(kind.field(at).type, pyarrow)) for at in range(kind.num_fields)]
        )
    return kind


def _as_python(batch: Any) -> list[Any]:
    """The rows of a batch; the reason, for one whose strings are not UTF-8, which Arrow does not check."""
    try:
        rows: list[Any] = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [f"has a string that is not UTF-8 (byte 0x{error.object[error.start]:02x}): write the row again"]
        return [row for at in range(batch.num_rows) for row in _as_python(batch.slice(at, 1))]
    return rows
