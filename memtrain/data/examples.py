"""Examples: rows as numbers, and what all that make them share: tokens of texts, and the tokens that stand around a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from memtrain.data.forms import Form
from memtrain.data.layouts import Columns
from memtrain.data.records import RowRefused
from memtrain.data.rows import IGNORED


@dataclass(frozen=True)
class Example:
    """A row as numbers.

    Attributes:
        columns: the names of the model's arguments to numbers; labels are :data:`~memtrain.data.rows.IGNORED` where nothing is
            learnt, and are not shifted.
        learnt: how many of its tokens or labels are learnt, after the shift of a causal model.
        cut: tokens that were cut off.
        without_end: whether it was cut within what is learnt, so that its end is not learnt.
    """

    columns: Mapping[str, list[int] | int | float]
    learnt: int
    cut: int = 0
    without_end: bool = False


class Maker(Protocol):
    """Makes examples for one task."""

    def accept(self, columns: Columns) -> None:
        """Refuse, by a ValueError, a source whose layout does not go with what was asked for."""
        ...

    def learnt(self, columns: Columns) -> str:
        """What is learnt of a source, in words: ``"assistant turns are learnt"``."""
        ...

    def prepared(self, form: Form) -> Form:
        """What a row says, in a form that the task learns from; else RowRefused."""
        ...

    def texts(self, form: Form) -> tuple[str, ...]:
        """The texts that :meth:`tokens` is asked for."""
        ...

    def tokens(self, texts: Sequence[tuple[str, ...]]) -> list[list[list[int]]]:
        """The tokens of each text of many rows, made together, which is faster."""
        ...

    def make(self, form: Form, tokens: Sequence[list[int]]) -> list[Example]:
        """Examples of one row, given the tokens of its texts: one or, cut, several; none where it is left out as too long.

        Raises:
            RowRefused: nothing could be learnt from it.
        """
        ...


def tokenise(tokenizer: Any, texts: Sequence[str], *, target: bool = False) -> list[list[int]]:
    """The tokens of texts and none besides.

    Args:
        target: whether they are what a sequence-to-sequence model has to write, for which some tokenizers differ.
    """
    if not texts:
        return []
    tokens: list[list[int]] = tokenizer(
        **{"text_target" if target else "text": list(texts)},
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]
    return tokens


def in_rows(tokens: Sequence[list[int]], texts: Sequence[tuple[str, ...]]) -> list[list[list[int]]]:
    """The tokens of all texts, one after the other, by the rows that the texts are of."""
    remaining = iter(tokens)
    return [[next(remaining) for _ in row] for row in texts]


@dataclass(frozen=True)
class Ends:
    """What a tokenizer sets before and behind a text by itself."""

    before: list[int]
    behind: list[int]

    @classmethod
    def of(cls, tokenizer: Any, *, target: bool = False) -> Self:
        """Ask the tokenizer, by a text of one letter; without one there are none."""
        if tokenizer is None:
            return cls([], [])
        name = "text_target" if target else "text"
        bare, dressed = (list(tokenizer(**{name: "a"}, add_special_tokens=special)["input_ids"]) for special in (False, True))
        for start in range(len(dressed) - len(bare) + 1):
            if bare and dressed[start : start + len(bare)] == bare:
                return cls(dressed[:start], dressed[start + len(bare) :])
        # The letter gives no token: then what begins a text stands before it.
        first = len(dressed[:1]) if dressed[:1] in ([tokenizer.bos_token_id], [tokenizer.cls_token_id]) else 0
        return cls(dressed[:first], dressed[first:]) if not bare else cls([], [])

    @property
    def count(self) -> int:
        return len(self.before) + len(self.behind)

    def bare(self, tokens: list[int]) -> list[int]:
        """Tokens without what the text itself has of the ends."""
        start = len(self.before) if self.before and tokens[: len(self.before)] == self.before else 0
        stop = len(tokens)
        if self.behind and tokens[start:][-len(self.behind) :] == self.behind:
            stop -= len(self.behind)
        return tokens[start:stop]

    def around(self, tokens: list[int]) -> list[int]:
        return [*self.before, *tokens, *self.behind]


def room(length: int, ends: Ends) -> int:
    """How many tokens of its own a row may have.

    Raises:
        ValueError: none.
    """
    if ends.count >= length:
        raise ValueError(
            f"sequence_length is {length}, and the tokenizer sets {ends.count} tokens around each text: raise it to "
            f"{ends.count + 1} or more."
        )
    return length - ends.count


def cut_before_end(tokens: list[int], length: int, ends: Ends) -> list[int]:
    """The first ``length`` tokens of a row that is longer, with what stands behind a text kept, such as ``[SEP]``."""
    behind = ends.behind
    if len(tokens) <= length or not behind or tokens[-len(behind) :] != behind or len(behind) >= length:
        return tokens[:length]
    return tokens[: length - len(behind)] + behind


def check_ids(ids: Sequence[int], vocab_size: int | None, name: str, *, labels: bool = False) -> None:
    """Refuse numbers that are no tokens of the vocabulary; labels may be :data:`~memtrain.data.rows.IGNORED`.

    Raises:
        RowRefused: with the first of them.
    """
    # What tensors of 32 bits hold, where the vocabulary is not known.
    most = 2**31 if vocab_size is None else vocab_size
    if not ids or (min(ids) >= 0 and max(ids) < most):
        return
    for place, token in enumerate(ids):
        if not 0 <= token < most and not (labels and token == IGNORED):
            allowed = f"0 to {most - 1}" + (f", or {IGNORED} for none" if labels else "")
            raise RowRefused(f"has {token} at place {place} of {name!r}, and tokens of the vocabulary are {allowed}")


def targets(labels: Sequence[int], *, shifted: bool) -> int:
    """How many labels are learnt; the first is none where a causal model shifts them."""
    of_all = len(labels) - labels.count(IGNORED)
    return of_all - 1 if shifted and labels and labels[0] != IGNORED else of_all
