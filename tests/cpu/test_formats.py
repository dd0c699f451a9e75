"""Formats: each row of a file is read as it stands, and each row that cannot be is named with its place and its fault."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.data import reading
from memtrain.data.files import read_records
from memtrain.data.json_rows import json_lines
from memtrain.data.records import BadRow, Origin, Record


def rows(file: Path) -> list[Record | BadRow]:
    return list(read_records(file, "the training rows"))


def values(file: Path) -> list[Any]:
    """What the records hold, and the bad rows as they are printed, without the folder."""
    return [str(row).replace(f"{file.parent}/", "") if isinstance(row, BadRow) else row.values for row in rows(file)]


def write(folder: Path, name: str, content: bytes | str) -> Path:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


# ---------------------------------------------------------------------------------------------------------- JSON Lines


def test_a_line_is_a_record_with_its_place_and_blank_lines_are_none(tmp_path: Path) -> None:
    file = write(tmp_path, "a.jsonl", b'{"text":"a"}\r\n\r\n  \n{"text":"b","n":12345678901234567890123}')
    assert rows(file) == [
        Record({"text": "a"}, Origin(str(file), 1)),
        Record({"text": "b", "n": 12345678901234567890123}, Origin(str(file), 4)),
    ]


def test_a_byte_order_mark_changes_nothing_at_the_start_or_where_files_were_put_together(tmp_path: Path) -> None:
    plain, marked = b'{"text":"caf\xc3\xa9"}\n', b'\xef\xbb\xbf{"text":"caf\xc3\xa9"}\r\n'
    assert values(write(tmp_path, "a.jsonl", marked + marked)) == values(write(tmp_path, "b.jsonl", plain + plain))


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x0ce\x1cf\tg\\h"
    line = json.dumps({"text": "x"}) + "\n" + '{"text": "' + text.replace("\\", "\\\\") + '"}\n'
    assert len(line.splitlines()) == 7
    assert values(write(tmp_path, "a.jsonl", line)) == [{"text": "x"}, {"text": text}]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1), st.booleans())
def test_any_text_comes_back_as_it_was_written(texts: list[str], ascii_only: bool) -> None:
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts)
    read = json_lines(io.BytesIO(lines.encode()), "a")
    assert [row.values["text"] for row in read if isinstance(row, Record)] == texts


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a":', "is no valid JSON (Expecting value at column 6)"),
        (b'{"a":"cut', "is no valid JSON (Unterminated string starting at column 6)"),
        (b"{'a':1}", "is no valid JSON (Expecting property name enclosed in double quotes at column 2)"),
        (b'\xef\xbb\xbf{"a":', "is no valid JSON (Expecting value at column 6)"),
        (b'{"a":1},', "is no valid JSON (the first value is followed by ',' at column 8)"),
        (b'{"a":1} {"a":2}', "holds more than one JSON object (another begins at column 9): give each a line of its own"),
        (b"[1]", 'is a list, and a row must be a JSON object, such as {"text": "..."}'),
        (b'"x"', 'is a string, and a row must be a JSON object, such as {"text": "..."}'),
        (b"2", 'is a number, and a row must be a JSON object, such as {"text": "..."}'),
        (b"true", 'is true or false, and a row must be a JSON object, such as {"text": "..."}'),
        (b"null", 'is null, and a row must be a JSON object, such as {"text": "..."}'),
        (b"{}", "is empty, and a row must have columns"),
        (b'{"a":NaN}', "holds NaN, which is no JSON: write null or leave the key out"),
        (b'{"a":[-Infinity]}', "holds -Infinity, which is no JSON: write null or leave the key out"),
        (b'{"a":1e999}', "holds 1e999, which is beyond the largest float: correct the number"),
        (b'{"a":1,"b":2,"a":1}', "has the key 'a' twice in one object, and only one value can be meant: remove the other"),
        (b'{"a":[{"b":1,"b":2}]}', "has the key 'b' twice in one object, and only one value can be meant: remove the other"),
        (b'{"a":["\\uD800x"]}', "has \\ud800 in 'a', which is half of a surrogate pair and no character: correct the text"),
        (b'{"\\udfff":1}', "has \\udfff in '\\udfff', which is half of a surrogate pair and no character: correct the text"),
        (b'{"a":"\0"}', "holds a NUL byte (offset 6 of the line, 14 of the file), and text has none: write the row again"),
        (b'{"a":"\xe9"}', "is not UTF-8 (byte 0xe9 at offset 6 of the line, 14 of the file): convert the file to UTF-8"),
        (
            b'\xef\xbb\xbf{"\xe9"}',
            "is not UTF-8 (byte 0xe9 at offset 5 of the line, 13 of the file): convert the file to UTF-8",
        ),
        (
            b'{"a":"\xed\xa0\x80"}',
            "is not UTF-8 (byte 0xed at offset 6 of the line, 14 of the file): convert the file to UTF-8",
        ),
        (b'{"a":' + b"9" * 5000 + b"}", "holds an integer of more digits than Python converts: write it as a string"),
        (b'{"a":' + b"[" * 100_000, "is nested too deeply to be read"),
    ],
)
def test_a_line_that_is_no_row_is_named_and_the_others_are_read(tmp_path: Path, line: bytes, reason: str) -> None:
    file = write(tmp_path, "a.jsonl", b'{"a":1}\n' + line + b'\n{"a":3}\n')
    assert values(file) == [{"a": 1}, f"a.jsonl, line 2, {reason}", {"a": 3}]


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    assert values(write(tmp_path, "a.jsonl", '{"a":"\\ud83d\\ude00"}')) == [{"a": "😀"}]


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE_BYTES", 16)
    monkeypatch.setattr(reading, "_PIECE_BYTES", 4)
    file = write(tmp_path, "a.jsonl", '{"a":"1234567"}\n{"a":"12345678901"}\n{"a":\n{"a":"12345678"}')
    assert values(file) == [
        {"a": "1234567"},
        "a.jsonl, line 2, is 20 B long, and a line may have 16 B: split it, or look for newlines that are missing",
        "a.jsonl, line 3, is no valid JSON (Expecting value at column 6)",
        {"a": "12345678"},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '\n[{"a":1}]',
            r"a\.jsonl is a JSON list, .* one object on each line: name it \.json, or write it again \(jq -c '\.\[\]'\)",
        ),
        ("[\n{}\n]", r"a\.jsonl is a JSON list"),
        ('{\n "a": 1\n}', r"objects that are spread over several lines, .*: write it again \(jq -c \.\), or name it \.json"),
    ],
)
def test_json_that_is_no_json_lines_is_refused_as_a_whole(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows(write(tmp_path, "a.jsonl", content))


# ---------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('\ufeff [{"a":1},\n {"a":2}]\n', [{"a": 1}, {"a": 2}]),
        (
            '{"version":1,"tags":["x"],"data":[{"a":1},2]}',
            [{"a": 1}, 'a.json, row 1, is a number, and a row must be a JSON object, such as {"text": "..."}'],
        ),
        ('{\n"text": "a"\n}', [{"text": "a"}]),
        ('{"messages":[{"role":"user"}]}', [{"messages": [{"role": "user"}]}]),
        ('\n{"a":1}\n{"a":\n', [{"a": 1}, "a.json, line 3, is no valid JSON (Expecting value at column 6)"]),
        (
            '[{"a":NaN},{"a":1,"a":2},{"a":"\\udc00"},null,{"a":5}]',
            [
                "a.json, row 0, holds NaN, which is no JSON: write null or leave the key out",
                "a.json, row 1, has the key 'a' twice in one object, and only one value can be meant: remove the other",
                "a.json, row 2, has \\udc00 in 'a', which is half of a surrogate pair and no character: correct the text",
                'a.json, row 3, is null, and a row must be a JSON object, such as {"text": "..."}',
                {"a": 5},
            ],
        ),
    ],
)
def test_a_json_file_holds_a_list_a_wrapped_list_one_row_or_lines(tmp_path: Path, content: str, expected: list[Any]) -> None:
    assert values(write(tmp_path, "a.json", content)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'[{"a":1},{"a"',
            r"a\.json is no valid JSON \(Expecting ':' delimiter at line 1, column 14\): correct it, or download",
        ),
        (b'[{"a":1}\n{"a":2}]', r"a\.json is no valid JSON \(Expecting ',' delimiter at line 2, column 1\)"),
        (
            b'{\n"a":1\n}\n{\n"a":2}',
            r"\(more than one value, where a list of objects should be: another begins at line 4, column 1\)",
        ),
        (b'[{"a":1}] []', r"another begins at line 1, column 11\)"),
        (b'"a"', r"a\.json holds a string, and rows are a list of objects: write them as one\."),
        (
            b'{"b":[{}],"c":[{}]}',
            r"a\.json holds 2 lists of objects \('b', 'c'\), and rows are one list: write each to its own",
        ),
        (
            b'{"text":{"0":"a"}}',
            r"a\.json holds columns \('text'\), .*: with pandas write them by to_json\(path, orient=\"records\"",
        ),
        (b'{"a":1,"a":[{}]}', r"a\.json has the key 'a' twice in one object"),
        (b'[{"a":' + b"[" * 100_000, r"a\.json has a row 0 that is nested too deeply to be read: leave it out\."),
        (
            b'[{"a":\n"\xe9"}]',
            r"a\.json, line 2, is not UTF-8 \(byte 0xe9 at offset 8 of the file\): convert the file to UTF-8\.",
        ),
        (
            b'[\n"\0"]',
            r"a\.json, line 2, holds a NUL byte \(at offset 3 of the file\), and text has none: write the file again\.",
        ),
        (b"[ ]", r"a\.json has no rows, and training needs 1 or more: fill it or leave it out\."),
    ],
)
def test_a_json_file_without_a_list_of_rows_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows(write(tmp_path, "a.json", content))


@pytest.mark.parametrize("name", ["a.json", "a.txt"])
def test_what_is_read_in_one_piece_may_not_be_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(reading, "LARGEST_WHOLE_BYTES", 11)
    assert len(rows(write(tmp_path, name, '[{"a":123}]'))) == 1
    with pytest.raises(
        ValueError, match=r"is larger than 11 B, which would all be held in memory: write its rows as JSON Lines"
    ):
        rows(write(tmp_path, name, '[{"a":1234}]'))


# ----------------------------------------------------------------------------------------------------------------- CSV


def test_a_table_gives_a_record_for_each_row_and_names_the_line_where_a_bad_one_begins(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "a.csv",
        b'\xef\xbb\xbftext, label\r\n"a\r\nb",1\r\n,2\r\n\r\nx\r\nx,1,2\r\n"q""q",3\r\n"n\ncaf\xe9\n",1\nn\0ul,1\n"a"b,3\nlast,4',
    )
    assert rows(file)[0] == Record({"text": "a\r\nb", "label": "1"}, Origin(str(file), 2))
    assert values(file) == [
        {"text": "a\r\nb", "label": "1"},
        {"text": "", "label": "2"},
        "a.csv, line 6, has 1 cell where the header has 2: write the cells that are missing",
        "a.csv, line 7, has 3 cells where the header has 2: quote cells that hold ','",
        {"text": 'q"q', "label": "3"},
        "a.csv, line 9, is not UTF-8 (byte 0xe9 at offset 3 of the line, 58 of the file): convert the file to UTF-8",
        "a.csv, line 12, holds a NUL byte (offset 1 of the line, 65 of the file), and text has none: write the row again",
        "a.csv, line 13, is no valid CSV (',' expected after '\"'): write quotes of the text twice, inside a quoted cell",
        {"text": "last", "label": "4"},
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", "a;b\nx, y;1\n"), ("a.csv", "a\tb\nx, y\t1\n"), ("a.tsv", "a\tb\nx, y\t1\n"), ("a.csv", ',a,b\n0,"x, y",1\n')],
)
def test_tables_of_other_programs_are_read(tmp_path: Path, name: str, content: str) -> None:
    assert values(write(tmp_path, name, content)) == [{"a": "x, y", "b": "1"}]


def test_a_quote_that_is_not_closed_takes_nothing_silently(tmp_path: Path) -> None:
    assert values(write(tmp_path, "a.csv", 'a,b\nx,1\n"y,2\nz,3\n')) == [
        {"a": "x", "b": "1"},
        "a.csv, line 3, opens a quote that is not closed by the end of line 4: close it, and write quotes of the text twice",
    ]


def test_a_cell_may_be_longer_than_the_limit_of_the_csv_module_which_stays_as_it_is(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    assert values(write(tmp_path, "a.csv", "a\n" + "x" * (before + 1))) == [{"a": "x" * (before + 1)}]
    assert csv.field_size_limit() == before


def test_long_lines_and_cells_of_a_table_are_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE_BYTES", 16)
    file = write(tmp_path, "a.csv", "a\n" + "x" * 20 + '\ny\n"xxxxxxxxxx\nxxxxxxxxxx\nz\n')
    assert values(file) == [
        "a.csv, line 2, is 21 B long, and a line may have 16 B: split it, or look for newlines that are missing",
        {"a": "y"},
        "a.csv, line 4, has a cell of more than 16 B: look for a quote that is not closed",
        {"a": "z"},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "I liked it,1\n",
            r"a\.csv, line 1, has '1' where the name of a column should be, .*: name the columns in the first line\.",
        ),
        ("a,,b\n", r"a\.csv, line 1, has '' where the name of a column should be"),
        ("x" * 101 + "\n", r"a\.csv, line 1, has 'x{40}\.\.\.' where the name of a column should be"),
        ("\na,b, a\n", r"a\.csv, line 2, names the column 'a' twice, and only one can be read: rename or remove the other\."),
        ("a,b\r1,2\r", r"a\.csv, line 1, holds a carriage return outside quotes, and lines end at newlines: convert the ends"),
        ('"a,b\n1,2\n', r"a\.csv, line 1, opens a quote that is not closed by the end of line 1"),
        (b"\xe9,b\n", r"a\.csv, line 1, is not UTF-8 \(byte 0xe9 at offset 0 of the line, 0 of the file\): convert"),
        (b"x" * 2048 + b"\n", r"a\.csv, line 1, is 2\.00 KiB long, and a line may have 1\.00 KiB"),
        ("a,b\n", r"a\.csv has no rows, and training needs 1 or more: fill it or leave it out\."),
    ],
)
def test_a_table_without_a_header_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | bytes, message: str
) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE_BYTES", 1024)
    with pytest.raises(ValueError, match=message):
        rows(write(tmp_path, "a.csv", content))


# ------------------------------------------------------------------------------------------------- text and compression


def test_a_text_file_is_one_record_as_it_stands(tmp_path: Path) -> None:
    assert values(write(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\ntwo\xe2\x82\xac\n")) == [{"text": "one\r\ntwo€\n"}]
    assert values(write(tmp_path, "a.md.gz", gzip.compress(b"one", mtime=0))) == [{"text": "one"}]


@pytest.mark.parametrize(
    ("content", "row"),
    [
        (b"", "a.txt, line 1, is empty, and a document must have text: remove or fill the file"),
        (b" \n", "a.txt, line 1, holds only white space, and a document must have text: remove or fill the file"),
        (
            b"\xef\xbb\xbfa\ncaf\xe9",
            "a.txt, line 2, is not UTF-8 (byte 0xe9 at offset 8 of the file): convert the file to UTF-8",
        ),
        (b"a\n\0", "a.txt, line 2, holds a NUL byte (at offset 2 of the file), and text has none: write the file again"),
    ],
)
def test_a_text_file_without_text_is_a_bad_row(tmp_path: Path, content: bytes, row: str) -> None:
    assert values(write(tmp_path, "a.txt", content)) == [row]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "A.JSONL"])
def test_gzip_changes_nothing(tmp_path: Path, name: str) -> None:
    lines = b'{"a":1}\n{"a":2}'
    # Two members, as cat makes them.
    assert values(write(tmp_path, f"{name}.gz", gzip.compress(lines[:8], mtime=0) + gzip.compress(lines[8:], mtime=0))) == [
        {"a": 1},
        {"a": 2},
    ]


def test_a_compressed_file_that_breaks_off_is_refused_after_its_rows(tmp_path: Path) -> None:
    read = read_records(write(tmp_path, "a.jsonl.gz", gzip.compress(b'{"a":1}\n' * 3, mtime=0)[:-8]), "the training rows")
    assert [next(read).origin.number for _ in range(3)] == [1, 2, 3]
    with pytest.raises(
        ValueError, match=r"a\.jsonl\.gz cannot be unpacked beyond row 3 \(Compressed file ended .*\): download"
    ):
        next(read)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl is empty, and training needs rows: fill it or leave it out\."),
        ("a.csv.gz", gzip.compress(b"", mtime=0), r"a\.csv\.gz is empty, and training needs rows"),
        ("a.jsonl", b"\n\r\n", r"a\.jsonl has no rows, and training needs 1 or more"),
        (
            "a.jsonl.gz",
            b'{"a":1}',
            r"a\.jsonl\.gz is no gzip file by its first bytes: take \.gz off its name, or compress it\.",
        ),
        (
            "a.jsonl",
            gzip.compress(b"{}", mtime=0),
            r"a\.jsonl is a gzip file by its first bytes, and JSON Lines by its name: name it \.gz\.",
        ),
        ("a.csv", b"PK\x03\x04", r"a\.csv is a zip file by its first bytes, and CSV by its name: unpack it\."),
        ("a.json", b"PAR1", r"a\.json is a Parquet file by its first bytes, and JSON by its name: name it \.parquet\."),
        (
            "a.parquet",
            b"version https://git-lfs.github.com/spec/v1\n",
            r"is a pointer of Git LFS .*: fetch it \(git lfs pull\)\.",
        ),
        (
            "a.jsonl",
            '{"a":1}'.encode("utf-16"),
            r"a\.jsonl, line 1, is UTF-16 \(it begins with the bytes FF FE\), .* UTF-8: convert",
        ),
        ("a.jsonl", '\ufeff{"a":1}'.encode("utf-16-be"), r"is UTF-16 \(it begins with the bytes FE FF\)"),
        ("a.csv", "a,b\n".encode("utf-16-le"), r"is UTF-16 \(it begins with the bytes 61 00\)"),
        ("a.txt", "ab".encode("utf-16-be"), r"is UTF-16 \(it begins with the bytes 00 61\), .* \(iconv -f UTF-16 -t UTF-8\)\."),
        ("a.jsonl", "{}".encode("utf-32"), r"is UTF-32 \(it begins with the bytes FF FE\)"),
        ("a.jsonl.gz", gzip.compress("{}".encode("utf-16"), mtime=0), r"a\.jsonl\.gz, line 1, is UTF-16"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows(write(tmp_path, name, content))
