"""Formats: which files are known, by the ending of their names, and the rows of one file, read as a stream.

What is wrong with one row is yielded as a :class:`~memtrain.data.records.BadRow`; what is wrong with the file as a whole raises
``ValueError``.
"""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from memtrain.data.json_rows import json_file, json_lines
from memtrain.data.reading import Rows, whole, whole_text
from memtrain.data.records import BadRow, Origin, Record
from memtrain.data.tables import arrow, parquet, separated

KNOWN_ENDINGS: Final = ".jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .txt or .md, each also with .gz"

_START_BYTES: Final = 64
_LFS_POINTER: Final = b"version https://git-lfs"
# UTF-32 first, because UTF-16 begins as it does.
_ENCODINGS: Final = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_OTHER_FORMATS: Final = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "Zstandard", b"PAR1": "Parquet"}


@dataclass(frozen=True)
class Format:
    """A way in which files hold rows.

    Attributes:
        name: in messages.
        read: the rows of an open file, which it names in messages.
        is_text: whether the file is text, so that its encoding matters.
    """

    name: str
    read: Callable[[BinaryIO, str], Rows]
    is_text: bool = True


def text_file(file: BinaryIO, source: str) -> Rows:
    """The file as one row ``{"text"}``, as it stands, line ends included."""
    text = whole_text(whole(file, source), source)
    if isinstance(text, BadRow):
        yield text
    elif text.strip():
        yield Record({"text": text}, Origin(source, 1))
    else:
        state = "holds only white space" if text else "is empty"
        yield BadRow(Origin(source, 1), f"{state}, and a document must have text: remove or fill the file")


_JSON_LINES: Final = Format("JSON Lines", json_lines)
_TEXT: Final = Format("text", text_file)
_FORMATS: Final[Mapping[str, Format]] = {
    ".jsonl": _JSON_LINES,
    ".ndjson": _JSON_LINES,
    ".json": Format("JSON", json_file),
    ".csv": Format("CSV", separated(",")),
    ".tsv": Format("TSV", separated("\t")),
    ".parquet": Format("Parquet", parquet, is_text=False),
    ".arrow": Format("Arrow", arrow, is_text=False),
    ".txt": _TEXT,
    ".md": _TEXT,
}


def without_gz(name: str) -> str:
    """The name of the file that a compressed one holds; any other name as it is."""
    return name[: -len(".gz")] if name.lower().endswith(".gz") else name


def format_by_name(name: str) -> Format | None:
    """The format that a file's name says it has, or None."""
    return _FORMATS.get(Path(without_gz(name)).suffix.lower())


def format_of(path: str) -> Format:
    """The format of a file that is there.

    The name of a link decides, else that of the file it leads to. What has no name to go by, such as ``/dev/stdin``, holds
    JSON Lines.

    Raises:
        ValueError: the ending of the name is not known.
    """
    known = format_by_name(path) or format_by_name(os.path.realpath(path))
    if known:
        return known
    mode = os.stat(path).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or path.startswith("/dev/"):
        return _JSON_LINES
    ending = Path(path).suffix
    raise ValueError(
        f"{path} has {f'the ending {ending}' if ending else 'no ending'}, by which its format is not known: "
        f"convert it, or name it by what it holds ({KNOWN_ENDINGS})."
    )


def rows_of_file(path: str, form: Format) -> Rows:
    """The rows of one file.

    Raises:
        ValueError: the file cannot be read, is empty, damaged or not what its name says.
    """
    # Names are bytes on some systems, and what is no UTF-8 in them could not be printed.
    source = os.fsencode(path).decode("utf-8", "backslashreplace")
    count = 0
    try:
        with gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb") as file:
            start = file.peek(_START_BYTES)[:_START_BYTES]
            _refuse_start(start, source, form)
            for row in form.read(file, source):  # type: ignore[arg-type]
                count += 1
                yield row
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        if count == 0 and "Not a gzipped file" in str(error):
            raise ValueError(f"{source} is no gzip file by its first bytes: take .gz off its name, or compress it.") from error
        raise ValueError(
            f"{source} cannot be unpacked beyond row {count} ({_plain(error)}): download or compress it again."
        ) from error
    except OSError as error:
        raise ValueError(
            f"{source} cannot be read ({error.strerror or _plain(error)}): allow reading it or leave it out."
        ) from error
    if count == 0:
        raise ValueError(f"{source} has no rows, and training needs 1 or more: fill it or leave it out.")


def _refuse_start(start: bytes, source: str, form: Format) -> None:
    # A text without text is one bad row among others.
    if not start and form is not _TEXT:
        raise ValueError(f"{source} is empty, and training needs rows: fill it or leave it out.")
    if start.startswith(_LFS_POINTER):
        raise ValueError(f"{source} is a pointer of Git LFS and not the file itself: fetch it (git lfs pull).")
    if not form.is_text:
        return
    other = next((name for mark, name in _OTHER_FORMATS.items() if start.startswith(mark)), None)
    if other:
        remedy = "name it .gz" if other == "gzip" else "name it .parquet" if other == "Parquet" else "unpack it"
        raise ValueError(f"{source} is a {other} file by its first bytes, and {form.name} by its name: {remedy}.")
    encoding = next((name for mark, name in _ENCODINGS.items() if start.startswith(mark)), None)
    # ASCII in UTF-16 without a mark: each second byte is 0.
    if encoding is None and len(start) >= 4 and any(not any(start[at::2]) and all(start[1 - at :: 2]) for at in (0, 1)):
        encoding = "UTF-16"
    if encoding:
        raise ValueError(
            f"{source}, line 1, is {encoding} (it begins with the bytes {start[:2].hex(' ').upper()}), and text must be UTF-8: "
            f"convert the file (iconv -f {encoding} -t UTF-8)."
        )


def _plain(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
