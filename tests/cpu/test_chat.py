"""Conversations as tokens: what is made of messages, which tokens begin and end a row, and what is refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from chats import (
    ASK_CHATML,
    CALL,
    CASES,
    QWEN,
    QWEN_THINK,
    TALK,
    answer,
    byte_level,
    learnt,
    rendered,
    system,
    tagged,
    user,
    words,
)
from tokenizers import normalizers
from transformers import ByT5Tokenizer

from memtrain.data.chat import ChatEncoder
from memtrain.data.records import RowRefused


# chat-01: who writes the token that begins a text.
@pytest.mark.parametrize(("written", "begin", "end"), list(product([False, True], repeat=3)))
def test_a_row_begins_with_one_begin_and_ends_with_one_end_whoever_writes_it(written: bool, begin: bool, end: bool) -> None:
    tokenizer = words(begin=begin, end=end)
    template = ("<bos> " if written else "") + (
        "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' ' }}"
        "{% if m.role == 'assistant' %}<end> {% endif %}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    encoded = ChatEncoder(tokenizer, template).encode([user("a b"), answer("c d")])
    text = tokenizer.decode(encoded.input_ids)
    assert text == ("<bos> " if written or begin else "") + "<user> a b <assistant> c d <end>"
    whole = rendered(tokenizer, [user("a b"), answer("c d")], template)
    assert encoded.input_ids == ([1] if begin and not written else []) + whole
    assert learnt(tokenizer, encoded) == "c d <end>"


@pytest.mark.parametrize(("begin", "end"), list(product([False, True], repeat=2)))
def test_the_end_of_sequence_is_put_once_where_a_template_ends_no_turn(begin: bool, end: bool) -> None:
    tokenizer = words(begin=begin, end=end)
    template = "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + '\n' }}{% endfor %}"
    encoder = ChatEncoder(tokenizer, template)
    text = ("<bos> " if begin else "") + "<user> a b <assistant> c d <user> e <assistant> f <eos>"
    assert tokenizer.decode(encoder.encode(TALK).input_ids) == text
    assert learnt(tokenizer, encoder.encode(TALK)) == "c d|f <eos>"
    assert learnt(tokenizer, encoder.encode([user("a"), answer("f <eos>")])) == "f <eos>"


@pytest.mark.parametrize("arguments", [{"at": "d"}, '{"at": "d"}', {"at": "d", "of": None}])
def test_arguments_reach_the_template_as_mappings_without_what_is_none(arguments: Any) -> None:
    template = QWEN_THINK + ASK_CHATML
    for call in ({"function": {"name": "look", "arguments": arguments}}, {**CALL, "function": {**CALL["function"]}}):
        tokenizer = byte_level(*QWEN)
        encoded = ChatEncoder(tokenizer, template).encode([user("a"), answer(None, tool_calls=[call])])
        assert '<tool_call>\nlook {"at": "d"}\n</tool_call><|im_end|>' in learnt(tokenizer, encoded)


def test_arguments_that_are_no_json_of_a_mapping_stay_as_they_are() -> None:
    tokenizer = byte_level(*QWEN)
    for arguments in ("d so", "[1]"):
        call = {"function": {"name": "look", "arguments": arguments}}
        encoded = ChatEncoder(tokenizer, QWEN_THINK + ASK_CHATML).encode([user("a"), answer("", tool_calls=[call])])
        assert f'look "{arguments}"' in learnt(tokenizer, encoded)


def test_the_word_after_a_header_that_ends_with_a_space_is_learnt() -> None:
    template = (
        "{% for m in messages %}{{ m.role + ': ' }}{% generation %}{{ m.content }}{% endgeneration %}{{ '\n' }}{% endfor %}"
    ).replace("{% generation %}", "{% if m.role == 'assistant' %}{% generation %}")
    template = template.replace("{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content }}{% endif %}")
    tokenizer = byte_level()
    assert " said" in [tokenizer.decode([token]) for token in tokenizer("a: said", add_special_tokens=False)["input_ids"]]
    assert learnt(tokenizer, ChatEncoder(tokenizer, template).encode([user("a"), answer("said so")])) == " said so\n<|eos|>"


def test_offsets_are_of_the_text_before_a_tokenizer_changes_it() -> None:
    tokenizer = words()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("\u00e9\u00e9\u00e9", "a"), normalizers.NFD()]
    )
    encoded = ChatEncoder(tokenizer, tagged("without tags")).encode([user("\u00e9\u00e9\u00e9"), answer("c d")])
    assert tokenizer.decode(encoded.input_ids) == "<user> a <assistant> c d <end>"
    assert learnt(tokenizer, encoded) == "c d <end>"


@pytest.mark.parametrize("tags", [False, True])
def test_a_tokenizer_without_offsets_gives_the_same(tags: bool) -> None:
    tokenizer = ByT5Tokenizer()
    said = "{% generation %}{{ m.content }}</s>{% endgeneration %}" if tags else "{{ m.content }}</s>"
    template = (
        "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}" + said + "{% else %}{{ m.content }};"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    encoded = ChatEncoder(tokenizer, template).encode([user("a"), answer("\u00e9 c"), user("e"), answer("f")])
    assert learnt(tokenizer, encoded) == "\u00e9 c</s>|f</s>"


def test_a_tokenizer_without_offsets_and_with_a_token_across_a_border_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["Vicuna, in words"]
    tokenizer = byte_level()
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    template = case.template.replace("'ASSISTANT:'", "'ASSISTANT: '")
    with pytest.raises(
        RowRefused, match=r"has a token across the border of a turn at 'SSISTANT: said so<.e', which this tokenizer"
    ):
        ChatEncoder(tokenizer, template).encode([user("a"), answer("said so")])


def test_of_a_completion_its_own_answers_are_learnt_alone() -> None:
    tokenizer = words()
    encoder = ChatEncoder(tokenizer, tagged("without tags"))
    assert learnt(tokenizer, encoder.encode_completion(TALK[:3], TALK[3:])) == "f <end>"
    assert encoder.encode_completion(TALK[:3], TALK[3:]).input_ids == encoder.encode(TALK).input_ids
    assert all(encoder.encode_completion(TALK[:3], TALK[3:], everything=True).learnt)
    with pytest.raises(RowRefused, match=r"has no message of the assistant in its completion, so there is nothing to learn"):
        encoder.encode_completion(TALK[:2], TALK[2:3])


def test_everything_is_learnt_if_asked_for_with_one_end() -> None:
    tokenizer = byte_level(*QWEN)
    encoded = ChatEncoder(tokenizer, CASES["ChatML"].template).encode([user("a")], everything=True)
    assert learnt(tokenizer, encoded) == "<|im_start|>user\na<|im_end|>\n"
    tokenizer = words(begin=True)
    encoded = ChatEncoder(tokenizer, "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}").encode(TALK, everything=True)
    assert learnt(tokenizer, encoded) == "<bos> a b c d e f <eos>"


def test_a_conversation_without_a_token_is_refused() -> None:
    encoder = ChatEncoder(words(), "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}")
    with pytest.raises(RowRefused, match=r"has no token that would be learnt"):
        encoder.encode([user(" ")], everything=True)


def test_an_end_that_also_fills_up_is_learnt_by_its_place() -> None:
    tokenizer = byte_level()
    tokenizer.pad_token = tokenizer.eos_token
    template = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    encoded = ChatEncoder(tokenizer, template).encode(TALK)
    ends = [counts for token, counts in zip(encoded.input_ids, encoded.learnt, strict=True) if token == tokenizer.pad_token_id]
    assert ends == [False, True, False, True]


def test_an_empty_answer_teaches_its_end_beside_one_that_is_not() -> None:
    tokenizer = words()
    encoder = ChatEncoder(tokenizer, tagged("without tags"))
    assert learnt(tokenizer, encoder.encode([user("a"), answer(""), *TALK[2:]])) == "<end>|f <end>"
    with pytest.raises(RowRefused, match=r"has only empty messages of the assistant, so there is nothing to learn"):
        encoder.encode([user("a"), answer(" ")])


def test_parts_of_text_are_joined_and_others_refused() -> None:
    tokenizer = words()
    encoder = ChatEncoder(tokenizer, tagged("without tags"))
    parts: Any = [{"type": "text", "text": "c "}, {"type": "text", "text": "d"}]
    assert encoder.encode([user("a b"), answer(parts), *TALK[2:]]) == encoder.encode(TALK)
    with pytest.raises(RowRefused, match=r"message 0: content has the part \{'type': 'image'\}, and only parts of text can be"):
        encoder.encode([{"role": "user", "content": [{"type": "image"}]}, answer("c")])


def test_chatml_is_written_in_the_tokens_that_there_are() -> None:
    known = byte_level(*QWEN)
    assert ChatEncoder(known, "chatml").encode(TALK) == ChatEncoder(known, CASES["ChatML"].template).encode(TALK)
    other = byte_level()
    encoder = ChatEncoder(other, "chatml")
    assert learnt(other, encoder.encode(TALK)) == "c d<|eos|>|f<|eos|>"
    assert "<|im_start|>" in encoder.chat_template


def test_a_template_comes_from_a_file_the_tokenizer_or_its_name(tmp_path: Path) -> None:
    tokenizer = words()
    file = tmp_path / "chat.jinja"
    file.write_text(tagged("without tags"))
    expected = ChatEncoder(tokenizer, tagged("without tags")).encode(TALK)
    assert ChatEncoder(tokenizer, file).encode(TALK) == expected
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "short": tagged("without tags")}
    assert ChatEncoder(tokenizer, "short").encode(TALK) == expected
    tokenizer.chat_template = tagged("without tags")
    encoder = ChatEncoder(tokenizer)
    assert encoder.encode(TALK) == expected
    assert encoder.chat_template == tagged("without tags")


def test_a_tokenizer_may_have_another_template_for_tools() -> None:
    tokenizer = words()
    tools = "{% if tools %}b {% endif %}" + tagged("without tags")
    tokenizer.chat_template = {"default": tagged("without tags"), "tool_use": tools}
    encoder = ChatEncoder(tokenizer)
    assert tokenizer.decode(encoder.encode(TALK[:2], '[{"name": "look"}]').input_ids) == "b <user> a b <assistant> c d <end>"
    assert tokenizer.decode(encoder.encode(TALK[:2], []).input_ids) == "<user> a b <assistant> c d <end>"


def test_without_an_end_of_sequence_a_template_must_end_its_turns() -> None:
    tokenizer = words()
    tokenizer.eos_token = None
    encoder = ChatEncoder(tokenizer, "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}")
    with pytest.raises(ValueError, match=r"would never learn to stop: set the tokenizer's eos_token\."):
        encoder.encode(TALK)


GEMMA = "Gemma, which calls the assistant model"
LLAMA = "Llama 2, a begin for each pair and no header"


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        (GEMMA, [system("b"), *TALK], r"is refused by the chat template \(System role not supported\)"),
        (LLAMA, [*TALK, answer("g")], r"is refused by the chat template \(Conversation roles must alternate user/assistant"),
        ("ChatML", [user("a")], r"has no message of the assistant in its conversation, so there is nothing to learn"),
        ("ChatML", [], r"has no message of the assistant in its conversation, so there is nothing to learn"),
        ("ChatML", [user("a"), answer("c", train=False)], r"leaves out each message of the assistant \(train, weight\), so"),
        ("ChatML", [user("a"), answer("c", weight=0.5)], r"message 1: weight is 0\.5, and a message is learnt \(1\) or not"),
        ("ChatML", "user: a", r"has a str for its messages, and they are a list of mappings"),
        ("ChatML", [{"content": "a"}], r"message 0 is \{'content': 'a'\}, and a message is a mapping with a role and a"),
        ("ChatML", [user("a"), answer(None)], r"message 1 \(assistant\) has no content"),
        ("ChatML", [{"role": "user", "content": 3}, answer("c")], r"message 0: content is 3, and it is a text or a list of"),
        (
            "ChatML",
            [user("a"), answer("c", tool_calls="look")],
            r"message 1: tool_calls is 'look', and it is a list of mappings",
        ),
        (
            "ChatML",
            [user("a"), answer("c", tool_calls=[CALL])],
            r"message 1: the chat template writes its tool_calls not at all",
        ),
        ("ChatML", [user("a"), answer(None, tool_calls=[CALL])], r"is refused by the chat template \("),
    ],
)
def test_a_conversation_that_cannot_be_learnt_from_is_refused(name: str, messages: Any, reason: str) -> None:
    case = CASES[name]
    encoder = ChatEncoder(byte_level(*case.special), case.template)
    with pytest.raises(RowRefused, match=reason):
        encoder.encode(messages)


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("{", r"tools is '\{', and it is a list of descriptions or the JSON of one"),
        ({"name": "look"}, r"tools is \{'name': 'look'\}, and it is a list of descriptions or the JSON of one"),
        ([{"name": "look"}], r"has tools, which the chat template does not write: give a chat_template that does"),
    ],
)
def test_tools_that_cannot_be_written_are_refused(tools: Any, reason: str) -> None:
    with pytest.raises(RowRefused, match=reason):
        ChatEncoder(words(), tagged("without tags")).encode(TALK, tools)
