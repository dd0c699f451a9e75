"""Conversations as token ids, and which of them are learnt: what the assistant says and the token that ends each turn.

The conversation is rendered through the chat template and the text tokenised once, as a whole, so the ids are those that
``tokenizer.apply_chat_template`` gives. Where the turns stand is known in characters (:mod:`memtrain.data.turns`) and
carried over to tokens by the offsets that a fast tokenizer gives. A tokenizer without offsets is asked for the tokens of the
text up to each border, which must be the first of the whole.

A token is learnt if it begins in a turn of the assistant. One that begins before it is learnt too if only spaces of it stand
before (" Paris" after a header that ends with the space), since otherwise the first word would not be.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memtrain.data.records import RowRefused
from memtrain.data.templates import ChatTemplate, Message, chatml, special_tokens
from memtrain.data.turns import Span, find_turns

NOT_RENDERED: Final = ("train", "weight")
"""Keys of a message that say whether it is learnt: ``"train": false`` (axolotl) and ``"weight": 0`` (OpenAI)."""


@dataclass(frozen=True)
class Encoded:
    """A conversation as tokens.

    Attributes:
        input_ids: the tokens.
        learnt: for each of them, whether it counts in the loss; of the same length.
    """

    input_ids: list[int]
    learnt: list[bool]


class ChatEncoder:
    """Conversations to tokens, through one chat template; made once for a tokenizer.

    Attributes:
        chat_template: the Jinja text that was given or found, to be saved with the tokenizer.
    """

    def __init__(self, tokenizer: Any, template: str | os.PathLike[str] | None = None) -> None:
        """Take a tokenizer and a chat template.

        Args:
            tokenizer: of transformers, fast or slow.
            template: Jinja text, the path of a file of it, ``"chatml"`` for that format in the tokenizer's own special
                tokens, or None for the tokenizer's template.

        Raises:
            ValueError: there is no template, or what is to be learnt cannot be told from it.
        """
        self._tokenizer = tokenizer
        self._given = None if template is None else _template_text(tokenizer, template)
        if self._given is None and not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, and conversations are written through one: give chat_template, as "
                "Jinja text, as a .jinja file, or as chatml."
            )
        self._templates: dict[str, ChatTemplate] = {}
        self.chat_template: str = tokenizer.get_chat_template(self._given)
        last_end = self._template(None).frame.last_end.strip()
        # What ends a turn is a special token, or the one token that the template ends turns with.
        self._closing = (*special_tokens(tokenizer), *([last_end] if len(self._encode(last_end)) == 1 else ()))
        self._begin = _automatic_begin(tokenizer)

    def encode(self, messages: Any, tools: Any = None, *, everything: bool = False) -> Encoded:
        """Encode one conversation.

        The ids are those of ``apply_chat_template``, with the token that begins a text in front if the tokenizer sets one by
        itself and the template does not, and with the end of sequence behind, learnt, if the last turn ends with no token of
        its own. Learnt are the assistant's turns, calls of tools included, but for those with ``"train": false`` or
        ``"weight": 0``. Of an answer that is empty the end is learnt.

        Args:
            messages: of ``{"role", "content"}`` each, and what else the template reads, such as ``"tool_calls"``. Arguments
                of calls are given to the template as mappings, also where they are JSON; a content in parts is joined.
            tools: descriptions of tools for the template, a list or its JSON.
            everything: learn every token.

        Raises:
            RowRefused: the conversation cannot be used; the message says why.
            ValueError: the tokenizer has no end of sequence, and the template ends no turn.
        """
        return self._encode_from(0, messages, tools, everything)

    def encode_completion(self, prompt: Any, completion: Any, tools: Any = None, *, everything: bool = False) -> Encoded:
        """Encode a conversation of which only the assistant's turns in ``completion`` are learnt; else as :meth:`encode`."""
        parts = [_checked(part) for part in (prompt, completion)]
        return self._encode_from(len(parts[0]), parts[0] + parts[1], tools, everything)

    def _encode_from(self, first: int, messages: Any, tools: Any, everything: bool) -> Encoded:
        given = _checked(messages)
        normal = [_message(message, number) for number, message in enumerate(given)]
        described = _tools(tools)
        template = self._template(described)
        if described and not template.writes_tools:
            raise RowRefused("has tools, which the chat template does not write: give a chat_template that does")
        wanted = [] if everything else _wanted(given, normal, first)
        text = template.render(normal, described)
        spans = [(0, len(text))] if everything else find_turns(template, normal, described, text, wanted)
        ids, learnt = self._learnt(text, spans)
        if not any(learnt):
            raise RowRefused("has no token that would be learnt")
        self._end(ids, learnt, text, spans[-1][1])
        if self._begin is not None and ids[:1] != [self._begin]:
            return Encoded([self._begin, *ids], [everything, *learnt])
        return Encoded(ids, learnt)

    def _template(self, tools: Any) -> ChatTemplate:
        """The template, of which a tokenizer may have another for conversations with tools."""
        text = self._tokenizer.get_chat_template(self._given, tools)
        if text not in self._templates:
            self._templates[text] = ChatTemplate(self._tokenizer, text)
        return self._templates[text]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
        return ids

    def _learnt(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """The tokens of the text, and which of them are of the spans of characters."""
        if not self._tokenizer.is_fast:
            return self._learnt_by_prefixes(text, spans)
        tokens = self._tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        begins = [start for start, _ in spans]
        learnt = []
        for start, stop in tokens["offset_mapping"]:
            index = bisect_right(begins, start) - 1
            inside = index >= 0 and start < spans[index][1]
            if not inside and index + 1 < len(begins) and start < begins[index + 1] < stop:
                inside = text[start : begins[index + 1]].isspace()
            learnt.append(inside)
        return tokens["input_ids"], learnt

    def _learnt_by_prefixes(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        ids = self._encode(text)
        learnt = [False] * len(ids)
        for start, stop in spans:
            borders = [len(text), len(text)]
            for side, border in enumerate((start, stop)):
                before = self._encode(text[:border])
                if ids[: len(before)] != before:
                    raise RowRefused(
                        f"has a token across the border of a turn at {text[max(border - 10, 0) : border + 10]!r}, which this "
                        f"tokenizer, a slow one, cannot tell apart: take the fast one"
                    )
                borders[side] = len(before)
            learnt[borders[0] : borders[1]] = [True] * (borders[1] - borders[0])
        return ids, learnt

    def _end(self, ids: list[int], learnt: list[bool], text: str, stop: int) -> None:
        """Put the end of sequence behind the last turn if that ends the text and has no end of its own."""
        if text[stop:].strip() or text[:stop].rstrip().endswith(self._closing):
            return
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                "the chat template ends an answer with no token of its own, and the tokenizer has no end-of-sequence token, so "
                "the model would never learn to stop: set the tokenizer's eos_token."
            )
        # What the template writes between the answer and its end the model has to write as well.
        last = max(index for index, counts in enumerate(learnt) if counts)
        learnt[last:] = [True] * (len(learnt) - last)
        ids.append(eos)
        learnt.append(True)


def _template_text(tokenizer: Any, template: str | os.PathLike[str]) -> str:
    """The Jinja text that is meant, or the name of one of the tokenizer's own templates."""
    given = os.fspath(template)
    if given == "chatml":
        return chatml(tokenizer)
    own = tokenizer.chat_template
    if "{{" in given or "{%" in given or (isinstance(own, dict) and given in own):
        return given
    file = Path(given).expanduser()
    if not file.is_file():
        raise ValueError(
            f"chat_template is {given!r}, which is no file, no Jinja text and not chatml: give the path of a .jinja file, "
            f"the text itself, or chatml."
        )
    return file.read_text(encoding="utf-8")


def _automatic_begin(tokenizer: Any) -> int | None:
    """The token that the tokenizer itself sets before a text, if it is the one that begins a text."""
    begin: int | None = tokenizer.bos_token_id
    alone, dressed = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return begin if begin is not None and dressed[:1] == [begin] and dressed != alone else None


def _checked(messages: Any) -> list[Mapping[str, Any]]:
    """Messages as a list of mappings, each with a role."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RowRefused(f"has a {type(messages).__name__} for its messages, and they are a list of mappings")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowRefused(f"message {number} is {_shown(message)}, and a message is a mapping with a role and a content")
    return list(messages)


def _message(message: Mapping[str, Any], number: int) -> Message:
    """The message as templates expect it: a text for content, arguments as mappings, nothing that is None."""
    given: Message = {key: value for key, value in message.items() if value is not None and key not in NOT_RENDERED}
    calls = given.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
            raise RowRefused(f"message {number}: tool_calls is {_shown(calls)}, and it is a list of mappings")
        given["tool_calls"] = [_call(call) for call in calls]
    content = given.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        given["content"] = "".join(_part(part, number) for part in content)
    elif content is None and not calls:
        raise RowRefused(f"message {number} ({given['role']}) has no content")
    elif content is not None and not isinstance(content, str):
        raise RowRefused(f"message {number}: content is {_shown(content)}, and it is a text or a list of text parts")
    return given


def _part(part: Any, number: int) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise RowRefused(f"message {number}: content has the part {_shown(part)}, and only parts of text can be learnt from")
    return text


def _call(call: Mapping[str, Any]) -> Message:
    """A call of a tool with its arguments as a mapping, if they are one or the JSON of one."""
    made: Message = _without_none(call)
    function = made.get("function", made)
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return made
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return made


def _without_none(value: Any) -> Any:
    """The value without the keys whose value is None, which tables fill in where rows have different keys."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_none(item) for item in value]
    return value


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except ValueError as error:
            raise RowRefused(f"tools is {_shown(tools)}, and it is a list of descriptions or the JSON of one") from error
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowRefused(f"tools is {_shown(tools)}, and it is a list of descriptions or the JSON of one")
    return [_without_none(tool) for tool in tools]


def _wanted(given: Sequence[Mapping[str, Any]], normal: Sequence[Message], first: int) -> list[int]:
    """Which messages are learnt."""
    answers = [number for number in range(first, len(normal)) if normal[number]["role"] == "assistant"]
    if not answers:
        where = "completion" if first else "conversation"
        raise RowRefused(f"has no message of the assistant in its {where}, so there is nothing to learn")
    wanted = [number for number in answers if _counts(given[number], number)]
    if not wanted:
        raise RowRefused("leaves out each message of the assistant (train, weight), so there is nothing to learn")
    if not any(normal[number].get("tool_calls") or normal[number]["content"].strip() for number in wanted):
        raise RowRefused("has only empty messages of the assistant, so there is nothing to learn")
    return wanted


def _counts(message: Mapping[str, Any], number: int) -> bool:
    """Whether a message is learnt, by what it says itself."""
    for key in NOT_RENDERED:
        value = message.get(key)
        if value is not None and value not in (0, 1):
            raise RowRefused(f"message {number}: {key} is {_shown(value)}, and a message is learnt (1) or not (0)")
        if value is not None and not value:
            return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
