"""Records to examples: the layout of each source is told, rows are made tokens of, and all that is not trained on is counted.

Rows are taken in blocks, since a fast tokenizer takes many texts at once on all cores. What a row becomes does not depend on its
block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, Final

from memtrain.data.examples import Example, Maker
from memtrain.data.forms import Form, form_of
from memtrain.data.labelled import AsGiven, Labels, SequenceLabels, TokenLabels
from memtrain.data.language import Causal, Masked, Seq2Seq
from memtrain.data.layouts import Columns, Layout, detect
from memtrain.data.options import DataOptions
from memtrain.data.records import BadRow, Record, RowRefused
from memtrain.data.task import Task

SHOWN_BAD_ROWS: Final = 10
"""So many rows that cannot be used are shown."""

_BLOCK_ROWS: Final = 256
_BLOCK_CHARACTERS: Final = 2**22
# With a bad row among them no more are read, where bad rows stop the run: what is wrong is known by then.
_ROWS_TO_LOOK_AT: Final = 1_000_000


@dataclass
class _Source:
    """A source, what its columns mean, what is learnt of it, and the columns that its rows have."""

    name: str
    columns: Columns
    learnt: str
    seen: dict[str, None] = field(default_factory=dict)


@dataclass
class Reading:
    """What was read.

    Attributes:
        what: the name of the rows in messages.
        sequence_length: tokens that a row may have.
        read: rows, those that cannot be used included.
        kept: rows that are trained on.
        examples: what was made of them; more than ``kept`` where rows were split.
        bad: rows that cannot be used; first_bad: the first of them.
        truncated: rows that were cut; cut: the tokens that this took; without_end: rows that were cut within what is learnt.
        split: rows that were made several of.
        left_out: rows that were too long.
        tokens: of all examples; learnt: those that are learnt, and labels where these are not of tokens.
        sources: what was found, by the name of each source.
    """

    what: str
    sequence_length: int
    read: int = 0
    kept: int = 0
    examples: int = 0
    bad: int = 0
    first_bad: list[BadRow] = field(default_factory=list)
    truncated: int = 0
    cut: int = 0
    without_end: int = 0
    split: int = 0
    left_out: int = 0
    tokens: int = 0
    learnt: int = 0
    sources: dict[str, _Source] = field(default_factory=dict)

    def refuse(self, row: BadRow) -> None:
        """Count a row that cannot be used."""
        self.bad += 1
        if len(self.first_bad) < SHOWN_BAD_ROWS:
            self.first_bad.append(row)

    def count(self, examples: list[Example]) -> None:
        """Count the examples of a row; none if it is left out."""
        self.kept += bool(examples)
        self.left_out += not examples
        self.split += len(examples) > 1
        self.examples += len(examples)
        for example in examples:
            self.truncated += example.cut > 0
            self.cut += example.cut
            self.without_end += example.without_end
            ids = example.columns["input_ids"]
            assert isinstance(ids, list)
            self.tokens += len(ids)
            self.learnt += example.learnt

    def has(self, examples: int | None, tokens: int | None) -> bool:
        """Whether as many examples or tokens are there; None for no number of them."""
        return (examples is not None and self.examples >= examples) or (tokens is not None and self.tokens >= tokens)

    def layouts(self) -> list[str]:
        """What was found of the columns, in sentences; sources that are alike share one."""
        alike: dict[tuple[object, ...], list[_Source]] = {}
        for source in self.sources.values():
            alike.setdefault((source.columns.layout, tuple(sorted(source.seen))), []).append(source)
        return [same[0].columns.said([source.name for source in same], same[0].seen, same[0].learnt) for same in alike.values()]

    def lines(self) -> list[str]:
        """All that was found and counted, in sentences for people."""
        lines = self.layouts()
        made = f" ({self.examples:,} after splitting)" if self.split else ""
        lines.append(f"{self.what}: {_rows(self.kept)}{made}, {self.tokens:,} tokens, {self.learnt:,} learnt.")
        if self.truncated:
            end = f", {self.without_end:,} of them within what is learnt, so without its end" if self.without_end else ""
            lines.append(f"{self.what}: {_rows(self.truncated)} cut at {self.sequence_length} tokens ({self.cut:,} lost){end}.")
        if self.split:
            lines.append(f"{self.what}: {_rows(self.split)} of more than {self.sequence_length} tokens cut into several.")
        if self.left_out:
            lines.append(f"{self.what}: {_rows(self.left_out)} of more than {self.sequence_length} tokens left out.")
        if self.bad:
            lines.append(f"{self.what}: {_rows(self.bad)} of {self.read:,} cannot be used and left out:")
            lines += self._bad_lines()
        return lines

    def counts(self) -> dict[str, int]:
        """What was counted, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    def check(self, on_bad_row: str) -> None:
        """Refuse what was read if rows cannot be used and that stops the run, or if none is left.

        Raises:
            ValueError: with the count and the first ten rows, each on a line of its own.
        """
        if self.bad and (on_bad_row == "stop" or not self.kept):
            which = "none of" if self.bad == self.read else f"{self.bad:,} of"
            remedy = "mend them" + (", or leave them out with on_bad_row=skip" if self.kept else "")
            raise ValueError(
                "\n".join(
                    [
                        f"{self.what}: {which} {_rows(self.read)} can{'' if self.bad == self.read else 'not'} be used:",
                        *self._bad_lines(),
                        f"{remedy}.",
                    ]
                )
            )
        if self.left_out and not self.kept:
            raise ValueError(
                f"{self.what}: each of {_rows(self.read)} has more than {self.sequence_length} tokens and long_rows is leave_out, so none is "
                f"left: raise sequence_length, or set long_rows to truncate."
            )
        if not self.read:
            raise ValueError(f"there is no row in {self.what}, and training needs 1 or more: give rows.")

    def _bad_lines(self) -> list[str]:
        more = self.bad - len(self.first_bad)
        return [*(f"  {row}" for row in self.first_bad), *([f"  and {more:,} more"] if more else [])]


class Encoder:
    """Makes examples of records, for one task; made once."""

    def __init__(
        self,
        tokenizer: Any,
        task: Task,
        options: DataOptions,
        *,
        sequence_length: int | None = None,
        vocab_size: int | None = None,
        label2id: Mapping[str, int] | None = None,
        num_labels: int | None = None,
    ) -> None:
        """
        Args:
            tokenizer: of transformers; None where rows are tokens.
            task: what is learnt.
            options: how rows are read.
            sequence_length: tokens per row at the most, where ``options`` leave it open; one of them says it.
            vocab_size: how many tokens the model knows; rows of tokens with others are refused.
            label2id: the numbers of the names of a classifier's labels.
            num_labels: how many labels a classifier has; 1 for a number that is to be told. By default as many as have names.

        Raises:
            ValueError: the tokenizer and the options do not go together.
        """
        length = options.sequence_length if sequence_length is None else sequence_length
        assert length is not None
        self._task, self._options = task, options
        self._reads_text = tokenizer is not None
        names = dict(label2id or {})
        self._maker = _maker(tokenizer, task, options, length, vocab_size, Labels(names, num_labels or len(names) or None))
        self._sources: dict[str, _Source] = {}
        self._alike = ""

    def encode(self, record: Record) -> list[Example]:
        """The examples of one record; none if it is left out as too long.

        Raises:
            RowRefused: it cannot be used.
            ValueError: its source cannot, as of :func:`memtrain.data.layouts.detect`.
        """
        source = self._source(record.origin.source, [record])
        (outcome,) = self._outcomes([record], source)
        if isinstance(outcome, BadRow):
            raise RowRefused(outcome.reason)
        return outcome

    def encode_all(
        self,
        records: Iterable[Record | BadRow],
        reading: Reading,
        *,
        enough: int | None = None,
        enough_tokens: int | None = None,
    ) -> Iterator[Mapping[str, list[int] | int | float]]:
        """The columns of the examples of all records.

        Args:
            reading: counts what is read.
            enough, enough_tokens: examples, and tokens of all of them, after which reading ends.

        Raises:
            ValueError: when all is read, that rows cannot be used, or that none is left; at once, that a source cannot be.
        """
        for outcome in self._all(islice(records, self._options.limit), reading):
            reading.read += 1
            if isinstance(outcome, BadRow):
                reading.refuse(outcome)
            else:
                reading.count(outcome)
                yield from (example.columns for example in outcome)
            stops = reading.bad and self._options.on_bad_row == "stop" and reading.read >= _ROWS_TO_LOOK_AT
            if stops or reading.has(enough, enough_tokens):
                break
        reading.check(self._options.on_bad_row)

    def _all(self, records: Iterable[Record | BadRow], reading: Reading) -> Iterator[BadRow | list[Example]]:
        for name, rows in groupby(records, key=lambda row: row.origin.source):
            for block in _blocks(rows):
                good = [row for row in block if isinstance(row, Record)]
                if not good:
                    yield from (row for row in block if isinstance(row, BadRow))
                    continue
                source = self._source(name, good)
                reading.sources[name] = source
                for row in good:
                    source.seen.update(dict.fromkeys(row.values))
                yield from self._outcomes(block, source)

    def _source(self, name: str, rows: Iterable[Record]) -> _Source:
        if name not in self._sources:
            columns = detect((row.values for row in rows), name, self._task, self._options.layout)
            if not self._reads_text and columns.layout is not Layout.TOKENS:
                raise ValueError(f"{name} is text, and there is no tokenizer to read it with: give tokenizer.")
            self._maker.accept(columns)
            self._sources[name] = _Source(name, columns, self._maker.learnt(columns))
        return self._sources[name]

    def _outcomes(self, block: Iterable[Record | BadRow], source: _Source) -> Iterator[BadRow | list[Example]]:
        """What becomes of each row of one source, in order."""
        forms = [row if isinstance(row, BadRow) else self._form(row, source) for row in block]
        tokens = iter(self._maker.tokens([self._maker.texts(found[1]) for found in forms if not isinstance(found, BadRow)]))
        for found in forms:
            yield found if isinstance(found, BadRow) else self._made(*found, next(tokens))

    def _form(self, record: Record, source: _Source) -> tuple[Record, Form] | BadRow:
        try:
            return record, self._maker.prepared(form_of(record.values, source.columns))
        except RowRefused as error:
            return BadRow(record.origin, str(error))
        except RecursionError:
            return BadRow(record.origin, "has values within values, too many to follow")

    def _made(self, record: Record, form: Form, tokens: list[list[int]]) -> BadRow | list[Example]:
        try:
            examples = self._maker.make(form, tokens)
        except RowRefused as error:
            return BadRow(record.origin, str(error))
        for kinds in (_kinds(example) for example in examples):
            self._alike = self._alike or kinds
            if kinds != self._alike:
                return BadRow(record.origin, f"makes {kinds} where the first row makes {self._alike}, and rows must be alike")
        return examples


def _maker(tokenizer: Any, task: Task, options: DataOptions, length: int, vocab_size: int | None, labels: Labels) -> Maker:
    match task:
        case Task.CAUSAL_LM:
            return Causal(tokenizer, options, length, vocab_size)
        case Task.MASKED_LM:
            return Masked(tokenizer, options, length, vocab_size)
        case Task.SEQ2SEQ_LM:
            return Seq2Seq(tokenizer, options, length, vocab_size)
        case Task.SEQUENCE_CLASSIFICATION:
            return SequenceLabels(tokenizer, options, length, vocab_size, labels)
        case Task.TOKEN_CLASSIFICATION:
            return TokenLabels(tokenizer, options, length, vocab_size, labels)
        case Task.IMAGE_CLASSIFICATION | Task.OTHER:
            return AsGiven(options, length, vocab_size)


def _blocks(rows: Iterator[Record | BadRow]) -> Iterator[list[Record | BadRow]]:
    """Rows, some at a time: as many as are worth it, and fewer where they are long."""
    for first in rows:
        block, characters = [first], _characters(first)
        while characters < _BLOCK_CHARACTERS and len(block) < _BLOCK_ROWS and (row := next(rows, None)) is not None:
            block.append(row)
            characters += _characters(row)
        yield block


def _characters(row: Record | BadRow) -> int:
    if isinstance(row, BadRow):
        return 0
    return sum(len(value) for value in row.values.values() if isinstance(value, str | list))


def _kinds(example: Example) -> str:
    """The columns of an example, and of which kind each is."""
    kinds = {int: "a whole number", float: "a number", list: "a list"}
    return ", ".join(f"{kinds[type(value)]} of {name}" for name, value in sorted(example.columns.items()))


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"
