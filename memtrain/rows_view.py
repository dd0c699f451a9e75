"""The view of ``mode=data``: what rows are like, and three of them with what is learnt marked, at 80 columns and without colour."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from memtrain.data.rows import IGNORED, Row
from memtrain.data.summary import Summary, learnt_spans
from memtrain.units import format_seconds

OPENS, CLOSES = "⟦", "⟧"
_BAR_WIDTH = 30
_SHOWN_CHARACTERS = 900


def rows_view(
    name: str, found: Summary, said: Sequence[str], speed: str, *, micro_batch_size: int | None, grouped: bool = False
) -> RenderableType:
    """What the rows of a name are like.

    Args:
        said: sentences about what was read.
        speed: how long an epoch takes, or why that is not known.
        micro_batch_size: rows that are padded together; None where they are not trained on.
        grouped: whether rows of like length are put into one step.
    """
    rows: list[tuple[str, RenderableType]] = [
        (
            name,
            Text(
                "\n".join(line.removeprefix(f"{name}: ") for line in said)
                or f"{found.rows:,} rows, {found.tokens:,} tokens, {found.learnt:,} learnt."
            ),
        ),
        ("lengths", Group(Text(_lengths(found)), Text(), _bars(found)) if len(found.histogram) > 1 else Text(_lengths(found))),
    ]
    if micro_batch_size is not None and found.is_packed:
        rows.append(("packing", Text(f"{found.rows:,} rows stand in {found.packs:,}, {_filled(found)}")))
    elif micro_batch_size is not None and found.shortest < found.longest:
        rows.append(("padding", Text(f"{_padding(found, grouped)}, in micro-batches of {micro_batch_size}")))
        rows.append(("packing", Text(f"with packing {found.rows:,} rows would stand in {found.packs:,}, {_filled(found)}")))
    if micro_batch_size is not None:
        rows.append(("epoch", Text(f"{found.steps:,} step{'s' * (found.steps != 1)}. {speed}")))
    view = Table.grid(Column(style="bold", no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for label, content in rows:
        view.add_row(label, content)
    return view


def _lengths(found: Summary) -> str:
    if found.shortest == found.longest:
        return f"{found.longest:,} tokens each"
    return (
        f"{found.shortest:,} to {found.longest:,} tokens, median {found.median:,.0f}, mean {found.mean:,.0f}; "
        f"90 % have up to {found.at_90:,}, 99 % up to {found.at_99:,}"
    )


def _bars(found: Summary) -> Table:
    most = max(bar.rows for bar in found.histogram)
    table = Table(
        Column(justify="right", no_wrap=True),
        Column(no_wrap=True),
        Column(justify="right", no_wrap=True),
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_header=False,
    )
    for bar in found.histogram:
        length = f"{bar.shortest:,}" if bar.shortest == bar.longest else f"{bar.shortest:,} – {bar.longest:,}"
        # A bar that is not there stands for no row at all.
        table.add_row(length, "━" * (max(1, round(_BAR_WIDTH * bar.rows / most)) if bar.rows else 0), f"{bar.rows:,}")
    return table


def _padding(found: Summary, is_grouped: bool) -> str:
    by_step, grouped = (100 * found.padding[name] for name in ("by_step", "grouped"))
    if is_grouped:
        return f"{grouped:.1f} % of what is computed is padding, with rows grouped by length"
    sentence = f"{by_step:.1f} % of what is computed is padding"
    return f"{sentence}; with group_by_length {grouped:.1f} %" if by_step - grouped >= 0.1 else sentence


def _filled(found: Summary) -> str:
    return f"{100 * found.filled:.1f} % filled"


def speed_sentence(steps: int, step_seconds: float, device: str) -> str:
    """How long an epoch takes by the planner's prediction, which is for the largest step."""
    return f"About {format_seconds(steps * step_seconds)} at the most on {device}, as predicted."


def examples_view(rows: Sequence[tuple[int, Row]], tokenizer: Any, *, shifted: bool = True) -> RenderableType:
    """Rows as text, what is learnt of them in brackets and in colour."""
    parts: list[RenderableType] = [Text(f"What is learnt stands between {OPENS} and {CLOSES}.", style="dim")]
    for number, row in rows:
        parts += [Text(), Text(f"row {number}: {len(row['input_ids']):,} tokens{_label(row, tokenizer)}", style="bold")]
        parts.append(_marked(row, tokenizer, shifted))
    return Group(*parts)


def _label(row: Row, tokenizer: Any) -> str:
    labels = row["labels"]
    if not labels.dim():
        return f", label {labels.item():g}"
    if len(labels) == len(row["input_ids"]):
        return ""
    return f", to be written: {OPENS}{_printable(tokenizer.decode(labels[labels != IGNORED].tolist()))}{CLOSES}"


def _marked(row: Row, tokenizer: Any, shifted: bool) -> Text:
    pieces = [(_printable(tokenizer.decode(ids)), counts) for ids, counts in learnt_spans(row, shifted=shifted)]
    total = sum(len(piece) for piece, _ in pieces)
    text, at, left_out = Text(), 0, total - _SHOWN_CHARACTERS
    half = _SHOWN_CHARACTERS // 2
    for piece, counts in pieces:
        # Of a long row the middle is left out.
        start, stop = at, at + len(piece)
        head = piece[: max(0, half - start)] if left_out > 0 else piece
        tail = piece[max(0, total - half - start) :] if left_out > 0 and stop > total - half else ""
        cut = f" … {left_out:,} characters … " if left_out > 0 and start < half <= stop else ""
        if head or tail or cut:
            shown = f"{head}{cut}{tail}"
            text.append(f"{OPENS}{shown}{CLOSES}" if counts else shown, style="green" if counts else "")
        at = stop
    return text


def _printable(text: str) -> str:
    """Text without what would move the cursor or cannot be seen, lines left as they are."""
    return "".join(one if _shows(one) else one.encode("unicode_escape").decode() for one in text)


def _shows(one: str) -> bool:
    # Spaces of any width, and what joins letters or keeps them apart (ZWNJ, ZWJ), are part of how languages are written.
    return one.isprintable() or one in "\n\u200c\u200d" or unicodedata.category(one) == "Zs"
