"""What a person reads when memory runs out: how the run goes on, or why it cannot."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from memtrain.device import Cuda
from memtrain.planner.choice import Choice, Side
from memtrain.planner.compare import compare
from memtrain.report.terminal import FIELD_NAMES, bytes_table, owners_view, peak_view, source_words
from memtrain.units import format_bytes, format_seconds, parse_bytes

# More than nothing: "Tried to allocate 20.00 MiB", "you tried to allocate 4096 bytes", "Unable to allocate 1.00 PiB".
_ASKED = re.compile(r"allocate (?=[\d.]*[1-9])(\d+(?:\.\d+)?) ?(?:bytes|([KMGTP]i?B))")


def recovery_lines(
    before: Choice, after: Choice, *, said: str, phase: str, step: int | None = None, measured: Side | None = None
) -> list[str]:
    """Two sentences when a run goes on: what ran out beside what was predicted, and the plan that comes now.

    Args:
        before, after: the choice that ran out and the one to go on with.
        said: the allocator's message.
        phase: where memory ran out.
        step: of which step, from 1; None where it was in none.
        measured: the most that was held, as far as it was measured.
    """
    peak, budget = before.footprint, before.budget.device_bytes
    predicted = f"{format_bytes(peak.total_device_bytes)} of the budget of {format_bytes(budget)} were predicted"
    held = "what was held is not known"
    if measured is not None:
        held = f"{format_bytes(measured.total_device_bytes)} were held at the most"
    if peak.total_device_bytes != peak.peak_allocated_bytes:
        predicted += f" ({format_bytes(peak.peak_allocated_bytes)} allocated)"
        held += f" ({format_bytes(measured.peak_allocated_bytes)} allocated)" if measured is not None else ""
    now, then = format_seconds(after.step_seconds), format_seconds(before.step_seconds)
    return [
        f"{_which(before, said)} ran out {_where(phase, step)}{_request(said)}: {predicted}, and {held}.",
        f"Going on with {', '.join(_changed(before, after))}: {format_bytes(after.footprint.total_device_bytes)} predicted, "
        f"{now} a step instead of {then}; the {before.job.global_batch_size} rows of each step stay.",
    ]


def nothing_left(
    choice: Choice,
    *,
    said: str,
    phase: str,
    step: int | None = None,
    measured: Side | None = None,
    ways_out: Sequence[tuple[str, int, bool]] = (),
    width: int = 80,
) -> str:
    """The report when memory ran out with the smallest plan: one sentence, then predicted beside measured and the owners.

    Args:
        choice: the smallest plan.
        said, phase, step, measured: as in :func:`recovery_lines`.
        ways_out: changes that take less, from :func:`memtrain.planner.smaller.ways_out`: what each is, the bytes of the
            device that it is predicted to take, and whether they are few enough.
        width: columns of what is below the sentence.
    """
    peak = choice.footprint
    enough = next(((change, size) for change, size, does in ways_out if does), None)
    larger = "take a larger machine or a smaller model"
    remedy = larger if enough is None else f"change to {enough[0]}, which is predicted to take {format_bytes(enough[1])}"
    sentence = (
        f"{_which(choice, said).lower()} ran out {_where(phase, step)}{_request(said)} with the smallest plan ({choice.plan}), "
        f"which was predicted to take {format_bytes(peak.total_device_bytes)} of the budget of "
        f"{format_bytes(choice.budget.device_bytes)}: free memory, or {remedy}."
    )
    view = Table.grid(Column(style="bold", no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    rows: list[tuple[str, RenderableType]] = [
        ("said", Text(said)),
        ("peak", peak_view(peak, choice.budget)),
        ("reached", Text(f"in {peak.peak_phase}, by {source_words(peak.peak_operator, peak.peak_module)}")),
        ("held by", owners_view(peak)),
        ("measured", Text("nothing") if measured is None else bytes_table(compare(choice, measured))),
        *([("instead", _ways(ways_out))] if ways_out else []),
    ]
    for label, content in rows:
        view.add_row(label, content)
    return "\n".join([sentence, *_lines(view, width)])


def requested_bytes(said: str) -> int | None:
    """The bytes that an allocator's message says were asked for, None where it says none.

    >>> requested_bytes("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.6 GiB of which")
    20971520
    """
    found = _ASKED.search(said)
    return None if found is None else parse_bytes(f"{found[1]}{found[2] or 'B'}")


def _which(choice: Choice, said: str) -> str:
    """The memory that ran out: beside a card the host's is another, and its allocators do not speak of CUDA."""
    if not isinstance(choice.device, Cuda):
        return "Memory"
    return "Memory of the card" if any(word in said for word in ("CUDA", "CUBLAS", "CUDNN")) else "Memory of the host"


def _where(phase: str, step: int | None) -> str:
    return f"in {phase}" if step is None else f"in {phase} of step {step}"


def _request(said: str) -> str:
    size = requested_bytes(said)
    return "" if size is None else f" when {format_bytes(size)} were asked for"


def _changed(before: Choice, after: Choice) -> list[str]:
    """The fields of the plan that change, as they are now and as they were."""
    pairs = ((name, getattr(after.plan, field), getattr(before.plan, field)) for field, name in FIELD_NAMES.items())
    return [f"{name} {now} instead of {then}" for name, now, then in pairs if now != then]


def _ways(ways: Sequence[tuple[str, int, bool]]) -> Table:
    """What takes less, with its bytes: first what takes few enough."""
    table = Table.grid(Column(justify="right", no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for change, size, does in sorted(ways, key=lambda way: not way[2]):
        table.add_row(format_bytes(size), Text(change if does else f"{change}, still too much"))
    return table


def _lines(view: RenderableType, width: int) -> list[str]:
    """A view as plain text, which is what an error message holds."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]
