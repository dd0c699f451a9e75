"""What mode=data shows: numbers by hand for a few rows, the view at two widths, and the command line."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from toys import BYTES

from memtrain.__main__ import main
from memtrain.data.rows import IGNORED
from memtrain.data.sets import padded
from memtrain.data.store import RaggedRows
from memtrain.data.summary import Bar, Summary, chosen_examples, learnt_spans, summary
from memtrain.rows_view import CLOSES, OPENS, examples_view, rows_view, speed_sentence

LENGTHS = np.array([8, 16, 2, 14, 4, 4], dtype=np.int64)


def stored(lengths: Any) -> RaggedRows:
    return RaggedRows.of({"input_ids": [70] * length, "labels": [70] * length} for length in lengths)


def found(lengths: Any = LENGTHS, **given: Any) -> Summary:
    settings: dict[str, Any] = {"sequence_length": 16, "micro_batch_size": 1, "global_batch_size": 2}
    rows = padded(stored(lengths), "data", pad_token_id=0, mask=False)
    return summary(np.asarray(lengths), 40, rows, **{**settings, **given})


def test_the_numbers_of_a_few_rows() -> None:
    seen = found()
    assert (seen.rows, seen.tokens, seen.learnt, seen.steps) == (6, 48, 40, 3)
    assert (seen.shortest, seen.median, seen.mean, seen.at_90, seen.at_99, seen.longest) == (2, 6.0, 8.0, 16, 16, 16)
    # 16; 14 + 2; 8 + 4 + 4.
    assert (seen.packs, seen.filled, seen.is_packed) == (3, 1.0, False)
    # Alone, rows are filled up to a multiple of 8: 8, 16, 8, 16, 8 and 8 for 48 tokens.
    assert seen.padding == {"by_step": 1 - 48 / 64, "grouped": 1 - 48 / 64}
    # By length: 16 and 14, 8 and 4, 4 and 2, each pair as long as the longer.
    assert found(micro_batch_size=2).padding["grouped"] == 1 - 48 / (32 + 16 + 16)
    assert found(global_batch_size=4, drop_last=True).steps == 1


def test_a_histogram_has_up_to_eleven_bars_of_a_round_width() -> None:
    assert found().histogram[:2] == (Bar(shortest=2, longest=3, rows=1), Bar(shortest=4, longest=5, rows=2))
    assert sum(bar.rows for bar in found().histogram) == 6
    long = found([3, 95, 100, 1003]).histogram
    assert [(bar.shortest, bar.longest, bar.rows) for bar in long if bar.rows] == [(3, 199, 3), (1000, 1003, 1)]
    assert found([5, 5]).histogram == (Bar(shortest=5, longest=5, rows=2),)


def test_the_first_row_one_of_median_length_and_the_longest_are_shown() -> None:
    assert list(chosen_examples(LENGTHS)) == [0, 5, 1]
    assert list(chosen_examples(np.array([7, 7]))) == [0]


def test_labels_that_are_not_those_of_tokens_mark_none() -> None:
    row = {"input_ids": torch.tensor([5, 6]), "labels": torch.tensor(1)}
    assert learnt_spans(row, shifted=False) == [([5, 6], False)]


def printed(view: Any, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(view)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@pytest.mark.parametrize("width", [80, 120])
def test_the_view_says_what_the_rows_are_like(width: int) -> None:
    text = printed(rows_view("data", found(), ["data: read", "more"], "Fast.", micro_batch_size=1), width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert words.startswith("data read more lengths 2 to 16 tokens, median 6, mean 8; 90 % have up to 16, 99 % up to 16")
    assert (
        "25.0 % of what is computed is padding, in micro-batches of 1 packing with packing 6 rows would stand in 3, 100.0 % filled"
        in words
    )
    assert words.endswith("epoch 3 steps. Fast.")
    packed = printed(rows_view("data", dataclasses.replace(found(), is_packed=True), [], "", micro_batch_size=1), width)
    assert "packing 6 rows stand in 3, 100.0 % filled epoch" in " ".join(packed.split())
    others = printed(rows_view("eval_data", found([5, 5]), [], "", micro_batch_size=None), width)
    assert others.split() == ["eval_data", "2", "rows,", "10", "tokens,", "40", "learnt.", "lengths", "5", "tokens", "each"]


def test_what_is_learnt_is_marked_without_colour_and_the_middle_of_a_long_row_is_left_out() -> None:
    ids = [*BYTES.encode("a\x1bb\n"), *BYTES.encode("z" * 2000)]
    row = {"input_ids": torch.tensor(ids), "labels": torch.tensor([IGNORED] * 4 + ids[4:])}
    text = printed(examples_view([(7, row)], BYTES)).replace("\n", "")
    assert text.startswith(f"What is learnt stands between {OPENS} and {CLOSES}.row 7: 2,004 tokensa\\x1bb{OPENS}zzz")
    assert "z … 1,107 characters …" in text
    assert text.endswith(f"z{CLOSES}")
    short = {"input_ids": torch.tensor(BYTES.encode("ab")), "labels": torch.tensor(2)}
    assert "row 0: 2 tokens, label 2\nab" in printed(examples_view([(0, short)], BYTES))
    written = {"input_ids": torch.tensor(BYTES.encode("ab")), "labels": torch.tensor([*BYTES.encode("c"), IGNORED, IGNORED])}
    assert f"row 0: 2 tokens, to be written: {OPENS}c{CLOSES}" in printed(examples_view([(0, written)], BYTES))


def test_of_text_the_first_token_is_learnt_by_nobody_and_letters_of_any_language_are_shown() -> None:
    ids = BYTES.encode("a\u3000\u200c\u202eb")
    row = {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)}
    assert f"a{OPENS}\u3000\u200c\\u202eb{CLOSES}" in printed(examples_view([(0, row)], BYTES))
    assert f"{OPENS}a\u3000" in printed(examples_view([(0, row)], BYTES, shifted=False))


def test_rows_that_are_grouped_by_length_are_said_to_be() -> None:
    text = " ".join(printed(rows_view("data", found(), [], "", micro_batch_size=1, grouped=True)).split())
    assert "25.0 % of what is computed is padding, with rows grouped by length, in micro-batches of 1" in text


def test_an_epoch_takes_its_steps() -> None:
    assert speed_sentence(1800, 2.0, "l4") == "About 1 h 00 min at the most on l4, as predicted."


# ---------------------------------------------------------------------- the command line


def run(folder: Path, *overrides: str) -> int:
    model = ["model.config.num_hidden_layers=1", "data.tokenizer.train_vocab_size=259", "data.sequence_length=32"]
    return main(["mode=data", f"run.dir={folder / 'out'}", "budget=1GiB", *model, *overrides])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat.jsonl", "".join(json.dumps({"prompt": "a" * n, "completion": "b" * 9}) + "\n" for n in range(1, 28))),
        ("table.csv", "text\n" + "".join(f"{'c' * n}\n" for n in range(1, 12))),
        ("book.txt", "All the world is a stage. " * 30),
    ],
)
def test_rows_of_a_file_are_shown_and_written(
    name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert run(tmp_path, f"data.path={tmp_path / name}") == 0
    out = capsys.readouterr().out
    assert "row 0: " in out
    assert "as predicted" in out
    written = json.loads((tmp_path / "out" / "data.json").read_text())
    assert set(written) == {"data", "eval_data"}
    rows = written["data"]["rows"]
    assert written["data"]["tokens"] == pytest.approx(written["data"]["mean"] * rows)
    if name == "book.txt":
        # 26 characters, 30 times, of which a tenth is held out; each text ends, and the first token of a row has nothing before it.
        assert written["data"]["tokens"] + written["eval_data"]["tokens"] == 26 * 30 + 2
        assert written["data"]["learnt"] == written["data"]["tokens"] - rows
    if name == "chat.jsonl":
        assert written["data"]["reading"]["cut"] >= 1
        assert "lost)" in out
    assert not (tmp_path / "out" / "plan.yaml").exists()


def test_rows_that_cannot_be_used_are_all_shown_and_end_in_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "good"}\n{"text": ""}\nbroken\n{"text": "good too"}\n')
    assert run(tmp_path, f"data.path={file}", "data.held_out=0") == 1
    shown = capsys.readouterr()
    assert "line 2" in shown.out
    assert "line 3" in shown.out
    assert shown.err == (
        "memtrain: 2 rows cannot be used, and training would stop for that: mend what is named, or set data.on_bad_row to skip.\n"
    )
    assert run(tmp_path / "again", f"data.path={file}", "data.held_out=0", "data.on_bad_row=skip") == 0


def test_where_no_plan_fits_the_rows_are_shown_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("All the world is a stage. " * 30)
    assert run(tmp_path, f"data.path={tmp_path / 'book.txt'}", "budget=1MiB") == 0
    assert "How long it takes is not known: " in " ".join(capsys.readouterr().out.split())


def test_rows_have_to_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "data=none") == 2
    assert capsys.readouterr().err.startswith(
        "memtrain: mode is data, and no rows are named: set data.path, or choose a data=NAME."
    )
