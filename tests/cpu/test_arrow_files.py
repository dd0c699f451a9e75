"""Arrow and Parquet files that are damaged: what is wrong is named, and nothing is read beyond them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from memtrain.data.files import read_records
from memtrain.data.records import BadRow

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values(name: str) -> list[Any]:
    return [row.reason if isinstance(row, BadRow) else row.values for row in read_records(name, "the training rows")]


def test_damaged_arrow_files_are_named(folder: Path) -> None:
    parquet.write_table(pyarrow.table({"a": [1]}), "a.parquet")
    Path("cut.parquet").write_bytes(Path("a.parquet").read_bytes()[:-9])
    Path("text.arrow").write_bytes(b"no Arrow, but text")
    with pytest.raises(
        ValueError, match=r"cut\.parquet cannot be read as Parquet beyond row 0 \(.*\): download or write it again\."
    ):
        values("cut.parquet")
    with pytest.raises(
        ValueError, match=r"text\.arrow cannot be read as Arrow beyond row 0 \(.*\): download or write it again\."
    ):
        values("text.arrow")
    twice = pyarrow.table([[1], [2]], names=["a", "a"])
    with pyarrow.ipc.new_stream("twice.arrow", twice.schema) as file:
        file.write_table(twice)
    with pytest.raises(ValueError, match=r"twice\.arrow has two columns named 'a', and only one can be read: rename or remove"):
        values("twice.arrow")


def test_a_string_of_a_parquet_file_that_is_not_utf8_is_a_bad_row(folder: Path) -> None:
    offsets = pyarrow.array([0, 1, 2, 3], pyarrow.int32()).buffers()[1]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, offsets, pyarrow.py_buffer(b"a\xe9b")])
    parquet.write_table(pyarrow.table({"text": texts}), "a.parquet")
    assert values("a.parquet") == [
        {"text": "a"},
        "has a string that is not UTF-8 (byte 0xe9): write the row again",
        {"text": "b"},
    ]


def test_a_string_deep_in_a_row_that_is_not_utf8_is_a_bad_row(folder: Path) -> None:
    said = pyarrow.struct([("content", pyarrow.binary())])
    rows = pyarrow.array([[{"content": b"a"}], [{"content": b"b"}, {"content": b"\xe9"}]], pyarrow.list_(said))
    pretended = rows.cast(pyarrow.list_(pyarrow.struct([("content", pyarrow.string())])), safe=False)
    parquet.write_table(pyarrow.table({"messages": pretended}), "a.parquet")
    assert values("a.parquet") == [
        {"messages": [{"content": "a"}]},
        "has a string that is not UTF-8 (byte 0xe9): write the row again",
    ]


def test_a_file_whose_offsets_lead_out_of_it_is_refused_and_not_followed(folder: Path) -> None:
    table = pyarrow.table({"text": ["row 0", "row 1"]})
    with pyarrow.ipc.new_file("a.arrow", table.schema) as file:
        file.write_table(table)
    content = Path("a.arrow").read_bytes()
    offsets = struct.pack("<3i", 0, 5, 10)
    assert content.count(offsets) == 1
    Path("a.arrow").write_bytes(content.replace(offsets, struct.pack("<3i", 0, 5, 2**30)))
    with pytest.raises(ValueError, match=r"a\.arrow cannot be read as Arrow beyond row 0 \(.*\): download or write it again\."):
        values("a.arrow")
