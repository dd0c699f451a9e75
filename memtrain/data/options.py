"""How rows are read: what a recipe and a Trainer say about their data, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.data.layouts import Layout
from memtrain.require import require


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How rows are read.

    Attributes:
        sequence_length: tokens per row at most, 2 or more; None for what suits the model.
        layout: what columns mean, one of :class:`memtrain.data.layouts.Layout`; ``"auto"`` for what their names say.
        train_on: of a causal model: ``"completions"`` (answers alone), ``"everything"``, or ``"auto"`` for completions where
            rows have them. Tokens that come with labels are learnt as these say.
        chat_template: how conversations are written, as :class:`memtrain.data.chat.ChatEncoder` takes it.
        packing: whether short rows are put into one.
        long_rows: what becomes of rows of more than ``sequence_length`` tokens: ``"truncate"`` keeps the beginning and so loses
            the end of sequence, ``"split"`` cuts text into several rows, ``"leave_out"`` leaves the row out. All are counted.
        on_bad_row: what becomes of rows that cannot be used: ``"stop"`` shows them and stops, ``"skip"`` leaves them out.
        limit: how many rows are read at most.
    """

    sequence_length: int | None = None
    layout: str = "auto"
    train_on: str = "auto"
    chat_template: str | None = None
    packing: bool = False
    long_rows: str = "truncate"
    on_bad_row: str = "stop"
    limit: int | None = None

    def __post_init__(self) -> None:
        length = self.sequence_length
        require(length is None or length >= 2, "sequence_length", length, "2 or more tokens")
        _one_of("layout", self.layout, ("auto", *Layout))
        _one_of("train_on", self.train_on, ("auto", "completions", "everything"))
        _one_of("long_rows", self.long_rows, ("truncate", "split", "leave_out"))
        _one_of("on_bad_row", self.on_bad_row, ("stop", "skip"))
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "1 or more rows, or null")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    require(value in known, name, value, f"one of {', '.join(known)}")
