"""The table of optimizers: bytes per parameter, as people look them up, at 80 columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from memtrain.planner.optimizers import OptimizerBytes, OptimizerTable
from memtrain.units import format_bytes, format_count

_COLUMNS = ("weights", "gradients", "optimizer_state", "temporaries")


def optimizers_view(model: str, table: OptimizerTable) -> RenderableType:
    """What each optimizer takes of memory in an update, per trained parameter: one block per precision."""
    parts: list[RenderableType] = []
    for precision in dict.fromkeys(row.precision for row in table.rows):
        rows = [row for row in table.rows if row.precision == precision]
        headline = f"{model}, {format_count(rows[0].parameters)} parameters in {precision}: bytes per parameter"
        parts += [Text(headline, style="bold"), _block(rows), Text()]
    parts.append(Text("At the peak of an update after backward, without activations and clipping."))
    parts += [Text(f"Left out: {reason}") for reason in table.left_out]
    return Group(*parts)


def _block(rows: Sequence[OptimizerBytes]) -> Table:
    numbers = ("weights", "gradients", "state", "temporary", "together", "× weights", "in all")
    table = Table(
        Column("optimizer", no_wrap=True),
        *[Column(name, justify="right", no_wrap=True) for name in numbers],
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    for row in rows:
        per_parameter = [f"{row.per_parameter(getattr(row, name)):.2f}" for name in (*_COLUMNS, "total")]
        table.add_row(_named(row), *per_parameter, f"{row.total / row.weights:.2f}", format_bytes(row.total))
    return table


def _named(row: OptimizerBytes) -> str:
    """The rule, and what of the plan is not as it is by itself.

    >>> sizes = dict(parameters=1, weights=4, gradients=4, optimizer_state=8, temporaries=0)
    >>> _named(OptimizerBytes(optimizer="AdamW", kernel="foreach", state="on_device", precision="fp32", **sizes))
    'AdamW foreach'
    """
    kernel = "" if row.kernel == "fused" else f" {row.kernel}"
    state = "" if row.state == "on_device" else f" {row.state}"
    return f"{row.optimizer}{kernel}{state}"


def optimizers_json(model: str, table: OptimizerTable) -> dict[str, Any]:
    """The table as plain data, sizes in bytes."""
    rows = [{**dataclasses.asdict(row), "total": row.total} for row in table.rows]
    return {"model": model, "optimizers": rows, "left_out": list(table.left_out)}
