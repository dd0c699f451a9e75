"""Field reports about chats: how many begin tokens a row has, and which of its tokens are learnt."""

from __future__ import annotations

from typing import Any

import pytest
from chats import TALK, answer, rendered, user, words

from memtrain.data.encode import Encoder, Reading
from memtrain.data.options import DataOptions
from memtrain.data.records import Origin, Record
from memtrain.data.rows import IGNORED
from memtrain.data.task import Task

PLAIN = "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' <end> ' }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
MARKED = (
    "{% for m in messages %}{{ '<' + m.role + '> ' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + ' <end> ' }}{% endgeneration %}{% else %}{{ m.content + ' <end> ' }}{% endif %}{% endfor %}"
)
BEGIN, END = 1, 2


def encoded(row: dict[str, Any], tokenizer: Any, template: str, length: int = 64) -> tuple[list[int], list[int], Reading]:
    reading = Reading("data", length)
    encoder = Encoder(tokenizer, Task.CAUSAL_LM, DataOptions(chat_template=template), sequence_length=length)
    ((columns),) = encoder.encode_all([Record(row, Origin("data", 0, "row"))], reading)
    return columns["input_ids"], columns["labels"], reading  # type: ignore[return-value]


def learnt(tokenizer: Any, labels: list[int]) -> str:
    return str(tokenizer.decode([label for label in labels if label != IGNORED]))


# ---------------------------------------------------------------------- chat-01


@pytest.mark.parametrize("end", [False, True], ids=["", "sets an end"])
@pytest.mark.parametrize("begin", [False, True], ids=["", "sets a beginning"])
@pytest.mark.parametrize("writes", [False, True], ids=["", "template writes a beginning"])
def test_a_row_begins_once_whoever_writes_its_beginning(writes: bool, begin: bool, end: bool) -> None:
    """chat-01: the template's beginning and the tokenizer's made two, on every path but the one that was tried."""
    tokenizer = words(begin=begin, end=end, special=("<bos>", "<eos>", "<end>", "<user>", "<assistant>"))
    template = ("{{ '<bos> ' }}" if writes else "") + PLAIN + ASKS
    ids, _, _ = encoded({"messages": TALK[:2]}, tokenizer, template)
    assert ids.count(BEGIN) == int(writes or begin)
    assert ids[: ids.count(BEGIN)] == [BEGIN] * ids.count(BEGIN)
    if writes or not begin:
        # What a template writes behind the last answer is not learnt, and so not kept.
        whole = rendered(tokenizer, TALK[:2], template)
        assert ids == whole[: len(ids)]
    for row in ({"text": "a b"}, {"prompt": "a", "completion": "b"}):
        ids, labels, _ = encoded(row, tokenizer, template)
        assert ids.count(BEGIN) == int(begin)
        assert (ids.count(END), ids[-1], labels[-1]) == (1, END, END)


# ---------------------------------------------------------------------- chat-03


@pytest.mark.parametrize("template", [MARKED, PLAIN + ASKS], ids=["with markers", "without markers"])
def test_of_a_chat_the_answers_are_learnt_and_no_question(template: str) -> None:
    """chat-03: without markers the mask was all zeros, or ran to the end of the row; nothing failed."""
    tokenizer = words(special=("<bos>", "<eos>", "<end>", "<user>", "<assistant>"))
    _, labels, _ = encoded({"messages": TALK}, tokenizer, template)
    assert learnt(tokenizer, labels) == "c d <end> f <end>"
    # An answer that comes first, whose first token is the first that something stands before.
    _, labels, _ = encoded({"messages": [answer("c d"), user("e"), answer("f")]}, tokenizer, template)
    assert learnt(tokenizer, labels) == "c d <end> f <end>"


@pytest.mark.parametrize("template", [MARKED, PLAIN + ASKS], ids=["with markers", "without markers"])
def test_an_answer_that_is_cut_is_learnt_as_far_as_it_goes_and_counted(template: str) -> None:
    """chat-03: <user> a b <end> <assistant> c is what six tokens hold."""
    tokenizer = words(special=("<bos>", "<eos>", "<end>", "<user>", "<assistant>"))
    _, labels, reading = encoded({"messages": TALK}, tokenizer, template, length=6)
    assert learnt(tokenizer, labels) == "c"
    assert (reading.truncated, reading.without_end) == (1, 1)


def test_a_row_of_which_nothing_is_left_to_learn_is_refused() -> None:
    """chat-03: and not trained on as a row of zeros."""
    tokenizer = words(special=("<bos>", "<eos>", "<end>", "<user>", "<assistant>"))
    with pytest.raises(ValueError, match="data, row 0, "):
        encoded({"messages": TALK}, tokenizer, PLAIN + ASKS, length=5)
