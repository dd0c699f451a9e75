"""Field reports about files of rows: byte order marks, characters that look like ends of lines, and rows of nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toys import BYTES

from memtrain.data.files import read_records
from memtrain.data.options import DataOptions
from memtrain.data.records import BadRow
from memtrain.inputs import Reader
from memtrain.models.build import source

MODEL = {"model_type": "llama", "vocab_size": len(BYTES), "max_position_embeddings": 64, "eos_token_id": 2}
ROWS = [{"text": "café"}, {"text": "b"}, {"text": "c"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def reader(**options: Any) -> Reader:
    return Reader(source(MODEL), BYTES, DataOptions(sequence_length=16, **options))


def found(file: Path) -> list[Any]:
    return [str(row) if isinstance(row, BadRow) else row.values for row in read_records(file, "data")]


# ---------------------------------------------------------------------- dat-02


def test_a_byte_order_mark_changes_no_row_and_no_key(tmp_path: Path) -> None:
    """dat-02: the first record was dropped, or had a key that begins with U+FEFF."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(LINES.encode("utf-8"))
    assert found(file) == ROWS
    file.write_bytes(LINES.encode("utf-8-sig"))
    assert found(file) == ROWS


def test_text_that_is_not_utf8_is_named_with_its_line_and_byte(tmp_path: Path) -> None:
    """dat-02: é is one byte, 0xe9, in Latin-1, the fourteenth of the line; UTF-16 tells by its first bytes."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(LINES.encode("latin-1"))
    first, *others = found(file)
    assert (
        first == f"{file}, line 1, is not UTF-8 (byte 0xe9 at offset 13 of the line, 13 of the file): convert the file to UTF-8"
    )
    assert others == ROWS[1:]
    file.write_bytes(LINES.encode("utf-16"))
    with pytest.raises(
        ValueError, match=r"rows\.jsonl, line 1, is UTF-16 \(it begins with the bytes FF FE\), and text must be"
    ):
        found(file)


def test_half_of_a_character_is_named_before_it_meets_the_tokenizer(tmp_path: Path) -> None:
    """dat-02: a lone surrogate crashed the tokenizer."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n{"text": "\\ud800"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2, has \\ud800 in 'text', which is half of a surrogate pair"):
        reader().read(file, "data")


# ---------------------------------------------------------------------- dat-03


def test_a_line_ends_at_a_newline_and_nowhere_else(tmp_path: Path) -> None:
    """dat-03: U+2028, U+2029 and U+0085 stand inside strings; str.splitlines made five pieces of these two rows."""
    rows = [{"text": "a\u2028b\u2029c\x85d"}, {"text": "e"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert len(file.read_text(encoding="utf-8").splitlines()) == 5
    assert found(file) == rows
    made = reader().read(file, "data")
    texts = [BYTES.decode(made.rows[number]["input_ids"].tolist()) for number in range(len(made))]
    assert texts == [row["text"] + BYTES.eos_token for row in rows]


# ---------------------------------------------------------------------- dat-05


@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_nothing_are_counted_and_the_others_are_trained(packing: bool) -> None:
    """dat-05: a row of no token crashed the model after a tenth of the epoch. One character is one token here, and each row ends."""
    made = reader(on_bad_row="skip", packing=packing)
    made.read([{"text": ""}, {"text": "  "}, {"text": "x"}, {"text": "hello world"}], "data")
    reading = made.readings["data"]
    assert (reading.read, reading.kept, reading.bad) == (4, 2, 2)
    assert [row.origin.number for row in reading.first_bad] == [0, 1]
    # x and its end have one target, hello world and its end eleven.
    assert (reading.tokens, reading.learnt) == (2 + 12, 1 + 11)


def test_an_empty_completion_is_not_learnt() -> None:
    """dat-05."""
    with pytest.raises(ValueError, match="data, row 1, "):
        reader().read([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}], "data")


def test_a_file_of_nothing_ends_before_the_model_is_made(tmp_path: Path) -> None:
    """dat-05."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": ""}\n{"text": " "}\n')
    with pytest.raises(ValueError, match="none of 2 rows can be used"):
        reader(on_bad_row="skip").read(file, "data")
