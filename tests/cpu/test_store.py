"""Stored rows: what goes in comes out, from memory and from the disk, in this process and in others."""

from __future__ import annotations

import gc
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from memtrain.data import store
from memtrain.data.store import RaggedRows

EXAMPLES: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "score": 0.5, "kind": 2},
    {"input_ids": [8], "labels": [8], "score": 1.25, "kind": 0},
    {"input_ids": [], "labels": [], "score": -1.0, "kind": 1},
    {"input_ids": [2**31 - 1, 0], "labels": [1, 2], "score": 3.0, "kind": 3},
]


@pytest.fixture(params=["in memory", "on the disk"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RaggedRows:
    if request.param == "on the disk":
        # Beyond one byte for each of the four columns: every row is written when it comes.
        monkeypatch.setattr(store, "_IN_MEMORY_BYTES", 4)
    return RaggedRows.of(iter(EXAMPLES))


def as_lists(rows: RaggedRows) -> list[dict[str, Any]]:
    return [{name: tensor.tolist() for name, tensor in rows[number].items()} for number in range(len(rows))]


def test_what_goes_in_comes_out(rows: RaggedRows) -> None:
    assert as_lists(rows) == EXAMPLES
    kinds = {name: (tensor.dtype, tensor.dim()) for name, tensor in rows[0].items()}
    assert kinds == {
        "input_ids": (torch.int64, 1),
        "labels": (torch.int64, 1),
        "score": (torch.float32, 0),
        "kind": (torch.int64, 0),
    }


def test_lengths_are_known(rows: RaggedRows) -> None:
    assert rows.lengths.tolist() == rows.length_of("labels").tolist() == [3, 1, 0, 2]
    assert rows.longest == {"input_ids": 3, "labels": 3, "score": None, "kind": None}


def test_a_row_that_is_changed_is_a_copy(rows: RaggedRows) -> None:
    rows[0]["input_ids"].zero_()
    assert as_lists(rows) == EXAMPLES


@pytest.mark.parametrize("index", [-1, 4])
def test_a_number_without_a_row_is_refused(rows: RaggedRows, index: int) -> None:
    with pytest.raises(IndexError, match=f"^row {index} of 4$"):
        rows[index]


def test_forked_workers_read_them(rows: RaggedRows) -> None:
    loader = DataLoader(rows, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert [{name: tensor.tolist() for name, tensor in row.items()} for row in loader] == EXAMPLES


def test_a_pickled_copy_holds_the_same(rows: RaggedRows) -> None:
    copied = pickle.loads(pickle.dumps(rows))
    assert as_lists(copied) == EXAMPLES
    assert copied.digest == rows.digest


def test_nothing_is_left_in_the_folder_of_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_IN_MEMORY_BYTES", 4)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = RaggedRows.of(EXAMPLES)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert f"{tmp_path}/" in maps.read_text()
    assert as_lists(rows) == EXAMPLES
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_is_refused_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_IN_MEMORY_BYTES", 4)
    with pytest.raises(ValueError, match="row 1"):
        RaggedRows.of([{"a": [1, 2]}, {"b": [1]}])
    # A file that is still open would warn here, and warnings are errors.
    gc.collect()


def test_the_digest_tells_contents_apart_and_not_places(monkeypatch: pytest.MonkeyPatch) -> None:
    found = RaggedRows.of(EXAMPLES).digest
    assert len(found) == 16
    monkeypatch.setattr(store, "_IN_MEMORY_BYTES", 4)
    assert RaggedRows.of(EXAMPLES).digest == found
    others = [
        EXAMPLES[:3],
        [*EXAMPLES[1:], EXAMPLES[0]],
        [{**example, "kind": 0} for example in EXAMPLES],
        [{("other" if name == "kind" else name): value for name, value in example.items()} for example in EXAMPLES],
        # The same numbers, cut elsewhere.
        [{**EXAMPLES[0], "input_ids": [5, 6]}, {**EXAMPLES[1], "input_ids": [7, 8]}, *EXAMPLES[2:]],
        [{**example, "score": [example["score"]]} for example in EXAMPLES],
    ]
    digests = [RaggedRows.of(other).digest for other in others]
    assert len({found, *digests}) == 1 + len(others)


def test_there_may_be_no_row() -> None:
    rows = RaggedRows.of([])
    assert len(rows) == 0
    assert rows.lengths.tolist() == []
    assert rows.longest == {}


def test_the_longest_column_has_the_tokens_where_none_has_their_name() -> None:
    assert RaggedRows.of([{"a": [1], "b": [1, 2, 3]}, {"a": [1, 2], "b": []}]).lengths.tolist() == [3, 0]
    assert RaggedRows.of([{"a": 1}, {"a": 2}]).lengths.tolist() == [1, 1]


def test_an_empty_first_row_does_not_decide_what_numbers_a_column_has() -> None:
    rows = RaggedRows.of([{"weights": []}, {"weights": [0.5]}])
    assert rows[1]["weights"].tolist() == [0.5]
    assert rows[0]["weights"].dtype == torch.float32


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"a": [1]}, "row 1 has no column 'b' where row 0 has one, and rows must be alike: give every row the same columns."),
        (
            {"a": [1], "b": 2, "c": 3},
            "row 1 has a column 'c' where row 0 has none, and rows must be alike: give every row the same columns.",
        ),
        (
            {"a": 1, "b": 2},
            "row 1 has one number in column 'a' where row 0 has a sequence, and rows must be alike: give every row the same kind.",
        ),
        (
            {"a": [1], "b": [2]},
            "row 1 has a sequence in column 'b' where row 0 has one number, and rows must be alike: give every row the same kind.",
        ),
        (
            {"a": [0.5], "b": 2},
            "row 1 has numbers in column 'a' that are no whole ones of 32 bits as those before them ('float' object cannot be "
            "interpreted as an integer): give token ids and labels, or make all numbers of the column floats.",
        ),
    ],
)
def test_a_row_unlike_the_first_is_refused_by_number_and_column(second: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="row 1") as caught:
        RaggedRows.of([{"a": [1, 2], "b": 2}, second])
    assert str(caught.value) == words


def test_numbers_of_more_than_32_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^row 0 has numbers in column 'a' that are no whole ones of 32 bits as those"):
        RaggedRows.of([{"a": [2**31]}])


def test_a_disk_that_takes_no_more_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_IN_MEMORY_BYTES", 4)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="the folder of temporary files") as caught:
        RaggedRows.of(EXAMPLES)
    found = str(caught.value)
    assert found.startswith(f"the rows do not fit into the folder of temporary files, {tmp_path}/gone ([Errno 2]")
    assert found.endswith("): make room there, or set TMPDIR to a folder that has it.")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_file_that_is_full_is_closed_without_another_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_IN_MEMORY_BYTES", 4)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "r+b"))  # noqa: SIM115
    with pytest.raises(ValueError, match="No space left on device"):
        RaggedRows.of(EXAMPLES)
