"""Records as examples of a causal model: what begins and ends them, what is learnt, what is cut, refused and counted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from chats import ASK_CHATML, CASES, CHATML_LOOP, TALK, byte_level, words
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.data.encode import Encoder, Reading
from memtrain.data.options import DataOptions
from memtrain.data.records import BadRow, Origin, Record, RowRefused
from memtrain.data.task import Task

Row = Mapping[str, Any]
CHATML = "{% for m in messages %}" + CHATML_LOOP + "{% endfor %}" + ASK_CHATML


def records(rows: Sequence[Row], source: str = "rows.jsonl") -> list[Record | BadRow]:
    return [Record(row, Origin(source, number)) for number, row in enumerate(rows, start=1)]


def read(
    tokenizer: Any,
    rows: Sequence[Row] | Sequence[Record | BadRow],
    *,
    length: int = 16,
    vocab_size: int | None = None,
    **options: Any,
) -> tuple[list[Any], Reading]:
    """The columns of all examples, and what was counted."""
    encoder = Encoder(tokenizer, Task.CAUSAL_LM, DataOptions(**options), sequence_length=length, vocab_size=vocab_size)
    reading = Reading("data", length)
    given = [row if isinstance(row, Record | BadRow) else Record(row, Origin("rows.jsonl", n)) for n, row in enumerate(rows, 1)]
    return list(encoder.encode_all(given, reading)), reading


def pairs(tokenizer: Any, rows: Sequence[Row], **more: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each example."""
    return [(columns["input_ids"], columns["labels"]) for columns in read(tokenizer, rows, **more)[0]]


def refused(tokenizer: Any, row: Row, *, length: int = 16, **options: Any) -> str:
    """Why a row is refused."""
    encoder = Encoder(tokenizer, Task.CAUSAL_LM, DataOptions(**options), sequence_length=length, vocab_size=12)
    with pytest.raises(RowRefused) as error:
        encoder.encode(Record(row, Origin("rows.jsonl", 1)))
    return str(error.value)


# In `words` a is 6, b is 7 and so on, <bos> 1, <eos> 2.


# tok-04, where padding is the end of sequence: nothing is masked by what a token is.
def test_each_text_ends_once_and_a_row_that_is_cut_without_its_end_is_counted() -> None:
    tokenizer = words()
    tokenizer.pad_token = tokenizer.eos_token
    columns, reading = read(tokenizer, [{"text": "a b"}, {"text": "a b c d"}, {"text": "a <eos>"}], length=4)
    assert [row["input_ids"] for row in columns] == [[6, 7, 2], [6, 7, 8, 9], [6, 2]]
    assert [row["labels"] for row in columns] == [[6, 7, 2], [6, 7, 8, 9], [6, 2]]
    assert (reading.truncated, reading.without_end, reading.tokens, reading.learnt) == (1, 1, 9, 6)
    assert "data: 1 row cut at 4 tokens (1 lost), 1 of them within what is learnt, so without its end." in reading.lines()


def test_what_the_tokenizer_sets_before_a_text_stands_there_once() -> None:
    rows = [{"text": "a"}, {"text": "<bos> a <eos>"}]
    assert pairs(words(begin=True), rows) == [([1, 6, 2], [1, 6, 2])] * 2
    # A tokenizer that sets the end by itself does not double it.
    assert pairs(words(begin=True, end=True), rows) == [([1, 6, 2], [1, 6, 2])] * 2
    assert pairs(words(), rows[:1]) == [([6, 2], [6, 2])]


def test_a_completion_is_made_tokens_of_apart_and_learnt_with_its_end() -> None:
    rows = [{"prompt": "a b", "completion": "c"}, {"prompt": "<bos> a", "completion": "b <eos>"}]
    assert pairs(words(begin=True), rows) == [
        ([1, 6, 7, 8, 2], [-100, -100, -100, 8, 2]),
        ([1, 6, 7, 2], [-100, -100, 7, 2]),
    ]
    assert pairs(words(), rows[:1], train_on="everything") == [([6, 7, 8, 2], [6, 7, 8, 2])]
    # A tokenizer that would join them: "d s" is one token where they stand together.
    tokenizer = byte_level()
    ((ids, labels),) = pairs(tokenizer, [{"prompt": "c d", "completion": " said"}], length=99)
    apart = [tokenizer.encode(text, add_special_tokens=False) for text in ("c d", " said")]
    assert ids == apart[0] + apart[1] + [tokenizer.eos_token_id]
    assert labels == [-100] * len(apart[0]) + ids[len(apart[0]) :]


def test_conversations_are_written_by_the_template_and_answers_are_learnt() -> None:
    tokenizer = byte_level("<|im_start|>", "<|im_end|>")
    tokenizer.chat_template = CHATML
    turns = [{"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"]} for turn in TALK]
    ((ids, labels),) = pairs(tokenizer, [{"messages": TALK}], length=99)
    # The newline behind the last answer teaches nothing.
    assert [*ids, *tokenizer.encode("\n")] == tokenizer.apply_chat_template(TALK)["input_ids"]
    assert tokenizer.decode([label for label in labels if label != -100]) == "c d<|im_end|>f<|im_end|>"
    assert pairs(tokenizer, [{"conversations": turns}], length=99) == [(ids, labels)]
    # Of a prompt no answer is learnt.
    ((again, labels),) = pairs(tokenizer, [{"prompt": TALK[:3], "completion": TALK[3:]}], length=99)
    assert again == ids
    assert tokenizer.decode([label for label in labels if label != -100]) == "f<|im_end|>"
    whole = tokenizer.apply_chat_template(TALK)["input_ids"]
    assert pairs(tokenizer, [{"messages": TALK}], length=99, train_on="everything") == [(whole, whole)]
    # chat-03: a row that is cut has what is left of its answers.
    columns, reading = read(tokenizer, [{"messages": TALK}], length=ids.index(tokenizer.convert_tokens_to_ids("c")) + 1)
    assert tokenizer.decode([label for label in columns[0]["labels"] if label != -100]) == "c"
    assert (reading.truncated, reading.without_end) == (1, 1)
    # One that is cut in a question has the whole answers before it.
    columns, reading = read(tokenizer, [{"messages": TALK}], length=ids.index(tokenizer.convert_tokens_to_ids("f")) - 12)
    assert tokenizer.decode([label for label in columns[0]["labels"] if label != -100]) == "c d<|im_end|>"
    assert (reading.truncated, reading.without_end) == (1, 0)


def test_alpaca_is_written_by_the_template_where_there_is_one() -> None:
    row = {"instruction": "a", "input": "", "output": "c d"}
    tokenizer = byte_level("<|im_start|>", "<|im_end|>")
    tokenizer.chat_template = None
    columns, reading = read(tokenizer, [row], length=999)
    assert tokenizer.decode(columns[0]["input_ids"]).endswith("### Response:c d<|eos|>")
    assert reading.layouts() == [
        "rows.jsonl holds Alpaca instructions (columns instruction, input, output): written by the Alpaca prompt, outputs are learnt."
    ]
    columns, reading = read(tokenizer, [row], length=999, chat_template=CASES["ChatML"].template)
    assert tokenizer.decode(columns[0]["input_ids"]) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nc d<|im_end|>"
    assert "written by the chat template" in reading.layouts()[0]
    with pytest.raises(ValueError, match="the tokenizer has no chat template, and conversations are written through one"):
        read(byte_level_without_template(), [{"conversations": TALK}])


def byte_level_without_template() -> Any:
    tokenizer = byte_level()
    tokenizer.chat_template = None
    return tokenizer


def test_tokens_are_taken_as_they_are_and_learnt_as_labels_and_masks_say() -> None:
    rows: list[Row] = [
        {"input_ids": [5, 6, 7]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 8]},
        {"input_ids": [0, 5, 6, 7], "attention_mask": [0, 1, 1, 1], "labels": [-100, -100, 6, 7]},
        {"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]},
        {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]},
    ]
    assert pairs(words(), rows, vocab_size=9) == [
        ([5, 6, 7], [5, 6, 7]),
        ([5, 6, 7], [-100, 6, 8]),
        ([5, 6, 7], [-100, 6, 7]),
        ([5, 6, 7], [-100, -100, 7]),
        ([5, 6, 7, 8], [-100, 6, -100, 8]),
    ]
    # Without a tokenizer as well, which only text needs.
    assert pairs(None, rows[:1]) == [([5, 6, 7], [5, 6, 7])]
    with pytest.raises(ValueError, match=r"^rows.jsonl is text, and there is no tokenizer to read it with: give tokenizer\.$"):
        read(None, [{"text": "a"}])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "<bos>"}, "has a text that gives no token but those of its ends, so only the end would be learnt"),
        ({"text": "<eos>"}, "has a text that gives no token but those of its ends, so only the end would be learnt"),
        (
            {"prompt": "a", "completion": "<eos>"},
            "has a completion that gives no token but those of its ends, so only the end would be learnt",
        ),
        ({"input_ids": [5]}, "has 1 token, and there must be one to predict after it"),
        ({"input_ids": [5, 12]}, "has 12 at place 1 of 'input_ids', and tokens of the vocabulary are 0 to 11"),
        ({"input_ids": [5, -100]}, "has -100 at place 1 of 'input_ids', and tokens of the vocabulary are 0 to 11"),
        (
            {"input_ids": [5, 6], "labels": [-100, 12]},
            "has 12 at place 1 of 'labels', and tokens of the vocabulary are 0 to 11, or -100 for none",
        ),
        ({"input_ids": [5, 6], "labels": [5]}, "has 1 labels and 2 tokens, and each token needs one"),
        ({"input_ids": [5, 6], "labels": 5}, "has 5 for its labels and 2 tokens, and each token needs one"),
        # The first label is no target, since a causal model shifts them.
        ({"input_ids": [5, 6], "labels": [5, -100]}, "has 2 tokens of which none is learnt"),
        ({"input_ids": [5, 6], "completion_mask": [0, 0]}, "has 2 tokens of which none is learnt"),
    ],
)
def test_a_row_from_which_nothing_would_be_learnt_is_refused(row: Row, reason: str) -> None:
    assert refused(words(begin=True), row) == reason


def test_what_no_conversation_can_be_is_a_bad_row_too() -> None:
    reason = refused(byte_level_cached(), {"messages": TALK[:1]})
    assert reason == "has no message of the assistant in its conversation, so there is nothing to learn"


def test_a_row_whose_answer_is_cut_off_is_refused() -> None:
    row = {"prompt": "a b c d e", "completion": "f"}
    assert refused(words(begin=True), row, length=5) == "has nothing that is learnt left within 5 tokens (the prompt has 6)"
    assert pairs(words(begin=True), [row], length=7) == [([1, 6, 7, 8, 9, 10, 11], [-100] * 6 + [11])]


# dat-05
def test_empty_rows_are_refused_and_one_token_has_the_end_for_a_target() -> None:
    rows = [{"text": text} for text in ("", "  ", "a", "a b")]
    columns, reading = read(words(), rows, on_bad_row="skip")
    assert [row["input_ids"] for row in columns] == [[6, 2], [6, 7, 2]]
    assert (reading.read, reading.kept, reading.bad) == (4, 2, 2)
    with pytest.raises(ValueError, match=r"^data: none of 2 rows can be used:\n") as error:
        read(words(), rows[:2], on_bad_row="skip")
    assert str(error.value).endswith("and a text that is not empty is needed\nmend them.")


# pack-02
def test_long_text_is_cut_split_or_left_out_and_counted() -> None:
    rows = [{"input_ids": list(range(20))}, {"input_ids": [5, 6]}]
    assert pairs(words(), rows, length=8) == [(list(range(8)), list(range(8))), ([5, 6], [5, 6])]
    columns, reading = read(words(), rows, length=8, long_rows="split")
    assert [row["input_ids"] for row in columns] == [[*range(8)], [*range(8, 16)], [*range(16, 20)], [5, 6]]
    assert (reading.read, reading.kept, reading.examples, reading.split, reading.tokens, reading.learnt) == (2, 2, 4, 1, 22, 18)
    assert reading.lines()[1:] == [
        "data: 2 rows (4 after splitting), 22 tokens, 18 learnt.",
        "data: 1 row of more than 8 tokens cut into several.",
    ]
    columns, reading = read(words(), rows, length=8, long_rows="leave_out")
    assert [row["input_ids"] for row in columns] == [[5, 6]]
    assert "data: 1 row of more than 8 tokens left out." in reading.lines()
    with pytest.raises(
        ValueError, match=r"^data: each of 1 row has more than 8 tokens and long_rows is leave_out, so none is left: "
    ):
        read(words(), rows[:1], length=8, long_rows="leave_out")


@given(count=st.integers(2, 60), length=st.integers(2, 9))
def test_a_text_that_is_split_loses_no_token_and_each_piece_has_a_target(count: int, length: int) -> None:
    columns, reading = read(None, [{"input_ids": list(range(count))}], length=length, long_rows="split")
    pieces = [row["input_ids"] for row in columns]
    assert all(2 <= len(piece) <= length for piece in pieces)
    # With pieces of two tokens the last may begin with one that the piece before ends with.
    joined = [token for piece in pieces for token in piece]
    assert sorted({*joined}) == list(range(count))
    assert len(joined) == count + (length == 2 and count % 2)
    assert reading.learnt == len(joined) - len(pieces)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="long_rows is split, and rows with layout completion would lose the questions"):
        read(words(), [{"prompt": "a", "completion": "b"}], long_rows="split")
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    assert refused(words(), row, length=2, long_rows="split") == (
        "has 3 tokens of which some are not learnt, and long_rows is split, which cuts text alone: set long_rows to truncate or leave_out"
    )


def test_what_does_not_go_with_the_rows_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^train_on is completions, and rows of text have none: set train_on to everything, or to auto\.$"
    ):
        read(words(), [{"text": "a"}], train_on="completions")
    endless = words()
    endless.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no end-of-sequence token, and one must follow each text, so that"):
        read(endless, [{"text": "a"}])
    with pytest.raises(
        ValueError, match="the tokenizer has no end-of-sequence token, and one must follow each completion: set"
    ):
        read(endless, [{"prompt": "a", "completion": "b"}], chat_template=CHATML)


# ------------------------------------------------------------------------------------------------ reading


def test_bad_rows_are_told_together_with_their_lines() -> None:
    rows = [
        *records([{"text": "a"}]),
        BadRow(Origin("rows.jsonl", 2), "is no valid JSON"),
        *records([{"text": ""}] * 11, "more.jsonl"),
    ]
    lines = "".join(
        f"  more.jsonl, line {number}, has '' for 'text', and a text that is not empty is needed\n" for number in range(1, 10)
    )
    with pytest.raises(ValueError, match=r"^data: 12 of 13 rows cannot be used:\n") as error:
        read(words(), rows)
    assert str(error.value) == (
        f"data: 12 of 13 rows cannot be used:\n  rows.jsonl, line 2, is no valid JSON\n{lines}  and 2 more\n"
        "mend them, or leave them out with on_bad_row=skip."
    )
    columns, reading = read(words(), rows, on_bad_row="skip")
    assert [row["input_ids"] for row in columns] == [[6, 2]]
    assert reading.lines() == [
        "rows.jsonl and 1 more hold text (column text): every token is learnt.",
        "data: 1 row, 2 tokens, 1 learnt.",
        "data: 12 rows of 13 cannot be used and left out:",
        "  rows.jsonl, line 2, is no valid JSON",
        *lines.rstrip("\n").split("\n"),
        "  and 2 more",
    ]


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^there is no row in data, and training needs 1 or more: give rows\.$"):
        read(words(), [])
    only_bad = [BadRow(Origin("rows.jsonl", 1), "is empty")]
    with pytest.raises(ValueError, match=r"^data: none of 1 row can be used:\n  rows.jsonl, line 1, is empty\nmend them\.$"):
        read(words(), only_bad)


def test_each_source_has_a_layout_of_its_own() -> None:
    rows = [*records([{"text": "a"}], "a.jsonl"), *records([{"prompt": "a", "completion": "b", "id": 1}], "b.jsonl")]
    columns, reading = read(words(), rows)
    assert [row["labels"] for row in columns] == [[6, 2], [-100, 7, 2]]
    assert reading.layouts() == [
        "a.jsonl holds text (column text): every token is learnt.",
        "b.jsonl holds prompts and completions (columns prompt, completion): completions are learnt; column id is not used.",
    ]


def test_no_more_rows_are_read_than_are_asked_for() -> None:
    rows = [{"text": "a"}, {"text": "a b"}, {"text": ""}]
    assert len(read(words(), rows, limit=2)[0]) == 2
    encoder = Encoder(words(), Task.CAUSAL_LM, DataOptions(), sequence_length=8)

    def endless() -> Iterator[Record]:
        number = 0
        while True:
            yield Record({"text": "a"}, Origin("stream", number, "row"))
            number += 1

    reading = Reading("data", 8)
    assert len(list(encoder.encode_all(endless(), reading, enough=300))) == reading.kept == 300


def test_a_row_becomes_the_same_alone_and_among_others() -> None:
    tokenizer = byte_level()
    rows = [{"prompt": "c d" * number, "completion": " said so."} for number in range(1, 600)]
    encoder = Encoder(tokenizer, Task.CAUSAL_LM, DataOptions(), sequence_length=4000)
    alone = [encoder.encode(record)[0].columns for record in records(rows) if isinstance(record, Record)]
    assert read(tokenizer, rows, length=4000)[0] == alone


# What JSON may hold, where a layout is meant and where it is not.
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-200, 300) | st.floats() | st.text(max_size=6) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(("role", "content", "from", "value", "tool_calls", "weight")), inner, max_size=3)
    ),
    max_leaves=6,
)
SAID = st.sampled_from(("user", "assistant", "human", "gpt", "system", "function_call")) | ANY
TURN = st.fixed_dictionaries({"role": SAID, "content": st.text(max_size=4) | ANY}) | st.fixed_dictionaries(
    {"from": SAID, "value": ANY}
)
VALUES = st.text(max_size=8) | st.lists(TURN, max_size=4) | st.lists(st.integers(-101, 300), max_size=6) | ANY
SETS = (
    {"text": "a"},
    {"prompt": "a", "completion": "b"},
    {"messages": TALK, "tools": []},
    {"conversations": TALK, "system": "s"},
    {"instruction": "a", "input": "", "output": "b", "history": []},
    {"input_ids": [5, 6], "labels": [5, 6], "attention_mask": [1, 1]},
)


@given(st.data())
@settings(max_examples=100)
def test_any_row_is_trained_on_or_refused_with_its_line(data: st.DataObject) -> None:
    good = data.draw(st.sampled_from(SETS))
    tokenizer = byte_level_cached()
    rows = [{name: data.draw(VALUES) if data.draw(st.booleans()) else value for name, value in good.items()} for _ in range(3)]
    columns, reading = read(tokenizer, [good, *rows], length=80, vocab_size=300, on_bad_row="skip", limit=9)
    assert reading.read == 4
    assert reading.kept + reading.bad == 4
    assert reading.kept == reading.examples == len(columns) >= 1
    assert [row.origin.number for row in reading.first_bad] == sorted({row.origin.number for row in reading.first_bad})
    for row in columns:
        assert len(row["input_ids"]) == len(row["labels"]) <= 80
        assert any(label != -100 for label in row["labels"][1:])


CACHED: list[Any] = []


def byte_level_cached() -> Any:
    if not CACHED:
        CACHED.append(byte_level("<|im_start|>", "<|im_end|>"))
        CACHED[0].chat_template = CHATML
    return CACHED[0]


def test_texts_keep_every_character() -> None:
    tokenizer = byte_level()
    text = "a\0\u2028b\x85\r\n" + "\U0001f600" * 3
    ((ids, _),) = pairs(tokenizer, [{"text": text}], length=99)
    assert tokenizer.decode(ids[:-1]) == text


def test_what_is_nested_too_deeply_is_refused() -> None:
    content: Any = "a"
    for _ in range(20_000):
        content = [content]
    reason = refused(byte_level_cached(), {"messages": [{"role": "user", "content": content}]})
    assert re.match("has values within values, too many to follow", reason)
