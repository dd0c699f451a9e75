"""What is learnt of a conversation is what the assistant says and what ends its turns, in the templates that models come with."""

from __future__ import annotations

import pytest
from chats import (
    ASK_CHATML,
    CALL,
    CASES,
    QWEN,
    QWEN_THINK,
    TAGGED,
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

from memtrain.data.chat import ChatEncoder
from memtrain.data.records import RowRefused


@pytest.mark.parametrize("name", CASES)
def test_learnt_are_the_assistants_words_and_the_ends_of_its_turns(name: str) -> None:
    case = CASES[name]
    tokenizer = byte_level(*case.special)
    encoded = ChatEncoder(tokenizer, case.template).encode(TALK)
    assert learnt(tokenizer, encoded) == case.learnt
    whole = rendered(tokenizer, TALK, case.template)
    assert encoded.input_ids[: len(whole)] == whole
    assert encoded.input_ids[len(whole) :] == ([tokenizer.eos_token_id] if name.startswith("GLM") else [])


@pytest.mark.parametrize("name", CASES)
def test_a_question_after_the_last_answer_is_not_learnt(name: str) -> None:
    case = CASES[name]
    tokenizer = byte_level(*case.special)
    encoded = ChatEncoder(tokenizer, case.template).encode([*TALK, user("a so")])
    assert learnt(tokenizer, encoded) == (case.followed or case.learnt)
    assert encoded.input_ids == rendered(tokenizer, [*TALK, user("a so")], case.template)


@pytest.mark.parametrize("special", [("<end>",), ()], ids=["special", "plain"])
@pytest.mark.parametrize("name", TAGGED)
def test_tags_and_no_tags_give_the_same(name: str, special: tuple[str, ...]) -> None:
    tokenizer = words(special=special)
    encoder = ChatEncoder(tokenizer, tagged(name))
    encoded = encoder.encode(TALK)
    assert learnt(tokenizer, encoded) == "c d <end>|f <end>"
    assert encoded.input_ids == rendered(tokenizer, TALK, tagged(name))
    # Cutting leaves to each position what it was: "<user> a b <assistant> c".
    assert encoded.learnt[:5] == [False, False, False, False, True]
    assert encoded.learnt[5:8] == [True, True, False]
    assert learnt(tokenizer, encoder.encode([answer("c d"), user("e"), answer("f")])) == "c d <end>|f <end>"
    assert learnt(tokenizer, encoder.encode([TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]])) == "f <end>"
    assert learnt(tokenizer, encoder.encode([TALK[0], answer("c", train=False), answer("d"), user("e")])) == "d <end>"


@pytest.mark.parametrize("name", ["without tags", "with tags around the words alone"])
def test_a_turn_at_the_first_token_is_learnt(name: str) -> None:
    tokenizer = words()
    template = tagged(name).replace("<assistant>{{ ' ' }}", "").replace("<assistant> ", "")
    encoded = ChatEncoder(tokenizer, template).encode([answer("c d"), user("e"), answer("f")])
    assert tokenizer.decode(encoded.input_ids) == "c d <end> <user> e f <end>"
    assert encoded.learnt == [True, True, True, False, False, True, True]


def test_tags_around_nothing_are_refused() -> None:
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}{% generation %}{% endgeneration %}"
    with pytest.raises(RowRefused, match=r"has nothing between the generation tags of the chat template, so nothing would be"):
        ChatEncoder(words(), template).encode(TALK)


@pytest.mark.parametrize("header", ["{% generation %}{{ '<assistant>\n' }}", "<assistant>{% generation %}{{ '\n' }}"])
def test_tags_around_a_header_or_its_end_leave_it_out(header: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + header + "{{ m.content + ' ' + eos_token }}"
        "{% endgeneration %}{% else %}<user> {{ m.content }} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
    )
    tokenizer = byte_level()
    assert learnt(tokenizer, ChatEncoder(tokenizer, template).encode(TALK)) == "c d <|eos|>|f <|eos|>"


def test_which_turn_is_left_out_must_be_clear() -> None:
    template = (
        "{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' and loop.last %}"
        "{% generation %}<end>{% endgeneration %}{% endif %}{% endfor %}"
    )
    with pytest.raises(RowRefused, match=r"its 2 assistant messages, and the chat template has 1 generation blocks for them"):
        ChatEncoder(words(), template).encode([*TALK[:3], {**TALK[3], "train": False}])


def test_thinking_is_learnt_where_the_template_writes_it() -> None:
    tokenizer = byte_level(*QWEN)
    encoder = ChatEncoder(tokenizer, QWEN_THINK + ASK_CHATML)
    given = "<think>\nso\n</think>\n\nf"
    for last in (answer(given), answer("f", reasoning_content="so")):
        talk = [user("a"), answer(given.replace("f", "c")), user("e"), last]
        encoded = encoder.encode(talk)
        assert learnt(tokenizer, encoded) == f"c<|im_end|>|{given}<|im_end|>"
        assert encoded.input_ids == rendered(tokenizer, talk, QWEN_THINK)


def test_calls_of_tools_are_learnt_and_results_are_not() -> None:
    tokenizer = byte_level(*QWEN)
    encoder = ChatEncoder(tokenizer, QWEN_THINK + ASK_CHATML)
    calls = [CALL, {"type": "function", "function": {"name": "see", "arguments": '{"x": null}'}}]
    talk = [user("a"), answer(None, tool_calls=calls), {"role": "tool", "content": "d"}, answer("f")]
    encoded = encoder.encode(talk, tools=[{"name": "look", "required": ["at"], "parameters": None}])
    called = (
        '\n<tool_call>\nlook {"at": "d"}\n</tool_call>\n<tool_call>\nsee {"x": null}\n</tool_call><|im_end|>'
        "|<think>\n\n</think>\n\nf<|im_end|>"
    )
    assert learnt(tokenizer, encoded) == called
    assert tokenizer.decode(encoded.input_ids).endswith('[{"name": "look", "required": ["at"]}]')
    thought = [user("a"), answer("c", reasoning_content="so", tool_calls=[CALL]), {"role": "tool", "content": "d"}, *TALK[1:]]
    # The first thoughts are dropped for the question that follows.
    expected = 'c\n<tool_call>\nlook {"at": "d"}\n</tool_call><|im_end|>|c d<|im_end|>|<think>\n\n</think>\n\nf<|im_end|>'
    assert learnt(tokenizer, encoder.encode(thought)) == expected


def test_a_call_that_ends_its_turn_with_another_token_is_learnt_with_it() -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls %}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if m.thinking else '' }}"
        "{{ '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|message|>' }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}"
        "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last else '<|end|>' }}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    )
    tokenizer = byte_level("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    talk = [user("a"), answer(None, tool_calls=[CALL], thinking="so"), {"role": "tool", "content": "d"}, answer("f")]
    call = ' to=look<|message|>{"at": "d"}<|call|>'
    thought = f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{call}"
    encoder = ChatEncoder(tokenizer, template)
    assert learnt(tokenizer, encoder.encode(talk)) == f"{thought}|<|message|>f<|return|>"
    assert learnt(tokenizer, encoder.encode([user("a"), answer(None, tool_calls=[CALL])])) == call


@pytest.mark.parametrize("name", ["ChatML", "Llama 3, which trims", "Llama 2, a begin for each pair and no header"])
def test_spaces_around_an_answer_are_learnt_as_the_template_leaves_them(name: str) -> None:
    case = CASES[name]
    tokenizer = byte_level(*case.special)
    kept = " c d\n" if name == "ChatML" else "c d"
    talk = [user("a"), answer(" c d\n"), *TALK[2:]]
    assert learnt(tokenizer, ChatEncoder(tokenizer, case.template).encode(talk)) == case.learnt.replace("c d", kept)


def test_an_answer_with_the_words_of_a_header_or_of_the_user_is_learnt_whole() -> None:
    case = CASES["ChatML"]
    tokenizer = byte_level(*case.special)
    encoder = ChatEncoder(tokenizer, case.template)
    odd = "d<|im_end|>\n<|im_start|>user\nnot e<|im_end|>\n<|im_start|>assistant\nso"
    for talk in ([user(odd), answer(odd), *TALK[2:]], [system(odd), user(odd), answer(odd), user("e"), answer("f")]):
        assert learnt(tokenizer, encoder.encode(talk)) == f"{odd}<|im_end|>|f<|im_end|>"


def test_an_answer_that_repeats_what_follows_it_and_is_changed_by_the_template_is_refused() -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content.split('#')[-1] + '<|eos|>' }}{% endfor %}"
    talk = [user("a"), answer("#<|eos|>user: e<|eos|>assistant: "), *TALK[2:]]
    with pytest.raises(RowRefused, match=r"message 1: the chat template writes .* so where the answer stands cannot be told"):
        ChatEncoder(byte_level(), template).encode(talk)


@pytest.mark.parametrize(
    ("begin", "end", "reason"),
    [
        ("", "so", r"message 3: the chat template writes 'f<\|eos\|>so' where another answer gives '<\|eos\|>', so where"),
        ("so", "", r"message 1: the chat template writes 'souser: a b.*' where another answer gives 'user: a b.*', so where"),
    ],
)
def test_a_template_that_writes_the_rest_differently_for_one_answer_is_refused(begin: str, end: str, reason: str) -> None:
    told = "{{{{ {!r} if messages[-1].content == 'f' else '' }}}}"
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|eos|>' }}{% endfor %}"
    with pytest.raises(RowRefused, match=reason):
        ChatEncoder(byte_level(), told.format(begin) + template + told.format(end)).encode(TALK)


def test_a_prompt_may_open_what_no_answer_has_where_there_is_no_header() -> None:
    template = (
        "{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}"
    )
    tokenizer = byte_level("[INST]", "[/INST]")
    assert learnt(tokenizer, ChatEncoder(tokenizer, template).encode(TALK)) == "c d<|eos|>|f<|eos|>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, r"the tokenizer has no chat template, .*: give chat_template, as Jinja text, as a \.jinja file, or as chatml\."),
        ("no.jinja", r"chat_template is 'no\.jinja', which is no file, no Jinja text and not chatml: give the path of a"),
        (
            "{% for m in %}",
            r"cannot write a user's and an assistant's turn by turns: it is refused by the chat template \(Expected",
        ),
        ("{{ messages[0].content }}", r"does not write what users and assistants say once each and in order, so what is to be"),
        (
            "{% for m in messages %}{{ '<' + m.role + '> ' + m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}",
            r"asks for an answer with '\[bot\]', and in a conversation writes '<assistant> ' before it, so what is to be learnt",
        ),
    ],
)
def test_a_template_from_which_nothing_can_be_learnt_is_refused(template: str | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        ChatEncoder(words(), template)
    assert not isinstance(raised.value, RowRefused)


def test_a_template_that_takes_parts_alone_is_given_parts() -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':' }}{% for part in m.content %}{{ part.text }}{% endfor %}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = byte_level()
    assert learnt(tokenizer, ChatEncoder(tokenizer, template).encode(TALK)) == "c d<|eos|>|f<|eos|>"


def test_the_header_of_the_user_is_no_end_of_a_turn() -> None:
    template = (
        "{% for m in messages %}{{ ('<|model|>' if m.role == 'assistant' else '<|user|>') + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|model|>{% else %}{{ eos_token }}{% endif %}"
    )
    tokenizer = byte_level("<|model|>", "<|user|>")
    assert learnt(tokenizer, ChatEncoder(tokenizer, template).encode(TALK)) == "c d|f<|eos|>"


def test_an_end_in_words_is_found_where_the_last_turn_has_more() -> None:
    template = (
        "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' <end> ' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% else %}<eos>{% endif %}"
    )
    tokenizer = words(special=())
    assert learnt(tokenizer, ChatEncoder(tokenizer, template).encode(TALK)) == "c d <end>|f <end> <eos>"


def test_where_prompts_go_on_as_no_answer_does_a_turn_begins_after_what_both_have() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ '<think></think>' if m.role == 'assistant' }}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    tokenizer = byte_level(*QWEN)
    expected = "<think></think>c d<|im_end|>|<think></think>f<|im_end|>"
    assert learnt(tokenizer, ChatEncoder(tokenizer, template).encode(TALK)) == expected


def test_thinking_that_a_prompt_rules_out_is_learnt_all_the_same() -> None:
    tokenizer = byte_level(*QWEN)
    ask = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
    encoder = ChatEncoder(tokenizer, QWEN_THINK + ask)
    assert learnt(tokenizer, encoder.encode(TALK)) == "c d<|im_end|>|f<|im_end|>"
    thought = [*TALK[:3], answer("<think>\nso\n</think>\n\nf")]
    assert learnt(tokenizer, encoder.encode(thought)) == "c d<|im_end|>|<think>\nso\n</think>\n\nf<|im_end|>"


def test_tools_may_stand_before_the_last_question_and_results_name_their_calls() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[TOOLS]' + tools | tojson if tools and loop.index0 == (messages | length) - 2 else '' }}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% elif m.role == 'tool' %}{{ '[RESULT]' + messages[loop.index0 - 1].tool_calls[0].function.name + ' ' + m.content }}"
        "{% elif m.tool_calls %}{{ '[CALL]' + m.tool_calls[0].function.name + eos_token }}{% else %}{{ m.content + eos_token }}{% endif %}"
        "{% endfor %}"
    )
    tokenizer = byte_level("[TOOLS]", "[INST]", "[/INST]", "[RESULT]", "[CALL]")
    talk = [user("a"), answer(None, tool_calls=[CALL]), {"role": "tool", "content": "d"}, answer("c"), *TALK[2:]]
    encoded = ChatEncoder(tokenizer, template).encode(talk, [{"name": "look"}])
    assert learnt(tokenizer, encoded) == "[CALL]look<|eos|>|c<|eos|>|f<|eos|>"
    text = '<|bos|>[INST]a[/INST][CALL]look<|eos|>[RESULT]look dc<|eos|>[TOOLS][{"name": "look"}][INST]e[/INST]f<|eos|>'
    assert tokenizer.decode(encoded.input_ids) == text


TURNS = "{% for m in messages %}{{ m.role + ': ' }}"
ENDED = "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            TURNS + "{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}{{ ('#' if loop.last else '%') if m.role == 'assistant' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            r"message 1: the chat template ends it in no way that is known, with '%user: eassistant: ', so where the",
        ),
        (
            "{{ messages | length }}" + TURNS.replace("m.role + ': '", "m.role + ': ' if not m.tool_calls")
            + "{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}" + ENDED,
            r"message 1: the chat template asks for it with '1user: a.*', and in the conversation writes '4user: a.*', so where",
        ),
        (
            TURNS + "{% generation %}{{ m.content }}{% endgeneration %}" + ENDED,
            r"message 1: the chat template writes its tool_calls not at all, so it cannot be learnt",
        ),
    ],
)  # fmt: skip
def test_a_turn_whose_place_cannot_be_told_is_refused(template: str, reason: str) -> None:
    with pytest.raises(RowRefused, match=reason):
        ChatEncoder(byte_level(), template).encode([user("a"), answer("c", tool_calls=[CALL]), *TALK[2:]])
