"""How rows are read: what of them is learnt, how long they may be, and what becomes of those that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.data.layouts import Layout
from memtrain.require import require

_CHOICES = {
    "layout": ("auto", *Layout),
    "train_on": ("auto", "completions", "everything"),
    "long_rows": ("truncate", "split", "leave_out"),
    "on_bad_row": ("stop", "skip"),
}


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How rows are read.

    Attributes:
        sequence_length: tokens of a row at the most; None for what the model has positions for, at most 1024.
        layout: what the columns mean (:class:`memtrain.data.layouts.Layout`), or ``"auto"``.
        train_on: ``"completions"``, the answers alone; ``"everything"``; ``"auto"``: completions where rows have them.
        chat_template: a Jinja template, its file, or ``"chatml"``; None for the tokenizer's.
        packing: whether short rows are put into one.
        long_rows: what becomes of longer rows: ``"truncate"`` keeps their beginning, ``"split"`` makes several of one of text,
            ``"leave_out"`` counts them.
        on_bad_row: ``"stop"`` refuses all where one cannot be used, ``"skip"`` leaves those out and counts them.
        limit: rows that are read at the most.
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
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "1 or more rows, or None")
        for name, choices in _CHOICES.items():
            require(getattr(self, name) in choices, name, getattr(self, name), f"one of {', '.join(choices)}")
