"""Records become rows: what is learnt, with one beginning and one end, and nothing is lost without a word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import BYTES
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from memtrain import Trainer
from memtrain.data.encode import Encoder, Reading
from memtrain.data.layouts import Layout, layout_of, unused
from memtrain.data.options import DataOptions
from memtrain.data.records import BadRow, Origin, Record
from memtrain.data.rows import IGNORED
from memtrain.data.task import Task

BOS, EOS, PAD = 0, 1, 2


def begins() -> Any:
    """A tokenizer of one token per byte that sets its begin token before each text, as Llama's does."""
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(BYTES.backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>")


def ids(text: str) -> list[int]:
    return list(BYTES.encode(text, add_special_tokens=False))


def rows_of(
    *rows: Mapping[str, Any], length: int = 100, task: Task = Task.CAUSAL_LM, tokenizer: Any = BYTES, **options: Any
) -> tuple[list[tuple[Any, Any]], Reading]:
    reading = Reading("data", length)
    encoder = Encoder(tokenizer, task, DataOptions(**options), sequence_length=length, vocab_size=259)
    records = [Record(row, Origin("a.jsonl", line)) for line, row in enumerate(rows, start=1)]
    return [(row["input_ids"], row["labels"]) for row in encoder.encode_all(records, reading)], reading


def asked(prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
    return prompt + answer, [IGNORED] * len(prompt) + answer


def said(*turns: str, keys: tuple[str, str] = ("role", "content"), names: tuple[str, str] = ("user", "assistant")) -> list[Any]:
    return [{keys[0]: names[number % 2], keys[1]: turn} for number, turn in enumerate(turns)]


# ---------------------------------------------------------------------- what is learnt


def test_all_of_a_text_and_its_end_is_learnt() -> None:
    whole = [*ids("ab"), EOS]
    assert rows_of({"text": "ab"})[0] == [(whole, whole)]
    # The end is there once, however it comes, and so is the beginning.
    assert rows_of({"text": "ab<|eos|>"})[0] == [(whole, whole)]
    for text in ("ab", "<|bos|>ab"):
        assert rows_of({"text": text}, tokenizer=begins())[0] == [([BOS, *whole], [BOS, *whole])]


def test_of_a_prompt_with_a_completion_that_and_its_end_are_learnt() -> None:
    answer = [*ids("cd"), EOS]
    assert rows_of({"prompt": "ab", "completion": "cd"})[0] == [asked(ids("ab"), answer)]
    assert rows_of({"prompt": "ab", "response": "cd"}, tokenizer=begins())[0] == [asked([BOS, *ids("ab")], answer)]
    assert rows_of({"prompt": "ab", "completion": "cd"}, train_on="everything")[0] == [(ids("ab") + answer,) * 2]


def test_of_conversations_in_any_layout_the_answers_are_learnt() -> None:
    one = asked([BOS, *ids("user\na"), EOS, *ids("\nassistant\n")], [*ids("b"), EOS])
    messages = said("a", "b")
    assert rows_of({"messages": messages})[0] == [one]
    assert rows_of({"messages": json.dumps(messages)})[0] == [one]
    assert rows_of({"conversations": said("a", "b", keys=("from", "value"), names=("human", "gpt"))})[0] == [one]
    assert rows_of({"instruction": "a", "output": "b"})[0] == [one]
    assert rows_of({"prompt": messages[:1], "completion": messages[1:]})[0] == [one]


def test_alpaca_without_a_chat_template_is_written_as_by_its_authors() -> None:
    ((tokens, labels),), _ = rows_of({"instruction": "Add.", "input": "1 1", "output": "2"}, length=900, tokenizer=begins())
    written = BYTES.decode(tokens)
    assert written.startswith("<|bos|>Below is an instruction that describes a task, paired with an input")
    assert written.endswith("### Instruction:\nAdd.\n\n### Input:\n1 1\n\n### Response:\n2<|eos|>")
    assert [label for label in labels if label != IGNORED] == [*ids("2"), EOS]


def test_tokens_are_taken_as_they_are_and_what_is_masked_is_padding() -> None:
    given = {"input_ids": [5, 6, 7, PAD], "labels": [IGNORED, 6, 7, IGNORED], "attention_mask": [1, 1, 1, 0]}
    assert rows_of(given)[0] == [([5, 6, 7], [IGNORED, 6, 7])]
    assert rows_of({"input_ids": torch.tensor([5, 6])})[0] == [([5, 6], [5, 6])]


def test_other_tasks_make_other_rows_of_the_same() -> None:
    made, _ = rows_of({"prompt": "ab", "completion": "c"}, task=Task.SEQ2SEQ_LM, tokenizer=begins())
    assert made == [([BOS, *ids("ab")], [*ids("c"), EOS])]
    assert rows_of({"text": "ab"}, task=Task.MASKED_LM)[0] == [(ids("ab"), ids("ab"))]
    assert rows_of({"text": "ab", "label": 2}, task=Task.SEQUENCE_CLASSIFICATION)[0] == [(ids("ab"), 2)]
    assert rows_of({"input_ids": [5, 6], "labels": 2}, task=Task.SEQUENCE_CLASSIFICATION)[0] == [([5, 6], 2)]
    assert rows_of({"input_ids": [5, 6], "labels": [7]}, task=Task.SEQ2SEQ_LM)[0] == [([5, 6], [7])]
    assert rows_of({"input_ids": [5, 6]}, task=Task.MASKED_LM)[0] == [([5, 6], [5, 6])]
    with pytest.raises(ValueError, match="the task is image_classification, for which no rows are made of records"):
        rows_of({"text": "ab"}, task=Task.IMAGE_CLASSIFICATION)


# ---------------------------------------------------------------------- length


def test_a_row_that_is_cut_loses_its_end_and_is_counted() -> None:
    made, reading = rows_of({"text": "abcd"}, {"text": "ab"}, length=4)
    assert made == [(ids("abcd"),) * 2, ([*ids("ab"), EOS],) * 2]
    assert reading.lines()[1] == "data: 1 rows are cut off after 4 tokens."


def test_long_text_may_be_split_without_losing_a_token_or_leaving_one_alone() -> None:
    made, _ = rows_of({"text": "x" * 19}, length=8, long_rows="split")
    assert [len(row) for row, _ in made] == [8, 8, 4]
    assert [len(row) for row, _ in rows_of({"text": "x" * 16}, length=8, long_rows="split")[0]] == [8, 7, 2]
    with pytest.raises(ValueError, match="long_rows is split, and data has the layout completion"):
        rows_of({"prompt": "a", "completion": "b"}, long_rows="split")


def test_long_rows_may_be_left_out_and_are_counted() -> None:
    made, reading = rows_of({"text": "abcdef"}, {"text": "a"}, length=4, long_rows="leave_out")
    assert len(made) == 1
    assert "data: 1 rows are longer than 4 tokens and left out." in reading.lines()
    with pytest.raises(ValueError, match="all 1 rows of data are longer than 4 tokens: raise sequence_length"):
        rows_of({"text": "abcdef"}, length=4, long_rows="leave_out")


# ---------------------------------------------------------------------- what cannot be used


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": ""}, "has a 'text' that is empty"),
        ({"text": " \n"}, "has a 'text' of white space alone"),
        ({"text": 5}, "has 'text' as int '5', and text is needed"),
        ({"text": None}, "has 'text' as nothing"),
        ({"other": "x"}, "has no 'text', and it is needed"),
        ({"text": "\ud800"}, "has half of a surrogate pair in 'text'"),
    ],
)
def test_text_that_cannot_be_used_is_named_by_file_and_line(row: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"1 of 2 rows of data cannot be used: mend them, .*\n  a\.jsonl, line 2, {reason}"):
        rows_of({"text": "good"}, row)
    made, reading = rows_of({"text": "good"}, row, on_bad_row="skip")
    assert (len(made), reading.bad, reading.read) == (1, 1, 2)


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": " "}, "has a 'completion' of white space alone"),
        (
            {"prompt": "a", "completion": "b"},
            {"prompt": "a" * 20, "completion": "b"},
            "has 20 tokens before the first that is learnt",
        ),
        ({"messages": said("a", "b")}, {"messages": "hello"}, "has 'messages' as text, and a list of messages is needed"),
        ({"messages": said("a", "b")}, {"messages": []}, "has a 'messages' that is empty"),
        ({"messages": said("a", "b")}, {"messages": 3}, "has 'messages' as int '3'"),
        ({"messages": said("a", "b")}, {"x": 3}, "has no 'messages'"),
        (
            {"conversations": [*said("a", "b", keys=("from", "value"))]},
            {"conversations": [{"from": "me"}]},
            "has a turn from 'me'",
        ),
        ({"input_ids": [5, 6]}, {"input_ids": [5, 999]}, "has tokens from 5 to 999, and the model knows 0 to 258"),
        ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [5, 400]}, "has the label 400"),
        ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [5]}, "has 1 labels for 2 input_ids"),
        ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [5, IGNORED]}, "has nothing to learn"),
        ({"input_ids": [5, 6]}, {"input_ids": [5]}, "has nothing to learn"),
        ({"input_ids": [5, 6]}, {"input_ids": []}, "has a 'input_ids' that is empty"),
        ({"input_ids": [5, 6]}, {"input_ids": "5 6"}, "has 'input_ids' as str '5 6', and a list of whole numbers"),
    ],
)
def test_rows_of_any_layout_that_cannot_be_used_are_named(good: Any, bad: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2, {reason}"):
        rows_of(good, bad, length=20)


def test_rows_of_other_tasks_that_cannot_be_used_are_named() -> None:
    for row, task, reason in (
        ({"text": "a", "label": "x"}, Task.SEQUENCE_CLASSIFICATION, "has label 'x', and a number is needed"),
        ({"text": "a"}, Task.SEQUENCE_CLASSIFICATION, "has no 'label'"),
        ({"prompt": "a", "completion": "b"}, Task.MASKED_LM, "is no text, which this model reads"),
        ({"text": "<|eos|>"}, Task.MASKED_LM, "has nothing but special tokens"),
        ({"text": "a"}, Task.SEQ2SEQ_LM, "has no prompt with a completion"),
        ({"input_ids": [5], "labels": [IGNORED]}, Task.SEQ2SEQ_LM, "has nothing to learn: none of its labels counts"),
        ({"input_ids": [5], "labels": [1]}, Task.SEQUENCE_CLASSIFICATION, "has 1 labels, and one is needed"),
        ({"input_ids": [5], "labels": 1}, Task.CAUSAL_LM, "has 1 labels for 1 input_ids, and each token has one"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, Task.CAUSAL_LM, "has 1 attention_mask for 2 input_ids"),
    ):
        with pytest.raises(ValueError, match=reason):
            rows_of(row, task=task)


def test_a_count_and_the_first_ten_are_shown() -> None:
    with pytest.raises(
        ValueError, match="12 of 12 rows of data cannot be used: give rows that can; the first 10 are:"
    ) as refused:
        rows_of(*[{"text": ""}] * 12, on_bad_row="skip") if layout_of({"text": ""}, "a") else None
    assert str(refused.value).count("a.jsonl, line") == 10


def test_what_a_source_could_not_read_is_counted_with_the_rest() -> None:
    reading = Reading("data", 9)
    encoder = Encoder(BYTES, Task.CAUSAL_LM, DataOptions(on_bad_row="skip", limit=2), sequence_length=9)
    records = [
        BadRow(Origin("a", 1), "is no JSON"),
        Record({"text": "x"}, Origin("a", 2)),
        Record({"text": "y"}, Origin("a", 3)),
    ]
    assert len(list(encoder.encode_all(records, reading))) == 1
    assert (reading.read, reading.lines()[-1]) == (2, "  a, line 1, is no JSON")
    with pytest.raises(ValueError, match="there is no row in data"):
        list(encoder.encode_all([], Reading("data", 9)))


def test_a_tokenizer_without_an_end_is_refused() -> None:
    endless = PreTrainedTokenizerFast(tokenizer_object=BYTES.backend_tokenizer)
    with pytest.raises(ValueError, match="the tokenizer has no end-of-sequence token, and one must end what is learnt"):
        rows_of({"text": "a"}, tokenizer=endless)


# ---------------------------------------------------------------------- layouts and options


def test_the_layout_is_told_by_the_columns_and_said() -> None:
    assert layout_of({"messages", "text"}, "a") is Layout.MESSAGES
    assert unused({"text", "id"}, Layout.TEXT) == ["id"]
    _, reading = rows_of({"messages": said("a", "b"), "id": 7})
    assert reading.layout == "The layout is messages: the assistant's turns are learnt; not read: id."
    with pytest.raises(
        ValueError, match=r"a\.csv has the columns body, title, which are no layout known: rename them to tokens"
    ):
        layout_of({"title", "body"}, "a.csv")
    with pytest.raises(ValueError, match="has the columns chosen and rejected, which are preferences"):
        layout_of({"prompt", "chosen", "rejected"}, "a")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"sequence_length": 1}, "sequence_length is 1, and it must be 2 or more tokens"),
        ({"limit": 0}, "limit is 0, and it must be 1 or more rows"),
        ({"layout": "chatty"}, "layout is 'chatty', and it must be one of auto, tokens, messages"),
        ({"on_bad_row": "drop"}, "on_bad_row is 'drop', and it must be one of stop, skip"),
    ],
)
def test_an_option_that_there_is_not_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DataOptions(**given)


# ---------------------------------------------------------------------- a run


def llama() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=264, max_position_embeddings=64, **shape))


@pytest.mark.parametrize("given", [{}, {"packing": True}, {"constraints": {"micro_batch_size": 1}}, {"group_by_length": True}])
def test_a_file_of_conversations_trains_the_loss_of_its_answers(tmp_path: Path, given: dict[str, Any]) -> None:
    turns = [("hi", "hello"), ("what", "a longer answer than that"), ("q", "a"), ("bye", "see you")]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": said(*turn)}) + "\n" for turn in turns))
    rows, _ = rows_of(*({"messages": said(*turn)} for turn in turns))
    total, counted = 0.0, 0
    for tokens, labels in rows:
        logits = llama()(input_ids=torch.tensor([tokens])).logits[0, :-1]
        target = torch.tensor(labels[1:])
        total += torch.nn.functional.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum").item()
        counted += int((target != IGNORED).sum())
    trainer = Trainer(
        model=llama(),
        data=file,
        eval_data=file,
        tokenizer=BYTES,
        budget="64MiB",
        global_batch_size=4,
        steps=2,
        progress=False,
        **given,
    )
    result = trainer.train()
    first, _ = (row for row in result.metrics if "loss" in row)
    assert first["loss"] == pytest.approx(total / counted, rel=1e-5)
    assert result.evaluations[0][1] == pytest.approx(total / counted, rel=1e-5)
    # Four rows fill one pack, which is fewer than a step may have.
    assert given == {"packing": True} or result.comparison.peak_error == pytest.approx(0, abs=0.002)
