"""Which columns mean what: the layout of a source, what is said of it, and what a row must have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from memtrain.data.forms import Completion, Conversation, Instruction, Labelled, Tagged, Text, Tokens, form_of
from memtrain.data.layouts import LAYOUTS_OF, Layout, detect
from memtrain.data.options import DataOptions
from memtrain.data.records import RowRefused
from memtrain.data.task import Task

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def form(row: Mapping[str, Any], task: Task = Task.CAUSAL_LM, like: Mapping[str, Any] | None = None) -> Any:
    """What a row says, where ``like`` is the first row of its source."""
    return form_of(row, detect([row if like is None else like], "rows.jsonl", task))


@pytest.mark.parametrize(
    ("names", "task", "layout", "roles"),
    [
        ("text", "causal_lm", "text", "text=text"),
        ("text label", "causal_lm", "text", "text=text"),
        ("text label", "sequence_classification", "classification", "text=text label=label"),
        ("sentence labels", "sequence_classification", "classification", "text=sentence label=labels"),
        (
            "premise hypothesis label",
            "sequence_classification",
            "classification",
            "text=premise text_pair=hypothesis label=label",
        ),
        ("text text_pair label", "sequence_classification", "classification", "text=text text_pair=text_pair label=label"),
        ("prompt completion", "causal_lm", "completion", "prompt=prompt completion=completion"),
        ("prompt completion answer", "causal_lm", "completion", "prompt=prompt completion=completion"),
        ("question answer", "causal_lm", "completion", "prompt=question completion=answer"),
        ("input output", "seq2seq_lm", "completion", "prompt=input completion=output"),
        ("query response", "causal_lm", "completion", "prompt=query completion=response"),
        ("prompt prompt_id messages", "causal_lm", "messages", "messages=messages"),
        ("conversations id", "causal_lm", "sharegpt", "messages=conversations"),
        ("conversation", "causal_lm", "sharegpt", "messages=conversation"),
        ("instruction input output text", "causal_lm", "alpaca", "instruction=instruction output=output"),
        (
            "instruction context response category",
            "causal_lm",
            "alpaca",
            "instruction=instruction output=response input=context",
        ),
        ("text input_ids attention_mask", "causal_lm", "tokens", "input_ids=input_ids"),
        ("input_ids label", "sequence_classification", "tokens", "input_ids=input_ids labels=label"),
        ("id tokens pos_tags ner_tags", "token_classification", "tagged", "words=tokens tags=ner_tags"),
        ("words labels", "token_classification", "tagged", "words=words tags=labels"),
        ("text", "masked_lm", "text", "text=text"),
    ],
)
def test_the_layout_is_told_by_the_names_of_columns(names: str, task: str, layout: str, roles: str) -> None:
    found = detect([dict.fromkeys(names.split(), "a")], "rows.jsonl", Task(task))
    assert found.layout == layout
    assert dict(role.split("=") for role in roles.split()).items() <= found.roles.items()


def test_columns_of_any_of_the_first_rows_count() -> None:
    assert detect([{"txt": "a"}, {"text": "a"}], "rows.jsonl", Task.CAUSAL_LM).layout is Layout.TEXT


def test_columns_are_told_in_a_sentence_with_those_that_are_not_used() -> None:
    found = detect([{"messages": TURNS}], "chat.jsonl", Task.CAUSAL_LM)
    # Tools are read although the first row has none.
    assert found.said(["chat.jsonl"], ["id", "messages", "tools"], "assistant turns are learnt") == (
        "chat.jsonl holds messages (columns messages, tools): assistant turns are learnt; column id is not used."
    )
    assert found.said(["a.jsonl", "b.jsonl", "c.jsonl"], ["messages", "x", "y"], "all is learnt") == (
        "a.jsonl and 2 more hold messages (column messages): all is learnt; columns x, y are not used."
    )


LM = (
    "known are text (text); completion (prompt, completion); messages (messages); sharegpt (conversations); "
    "alpaca (instruction, output); tokens (input_ids)"
)


@pytest.mark.parametrize(
    ("names", "task", "error"),
    [
        ("foo bar", "causal_lm", f"rows.jsonl has columns foo, bar, from which the task causal_lm cannot learn: {LM}."),
        (
            "text messages",
            "causal_lm",
            "rows.jsonl has columns text, messages, which can be read as text (text) or messages (messages): set layout to text or "
            f"messages; {LM}.",
        ),
        (
            "question prompt answer",
            "causal_lm",
            "rows.jsonl has columns question, prompt, answer, which can be read as prompts and completions (prompt, answer) or prompts "
            f"and completions (question, answer): rename or remove the others; {LM}.",
        ),
        (
            "text",
            "sequence_classification",
            "rows.jsonl has column text, from which the task sequence_classification cannot learn: known are classification (text, "
            "label); tokens (input_ids).",
        ),
        (
            "image label",
            "image_classification",
            "rows.jsonl has columns image, label, from which the task image_classification cannot learn: give rows of tensors, or a "
            "data_collator that makes them.",
        ),
        (
            "text",
            "other",
            "rows.jsonl has column text, from which a model of another kind cannot learn: known are tokens (input_ids), or give rows of "
            "tensors or a data_collator.",
        ),
        (
            "prompt chosen rejected",
            "causal_lm",
            "rows.jsonl is preference data (chosen, rejected), which is for DPO and its like and not learnt from here: keep the good "
            "answers as prompt and completion.",
        ),
    ],
)
def test_what_cannot_be_told_is_refused_with_what_is_there_and_what_is_known(names: str, task: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        detect([dict.fromkeys(names.split(), "a")], "rows.jsonl", Task(task))


def test_answers_that_are_judged_good_or_bad_are_preference_data() -> None:
    row = {"prompt": "a", "completion": "b", "label": False}
    with pytest.raises(ValueError, match="is preference data \\(prompt, completion and a true or false label\\)"):
        detect([row], "rows.jsonl", Task.CAUSAL_LM)
    assert detect([{**row, "label": "x"}], "rows.jsonl", Task.CAUSAL_LM).layout is Layout.COMPLETION


def test_a_layout_that_is_given_decides() -> None:
    both = [{"text": "a", "messages": TURNS}]
    assert detect(both, "rows.jsonl", Task.CAUSAL_LM, "messages").layout is Layout.MESSAGES
    with pytest.raises(
        ValueError, match="layout is alpaca, of which one set of columns must be there and none is: name them as alpaca"
    ):
        detect(both, "rows.jsonl", Task.CAUSAL_LM, "alpaca")
    with pytest.raises(ValueError, match="layout is messages, from which the task masked_lm cannot learn: known are text"):
        detect(both, "rows.jsonl", Task.MASKED_LM, "messages")


def test_every_layout_but_none_of_images_is_of_some_task() -> None:
    assert {layout for layouts in LAYOUTS_OF.values() for layout in layouts} == set(Layout)
    assert LAYOUTS_OF.keys() == set(Task)


# ------------------------------------------------------------------------------------------------ what rows say


def test_text_and_completions_stand_as_they_are() -> None:
    # dat-03: what str.splitlines would split at, and NUL, are text.
    assert form({"text": " a\0\u2028b\r\n"}) == Text(" a\0\u2028b\r\n")
    assert form({"question": " \n", "answer": " a "}) == Completion(" \n", " a ")
    assert form({"prompt": TURNS[:1], "completion": TURNS[1:], "tools": "[]"}) == Conversation(TURNS[:1], TURNS[1:], "[]")


def test_messages_may_be_json_and_tools_come_with_them() -> None:
    text = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    assert form({"messages": text}) == form({"messages": TURNS}) == Conversation([], TURNS)
    assert form({"messages": TURNS, "tools": [{"name": "look"}]}).tools == [{"name": "look"}]


def test_sharegpt_is_written_as_messages() -> None:
    said = ["system", "human", "gpt", "user", "bard", "human", "chatgpt", "tool", "model", "observation", "assistant"]
    roles = ["system", "user", "assistant", "user", "assistant", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert form({"conversations": [{"from": one, "value": "a", "weight": 1} for one in said]}).messages == [
        {"role": role, "weight": 1, "content": "a"} for role in roles
    ]
    assert form({"conversations": TURNS, "system": "s"}).messages == [{"role": "system", "content": "s"}, *TURNS]
    # Roles that are no ShareGPT names are the template's to know.
    assert form({"messages": [{"role": "developer", "content": "a"}]}).messages == [{"role": "developer", "content": "a"}]


def test_calls_of_tools_in_sharegpt_are_calls() -> None:
    call = {"name": "look", "arguments": {"at": "d"}}
    made = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    turns = [
        {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "d"}}'},
        {"from": "observation", "value": "d"},
    ]
    assert form({"conversations": turns}).messages == [made, {"role": "tool", "content": "d"}]


def test_alpaca_is_a_question_and_its_answer() -> None:
    row = {"instruction": "Say.", "input": "a", "output": "b", "system": None, "history": [["c", "d"]]}
    assert form(row) == Instruction("Say.", "a", "b", "", [("c", "d")])
    assert form(row).conversation() == Conversation(
        [
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
            {"role": "user", "content": "Say.\n\na"},
        ],
        [{"role": "assistant", "content": "b"}],
    )
    with pytest.raises(RowRefused, match="has a history, for which the Alpaca prompt has no place: give chat_template"):
        form(row).completion()


def test_without_a_template_alpaca_is_written_as_it_was_published() -> None:
    assert form({"instruction": "Say.", "input": "a", "output": "b"}).completion() == Completion(
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay.\n\n### Input:\na\n\n### Response:",
        "b",
    )
    assert form({"instruction": "Say.", "input": "", "output": "b"}).completion().prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay.\n\n### Response:"
    )


def test_tokens_lose_their_padding() -> None:
    row = {"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0], "completion_mask": [0, 0, 1, 0]}
    assert form(row) == Tokens([5, 6], None, (4, slice(1, 3)), ([0, 1],), None)
    assert form({"input_ids": np.array([5, 6])}).input_ids == form({"input_ids": "[5, 6]"}).input_ids == [5, 6]


def test_labels_and_tags_are_kept_as_they_are() -> None:
    assert form({"sentence1": "a", "sentence2": "b", "label": "x"}, Task.SEQUENCE_CLASSIFICATION) == Labelled("a", "b", "x")
    assert form({"tokens": ("a", "b"), "tags": np.array([1, 0])}, Task.TOKEN_CLASSIFICATION) == Tagged(["a", "b"], [1, 0])


NEEDS_TEXT = "and a text that is not empty is needed"
NEEDS_LIST = "and a list of messages is needed"
NESTED: list[Any] = []
for _ in range(5000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("like", "row", "reason"),
    [
        ({"text": "a"}, {"txt": "a"}, f"has no 'text', {NEEDS_TEXT}"),
        ({"text": "a"}, {"text": None}, f"has null for 'text', {NEEDS_TEXT}"),
        ({"text": "a"}, {"text": 5}, f"has 5 for 'text', {NEEDS_TEXT}"),
        ({"text": "a"}, {"text": ""}, f"has '' for 'text', {NEEDS_TEXT}"),
        ({"text": "a"}, {"text": " \n"}, f"has ' \\n' for 'text', {NEEDS_TEXT}"),
        ({"text": "a"}, {"text": [1] * 99}, f"has [{'1, ' * 19}1,... for 'text', {NEEDS_TEXT}"),
        ({"text": "a"}, {"text": 10**5000}, f"has a int too long to show for 'text', {NEEDS_TEXT}"),
        ({"text": "a"}, {"text": NESTED}, f"has a list too long to show for 'text', {NEEDS_TEXT}"),
        (
            {"text": "a"},
            {"text": "ab\ud800"},
            "has half of a surrogate pair in 'text' (\\ud800 at character 2), which is no text: write the row again",
        ),
        ({"question": "a", "answer": "b"}, {"question": "", "answer": "b"}, f"has '' for 'question', {NEEDS_TEXT}"),
        ({"question": "a", "answer": "b"}, {"question": "a", "answer": " "}, f"has ' ' for 'answer', {NEEDS_TEXT}"),
        (
            {"question": "a", "answer": "b"},
            {"question": "a", "answer": TURNS[:0]},
            "has 'a' for 'question' and [] for 'answer', and both must be texts, or both lists of messages",
        ),
        ({"messages": TURNS}, {"messages": "a"}, f"has 'a' for 'messages', {NEEDS_LIST}"),
        ({"messages": TURNS}, {"messages": "[a"}, f"has '[a' for 'messages', {NEEDS_LIST}"),
        ({"messages": TURNS}, {"messages": []}, "has an empty list for 'messages', and one message or more is needed"),
        (
            {"messages": TURNS},
            {"messages": ["a"]},
            "has 'a' as message 0 of 'messages', and a mapping with a role and a content is needed",
        ),
        (
            {"messages": TURNS},
            {"messages": [{"content": "a"}]},
            "has {'content': 'a'} as message 0 of 'messages', and a role and a content (or from and value) are needed",
        ),
        (
            {"messages": TURNS},
            {"messages": [{"role": "user", "content": [{"text": "\udfff"}]}]},
            "has half of a surrogate pair in 'messages' (\\udfff at character 0), which is no text: write the row again",
        ),
        (
            {"conversations": TURNS},
            {"conversations": [{"from": "alien", "value": "a"}]},
            "has a message 0 of 'conversations' from 'alien', and known are user, human, assistant, gpt, bard, chatgpt, bing, model, "
            "tool, observation, function_response, tool_response, system, function_call",
        ),
        (
            {"conversations": TURNS},
            {"conversations": [{"from": "gpt"}]},
            "has {'from': 'gpt'} as message 0 of 'conversations', and a text for its value is needed",
        ),
        (
            {"conversations": TURNS},
            {"conversations": [{"from": "function_call", "value": "look"}]},
            "has 'look' as function_call in message 0 of 'conversations', and the JSON of a name and its arguments is needed",
        ),
        (
            {"conversations": TURNS},
            {"conversations": TURNS, "system": 5},
            "has 5 for 'system', and a text is needed where there is something",
        ),
        (
            {"instruction": "a", "output": "b"},
            {"instruction": "a", "output": "b", "history": [["a"]]},
            "has ['a'] in 'history', and a pair of texts is needed: a question, its answer",
        ),
        ({"input_ids": [1]}, {"input_ids": []}, "has no token in 'input_ids', and one or more are needed"),
        ({"input_ids": [1]}, {"input_ids": 1}, "has 1 for 'input_ids', and a list of whole numbers is needed"),
        ({"input_ids": [1]}, {"input_ids": [1, 2.5]}, "has 2.5 at place 1 of 'input_ids', and a whole number is needed"),
        ({"input_ids": [1]}, {"input_ids": [True]}, "has True at place 0 of 'input_ids', and a whole number is needed"),
        (
            {"input_ids": [1]},
            {"input_ids": [1, 2], "attention_mask": [1]},
            "has 1 numbers in 'attention_mask' for 2 tokens, and each token needs one",
        ),
        (
            {"input_ids": [1]},
            {"input_ids": [1, 2], "completion_mask": [0, 2]},
            "has 2 in 'completion_mask', and 0 or 1 is needed",
        ),
        (
            {"input_ids": [1]},
            {"input_ids": [1, 2], "attention_mask": [0, 0]},
            "has an attention_mask of zeros alone, so all of it is padding",
        ),
        (
            {"input_ids": [1]},
            {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]},
            "has an attention_mask with zeros between ones, and padding stands at the ends",
        ),
    ],
)
def test_a_row_that_lacks_what_is_needed_is_refused_with_what_it_has(
    like: Mapping[str, Any], row: Mapping[str, Any], reason: str
) -> None:
    with pytest.raises(RowRefused, match=f"^{re.escape(reason)}$"):
        form(row, like=like)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tokens": ["a"], "tags": []}, "has 1 words and 0 tags, and each word, one or more, needs one"),
        ({"tokens": [], "tags": []}, "has 0 words and 0 tags, and each word, one or more, needs one"),
        ({"tokens": ["a", 5], "tags": [1, 1]}, "has 5 as word 1 of 'tokens', and a text that is not empty is needed"),
    ],
)
def test_each_word_needs_a_tag(row: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused, match=f"^{re.escape(reason)}$"):
        form(row, Task.TOKEN_CLASSIFICATION)


def test_a_number_of_token_types_may_be_any_from_0() -> None:
    row = {"input_ids": [1, 2], "token_type_ids": [0, 3]}
    assert form(row, Task.MASKED_LM).token_type_ids == [0, 3]
    with pytest.raises(RowRefused, match=r"^has -1 in 'token_type_ids', and 0 or more is needed$"):
        form({**row, "token_type_ids": [0, -1]}, Task.MASKED_LM)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sequence_length": 1}, "sequence_length is 1, and it must be 2 or more tokens."),
        ({"layout": "chat"}, "layout is 'chat', and it must be one of auto, text, completion, messages, "),
        ({"train_on": "answers"}, "train_on is 'answers', and it must be one of auto, completions, everything."),
        ({"long_rows": "cut"}, "long_rows is 'cut', and it must be one of truncate, split, leave_out."),
        ({"on_bad_row": "warn"}, "on_bad_row is 'warn', and it must be one of stop, skip."),
        ({"limit": 0}, "limit is 0, and it must be 1 or more rows, or null."),
    ],
)
def test_an_option_that_is_none_is_refused_with_those_there_are(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(error)}"):
        DataOptions(**options)
