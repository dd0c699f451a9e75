"""Chat templates: conversations rendered to text, and what a template writes around a turn of the assistant.

What an assistant's turn is: what the model has to write after the prompt that ``add_generation_prompt`` makes, up to and
with the token that ends the turn. So the header is not in it, a thinking block or a channel that the template puts after the
header is, and what the template writes after the end (mostly a newline) is not.

Which text begins and ends a turn is read once, from a conversation of four turns whose contents are marks. Where the turns
of a conversation stand is found in :mod:`memtrain.data.turns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from memtrain.data.records import RowRefused

Message = dict[str, Any]

# Unicode keeps these as noncharacters: for use inside a program, in no text that is exchanged.
OPEN: Final = "\ufdd0"
CLOSE: Final = "\ufdd1"

_CHATML: Final = (
    "{{% for message in messages %}}"
    "{{{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + {end!r} + '\\n' }}}}"
    "{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"
)


def chatml(tokenizer: Any) -> str:
    """The ChatML template, with the tokenizer's end of sequence at the end of a turn where it knows no ``<|im_end|>``."""
    known = "<|im_end|>" in tokenizer.get_vocab() or tokenizer.eos_token is None
    return _CHATML.format(end="<|im_end|>" if known else str(tokenizer.eos_token))


def special_tokens(tokenizer: Any) -> list[str]:
    """The tokens that the tokenizer calls special, as text writes them."""
    added = (token for token in tokenizer.added_tokens_decoder.values() if token.special)
    return list(dict.fromkeys(str(token) for token in [*added, *tokenizer.all_special_tokens]))


def mark(number: int) -> str:
    """A text that no message has, to be put in the place of what message ``number`` says."""
    return f"{OPEN}{number}{CLOSE}"


def shown(text: str) -> str:
    """The beginning of a text, for errors."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


@dataclass(frozen=True)
class Frame:
    """What a template writes around an assistant's turn.

    Attributes:
        heads: after which a turn begins, the generation prompt first; empty where the template has no such prompt.
        header: what it writes before an answer without being asked to prompt, where that is more than spaces.
        lead: spaces before an answer that the model has to write, since a prompt ends before them.
        end: of a turn that another message follows; may be empty.
        last_end: of a turn that ends the conversation; may be empty.
    """

    heads: tuple[str, ...]
    header: str
    lead: str
    end: str
    last_end: str


class ChatTemplate:
    """A template of a tokenizer, and the frame of its turns.

    Attributes:
        text: the Jinja text.
        frame: what it writes around an assistant's turn.
        writes_tools: whether it has descriptions of tools in the text.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        """Take the Jinja text of a template.

        Raises:
            ValueError: it cannot be rendered, or does not tell where an assistant's turn begins.
        """
        self.text = text
        self.writes_tools = "tools" in text
        self._tokenizer = tokenizer
        self._specials = special_tokens(tokenizer)
        # Templates of models that also see images may take a content in parts alone.
        self._in_parts = False
        try:
            self.frame = self._read_frame()
        except ValueError as refused:
            self._in_parts = True
            try:
                self.frame = self._read_frame()
            except ValueError:
                raise refused from None

    def render(self, messages: Sequence[Message], tools: Any = None, prompt: bool = False, template: str | None = None) -> str:
        """The text of a conversation, and with ``prompt`` what asks for the next answer.

        Args:
            messages: the conversation.
            tools: descriptions of tools.
            prompt: whether an answer is asked for.
            template: Jinja text to take instead.

        Raises:
            RowRefused: the template raises, with its words.
        """
        from jinja2 import TemplateError

        given = [_in_parts(message) for message in messages] if self._in_parts else list(messages)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    given,
                    tools=tools,
                    chat_template=template or self.text,
                    add_generation_prompt=prompt,
                    tokenize=False,
                )
            )
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise RowRefused(f"is refused by the chat template ({str(error).strip() or type(error).__name__})") from error

    def ends(self, between: str, last: str, header: str = "") -> tuple[str, str]:
        """What ends a turn that another message follows, and a turn that is the last.

        Args:
            between: the text after a turn, up to where the next message begins to speak.
            last: the text after the same turn as the last one.
            header: what stands before a message of the kind that follows, elsewhere.
        """
        if between.startswith(last):
            return last.rstrip(), last.rstrip()
        tokens = [self._first_special(text) for text in (between, last)]
        # A token that ends no turn of another role may be the next message's header.
        if all(tokens) and not header.endswith(between.lstrip()):
            return tokens[0], tokens[1]
        # The longest that both have, up to where in both something new begins.
        for length in range(shared(between, last), 0, -1):
            if all(self._begins_anew(text[length:]) for text in (between, last)):
                return last[:length].rstrip(), last.rstrip()
        return "", last.rstrip()

    def _read_frame(self) -> Frame:
        roles = ("user", "assistant", "user", "assistant")
        talk: list[Message] = [{"role": role, "content": mark(number)} for number, role in enumerate(roles)]
        before: list[Message] = []
        try:
            try:
                whole = self.render(talk)
            except RowRefused:
                before = [{"role": "system", "content": "system"}]
                whole = self.render(before + talk)
            asked, unasked = (self.render(before + talk[:1], prompt=prompt).partition(mark(0))[2] for prompt in (True, False))
            answered = self.render(before + talk[:2]).partition(mark(1))[2]
        except RowRefused as refused:
            raise ValueError(
                f"the chat template cannot write a user's and an assistant's turn by turns: it {refused}; give another "
                f"chat_template."
            ) from refused
        parts = _split(whole, [mark(number) for number in range(4)])
        if parts is None:
            raise ValueError(
                "the chat template does not write what users and assistants say once each and in order, so what is to be "
                "learnt cannot be told: give another chat_template."
            )
        token = self._first_special(parts[2])
        ends_all = bool(token) and parts[1].lstrip().startswith(token.strip())
        end, last_end = self.ends(parts[2], answered, "" if ends_all else parts[0])
        if asked == unasked:
            header = parts[1].removeprefix(asked)
            blank = not header.strip()
            return Frame((), "" if blank else header, header if blank else "", end, last_end)
        return Frame(self._heads(asked, shared(asked, unasked), (parts[1], parts[3])), "", "", end, last_end)

    def _heads(self, asked: str, turn: int, gaps: Sequence[str]) -> tuple[str, ...]:
        """What turns begin after: the prompt, or as much of it as conversations have.

        A prompt may go on where conversations have the answer, as with a thinking block that it opens.

        Args:
            asked: the prompt after what a user says.
            turn: where in it what is written only to ask begins.
            gaps: what conversations have there.
        """
        heads = {asked[turn:]: None}
        for gap in gaps:
            alike = shared(asked, gap)
            if alike == len(asked):
                continue
            if alike < len(gap):
                alike = self._last_boundary(asked[:alike])
                if not asked[turn:alike].strip():
                    raise ValueError(
                        f"the chat template asks for an answer with {shown(asked)}, and in a conversation writes {shown(gap)} "
                        f"before it, so what is to be learnt cannot be told: give another chat_template."
                    )
            heads[asked[turn:alike]] = None
        return tuple(heads)

    def _first_special(self, text: str) -> str:
        """The special token that a text begins with, and the spaces before it; nothing where it begins with none."""
        spaces = len(text) - len(text.lstrip())
        found = max((token for token in self._specials if text.startswith(token, spaces)), key=len, default="")
        return text[:spaces] + found if found else ""

    def _begins_anew(self, text: str) -> bool:
        return not text or text[0].isspace() or bool(self._first_special(text))

    def _last_boundary(self, text: str) -> int:
        """Where the last line or special token in a text ends."""
        ends = (text.rfind(token) + len(token) for token in ("\n", *self._specials) if token in text)
        return max(ends, default=0)


def shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    differing = (place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differing, min(len(one), len(other)))


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]} if "content" in message else message


def _split(text: str, marks: Sequence[str]) -> list[str] | None:
    """The text between marks, each of which it must have once, in this order."""
    parts = []
    for each in marks:
        if text.count(each) != 1:
            return None
        part, _, text = text.partition(each)
        parts.append(part)
    return [*parts, text]
