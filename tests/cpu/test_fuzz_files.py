"""Files with anything in them: every row of a file is read as it stands or named with its place, or the file is refused.

What is expected of a damaged file is found by Python's own parsers, line by line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memtrain.data.files import read_records
from memtrain.data.records import BadRow, Record

# What rows are damaged with: bytes that mean something to a reader, and some that mean nothing in UTF-8.
NASTY = [
    b"\0",
    b"\xff",
    b"\xc3",
    b"\xef\xbb\xbf",
    b"\r\n",
    b"\r",
    b"\n",
    b"\xe2\x80\xa8",
    b"\xc2\x85",
    b"\x0c",
    b'"',
    b"'",
    b",",
    b"{",
]
NASTY += [
    b"}",
    b"[",
    b"]",
    b"\\",
    b"\\ud800",
    b"NaN",
    b"1e999",
    b"\t",
    b" ",
    b"\x1f\x8b",
    b"PAR1",
    b"null",
    b":",
    b"-",
    b"\xed\xa0\x80",
]

cells = st.text(max_size=12) | st.sampled_from(
    ["", " ", "a,b", 'he said "no"', "two\nlines", "\u2028", "\x85", "\x1f", "naïve", "🙂"]
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | cells,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(cells, inner, max_size=3),
    max_leaves=5,
)
json_rows = st.lists(st.dictionaries(cells, json_values, min_size=1, max_size=3), min_size=1, max_size=5)
damages = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 3), st.sampled_from(NASTY) | st.binary(max_size=3)), max_size=3
)
Damages = list[tuple[int, int, bytes]]


def damaged(content: bytes, damages: Damages) -> bytes:
    """The content with some bytes taken out at each place and others put in."""
    for place, removed, put_in in damages:
        at = place % (len(content) + 1)
        content = content[:at] + put_in + content[at + removed :]
    return content


def read(name: str, content: bytes) -> list[Record | BadRow] | str:
    """The rows of a file of that name, or the sentence that refuses it; anything else that is raised is a fault."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_bytes(content)
        try:
            found: list[Record | BadRow] | ValueError = list(read_records(file, "data"))
        except ValueError as error:
            found = error
        if isinstance(found, ValueError):
            sentence = str(found)
            assert (type(found), sentence[: len(str(file))], sentence[-1]) == (ValueError, str(file), ".")
            assert len(sentence) < 1000
            return sentence.replace(str(file), name)
        for row in found:
            assert row.origin.source == str(file)
            if isinstance(row, BadRow):
                assert re.match(rf"{re.escape(str(file))}, (line|row) \d+, \w", str(row)), row
                assert "\n" not in str(row)
        return found


def numbered_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(content.split(b"\n"), 1):
        line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip(b" \t\r"):
            yield number, line


def as_json_says(line: bytes) -> dict[str, Any] | None:
    """The row on a line by a reading that is strict, or None where there is none."""

    def only_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError
        return dict(pairs)

    def refuse(_: str) -> None:
        raise ValueError

    def finite(digits: str) -> float:
        if float(digits) in (float("inf"), float("-inf")):
            raise ValueError
        return float(digits)

    try:
        if b"\0" in line:
            return None
        # Control characters inside strings are what people have in their files.
        strict = {"object_pairs_hook": only_once, "parse_constant": refuse, "parse_float": finite}
        value = json.loads(line.decode(), strict=False, **strict)
        # Halves of surrogate pairs cannot be written.
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return None
    return value if isinstance(value, dict) and value else None


@given(json_rows, damages, st.sampled_from(["\n", "\r\n"]), st.booleans())
@example([{"a": "\u2028"}, {"b": "\x85\x0c"}], [], "\r\n", False)
@example([{"a": 1}, {"a": 2}], [(0, 0, b"\xef\xbb\xbf"), (4, 0, b"\xed\xa0\x80")], "\n", False)
def test_each_line_of_json_is_read_as_it_stands_or_named(
    rows: list[dict[str, Any]], damages: Damages, line_end: str, ascii_only: bool
) -> None:
    content = damaged("".join(json.dumps(row, ensure_ascii=ascii_only) + line_end for row in rows).encode(), damages)
    found = read("a.jsonl", content)
    if isinstance(found, str):
        # All of it is refused where no line tells what it is, or its first bytes are those of another kind of file.
        lines = list(numbered_lines(content))
        assert not lines or as_json_says(lines[0][1]) is None, found
        return
    expected = [(number, as_json_says(line)) for number, line in numbered_lines(content)]
    assert [(row.origin.number, row.values if isinstance(row, Record) else None) for row in found] == expected


@given(json_rows, damages, st.sampled_from([None, 2]))
def test_a_list_of_json_is_read_whole_or_refused(rows: list[dict[str, Any]], damages: Damages, indent: int | None) -> None:
    content = damaged(json.dumps(rows, indent=indent, ensure_ascii=False).encode(), damages)
    found = read("a.json", content)
    if not damages:
        assert not isinstance(found, str)
        assert [row.values for row in found if isinstance(row, Record)] == rows
    try:
        expected = json.loads(content.decode("utf-8-sig"), strict=False)
    except ValueError:
        # Lines of JSON are read from a .json file as well, as is what a reading by the letter passes over.
        assert isinstance(found, str) or b"\n" in content or any(isinstance(row, BadRow) for row in found)
        return
    if isinstance(expected, list) and not isinstance(found, str):
        assert len(found) == len(expected)
        for row, value in zip(found, expected, strict=True):
            assert isinstance(row, BadRow) or row.values == value


@st.composite
def tables(draw: st.DrawFn) -> list[list[str]]:
    """A header and rows of as many cells, of what CSV can hold: no line end but the newline, and no NUL."""
    cell = st.text(st.characters(blacklist_characters="\0\r", blacklist_categories=["Cs"]), max_size=8)
    cell |= st.sampled_from(["a,b", 'he said "no"', "two\nlines", " ", "\u2028", ""])
    width = draw(st.integers(2, 4))
    body = draw(st.lists(st.lists(cell, min_size=width, max_size=width), min_size=1, max_size=5))
    return [[f"column{number}" for number in range(width)], *body]


def written(table: list[list[str]], **how: Any) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, **how).writerows(table)
    return text.getvalue().encode()


@given(
    tables(), st.sampled_from([",", "\t"]), st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]), st.sampled_from(["\n", "\r\n"])
)
def test_what_a_table_was_written_with_comes_back(table: list[list[str]], delimiter: str, quoting: int, line_end: str) -> None:
    content = written(table, delimiter=delimiter, quoting=quoting, lineterminator=line_end)
    found = read("a.csv" if delimiter == "," else "a.tsv", content)
    header, *body = table
    assert not isinstance(found, str), found
    expected = [dict(zip(header, row, strict=True)) for row in body]
    assert [row.values if isinstance(row, Record) else str(row) for row in found] == expected


@given(tables(), damages)
def test_a_damaged_table_keeps_the_rows_before_the_damage_and_loses_none(table: list[list[str]], damages: Damages) -> None:
    content = written(table, quoting=csv.QUOTE_ALL, lineterminator="\n")
    spoilt = damaged(content, damages)
    found = read("a.csv", spoilt)
    if isinstance(found, str):
        return
    assert found
    header, *body = table
    same = next((at for at, (a, b) in enumerate(zip(content, spoilt, strict=False)) if a != b), min(len(content), len(spoilt)))
    # A row has ended before the damage if its line end has.
    ends = [len(written(table[: number + 1], quoting=csv.QUOTE_ALL, lineterminator="\n")) for number in range(len(table))]
    whole = sum(end <= same for end in ends) - 1
    for row, cells in zip(found, body[: max(0, whole)], strict=False):
        assert isinstance(row, Record), row
        assert row.values == dict(zip(header, cells, strict=True))
    assert len(found) >= max(0, whole)


@given(st.text(st.characters(blacklist_categories=["Cs"]), max_size=60), damages)
def test_a_text_is_one_row_as_it_stands_or_named_with_its_line(text: str, damages: Damages) -> None:
    content = damaged(text.encode(), damages)
    found = read("a.txt", content)
    if isinstance(found, str):
        return
    (row,) = found
    try:
        expected = None if b"\0" in content else content.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError:
        expected = None
    if expected is None or not expected.strip():
        assert isinstance(row, BadRow)
    else:
        assert isinstance(row, Record)
        assert row.values == {"text": expected}


def _arrow(kind: str) -> Callable[[list[dict[str, Any]]], bytes]:
    def write(rows: list[dict[str, Any]]) -> bytes:
        import pyarrow
        import pyarrow.parquet

        table, sink = pyarrow.Table.from_pylist(rows), pyarrow.BufferOutputStream()
        if kind == "parquet":
            pyarrow.parquet.write_table(table, sink)
        else:
            with pyarrow.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        content: bytes = sink.getvalue().to_pybytes()
        return content

    return write


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


ROWS = [{"text": f"row {number}"} for number in range(3)]
WRITTEN = {
    "a.parquet": _arrow("parquet")(ROWS),
    "a.arrow": _arrow("arrow")(ROWS),
    "a.jsonl.gz": gzip.compress(_lines(ROWS), mtime=0),
    "a.csv.gz": gzip.compress(written([["text"], *([row["text"]] for row in ROWS)]), mtime=0),
}


@pytest.mark.parametrize("name", WRITTEN)
@given(damages)
@example([(114, 1, b"\xff")])
@example([])
def test_a_damaged_file_that_is_not_text_is_refused_or_gives_its_rows(name: str, damages: Damages) -> None:
    found = read(name, damaged(WRITTEN[name], damages))
    if not damages:
        assert not isinstance(found, str)
        assert [row.values for row in found if isinstance(row, Record)] == ROWS


@given(
    st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.md", "a.parquet", "a.arrow", "a.json.gz"]),
    st.binary(max_size=64),
)
def test_any_bytes_are_read_or_refused(name: str, content: bytes) -> None:
    found = read(name, content)
    assert isinstance(found, str) or found
