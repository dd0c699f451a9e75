"""Where in the text of a conversation each turn of the assistant stands.

Templates with ``{% generation %}`` tags say so themselves. Each tag is given a character that no text has, the
conversation is rendered once more, and the characters tell where the blocks stand; the offsets that transformers keeps are
wrong for a block inside a macro.

For other templates the conversation is rendered once more with a mark in place of each answer: its outline. What stands
between the marks is the template's and the user's, and is looked up in the text. That takes two renderings however many
turns there are. It also holds where the rendering of the first turns is no prefix of the whole, as with Qwen3, which drops
the thinking of earlier turns. What does not have the frame of the template's turns is found by rendering the conversation up
to that turn, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from memtrain.data.records import RowRefused
from memtrain.data.templates import CLOSE, OPEN, ChatTemplate, Frame, Message, mark, shared, shown

Span = tuple[int, int]

_BEGINS: Final = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_ENDS: Final = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")


def find_turns(template: ChatTemplate, messages: Sequence[Message], tools: Any, text: str, wanted: Sequence[int]) -> list[Span]:
    """Where the turns of the assistant stand in ``text``, in characters, in order.

    Args:
        template: of the conversation.
        messages: the conversation.
        tools: what it was rendered with.
        text: the conversation rendered.
        wanted: numbers of the messages whose turns are asked for.

    Raises:
        RowRefused: it cannot be told for one of them.
    """
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if _BEGINS.search(template.text):
        if any(message.get("tool_calls") for message in messages):
            # Refuses calls that the template leaves out.
            _Outline(template, messages, tools, answers)
        marked = template.render(messages, tools, template=_with_marks(template.text))
        if marked.replace(OPEN, "").replace(CLOSE, "") == text:
            return [_trimmed(template.frame, text, *block) for block in _chosen(_blocks(marked), answers, wanted)]
    outline = _Outline(template, messages, tools, answers)
    try:
        spans = outline.spans(text, template.frame.heads)
    except RowRefused:
        if len(template.frame.heads) < 2:
            raise
        # A prompt that goes on as no answer of this conversation does.
        spans = outline.spans(text, template.frame.heads[1:])
    return [spans[number] for number in wanted]


class _Outline:
    """A conversation rendered with marks in place of the answers, and where the marks stand."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Message], tools: Any, answers: list[int]) -> None:
        self.template = template
        self.messages = messages
        self.tools = tools
        self.answers = answers
        self.marked = [_marked(message, number) if number in answers else message for number, message in enumerate(messages)]
        self.text = self.render(len(messages))
        self.places = [self._place(number) for number in answers]
        self.ends = [place + len(mark(number)) for number, place in zip(answers, self.places, strict=True)]

    def render(self, count: int, prompt: bool = False, tools: bool = True) -> str:
        """The first ``count`` messages; each mark is kept where it is first, in a call, and left out where a result names it."""
        text = self.template.render(self.marked[:count], self.tools if tools else None, prompt=prompt)
        for number in self.answers:
            if number < count and self.messages[number].get("tool_calls") and text.count(mark(number)) > 1:
                first, _, rest = text.partition(mark(number))
                text = first + mark(number) + rest.replace(mark(number), "")
        return text

    def spans(self, text: str, heads: Sequence[str]) -> dict[int, Span]:
        """Where each answer stands in the text of the conversation."""
        spans: dict[int, Span] = {}
        starts = [self._start(index, heads) for index in range(len(self.answers))]
        # Of the outline: what is not looked up yet begins at `done`. Of the text: it is found from `position` on.
        done = position = 0
        for index, (number, place, start) in enumerate(zip(self.answers, self.places, starts, strict=True)):
            if not text.startswith(self.text[done:start], position):
                raise _differs(number, self.text[done:start], text[position:])
            position += start - done
            done, begins = self.ends[index], position
            last = index + 1 == len(starts)
            # The text up to where the next turn begins is not the answer's, so the answer's end is found by it.
            limit = len(self.text) if last else starts[index + 1]
            follows = self.text[done:limit]
            stop = self._stop(number, done, limit)
            position = _found(text, position, self.text[start:place], self.messages[number], follows, last)
            if position < 0:
                raise _differs(number, follows, text[begins:])
            spans[number] = (begins, position + stop - done)
        return spans

    def _place(self, number: int) -> int:
        """Where the mark of a message stands."""
        found = self.text.count(mark(number))
        if found != 1:
            what = "tool_calls" if self.messages[number].get("tool_calls") else "content"
            times = "not at all" if not found else f"{found} times"
            raise RowRefused(f"message {number}: the chat template writes its {what} {times}, so it cannot be learnt")
        return self.text.index(mark(number))

    def _start(self, index: int, heads: Sequence[str]) -> int:
        """Where in the outline a turn begins."""
        frame, number, place = self.template.frame, self.answers[index], self.places[index]
        after = self.ends[index - 1] if index else 0
        called = bool(self.messages[number].get("tool_calls"))
        if not frame.heads and not called:
            return place - len(frame.lead) if self.text.endswith(frame.lead, after, place) else place
        said = [str(message.get("content", "")) for message in self.marked[:number]]
        for head in heads:
            # Where it may be a message's own words, or of another part of the turn, rendering up to here tells.
            if head.strip() and self.text.count(head, after, place) == 1 and not any(head in content for content in said):
                return self.text.index(head, after) + len(head)
        # Some templates write the tools before the last question, which is another one in the whole conversation.
        asks = (self.render(number, prompt=True, tools=tools) for tools in ((True, False) if self.tools else (True,)))
        asked = next((ask for ask in asks if len(ask) <= place and self.text.startswith(ask)), None)
        if asked is not None:
            return len(asked) + (len(frame.header) if self.text.startswith(frame.header, len(asked)) else 0)
        asked = self.render(number, prompt=True)
        alike = shared(asked, self.text)
        if alike >= place and not called:
            return place
        raise RowRefused(
            f"message {number}: the chat template asks for it with {shown(asked[alike:])}, and in the conversation writes "
            f"{shown(self.text[alike:])}, so where the answer begins cannot be told"
        )

    def _stop(self, number: int, after: int, limit: int) -> int:
        """Where in the outline the turn of a message ends, at ``limit`` at the latest."""
        frame = self.template.frame
        end = frame.last_end if number == len(self.messages) - 1 else frame.end
        if not self.messages[number].get("tool_calls") and self.text.startswith(end, after):
            return after + len(end)
        follows, token = self.text[after:limit], end.strip()
        own = self.render(number + 1).partition(mark(number))[2]
        if not self.text.startswith(own, after):
            own, _ = self.template.ends(follows, own)
            if not own:
                raise RowRefused(
                    f"message {number}: the chat template ends it in no way that is known, with {shown(follows)}, so where "
                    f"the answer ends cannot be told"
                )
        found = own.find(token) if token else -1
        return after + (found + len(token) if found >= 0 else len(own.rstrip()))


def _with_marks(template: str) -> str:
    """The template with a character at the beginning and at the end of what its generation tags enclose.

    The characters stand in blocks of their own beside the tags, so that the newlines and spaces that Jinja takes away around
    a block stay as they are.
    """
    template = _BEGINS.sub(rf"{{%\1 generation %}}{{% if true %}}{OPEN}{{% endif \2%}}", template)
    return _ENDS.sub(rf"{{%\1 if true %}}{CLOSE}{{% endif %}}{{% endgeneration \2%}}", template)


def _blocks(marked: str) -> list[Span]:
    """Where the outermost blocks stand, in the text without the characters that enclose them; empty ones left out."""
    blocks: list[Span] = []
    depth = start = 0
    for passed, found in enumerate(re.finditer(f"[{OPEN}{CLOSE}]", marked)):
        position = found.start() - passed
        if found.group() == OPEN:
            start = start if depth else position
            depth += 1
        else:
            depth -= 1
            if not depth and position > start:
                blocks.append((start, position))
    return blocks


def _chosen(blocks: list[Span], answers: list[int], wanted: Sequence[int]) -> list[Span]:
    """The blocks of the messages that are wanted."""
    if not blocks:
        raise RowRefused("has nothing between the generation tags of the chat template, so nothing would be learnt")
    if len(wanted) == len(answers):
        return blocks
    if len(blocks) != len(answers):
        raise RowRefused(
            f"leaves out some of its {len(answers)} assistant messages, and the chat template has {len(blocks)} generation "
            f"blocks for them, so which to leave out cannot be told"
        )
    return [block for number, block in zip(answers, blocks, strict=True) if number in wanted]


def _trimmed(frame: Frame, text: str, start: int, stop: int) -> Span:
    """A block without what a prompt writes of it, and with the end of the turn also where that stands behind it."""
    for head in frame.heads:
        begins = text.find(head, max(start - len(head), 0), min(start + len(head), stop)) if head.strip() else -1
        if begins >= 0:
            start = max(start, begins + len(head))
            break
    inside = text[start:stop].rstrip()
    for end in (frame.end, frame.last_end):
        if end.strip():
            if inside.endswith(end.strip()):
                return start, start + len(inside)
            if text.startswith(end, stop):
                return start, stop + len(end)
    return start, stop


def _marked(message: Message, number: int) -> Message:
    """The message with its mark: behind the name of its last call where it has calls, else in place of what it says."""
    if not message.get("tool_calls"):
        return {**message, "content": mark(number)}
    *calls, last = message["tool_calls"]
    function = last.get("function", last)
    function = {**function, "name": f"{function.get('name', '')}{mark(number)}"}
    last = {**last, "function": function} if "function" in last else function
    return {**message, "tool_calls": [*calls, last]}


def _found(text: str, position: int, before: str, message: Message, follows: str, last: bool) -> int:
    """Where in the text, from ``position`` on, what follows an answer begins; -1 where that cannot be told."""
    content = "" if message.get("tool_calls") else str(message.get("content", ""))
    end = len(text) - len(follows)
    for answer in (content, content.strip()):
        found = position + len(before) + len(answer)
        if text.startswith(before + answer + follows, position) and (found == end or not last):
            return found
    if last:
        return end if end >= position and text.endswith(follows) else -1
    return -1 if follows in content else text.find(follows, position)


def _differs(number: int, expected: str, text: str) -> RowRefused:
    return RowRefused(
        f"message {number}: the chat template writes {shown(text)} where another answer gives {shown(expected)}, so where "
        f"the answer stands cannot be told"
    )
