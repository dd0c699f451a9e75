"""Layouts: which columns rows have, and what these mean.

A layout is told once for each source, from the names of the columns that its first rows have. Names that are common for one
thing are taken for it where only one of them is there. Two readings of one source are refused, with what was found and what is
known, except that tokens come before what they were made from, and Alpaca's columns before the ``text`` that some files keep
beside them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, product
from typing import Any, Final

from memtrain.data.task import Task


class Layout(StrEnum):
    """What the columns of a source mean."""

    TEXT = "text"
    COMPLETION = "completion"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    TOKENS = "tokens"
    CLASSIFICATION = "classification"
    TAGGED = "tagged"


Roles = Mapping[str, str]
"""What is asked for, to the column that has it."""

_PROMPTS: Final = ("prompt", "question", "query", "input", "instruction")
_COMPLETIONS: Final = ("completion", "response", "answer", "output")
_TEXT_PAIRS: Final = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text", "text_pair"))
_TAGS: Final = ("ner_tags", "tags", "labels", "pos_tags")


def _classified(label: str) -> tuple[tuple[Roles, ...], ...]:
    pairs = tuple({"text": one, "text_pair": two, "label": label} for one, two in _TEXT_PAIRS)
    return pairs, tuple({"text": text, "label": label} for text in ("text", "sentence"))


# Of each layout the columns by which it is told. The first group of which any are there decides; two of a group are too many.
_TOLD_BY: Final[Mapping[Layout, tuple[tuple[Roles, ...], ...]]] = {
    Layout.TEXT: (({"text": "text"},),),
    Layout.COMPLETION: (
        ({"prompt": "prompt", "completion": "completion"},),
        tuple({"prompt": prompt, "completion": completion} for prompt, completion in product(_PROMPTS, _COMPLETIONS)),
    ),
    Layout.MESSAGES: (({"messages": "messages"},),),
    Layout.SHAREGPT: (({"messages": "conversations"}, {"messages": "conversation"}),),
    Layout.ALPACA: (
        ({"instruction": "instruction", "output": "output"}, {"instruction": "instruction", "output": "response"}),
    ),
    Layout.TOKENS: (({"input_ids": "input_ids"},),),
    Layout.CLASSIFICATION: (*_classified("label"), *_classified("labels")),
    Layout.TAGGED: tuple(({"words": words, "tags": tags},) for words, tags in product(("tokens", "words"), _TAGS)),
}
# Read from every row that has them, also where the first rows have not.
_OPTIONAL: Final[Mapping[Layout, tuple[str, ...]]] = {
    Layout.COMPLETION: ("tools",),
    Layout.MESSAGES: ("tools",),
    Layout.SHAREGPT: ("system", "tools"),
    Layout.ALPACA: ("input", "system", "history"),
    Layout.TOKENS: ("labels", "attention_mask"),
}
_LEARNT_BY_MASK: Final = ("completion_mask", "assistant_masks")
_CONVERSATIONS: Final = (Layout.COMPLETION, Layout.MESSAGES, Layout.SHAREGPT, Layout.ALPACA)
LAYOUTS_OF: Final[Mapping[Task, tuple[Layout, ...]]] = {
    Task.CAUSAL_LM: (Layout.TEXT, *_CONVERSATIONS, Layout.TOKENS),
    Task.MASKED_LM: (Layout.TEXT, Layout.TOKENS),
    Task.SEQ2SEQ_LM: (*_CONVERSATIONS, Layout.TOKENS),
    Task.SEQUENCE_CLASSIFICATION: (Layout.CLASSIFICATION, Layout.TOKENS),
    Task.TOKEN_CLASSIFICATION: (Layout.TAGGED, Layout.TOKENS),
    Task.IMAGE_CLASSIFICATION: (),
    Task.OTHER: (Layout.TOKENS,),
}
"""The layouts that a task can learn from."""

_NAMED: Final[Mapping[Layout, str]] = {
    Layout.TEXT: "text",
    Layout.COMPLETION: "prompts and completions",
    Layout.MESSAGES: "messages",
    Layout.SHAREGPT: "ShareGPT conversations",
    Layout.ALPACA: "Alpaca instructions",
    Layout.TOKENS: "tokens",
    Layout.CLASSIFICATION: "texts and labels",
    Layout.TAGGED: "words and tags",
}


@dataclass(frozen=True)
class Columns:
    """What the columns of a source mean.

    Attributes:
        layout: what they are together.
        roles: what is asked for, to the column that has it; what need not be there included.
        needed: the roles that every row must have.
    """

    layout: Layout
    roles: Roles
    needed: frozenset[str]

    def said(self, sources: Sequence[str], seen: Iterable[str], learnt: str) -> str:
        """What was found, in a sentence for people.

        Args:
            sources: that are alike, one or more.
            seen: the columns that any of their rows has.
            learnt: what is learnt of them.
        """
        used = [name for name in seen if name in self.roles.values()]
        unused = [name for name in seen if name not in self.roles.values()]
        source, hold = sources[0], "holds"
        if len(sources) > 1:
            source, hold = f"{sources[0]} and {len(sources) - 1} more", "hold"
        rest = ""
        if unused:
            rest = f"; {_counted('column', unused)} {'is' if len(unused) == 1 else 'are'} not used"
        return f"{source} {hold} {_NAMED[self.layout]} ({_counted('column', used)}): {learnt}{rest}."


def detect(rows: Iterable[Mapping[str, Any]], source: str, task: Task, layout: str = "auto") -> Columns:
    """Tell the layout of a source from its first rows.

    Args:
        rows: one or more.
        source: its name in messages.
        task: what is learnt from it.
        layout: the name of a :class:`Layout`, where it is known.

    Raises:
        ValueError: nothing is known that the task could learn from, or more than one thing.
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    known = LAYOUTS_OF[task]
    if layout != "auto":
        return _as_given(Layout(layout), names, source, task)
    _refuse_preferences(rows, names, source)
    found = {one: groups for one in known if (groups := _matches(one, names))}
    if Layout.TOKENS in found:
        found = {Layout.TOKENS: found[Layout.TOKENS]}
    if Layout.ALPACA in found:
        found.pop(Layout.TEXT, None)
        if not {"prompt", "completion"} <= set(names):
            found.pop(Layout.COMPLETION, None)
    readings = [(one, roles) for one, matches in found.items() for roles in matches]
    if not readings:
        raise ValueError(
            f"{source} has {_counted('column', names)}, from which {_learner(task)} cannot learn: {_remedy(task)}."
        )
    if len(readings) > 1:
        ways = " or ".join(f"{_NAMED[one]} ({', '.join(roles.values())})" for one, roles in readings)
        remedy = f"set layout to {' or '.join(found)}" if len(found) > 1 else "rename or remove the others"
        raise ValueError(
            f"{source} has {_counted('column', names)}, which can be read as {ways}: {remedy}; known are {_described(known)}."
        )
    return _columns(*readings[0], names, task)


def _matches(layout: Layout, names: Collection[str]) -> tuple[Roles, ...]:
    """The ways in which columns of these names have the layout; one, several or none."""
    for group in _TOLD_BY[layout]:
        matches = tuple(roles for roles in group if all(name in names for name in roles.values()))
        if matches:
            return matches
    return ()


def _as_given(layout: Layout, names: Sequence[str], source: str, task: Task) -> Columns:
    if layout not in LAYOUTS_OF[task]:
        raise ValueError(f"layout is {layout}, from which {_learner(task)} cannot learn: {_remedy(task)}.")
    matches = _matches(layout, names)
    if len(matches) != 1:
        ways = " or ".join(", ".join(roles.values()) for roles in matches) or "none"
        raise ValueError(
            f"{source} has {_counted('column', names)} and layout is {layout}, of which one set of columns must be there and "
            f"{ways} is: name them as {_described((layout,))}."
        )
    return _columns(layout, matches[0], names, task)


def _columns(layout: Layout, roles: Roles, names: Collection[str], task: Task) -> Columns:
    optional = {name: name for name in _OPTIONAL.get(layout, ())}
    if layout is Layout.ALPACA and "context" in names and "input" not in names:
        optional["input"] = "context"
    if layout is Layout.TOKENS:
        optional |= {name: name for name in (_LEARNT_BY_MASK if task is Task.CAUSAL_LM else ("token_type_ids",))}
        if task is Task.SEQUENCE_CLASSIFICATION and "labels" not in names:
            optional["labels"] = "label"
    return Columns(layout, {**roles, **optional}, frozenset(roles))


def _refuse_preferences(rows: Sequence[Mapping[str, Any]], names: Collection[str], source: str) -> None:
    """Refuse answers that are compared, since learning all of them alike would teach the bad ones."""
    compared = {"chosen", "rejected"} <= set(names)
    judged = {"prompt", "completion", "label"} <= set(names) and any(isinstance(row.get("label"), bool) for row in rows)
    if compared or judged:
        shown = "chosen, rejected" if compared else "prompt, completion and a true or false label"
        raise ValueError(
            f"{source} is preference data ({shown}), which is for DPO and its like and not learnt from here: keep the good answers "
            f"as prompt and completion."
        )


def _remedy(task: Task) -> str:
    if not LAYOUTS_OF[task]:
        return "give rows of tensors, or a data_collator that makes them"
    more = ", or give rows of tensors or a data_collator" if task is Task.OTHER else ""
    return f"known are {_described(LAYOUTS_OF[task])}{more}"


def _learner(task: Task) -> str:
    return "a model of another kind" if task is Task.OTHER else f"the task {task}"


def _described(layouts: Iterable[Layout]) -> str:
    """Layouts with the columns by which they are told, of each the first way that needs the fewest."""
    ways = {layout: min(chain.from_iterable(_TOLD_BY[layout]), key=len) for layout in layouts}
    return "; ".join(f"{layout} ({', '.join(roles.values())})" for layout, roles in ways.items())


def _counted(noun: str, names: Sequence[str]) -> str:
    return f"{noun}{'s' * (len(names) != 1)} {', '.join(names)}" if names else f"no {noun}s"
