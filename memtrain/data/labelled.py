"""Rows of classifiers: a text, or two, with one label, and words with a tag for each.

Labels are numbers, or names that the model's ``label2id`` has. Of a word the first token has its tag, as in the first use of
BERT for names (Devlin et al., 2019, section 5.3); the other tokens and the special ones have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from memtrain.data.examples import Ends, Example, check_ids, cut_before_end, in_rows, room, tokenise
from memtrain.data.forms import Form, Labelled, Tagged, Tokens, as_number, shown
from memtrain.data.language import token_labels
from memtrain.data.layouts import Columns
from memtrain.data.options import DataOptions
from memtrain.data.records import RowRefused
from memtrain.data.rows import IGNORED

# About the largest float of 32 bits, as which labels are kept.
_MOST: Final = 3.4e38


@dataclass(frozen=True)
class Labels:
    """The labels of a model.

    Attributes:
        numbers: the number of each name; empty where names are not known.
        count: how many there are, None where that is not known; 1 for a number that is to be told (regression).
    """

    numbers: Mapping[str, int]
    count: int | None

    def number(self, value: Any, what: str) -> int | float:
        """The number of a label.

        Raises:
            RowRefused: it is none of the model's.
        """
        number = self.numbers[value] if isinstance(value, str) and value in self.numbers else as_number(value)
        if number is None:
            names = ", ".join(list(self.numbers)[:10])
            known = f"the model's are named {names}" if names else "the model's have no names"
            raise RowRefused(
                f"has {shown(value)} for its {what}, and {known}: give numbers, or name them in the model's label2id (model.settings.label2id)"
            )
        if self.count == 1 or (self.count is None and isinstance(number, float)):
            if not abs(number) <= _MOST:
                raise RowRefused(f"has {shown(value)} for its {what}, and a finite number is needed")
            return float(number)
        most = 2**31 if self.count is None else self.count
        if not 0 <= number < most or number != int(number):
            raise RowRefused(f"has {shown(value)} for its {what}, and the model's are 0 to {most - 1}")
        return int(number)


class SequenceLabels:
    """Makes examples of texts with one label: ``{"input_ids", "labels"}``, of pairs with ``token_type_ids`` where there are any."""

    def __init__(self, tokenizer: Any, options: DataOptions, length: int, vocab_size: int | None, labels: Labels) -> None:
        self._tokenizer, self._options, self._length, self._vocab_size = tokenizer, options, length, vocab_size
        self._labels, self._ends = labels, Ends.of(tokenizer)
        self._room = room(length, self._ends)

    def accept(self, columns: Columns) -> None:
        _not_split(self._options)
        if "text_pair" not in columns.needed:
            return
        around = self._tokenizer.num_special_tokens_to_add(pair=True)
        if self._length < around + 2:
            raise ValueError(
                f"sequence_length is {self._length}, and the tokenizer sets {around} tokens around two texts: raise it to "
                f"{around + 2} or more."
            )

    def learnt(self, columns: Columns) -> str:
        return "labels are learnt"

    def prepared(self, form: Form) -> Form:
        return form

    def texts(self, form: Form) -> tuple[str, ...]:
        return (form.text,) if isinstance(form, Labelled) and form.text_pair is None else ()

    def tokens(self, texts: Sequence[tuple[str, ...]]) -> list[list[list[int]]]:
        return in_rows(tokenise(self._tokenizer, list(chain.from_iterable(texts))), texts)

    def make(self, form: Form, tokens: Sequence[list[int]]) -> list[Example]:
        assert isinstance(form, Labelled | Tokens)
        value = form.labels if isinstance(form, Tokens) else form.label
        if value is None:
            raise RowRefused("has no labels, and a label is needed")
        label = self._labels.number(value, "label")
        if isinstance(form, Tokens):
            check_ids(form.input_ids, self._vocab_size, "input_ids")
            over = max(0, len(form.input_ids) - self._length)
            columns = {"input_ids": cut_before_end(form.input_ids, self._length, self._ends)}
            if form.token_type_ids is not None:
                columns["token_type_ids"] = form.token_type_ids[: self._length]
        elif form.text_pair is None:
            own = self._ends.bare(tokens[0])
            if not own:
                raise RowRefused("has a text that gives no token but special ones")
            over = max(0, len(own) - self._room)
            columns = {"input_ids": self._ends.around(own[: self._room])}
        else:
            columns, over = self._pair(form.text, form.text_pair)
        if over and self._options.long_rows == "leave_out":
            return []
        return [Example({**columns, "labels": label}, 1, over)]

    def _pair(self, text: str, text_pair: str) -> tuple[dict[str, list[int]], int]:
        """Two texts as the tokenizer joins them, the longer one cut first, and how many tokens that took."""
        found = self._tokenizer(text, text_pair, return_attention_mask=False, verbose=False)
        over = max(0, len(found["input_ids"]) - self._length)
        if over:
            found = self._tokenizer(
                text, text_pair, truncation="longest_first", max_length=self._length, return_attention_mask=False, verbose=False
            )
        return {name: list(found[name]) for name in ("input_ids", "token_type_ids") if name in found}, over


class TokenLabels:
    """Makes examples of words with tags: ``{"input_ids", "labels"}``, a label for each token."""

    def __init__(self, tokenizer: Any, options: DataOptions, length: int, vocab_size: int | None, labels: Labels) -> None:
        self._tokenizer, self._options, self._length, self._vocab_size = tokenizer, options, length, vocab_size
        self._labels, self._ends = labels, Ends.of(tokenizer)
        self._room = room(length, self._ends)

    def accept(self, columns: Columns) -> None:
        _not_split(self._options)
        if "words" not in columns.roles:
            return
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"the tokenizer is {type(self._tokenizer).__name__}, a slow one, which does not tell of which word a token is: give the "
                f"fast one."
            )
        joined, words = tokenise(self._tokenizer, ["a a"])[0], self._words(["a", "a"])["input_ids"]
        # Of bytes, " a" is another token than "a", and words that come without their spaces would be read as one.
        if len(joined) == len(words) == 2 and joined != words:
            raise ValueError(
                "the tokenizer reads words as if no space stood between them: make it with "
                "AutoTokenizer.from_pretrained(PATH, add_prefix_space=True)."
            )

    def learnt(self, columns: Columns) -> str:
        return "tags are learnt, each on the first token of its word" if "words" in columns.roles else "labels are learnt"

    def prepared(self, form: Form) -> Form:
        return form

    def texts(self, form: Form) -> tuple[str, ...]:
        return ()

    def tokens(self, texts: Sequence[tuple[str, ...]]) -> list[list[list[int]]]:
        return [[] for _ in texts]

    def make(self, form: Form, tokens: Sequence[list[int]]) -> list[Example]:
        if isinstance(form, Tokens):
            check_ids(form.input_ids, self._vocab_size, "input_ids")
            if form.labels is None:
                raise RowRefused("has no labels, and a label for each token is needed")
            ids, labels = form.input_ids, [self._tag(label) for label in token_labels(form, None)]
            columns = {"input_ids": ids[: self._length], "labels": labels[: self._length]}
            over = max(0, len(ids) - self._length)
            if form.token_type_ids is not None:
                columns["token_type_ids"] = form.token_type_ids[: self._length]
        else:
            assert isinstance(form, Tagged)
            ids, labels = self._tagged(form)
            over = max(0, len(ids) - self._room)
            unlearnt = ([IGNORED] * len(self._ends.before), [IGNORED] * len(self._ends.behind))
            columns = {
                "input_ids": self._ends.around(ids[: self._room]),
                "labels": [*unlearnt[0], *labels[: self._room], *unlearnt[1]],
            }
        if over and self._options.long_rows == "leave_out":
            return []
        learnt = sum(label != IGNORED for label in columns["labels"])
        if not learnt:
            raise RowRefused(f"has no tag that is learnt within {self._length} tokens")
        return [Example(columns, learnt, over)]

    def _tagged(self, form: Tagged) -> tuple[list[int], list[int]]:
        """The tokens of all words, and the tag of each word at its first."""
        tags = [self._tag(tag) for tag in form.tags]
        found = self._words(form.words)
        ids: list[int] = found["input_ids"]
        labels, last = [], None
        seen = set()
        for word in found.word_ids():
            labels.append(tags[word] if word != last else IGNORED)
            last = word
            seen.add(word)
        for number, word in enumerate(form.words):
            if number not in seen:
                raise RowRefused(f"has {shown(word)} as word {number}, which gives no token to be tagged")
        return ids, labels

    def _words(self, words: list[str]) -> Any:
        return self._tokenizer(
            words, is_split_into_words=True, add_special_tokens=False, return_attention_mask=False, verbose=False
        )

    def _tag(self, value: Any) -> int:
        return IGNORED if value == IGNORED else int(self._labels.number(value, "tag"))


class AsGiven:
    """Takes rows of tokens as they are, for models of any kind."""

    def __init__(self, options: DataOptions, length: int, vocab_size: int | None) -> None:
        self._options, self._length, self._vocab_size = options, length, vocab_size

    def accept(self, columns: Columns) -> None:
        _not_split(self._options)

    def learnt(self, columns: Columns) -> str:
        return "they are taken as they are"

    def prepared(self, form: Form) -> Form:
        return form

    def texts(self, form: Form) -> tuple[str, ...]:
        return ()

    def tokens(self, texts: Sequence[tuple[str, ...]]) -> list[list[list[int]]]:
        return [[] for _ in texts]

    def make(self, form: Form, tokens: Sequence[list[int]]) -> list[Example]:
        assert isinstance(form, Tokens)
        check_ids(form.input_ids, self._vocab_size, "input_ids")
        columns: dict[str, list[int] | int | float] = {"input_ids": form.input_ids[: self._length]}
        over = max(0, len(form.input_ids) - self._length)
        learnt = len(form.input_ids[: self._length])
        if isinstance(form.labels, list):
            labels = token_labels(form, None)[: self._length]
            columns["labels"], learnt = labels, sum(label != IGNORED for label in labels)
        elif form.labels is not None:
            number = as_number(form.labels)
            if number is None or not abs(number) <= (_MOST if isinstance(number, float) else 2**31 - 1):
                raise RowRefused(f"has {shown(form.labels)} for its labels, and numbers of 32 bits are needed")
            columns["labels"], learnt = number, 1
        if form.token_type_ids is not None:
            columns["token_type_ids"] = form.token_type_ids[: self._length]
        if not learnt:
            raise RowRefused("has labels of which none is learnt")
        return [] if over and self._options.long_rows == "leave_out" else [Example(columns, learnt, over)]


def _not_split(options: DataOptions) -> None:
    if options.long_rows == "split":
        raise ValueError(
            "long_rows is split, and only text that is learnt as a whole can be cut into rows: set long_rows to truncate or leave_out."
        )
