"""Forms: what a row says, whatever its columns are called, with everything that it needs there and of the right kind.

A value that is missing, empty or of another kind makes the row unusable, and the reason names the column, what it has and what
is needed. Files in which all is text (CSV) may have lists as JSON and numbers in digits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

from memtrain.data.layouts import Columns, Layout
from memtrain.data.records import RowRefused

Message = dict[str, Any]

# Who speaks in ShareGPT and its like, in the words of chat templates.
_SPEAKERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bard", "chatgpt", "bing", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response"), "tool"),
    "system": "system",
    "function_call": "function_call",
}


@dataclass(frozen=True)
class Text:
    """One document."""

    text: str


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it, as text that stands as it is."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Messages, of which those of the assistant are learnt.

    Attributes:
        prompt: messages of which none is learnt.
        messages: those after them.
        tools: descriptions of tools, a list or its JSON; None for none.
    """

    prompt: list[Message]
    messages: list[Message]
    tools: Any = None


@dataclass(frozen=True)
class Instruction:
    """An instruction in the form of Alpaca; what is not there is empty."""

    instruction: str
    input: str
    output: str
    system: str
    history: list[tuple[str, str]]

    def conversation(self) -> Conversation:
        """As messages; the input stands two lines below the instruction."""
        asked = f"{self.instruction}\n\n{self.input}" if self.input else self.instruction
        turns = [*self.history, (asked, self.output)]
        prompt: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in turns:
            prompt += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return Conversation(prompt[:-1], prompt[-1:])

    def completion(self) -> Completion:
        """As the text that Alpaca was trained on (Taori et al., 2023, stanford_alpaca, train.py)."""
        for name, value in (("system", self.system), ("history", self.history)):
            if value:
                raise RowRefused(f"has a {name}, for which the Alpaca prompt has no place: give chat_template")
        further = ", paired with an input that provides further context" if self.input else ""
        middle = f"### Input:\n{self.input}\n\n" if self.input else ""
        prompt = (
            f"Below is an instruction that describes a task{further}. Write a response that appropriately completes the request."
            f"\n\n### Instruction:\n{self.instruction}\n\n{middle}### Response:"
        )
        return Completion(prompt, self.output)


@dataclass(frozen=True)
class Tokens:
    """Tokens that were made elsewhere, without their padding.

    Attributes:
        input_ids: one or more.
        labels: as the row has them, a list of whole numbers or one value; None where it has none.
        padded: how many numbers the row has with its padding, as a list of labels for them has; and which of them are no padding.
        masks: of each token whether it is learnt; as many lists as the row has masks.
        token_type_ids: of each token, or None.
    """

    input_ids: list[int]
    labels: Any
    padded: tuple[int, slice]
    masks: tuple[list[int], ...]
    token_type_ids: list[int] | None


@dataclass(frozen=True)
class Labelled:
    """A text, or two, and the label of it."""

    text: str
    text_pair: str | None
    label: Any


@dataclass(frozen=True)
class Tagged:
    """Words and a tag for each."""

    words: list[str]
    tags: list[Any]


Form = Text | Completion | Conversation | Instruction | Tokens | Labelled | Tagged


def form_of(values: Mapping[str, Any], columns: Columns) -> Form:
    """What a row says.

    Raises:
        RowRefused: it lacks something, or has something of another kind.
    """
    row = _Row(values, columns)
    match columns.layout:
        case Layout.TEXT:
            return Text(row.text("text"))
        case Layout.COMPLETION:
            return _completion(row)
        case Layout.MESSAGES | Layout.SHAREGPT:
            system = row.optional_text("system")
            first: list[Message] = [{"role": "system", "content": system}] if system else []
            return Conversation([], first + row.messages("messages"), row.get("tools"))
        case Layout.ALPACA:
            instruction, answer = row.text("instruction"), row.text("output")
            system, given = row.optional_text("system"), row.optional_text("input")
            return Instruction(instruction, given, answer, system, row.history("history"))
        case Layout.TOKENS:
            return _tokens(row)
        case Layout.CLASSIFICATION:
            pair = row.text("text_pair") if "text_pair" in columns.needed else None
            return Labelled(row.text("text"), pair, row.needed("label", "a label"))
        case Layout.TAGGED:
            return _tagged(row)


def _completion(row: _Row) -> Completion | Conversation:
    needed = "a text or a list of messages"
    prompt, completion = row.needed("prompt", needed), row.needed("completion", needed)
    texts = [isinstance(value, str) for value in (prompt, completion)]
    if all(texts):
        # Spaces alone may well be a prompt, and are no answer.
        return Completion(row.text("prompt", blank=True), row.text("completion"))
    if any(texts):
        raise RowRefused(
            f"has {shown(prompt)} for {row.name('prompt')!r} and {shown(completion)} for {row.name('completion')!r}, and both must "
            f"be texts, or both lists of messages"
        )
    return Conversation(row.messages("prompt"), row.messages("completion"), row.get("tools"))


def _tokens(row: _Row) -> Tokens:
    ids = row.numbers("input_ids")
    if not ids:
        raise RowRefused(f"has no token in {row.name('input_ids')!r}, and one or more are needed")
    own = slice(0, len(ids))
    mask = row.each("attention_mask", len(ids))
    if mask is not None:
        if 1 not in mask:
            raise RowRefused("has an attention_mask of zeros alone, so all of it is padding")
        own = slice(mask.index(1), len(mask) - mask[::-1].index(1))
        if 0 in mask[own]:
            raise RowRefused("has an attention_mask with zeros between ones, and padding stands at the ends")
    labels = row.listed(row.get("labels"))
    if isinstance(labels, list):
        labels = row.numbers("labels")
    masks = [row.each(name, len(ids)) for name in ("completion_mask", "assistant_masks")]
    types = row.each("token_type_ids", len(ids), most=None)
    return Tokens(
        ids[own],
        labels,
        (len(ids), own),
        tuple(mask[own] for mask in masks if mask is not None),
        None if types is None else types[own],
    )


def _tagged(row: _Row) -> Tagged:
    words, tags = row.items("words", "a list of words"), row.items("tags", "a list of tags")
    for number, word in enumerate(words):
        if not isinstance(word, str) or not word:
            raise RowRefused(
                f"has {shown(word)} as word {number} of {row.name('words')!r}, and a text that is not empty is needed"
            )
        check_text(word, row.name("words"))
    if len(tags) != len(words) or not words:
        raise RowRefused(f"has {len(words)} words and {len(tags)} tags, and each word, one or more, needs one")
    return Tagged(words, tags)


class _Row:
    """The values of a row by what they mean."""

    def __init__(self, values: Mapping[str, Any], columns: Columns) -> None:
        self._values, self._columns = values, columns

    def name(self, role: str) -> str:
        """The column that has it."""
        return self._columns.roles[role]

    def get(self, role: str) -> Any:
        """The value, None where there is none or where the layout has no such thing."""
        name = self._columns.roles.get(role)
        return None if name is None else self._values.get(name)

    def needed(self, role: str, needed: str) -> Any:
        name = self.name(role)
        value = self._values.get(name)
        if value is None:
            raise RowRefused(f"has {'null for' if name in self._values else 'no'} {name!r}, and {needed} is needed")
        return value

    def text(self, role: str, *, blank: bool = False) -> str:
        """A text that is not empty, and unless ``blank`` not of white space alone."""
        value = self.needed(role, "a text that is not empty")
        if not isinstance(value, str) or not (value if blank else value.strip()):
            raise RowRefused(f"has {shown(value)} for {self.name(role)!r}, and a text that is not empty is needed")
        return check_text(value, self.name(role))

    def optional_text(self, role: str) -> str:
        value = self.get(role)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise RowRefused(f"has {shown(value)} for {self.name(role)!r}, and a text is needed where there is something")
        return check_text(value, self.name(role)) if value.strip() else ""

    def listed(self, value: Any) -> Any:
        """The value as a list, if it is one in another form: JSON, a tuple, an array."""
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return value
        elif hasattr(value, "tolist"):
            value = value.tolist()
        return list(value) if isinstance(value, tuple) else value

    def items(self, role: str, needed: str) -> list[Any]:
        value = self.listed(self.needed(role, needed))
        if not isinstance(value, list):
            raise RowRefused(f"has {shown(value)} for {self.name(role)!r}, and {needed} is needed")
        return value

    def numbers(self, role: str) -> list[int]:
        """A list of whole numbers; empty if it is."""
        values = self.items(role, "a list of whole numbers")
        if {*map(type, values)} <= {int}:
            return values
        for number, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise RowRefused(f"has {shown(value)} at place {number} of {self.name(role)!r}, and a whole number is needed")
        return [int(value) for value in values]

    def each(self, role: str, count: int, most: int | None = 1) -> list[int] | None:
        """A number from 0 for each of ``count`` tokens, at most ``most``; None where there are none."""
        if self.get(role) is None:
            return None
        values = [int(value) if isinstance(value, bool) else value for value in self.items(role, "a list of whole numbers")]
        if len(values) != count:
            raise RowRefused(f"has {len(values)} numbers in {self.name(role)!r} for {count} tokens, and each token needs one")
        for value in values:
            if not isinstance(value, Integral) or int(value) < 0 or (most is not None and int(value) > most):
                raise RowRefused(
                    f"has {shown(value)} in {self.name(role)!r}, and {'0 or 1' if most else '0 or more'} is needed"
                )
        return [int(value) for value in values]

    def messages(self, role: str) -> list[Message]:
        name = self.name(role)
        turns = self.items(role, "a list of messages")
        if not turns:
            raise RowRefused(f"has an empty list for {name!r}, and one message or more is needed")
        messages = [_message(turn, number, name) for number, turn in enumerate(turns)]
        _check_strings(messages, name)
        return messages

    def history(self, role: str) -> list[tuple[str, str]]:
        if not self.get(role):
            return []
        turns = [self.listed(turn) for turn in self.items(role, "a list of pairs of texts")]
        for turn in turns:
            if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) and text.strip() for text in turn):
                raise RowRefused(
                    f"has {shown(turn)} in {self.name(role)!r}, and a pair of texts is needed: a question, its answer"
                )
            for text in turn:
                check_text(text, self.name(role))
        return [(question, answer) for question, answer in turns]


def _message(turn: Any, number: int, name: str) -> Message:
    """A message with role and content; one of ShareGPT (from and value) is written so."""
    place = f"has {shown(turn)} as message {number} of {name!r}"
    if not isinstance(turn, Mapping):
        raise RowRefused(f"{place}, and a mapping with a role and a content is needed")
    by_role = isinstance(turn.get("role"), str)
    speaker = turn["role"] if by_role else turn.get("from")
    if not isinstance(speaker, str):
        raise RowRefused(f"{place}, and a role and a content (or from and value) are needed")
    # Roles are the template's to know; other names for who speaks are not.
    role = _SPEAKERS.get(speaker, speaker if by_role else None)
    if role is None:
        raise RowRefused(f"has a message {number} of {name!r} from {speaker!r}, and known are {', '.join(_SPEAKERS)}")
    message = {key: value for key, value in turn.items() if key not in ("role", "from", "value")}
    if not by_role:
        message["content"] = turn.get("value", turn.get("content"))
        if not isinstance(message["content"], str):
            raise RowRefused(f"{place}, and a text for its value is needed")
    if role != "function_call":
        return {"role": role, **message}
    del message["content"]
    return {"role": "assistant", **message, "tool_calls": _calls(turn, number, name)}


def _calls(turn: Mapping[str, Any], number: int, name: str) -> list[Message]:
    """The calls of tools that a ShareGPT turn holds as JSON: a mapping of name and arguments, or a list of these."""
    value = turn.get("value", turn.get("content"))
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        calls = None
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list) or not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise RowRefused(
            f"has {shown(value)} as function_call in message {number} of {name!r}, and the JSON of a name and its arguments is needed"
        )
    return [{"type": "function", "function": dict(call)} for call in calls]


def _check_strings(value: Any, name: str) -> None:
    if isinstance(value, str):
        check_text(value, name)
    elif isinstance(value, Mapping):
        for part in value.values():
            _check_strings(part, name)
    elif isinstance(value, Sequence):
        for part in value:
            _check_strings(part, name)


def check_text(text: str, name: str) -> str:
    """Refuse half of a surrogate pair, which JSON and Python can hold and no tokenizer reads."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowRefused(
                f"has half of a surrogate pair in {name!r} (\\u{ord(text[error.start]):04x} at character {error.start}), which is no "
                f"text: write the row again"
            ) from error
    return text


def as_number(value: Any) -> int | float | None:
    """A number, or the number that a text is in digits; None for anything else."""
    if isinstance(value, str):
        try:
            return int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
        except ValueError:
            return None
    if isinstance(value, bool | Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


def shown(value: Any) -> str:
    """A value for messages, its beginning where it is long."""
    try:
        text = repr(value[:60] if isinstance(value, str) else value)
    except (ValueError, RecursionError):
        # Numbers of thousands of digits, lists within thousands of lists.
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 60 else f"{text[:60]}..."
