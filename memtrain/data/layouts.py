"""Layouts: what the columns of a record mean, told by their names, and records in one form for each meaning."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from memtrain.data.records import RowRefused


class Layout(StrEnum):
    """The layouts that are known, the most telling first."""

    TOKENS = "tokens"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    COMPLETION = "completion"
    ALPACA = "alpaca"
    CLASSIFICATION = "classification"
    TEXT = "text"


# The columns that a layout needs; of each group one.
_NEEDED: Final[Mapping[Layout, tuple[tuple[str, ...], ...]]] = {
    Layout.TOKENS: (("input_ids",),),
    Layout.MESSAGES: (("messages",),),
    Layout.SHAREGPT: (("conversations", "conversation"),),
    Layout.COMPLETION: (("prompt",), ("completion", "response")),
    Layout.ALPACA: (("instruction",), ("output", "response")),
    Layout.CLASSIFICATION: (("text", "sentence"), ("label",)),
    Layout.TEXT: (("text",),),
}
_MORE: Final[Mapping[Layout, tuple[str, ...]]] = {
    Layout.TOKENS: ("labels", "attention_mask"),
    Layout.MESSAGES: ("tools",),
    Layout.SHAREGPT: ("system", "tools"),
    Layout.COMPLETION: ("tools",),
    Layout.ALPACA: ("input", "system"),
}
LEARNT: Final[Mapping[Layout, str]] = {
    Layout.TOKENS: "their labels are learnt",
    Layout.MESSAGES: "the assistant's turns are learnt",
    Layout.SHAREGPT: "the assistant's turns are learnt",
    Layout.COMPLETION: "completions are learnt",
    Layout.ALPACA: "outputs are learnt",
    Layout.CLASSIFICATION: "labels are learnt",
    Layout.TEXT: "all of it is learnt",
}
_ROLES: Final = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
# Stanford's prompts (github.com/tatsu-lab/stanford_alpaca).
_ALPACA: Final = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT: Final = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Text:
    """Text by itself, with the class that it has where it has one."""

    text: str
    label: int | float | None = None


@dataclass(frozen=True)
class Completion:
    """A prompt and what is to be written after it, as they stand."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Messages; of a prompt with a completion ``first`` is the number of the first message that may be learnt."""

    messages: Sequence[Mapping[str, Any]]
    tools: Any = None
    first: int = 0


@dataclass(frozen=True)
class Tokens:
    """Tokens, and what is learnt of them: a label for each, other tokens, or one label for all."""

    input_ids: list[int]
    labels: list[int] | int | float


Normal = Text | Completion | Conversation | Tokens


def layout_of(columns: Collection[str], source: str) -> Layout:
    """The layout of records with these columns.

    Raises:
        ValueError: none is known; or they hold preferences, which nothing here trains on.
    """
    if {"chosen", "rejected"} <= set(columns):
        raise ValueError(f"{source} has the columns chosen and rejected, which are preferences: give rows of one answer each.")
    for layout, groups in _NEEDED.items():
        if all(any(name in columns for name in group) for group in groups):
            return layout
    known = "; ".join(f"{layout} ({', '.join(group[0] for group in groups)})" for layout, groups in _NEEDED.items())
    raise ValueError(
        f"{source} has the columns {', '.join(sorted(columns))}, which are no layout known: rename them to {known}."
    )


def unused(columns: Collection[str], layout: Layout) -> list[str]:
    """The columns that a layout does not read."""
    used = {name for group in _NEEDED[layout] for name in group} | set(_MORE.get(layout, ()))
    return sorted(set(columns) - used)


def normal(values: Mapping[str, Any], layout: Layout) -> Normal:
    """A record in the form of its layout.

    Raises:
        RowRefused: a column is missing, empty, or of another type.
    """
    match layout:
        case Layout.TEXT:
            return Text(_text(values, "text"))
        case Layout.CLASSIFICATION:
            label = values.get("label")
            if isinstance(label, bool) or not isinstance(label, int | float):
                raise RowRefused(f"has label {label!r}, and a number is needed")
            return Text(_text(values, *_NEEDED[layout][0]), label)
        case Layout.TOKENS:
            return _tokens(values)
        case Layout.COMPLETION:
            return _completion(values)
        case Layout.MESSAGES:
            return Conversation(_messages(values, "messages"), values.get("tools"))
        case Layout.SHAREGPT:
            turns = [_turn(turn) for turn in _messages(values, "conversations", "conversation")]
            if values.get("system"):
                turns.insert(0, {"role": "system", "content": _text(values, "system")})
            return Conversation(turns, values.get("tools"))
        case Layout.ALPACA:
            asked = _text(values, "instruction")
            if values.get("input"):
                asked = f"{asked}\n\n{_text(values, 'input')}"
            system = [{"role": "system", "content": values["system"]}] if values.get("system") else []
            answer = {"role": "assistant", "content": _text(values, "output", "response")}
            return Conversation([*system, {"role": "user", "content": asked}, answer])


def alpaca_text(values: Mapping[str, Any]) -> Completion:
    """A record of Alpaca's layout as its authors wrote it, for tokenizers without a chat template.

    Raises:
        RowRefused: as :func:`normal`.
    """
    form = _ALPACA_WITH_INPUT if values.get("input") else _ALPACA
    given = {"instruction": _text(values, "instruction"), "input": values.get("input")}
    return Completion(form.format(**given), _text(values, "output", "response"))


def _completion(values: Mapping[str, Any]) -> Completion | Conversation:
    answer = "completion" if "completion" in values else "response"
    if isinstance(values.get("prompt"), list) or isinstance(values.get(answer), list):
        prompt = _messages(values, "prompt")
        return Conversation([*prompt, *_messages(values, answer)], values.get("tools"), len(prompt))
    return Completion(_text(values, "prompt"), _text(values, answer))


def _text(values: Mapping[str, Any], *names: str) -> str:
    name = next((name for name in names if name in values), None)
    if name is None:
        raise RowRefused(f"has no {names[0]!r}, and it is needed")
    text = values[name]
    if not isinstance(text, str):
        raise RowRefused(f"has {name!r} as {_kind(text)}, and text is needed")
    if not text.strip():
        raise RowRefused(f"has a {name!r} {'of white space alone' if text else 'that is empty'}, and text is needed")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise RowRefused(f"has half of a surrogate pair in {name!r}, which is no text")
    return text


def _messages(values: Mapping[str, Any], *names: str) -> list[Mapping[str, Any]]:
    name = next((name for name in names if name in values), None)
    if name is None:
        raise RowRefused(f"has no {names[0]!r}, and it is needed")
    messages = values[name]
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except ValueError:
            raise RowRefused(f"has {name!r} as text, and a list of messages is needed") from None
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        raise RowRefused(f"has {name!r} as {_kind(messages)}, and a list of messages is needed")
    if not messages:
        raise RowRefused(f"has a {name!r} that is empty, and messages are needed")
    return list(messages)


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of ShareGPT as a message."""
    who, said = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if who not in _ROLES:
        raise RowRefused(f"has a turn from {who!r}, and known are {', '.join(_ROLES)}")
    rest = {name: value for name, value in turn.items() if name not in ("from", "role", "value", "content")}
    return {"role": _ROLES[who], "content": said, **rest}


def _tokens(values: Mapping[str, Any]) -> Tokens:
    ids = _numbers(values, "input_ids")
    given = values.get("labels", ids)
    labels = given if isinstance(given, int | float) and not isinstance(given, bool) else _numbers({"labels": given}, "labels")
    if values.get("attention_mask") is None:
        return Tokens(ids, labels)
    mask = _numbers(values, "attention_mask")
    if len(mask) != len(ids):
        raise RowRefused(f"has {len(mask)} attention_mask for {len(ids)} input_ids, and each token has one")
    # What is masked is padding.
    kept = [place for place, real in enumerate(mask) if real]
    if isinstance(labels, list) and len(labels) == len(ids):
        labels = [labels[place] for place in kept]
    return Tokens([ids[place] for place in kept], labels)


def _numbers(values: Mapping[str, Any], name: str) -> list[int]:
    found: Any = values.get(name)
    found = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(found, list | tuple) or not all(type(number) is int for number in found):
        raise RowRefused(f"has {name!r} as {_kind(found)}, and a list of whole numbers is needed")
    if not found:
        raise RowRefused(f"has a {name!r} that is empty, and tokens are needed")
    return list(found)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
