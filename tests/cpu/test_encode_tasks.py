"""Records as examples of models that are no causal ones: masked, sequence to sequence, classifiers, and any other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from chats import TALK, answer, user
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from memtrain.data.encode import Encoder, Reading
from memtrain.data.options import DataOptions
from memtrain.data.records import Origin, Record, RowRefused
from memtrain.data.store import RaggedRows
from memtrain.data.task import Task
from memtrain.data.tokenizer import train_tokenizer

Row = Mapping[str, Any]
NAMES = {"NEG": 0, "POS": 1}


def tokenizer(single: str, pair: str, *, types: bool = False) -> Any:
    """A token per word: a is 6, b is 7 and so on, [CLS] 2, [SEP] 3, [MASK] 4, </s> 5; what is not known gives none."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>", *"abcdefgh"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [(word, vocabulary.index(word)) for word in ("[CLS]", "[SEP]", "</s>")]
    made.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    names = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="</s>",
        model_input_names=names,
    )


BERT = tokenizer("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", types=True)
T5 = tokenizer("$A </s>", "$A </s> $B </s>")


def read(reader: Any, task: Task, rows: Sequence[Row], *, length: int = 5, **more: Any) -> tuple[list[Any], Reading]:
    """The columns of all examples, and what was counted."""
    model = {name: more.pop(name) for name in ("vocab_size", "label2id", "num_labels") if name in more}
    encoder = Encoder(reader, task, DataOptions(**more), sequence_length=length, **model)
    reading = Reading("data", length)
    records = (Record(row, Origin("rows.jsonl", number)) for number, row in enumerate(rows, start=1))
    return list(encoder.encode_all(records, reading)), reading


def refused(reader: Any, task: Task, row: Row, *, length: int = 5, **model: Any) -> str:
    """Why a row is refused."""
    encoder = Encoder(reader, task, DataOptions(), sequence_length=length, **model)
    with pytest.raises(RowRefused) as error:
        encoder.encode(Record(row, Origin("rows.jsonl", 1)))
    return str(error.value)


# ------------------------------------------------------------------------------------------------ masked


def test_masked_text_stands_within_the_special_tokens_also_where_it_is_cut() -> None:
    columns, reading = read(BERT, Task.MASKED_LM, [{"text": "a b c d"}, {"text": "[CLS] a [SEP]"}])
    assert columns == [
        {"input_ids": [2, 6, 7, 8, 3], "labels": [2, 6, 7, 8, 3]},
        {"input_ids": [2, 6, 3], "labels": [2, 6, 3]},
    ]
    # Learnt are at most the tokens that are no special ones.
    assert (reading.truncated, reading.without_end, reading.learnt) == (1, 0, 4)
    columns, reading = read(BERT, Task.MASKED_LM, [{"text": "a b c d"}], long_rows="split")
    assert [row["input_ids"] for row in columns] == [[2, 6, 7, 8, 3], [2, 9, 3]]
    assert (reading.truncated, reading.split) == (0, 1)
    columns, reading = read(BERT, Task.MASKED_LM, [{"text": "a b c d"}, {"text": "a"}], long_rows="leave_out")
    assert ([row["input_ids"] for row in columns], reading.left_out) == ([[2, 6, 3]], 1)


def test_masked_tokens_are_taken_with_their_special_ones() -> None:
    row = {"input_ids": [2, 6, 7, 8, 9, 3, 0], "attention_mask": [1] * 6 + [0], "token_type_ids": [0] * 7}
    columns, _ = read(BERT, Task.MASKED_LM, [row, {**row, "labels": row["input_ids"]}])
    assert columns == [{"input_ids": [2, 6, 7, 8, 3], "token_type_ids": [0] * 5, "labels": [2, 6, 7, 8, 3]}] * 2
    assert (
        read(BERT, Task.MASKED_LM, [row, {"input_ids": [2, 6, 3], "token_type_ids": [0] * 3}], long_rows="leave_out")[
            1
        ].left_out
        == 1
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "[MASK]"}, "has no token that could be masked, only special ones"),
        ({"input_ids": [2, 3]}, "has a piece of 2 tokens of which none could be masked, all of them special ones"),
        ({"input_ids": [2, 14]}, "has 14 at place 1 of 'input_ids', and tokens of the vocabulary are 0 to 13"),
        (
            {"input_ids": [2, 4, 3], "labels": [-100, 6, -100]},
            "has labels of its own, and tokens are masked anew in each step: leave them out",
        ),
    ],
)
def test_a_row_without_a_token_to_be_told_is_refused(row: Row, reason: str) -> None:
    assert refused(BERT, Task.MASKED_LM, row, vocab_size=14) == reason


def test_what_cannot_hold_a_masked_row_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^sequence_length is 2, and the tokenizer sets 2 tokens around each text: raise it to 3 or more\.$"
    ):
        read(BERT, Task.MASKED_LM, [{"text": "a"}], length=2)
    with pytest.raises(ValueError, match="long_rows is split, and rows of tokens have their special tokens already"):
        read(BERT, Task.MASKED_LM, [{"input_ids": [2, 6, 3]}], long_rows="split")


# ------------------------------------------------------------------------------------------------ sequence to sequence


# mod-01: the labels are the target's tokens and its end, neither shifted nor padded.
def test_a_source_and_its_target_have_the_tokenizers_own_ends_once() -> None:
    rows: list[Row] = [{"prompt": "a b", "completion": "c"}, {"prompt": "a </s>", "completion": "b </s>"}]
    columns, reading = read(T5, Task.SEQ2SEQ_LM, rows)
    assert columns == [{"input_ids": [6, 7, 5], "labels": [8, 5]}, {"input_ids": [6, 5], "labels": [7, 5]}]
    assert reading.learnt == 4
    # A tokenizer that sets no end by itself gets one on the target.
    assert read(tokenizer("$A", "$A $B"), Task.SEQ2SEQ_LM, rows[:1])[0] == [{"input_ids": [6, 7], "labels": [8, 5]}]


def test_a_source_that_is_cut_keeps_its_end_and_a_target_loses_it() -> None:
    rows = [{"prompt": "a b c d e", "completion": "a"}, {"prompt": "a", "completion": "a b c d e"}]
    columns, reading = read(T5, Task.SEQ2SEQ_LM, rows)
    assert columns == [{"input_ids": [6, 7, 8, 9, 5], "labels": [6, 5]}, {"input_ids": [6, 5], "labels": [6, 7, 8, 9, 10]}]
    assert (reading.truncated, reading.without_end) == (2, 1)
    with pytest.raises(ValueError, match="each of 2 rows has more than 5 tokens"):
        read(T5, Task.SEQ2SEQ_LM, rows, long_rows="leave_out")
    with pytest.raises(ValueError, match="long_rows is split, and a source and its target cannot be cut alike"):
        read(T5, Task.SEQ2SEQ_LM, rows, long_rows="split")


def test_the_last_answer_of_a_conversation_is_the_target() -> None:
    columns, reading = read(T5, Task.SEQ2SEQ_LM, [{"messages": [user("a b"), answer("c")]}])
    assert columns == [{"input_ids": [6, 7, 5], "labels": [8, 5]}]
    assert reading.layouts() == ["rows.jsonl holds messages (column messages): the last assistant turn is learnt."]
    template = "{% for m in messages %}{{ m.content + ' </s> ' }}{% endfor %}"
    columns, _ = read(T5, Task.SEQ2SEQ_LM, [{"messages": TALK}], length=9, chat_template=template)
    assert columns == [{"input_ids": [6, 7, 5, 8, 9, 5, 10, 5], "labels": [11, 5]}]


def test_source_and_labels_that_are_tokens_have_lengths_of_their_own() -> None:
    row = {"input_ids": [6, 7, 8, 5, 0], "attention_mask": [1, 1, 1, 1, 0], "labels": [6, 5, -100, -100, -100]}
    assert read(T5, Task.SEQ2SEQ_LM, [row])[0] == [{"input_ids": [6, 7, 8, 5], "labels": [6, 5]}]
    assert read(None, Task.SEQ2SEQ_LM, [row])[0] == [{"input_ids": [6, 7, 8, 5], "labels": [6, 5]}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"messages": TALK[:1]},
            "does not end with a text of the assistant after something that was asked, so there is no target",
        ),
        ({"messages": TALK}, "is a conversation of more than one question and its answer, which needs a chat_template"),
        (
            {"messages": [user("a"), answer(" ")]},
            "ends with a message of the assistant that is empty, so there is nothing to learn",
        ),
        ({"prompt": "</s>", "completion": "a"}, "has a prompt that gives no token but those of its ends"),
        (
            {"prompt": "a", "completion": "</s>"},
            "has a completion that gives no token but those of its ends, so only the end would be learnt",
        ),
        ({"input_ids": [6]}, "has no list of labels, and the tokens that are to be written are needed"),
        ({"input_ids": [6], "labels": [-100]}, "has no list of labels, and the tokens that are to be written are needed"),
        ({"input_ids": [6], "labels": [-100] * 5 + [6]}, "has no label that is learnt within 5 tokens"),
    ],
)
def test_a_source_without_a_target_is_refused(row: Row, reason: str) -> None:
    assert refused(T5, Task.SEQ2SEQ_LM, row) == reason


def test_a_target_needs_an_end() -> None:
    endless = tokenizer("$A", "$A $B")
    endless.eos_token = None
    with pytest.raises(
        ValueError, match=r"^the tokenizer has no end-of-sequence token, and one must follow each target: set its eos_token\.$"
    ):
        read(endless, Task.SEQ2SEQ_LM, [{"prompt": "a", "completion": "b"}])


# ------------------------------------------------------------------------------------------------ one label


def test_a_text_is_learnt_with_its_label_by_number_or_name() -> None:
    rows = [{"text": "a b c d", "label": 1}, *({"text": "a", "label": label} for label in ("POS", "1", True, 1.0, "NEG"))]
    columns, reading = read(BERT, Task.SEQUENCE_CLASSIFICATION, rows, label2id=NAMES)
    assert columns == [
        {"input_ids": [2, 6, 7, 8, 3], "labels": 1},
        *[{"input_ids": [2, 6, 3], "labels": 1}] * 4,
        {"input_ids": [2, 6, 3], "labels": 0},
    ]
    assert (reading.truncated, reading.learnt) == (1, 6)
    assert reading.layouts() == ["rows.jsonl holds texts and labels (columns text, label): labels are learnt."]


def test_a_number_that_is_to_be_told_is_a_float() -> None:
    rows = [{"text": "a", "label": 1}, {"text": "a", "label": "2.5"}]
    columns, _ = read(BERT, Task.SEQUENCE_CLASSIFICATION, rows, num_labels=1)
    assert [row["labels"] for row in columns] == [1.0, 2.5]
    assert all(isinstance(row["labels"], float) for row in columns)


def test_two_texts_are_joined_as_the_tokenizer_does_the_longer_one_cut() -> None:
    rows = [{"premise": "a b c d", "hypothesis": "e", "label": 0}, {"premise": "a", "hypothesis": "b", "label": 1}]
    columns, reading = read(BERT, Task.SEQUENCE_CLASSIFICATION, rows, length=6, num_labels=2)
    assert columns == [
        {"input_ids": [2, 6, 7, 3, 10, 3], "token_type_ids": [0, 0, 0, 0, 1, 1], "labels": 0},
        {"input_ids": [2, 6, 3, 7, 3], "token_type_ids": [0, 0, 0, 1, 1], "labels": 1},
    ]
    assert reading.truncated == 1
    with pytest.raises(
        ValueError, match=r"^sequence_length is 4, and the tokenizer sets 3 tokens around two texts: raise it to 5 or more\.$"
    ):
        read(BERT, Task.SEQUENCE_CLASSIFICATION, rows, length=4)
    assert read(BERT, Task.SEQUENCE_CLASSIFICATION, rows, length=6, long_rows="leave_out")[1].left_out == 1


def test_tokens_may_come_with_a_label() -> None:
    row = {"input_ids": [2, 6, 7, 8, 9, 3], "token_type_ids": [0] * 6, "label": 1}
    columns, _ = read(BERT, Task.SEQUENCE_CLASSIFICATION, [row], num_labels=2)
    assert columns == [{"input_ids": [2, 6, 7, 8, 3], "token_type_ids": [0] * 5, "labels": 1}]
    assert refused(BERT, Task.SEQUENCE_CLASSIFICATION, {"input_ids": [2, 6, 3]}) == "has no labels, and a label is needed"


@pytest.mark.parametrize(
    ("label", "model", "reason"),
    [
        (2, {"num_labels": 2}, "has 2 for its label, and the model's are 0 to 1"),
        (-1, {"num_labels": 2}, "has -1 for its label, and the model's are 0 to 1"),
        (0.5, {"num_labels": 2}, "has 0.5 for its label, and the model's are 0 to 1"),
        (float("nan"), {"num_labels": 2}, "has nan for its label, and the model's are 0 to 1"),
        (float("inf"), {"num_labels": 1}, "has inf for its label, and a finite number is needed"),
        (10**400, {"num_labels": 1}, f"has 1{'0' * 59}... for its label, and a finite number is needed"),
        (
            "good",
            {"label2id": NAMES},
            "has 'good' for its label, and the model's are named NEG, POS: give numbers, or name them in the model's label2id (model.settings.label2id)",
        ),
        (
            "good",
            {},
            "has 'good' for its label, and the model's have no names: give numbers, or name them in the model's label2id (model.settings.label2id)",
        ),
        (None, {}, "has null for 'label', and a label is needed"),
    ],
)
def test_a_label_that_the_model_has_not_is_refused(label: Any, model: dict[str, Any], reason: str) -> None:
    assert refused(BERT, Task.SEQUENCE_CLASSIFICATION, {"text": "a", "label": label}, **model) == reason


# ------------------------------------------------------------------------------------------------ a tag for each word


def test_the_first_token_of_a_word_has_its_tag() -> None:
    row = {"tokens": ["a", "b c", "d"], "ner_tags": ["B", 0, -100], "pos_tags": [1, 1, 1]}
    columns, reading = read(BERT, Task.TOKEN_CLASSIFICATION, [row], length=6, label2id={"O": 0, "B": 1})
    assert columns == [{"input_ids": [2, 6, 7, 8, 9, 3], "labels": [-100, 1, 0, -100, -100, -100]}]
    assert (reading.truncated, reading.learnt) == (0, 2)
    assert reading.layouts() == [
        "rows.jsonl holds words and tags (columns tokens, ner_tags): tags are learnt, each on the first token of its word; column "
        "pos_tags is not used."
    ]
    columns, reading = read(BERT, Task.TOKEN_CLASSIFICATION, [row], length=3, label2id={"O": 0, "B": 1})
    assert columns == [{"input_ids": [2, 6, 3], "labels": [-100, 1, -100]}]
    assert reading.truncated == 1


def test_tokens_may_come_with_tags() -> None:
    row = {"input_ids": [2, 6, 7, 3], "labels": [-100, 1, 0, -100], "token_type_ids": [0] * 4}
    assert read(BERT, Task.TOKEN_CLASSIFICATION, [row], length=3, num_labels=2)[0] == [
        {"input_ids": [2, 6, 7], "labels": [-100, 1, 0], "token_type_ids": [0] * 3}
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tokens": ["a", " "], "tags": [0, 1]}, "has ' ' as word 1, which gives no token to be tagged"),
        ({"tokens": ["a"], "tags": [2]}, "has 2 for its tag, and the model's are 0 to 1"),
        ({"tokens": ["a"], "tags": [-100]}, "has no tag that is learnt within 5 tokens"),
        ({"input_ids": [6]}, "has no labels, and a label for each token is needed"),
        ({"input_ids": [6], "labels": [1, 1]}, "has 2 labels and 1 tokens, and each token needs one"),
    ],
)
def test_words_without_tags_of_the_model_are_refused(row: Row, reason: str) -> None:
    assert refused(BERT, Task.TOKEN_CLASSIFICATION, row, num_labels=2) == reason


def test_a_tokenizer_that_takes_no_words_is_refused() -> None:
    row = {"tokens": ["a"], "tags": [1]}
    with pytest.raises(
        ValueError, match="the tokenizer is ByT5Tokenizer, a slow one, which does not tell of which word a token is: give"
    ):
        read(ByT5Tokenizer(), Task.TOKEN_CLASSIFICATION, [row])
    of_bytes = train_tokenizer(["a a a a"], 300)
    with pytest.raises(
        ValueError, match="the tokenizer reads words as if no space stood between them: make it with AutoTokenizer"
    ):
        read(of_bytes, Task.TOKEN_CLASSIFICATION, [row])
    of_bytes.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert len(read(of_bytes, Task.TOKEN_CLASSIFICATION, [row])[0]) == 1


# ------------------------------------------------------------------------------------------------ any other


def test_another_model_gets_the_tokens_that_are_given() -> None:
    assert read(None, Task.OTHER, [{"input_ids": [6, 7], "labels": [6, -100]}])[0] == [
        {"input_ids": [6, 7], "labels": [6, -100]}
    ]
    assert read(None, Task.OTHER, [{"input_ids": [6, 7], "labels": 0.5}])[0] == [{"input_ids": [6, 7], "labels": 0.5}]
    assert read(None, Task.OTHER, [{"input_ids": [6, 7], "token_type_ids": [0, 1]}], length=1)[0] == [
        {"input_ids": [6], "token_type_ids": [0]}
    ]
    assert (
        refused(None, Task.OTHER, {"input_ids": [6], "labels": "x"})
        == "has 'x' for its labels, and numbers of 32 bits are needed"
    )
    assert refused(None, Task.OTHER, {"input_ids": [6], "labels": 2**31}).endswith(
        "for its labels, and numbers of 32 bits are needed"
    )
    assert refused(None, Task.OTHER, {"input_ids": [6], "labels": [-100]}) == "has labels of which none is learnt"


def test_rows_that_would_not_stand_in_one_batch_are_refused_with_their_line() -> None:
    rows: list[Row] = [{"input_ids": [6], "labels": 1}, {"input_ids": [6], "labels": 0.5}, {"input_ids": [6]}]
    columns, reading = read(None, Task.OTHER, rows, on_bad_row="skip")
    assert columns == rows[:1]
    assert reading.lines()[-2:] == [
        "  rows.jsonl, line 2, makes a list of input_ids, a number of labels where the first row makes a list of input_ids, a whole "
        "number of labels, and rows must be alike",
        "  rows.jsonl, line 3, makes a list of input_ids where the first row makes a list of input_ids, a whole number of labels, and "
        "rows must be alike",
    ]


@pytest.mark.parametrize("task", [Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.OTHER])
def test_only_text_that_is_learnt_as_a_whole_can_be_split(task: Task) -> None:
    error = "long_rows is split, and only text that is learnt as a whole can be cut into rows: set long_rows to truncate or leave_out."
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        read(BERT, task, [{"input_ids": [6], "labels": [1]}], long_rows="split")


ANY = st.none() | st.booleans() | st.integers(-101, 20) | st.floats() | st.text("ab \0\ud800[", max_size=4)
VALUES = ANY | st.lists(ANY, max_size=4) | st.lists(st.integers(0, 13), max_size=7)
SETS: dict[Task, tuple[dict[str, Any], ...]] = {
    Task.MASKED_LM: ({"text": "a"}, {"input_ids": [6], "labels": [6]}),
    Task.SEQ2SEQ_LM: ({"prompt": "a", "completion": "b"}, {"input_ids": [6], "labels": [6], "attention_mask": [1]}),
    Task.SEQUENCE_CLASSIFICATION: ({"text": "a", "label": 1}, {"sentence1": "a", "sentence2": "b", "label": 1}),
    Task.TOKEN_CLASSIFICATION: ({"tokens": ["a"], "tags": [1]}, {"input_ids": [6], "labels": [1], "attention_mask": [1]}),
    Task.OTHER: ({"input_ids": [6], "labels": [6], "token_type_ids": [0]},),
}


@given(st.data())
@settings(max_examples=150)
def test_any_row_of_any_task_is_trained_on_or_refused_with_its_line(data: st.DataObject) -> None:
    task = data.draw(st.sampled_from([*SETS]))
    good = data.draw(st.sampled_from(SETS[task]))
    rows = [{name: data.draw(VALUES) if data.draw(st.booleans()) else value for name, value in good.items()} for _ in range(3)]
    columns, reading = read(BERT, task, [good, *rows], length=6, vocab_size=14, num_labels=2, on_bad_row="skip")
    assert (reading.read, reading.kept + reading.bad, len(columns)) == (4, 4, reading.kept)
    assert all(1 <= len(row["input_ids"]) <= 6 for row in columns)
    assert len(RaggedRows.of(columns)) == len(columns)
