"""From records to tokens: which ids a row has, which of them are learnt, and what cannot be used.

Text is tokenised as it stands, without what a tokenizer puts around it. Put in front is the token that begins a text, once, if the
tokenizer sets one by itself. Behind what is learnt stands the end of sequence, once, and it is learnt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from memtrain.data.chat import ChatEncoder
from memtrain.data.layouts import LEARNT, Completion, Conversation, Layout, Text, Tokens, alpaca_text, layout_of, normal, unused
from memtrain.data.options import DataOptions
from memtrain.data.records import BadRow, Record, RowRefused
from memtrain.data.rows import IGNORED
from memtrain.data.task import Task

Columns = Mapping[str, list[int] | int | float]
_SHOWN = 10
_SPLITS = (Layout.TEXT,)


@dataclass
class Reading:
    """What was read of one source, counted while it is read.

    Attributes:
        layout: a sentence about what the columns mean.
        read, kept: rows.
        bad: how many rows cannot be used; ``first_bad`` are the first ten.
        truncated: rows whose end was cut off.
        left_out: rows that are too long, where those are left out.
        tokens, learnt: of the rows that are kept.
    """

    what: str
    sequence_length: int
    layout: str = ""
    read: int = 0
    kept: int = 0
    bad: int = 0
    first_bad: list[BadRow] = field(default_factory=list)
    truncated: int = 0
    left_out: int = 0
    tokens: int = 0
    learnt: int = 0

    def note_bad(self, row: BadRow) -> None:
        """Count a row that cannot be used."""
        self.bad += 1
        if len(self.first_bad) < _SHOWN:
            self.first_bad.append(row)

    def lines(self) -> list[str]:
        """What was read, for people."""
        counts = f"{self.kept:,} of {self.read:,} rows, {self.tokens:,} tokens, of which {self.learnt:,} are learnt"
        found = [f"{self.what}: {counts}. {self.layout}".strip()]
        if self.truncated:
            found.append(f"{self.what}: {self.truncated:,} rows are cut off after {self.sequence_length} tokens.")
        if self.left_out:
            found.append(f"{self.what}: {self.left_out:,} rows are longer than {self.sequence_length} tokens and left out.")
        if self.bad:
            found += [f"{self.what}: {self.bad:,} rows cannot be used and are left out; {self._of_them()}", *self._listed()]
        return found

    def refusal(self, remedy: str) -> str:
        """Why nothing is trained."""
        listed = "\n".join(self._listed())
        return f"{self.bad:,} of {self.read:,} rows of {self.what} cannot be used: {remedy}; {self._of_them()}\n{listed}"

    def _of_them(self) -> str:
        return "they are:" if self.bad <= _SHOWN else f"the first {_SHOWN} are:"

    def _listed(self) -> list[str]:
        return [f"  {row}" for row in self.first_bad]


class Encoder:
    """Makes rows of tokens of the records of one source."""

    def __init__(
        self, tokenizer: Any, task: Task, options: DataOptions, *, sequence_length: int, vocab_size: int | None = None
    ) -> None:
        """
        Args:
            tokenizer: of transformers.
            task: what the model learns.
            options: how rows are read.
            sequence_length: tokens of a row at the most.
            vocab_size: of the model; None where it is not known.

        Raises:
            ValueError: the tokenizer has no end-of-sequence token, or the task learns nothing from such rows.
        """
        self._tokenizer, self._task, self._options = tokenizer, task, options
        self._length = sequence_length
        self._vocab_size = vocab_size
        if task in (Task.TOKEN_CLASSIFICATION, Task.IMAGE_CLASSIFICATION):
            raise ValueError(f"the task is {task}, for which no rows are made of records: give rows of tensors.")
        if tokenizer.eos_token_id is None and task not in (Task.MASKED_LM, Task.SEQUENCE_CLASSIFICATION):
            raise ValueError("the tokenizer has no end-of-sequence token, and one must end what is learnt: set its eos_token.")
        self._eos = tokenizer.eos_token_id
        alone = tokenizer.encode("", verbose=False)[:1]
        self._begin = alone if alone and alone == [tokenizer.bos_token_id] else []
        self._chat: ChatEncoder | None = None

    def encode_all(self, records: Iterable[Record | BadRow], reading: Reading) -> Iterator[Columns]:
        """The rows of records, one at a time, counted in ``reading``.

        Raises:
            ValueError: rows cannot be used and the options say to stop, or none is left; after all have been read.
        """
        layout: Layout | None = None
        for record in islice(records, self._options.limit):
            reading.read += 1
            if isinstance(record, BadRow):
                reading.note_bad(record)
                continue
            if layout is None:
                layout = self._layout(record, reading)
            try:
                rows = list(self._rows(record.values, layout, reading))
            except RowRefused as refusal:
                reading.note_bad(BadRow(record.origin, str(refusal)))
                continue
            for row in rows:
                reading.kept += 1
                reading.tokens += len(_list(row["input_ids"]))
                labels = row["labels"]
                reading.learnt += sum(label != IGNORED for label in labels) if isinstance(labels, list) else 1
                yield row
        if reading.bad and self._options.on_bad_row == "stop":
            raise ValueError(reading.refusal("mend them, or set on_bad_row to skip to go on without them"))
        if not reading.kept:
            if reading.bad:
                raise ValueError(reading.refusal("give rows that can"))
            if reading.left_out:
                raise ValueError(
                    f"all {reading.left_out} rows of {reading.what} are longer than {self._length} tokens: raise sequence_length."
                )
            raise ValueError(f"there is no row in {reading.what}, and training needs 1 or more: give rows.")

    def _layout(self, record: Record, reading: Reading) -> Layout:
        given = self._options.layout
        layout = layout_of(record.values, record.origin.source) if given == "auto" else Layout(given)
        if layout is Layout.CLASSIFICATION and self._task is not Task.SEQUENCE_CLASSIFICATION:
            layout = Layout.TEXT
        if self._options.long_rows == "split" and layout not in _SPLITS:
            raise ValueError(
                f"long_rows is split, and {reading.what} has the layout {layout}, of which a part says little: set it to truncate or "
                f"leave_out."
            )
        learnt = "all of it is learnt" if self._options.train_on == "everything" else LEARNT[layout]
        beside = unused(record.values, layout)
        not_read = f"; not read: {', '.join(beside)}" if beside else ""
        reading.layout = f"The layout is {layout}: {learnt}{not_read}."
        return layout

    def _rows(self, values: Mapping[str, Any], layout: Layout, reading: Reading) -> Iterator[Columns]:
        found = normal(values, layout)
        if layout is Layout.ALPACA and not (self._options.chat_template or self._tokenizer.chat_template):
            found = alpaca_text(values)
        if self._task is Task.SEQ2SEQ_LM:
            yield self._translated(found, reading)
            return
        if self._task in (Task.MASKED_LM, Task.SEQUENCE_CLASSIFICATION):
            yield self._with_specials(found, reading)
            return
        ids, labels = self._causal(found)
        if self._vocab_size is not None and not all(0 <= token < self._vocab_size for token in ids):
            raise RowRefused(f"has tokens from {min(ids)} to {max(ids)}, and the model knows 0 to {self._vocab_size - 1}")
        wrong = [label for label in labels if label != IGNORED and not 0 <= label < (self._vocab_size or label + 1)]
        if wrong:
            raise RowRefused(f"has the label {wrong[0]}, and labels are tokens of the model or {IGNORED}")
        if len(ids) > self._length:
            if self._options.long_rows == "leave_out":
                reading.left_out += 1
                return
            if self._options.long_rows == "split":
                for start, stop in _pieces(len(ids), self._length):
                    yield {"input_ids": ids[start:stop], "labels": labels[start:stop]}
                return
            reading.truncated += 1
        if all(label == IGNORED for label in labels[1:]):
            raise RowRefused("has nothing to learn: nothing is predicted for a first token, and no other counts")
        ids, cut = ids[: self._length], labels[: self._length]
        if all(label == IGNORED for label in cut[1:]):
            before = next(place for place, label in enumerate(labels) if place and label != IGNORED)
            raise RowRefused(
                f"has {before} tokens before the first that is learnt, and rows end after {self._length}: raise sequence_length, or "
                f"leave the row out"
            )
        yield {"input_ids": ids, "labels": cut}

    def _causal(self, found: Text | Completion | Conversation | Tokens) -> tuple[list[int], list[int]]:
        everything = self._options.train_on == "everything"
        match found:
            case Tokens(ids, labels):
                if not isinstance(labels, list) or len(labels) != len(ids):
                    count = len(labels) if isinstance(labels, list) else 1
                    raise RowRefused(f"has {count} labels for {len(ids)} input_ids, and each token has one")
                return ids, ids if everything else labels
            case Text(text):
                ids = [*self._begin_of(text), *self._ids(text)]
                ids = ids if ids[-1:] == [self._eos] else [*ids, self._eos]
                return ids, ids
            case Completion(prompt, completion):
                # Apart, as a model sees them that is asked.
                asked, answer = [*self._begin_of(prompt), *self._ids(prompt)], self._ids(completion)
                answer = answer if answer[-1:] == [self._eos] else [*answer, self._eos]
                return asked + answer, asked + answer if everything else [IGNORED] * len(asked) + answer
            case Conversation():
                encoded = self._conversation(found)
                # What a template writes after the last answer teaches nothing.
                end = max((place for place, learnt in enumerate(encoded.learnt, start=1) if learnt), default=0)
                pairs = zip(encoded.input_ids[:end], encoded.learnt, strict=False)
                return encoded.input_ids[:end], [token if learnt else IGNORED for token, learnt in pairs]

    def _conversation(self, found: Conversation) -> Any:
        if self._chat is None:
            self._chat = ChatEncoder(self._tokenizer, self._options.chat_template)
        everything = self._options.train_on == "everything"
        if found.first:
            parts = found.messages[: found.first], found.messages[found.first :]
            return self._chat.encode_completion(*parts, found.tools, everything=everything)
        return self._chat.encode(found.messages, found.tools, everything=everything)

    def _translated(self, found: Text | Completion | Conversation | Tokens, reading: Reading) -> Columns:
        if isinstance(found, Tokens):
            source, target = found.input_ids, found.labels if isinstance(found.labels, list) else []
        elif isinstance(found, Completion):
            source = self._tokenizer.encode(found.prompt, verbose=False)
            target = self._ids(found.completion)
            target = target if target[-1:] == [self._eos] else [*target, self._eos]
        else:
            raise RowRefused("has no prompt with a completion, which a model that writes one text for another needs")
        if all(label == IGNORED for label in target):
            raise RowRefused("has nothing to learn: none of its labels counts")
        if max(len(source), len(target)) > self._length:
            reading.truncated += 1
        return {"input_ids": source[: self._length], "labels": target[: self._length]}

    def _with_specials(self, found: Text | Completion | Conversation | Tokens, reading: Reading) -> Columns:
        if isinstance(found, Tokens):
            return self._of_tokens(found, reading)
        if not isinstance(found, Text):
            raise RowRefused("is no text, which this model reads")
        ids: list[int] = self._tokenizer.encode(found.text, verbose=False)
        if len(ids) > self._length:
            reading.truncated += 1
            ids = self._tokenizer.encode(found.text, truncation=True, max_length=self._length, verbose=False)
        if self._task is Task.MASKED_LM:
            if set(ids) <= set(self._tokenizer.all_special_ids):
                raise RowRefused("has nothing but special tokens, so none can be masked")
            return {"input_ids": ids, "labels": ids}
        if found.label is None:
            raise RowRefused("has no 'label', and it is needed")
        return {"input_ids": ids, "labels": found.label}

    def _of_tokens(self, found: Tokens, reading: Reading) -> Columns:
        """Tokens of a model that sees a row whole; of those that are masked the labels are made later."""
        ids, labels = found.input_ids, found.labels
        if len(ids) > self._length:
            reading.truncated += 1
        if self._task is Task.MASKED_LM:
            return {"input_ids": ids[: self._length], "labels": ids[: self._length]}
        if isinstance(labels, list):
            raise RowRefused(f"has {len(labels)} labels, and one is needed")
        return {"input_ids": ids[: self._length], "labels": labels}

    def _begin_of(self, text: str) -> list[int]:
        """The token that begins a text, unless the text says it."""
        return [] if self._begin and text.startswith(self._tokenizer.bos_token) else self._begin

    def _ids(self, text: str) -> list[int]:
        # verbose=False: no warning that a text is longer than the model's context; it is measured here.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def _list(value: list[int] | int | float) -> list[int]:
    assert isinstance(value, list)
    return value


def _pieces(tokens: int, length: int) -> Iterator[tuple[int, int]]:
    """Where a row is cut: every ``length`` tokens, and so that no piece has a single token, which would be no target."""
    start = 0
    while start < tokens:
        stop = min(start + length, tokens)
        if tokens - stop == 1 and stop - start > 2:
            stop -= 1
        yield start, stop
        start = stop
