"""What a run is given and what it leaves behind, for the scripts that disturb runs and compare them with undisturbed ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# What is logged of a step and decided by the clock.
_TIMES = ("step_seconds", "tokens_per_second", "rows_per_second")


def rows(count: int, length: int) -> list[dict[str, Tensor]]:
    """Rows of tokens below 100, of which each begins with its own number."""
    found = [(torch.arange(length) * 7 + number * 13) % 90 + 7 for number in range(count)]
    for number, ids in enumerate(found):
        ids[0] = number
    return [{"input_ids": ids, "labels": ids} for ids in found]


def logged(folder: Path, *, evaluations: bool = False) -> list[dict[str, Any]]:
    """What is logged of the steps, or of evaluations too, without times; a line that is cut short is left out."""
    found: list[dict[str, Any]] = []
    with suppress(FileNotFoundError):
        for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                found.append({name: value for name, value in json.loads(line).items() if name not in _TIMES})
    return [row for row in found if evaluations or "loss" in row]


def last_taken(taken: Iterable[tuple[int, list[int]]], rows: int, global_batch_size: int) -> dict[int, list[int]]:
    """The rows of each step as they were trained on the last time.

    Args:
        taken: a step, from 1, and the rows of a micro-batch, in the order of time.
        rows: of an epoch, whose last step has those that are left.
        global_batch_size: rows of the other steps.
    """
    in_epoch = -(-rows // global_batch_size)
    found: dict[int, list[int]] = {}
    for step, numbers in taken:
        found.setdefault(step, []).extend(numbers)
    begins = {step: (step - 1) % in_epoch * global_batch_size for step in found}
    return {step: numbers[-min(global_batch_size, rows - begins[step]) :] for step, numbers in found.items()}


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A sentence for each thing in which two outcomes differ."""
    return [
        f"{name}: {found.get(name, 'nothing')} where the undisturbed run has {expected.get(name, 'nothing')}"
        for name in dict.fromkeys((*expected, *found))
        if name not in expected or name not in found or expected[name] != found[name]
    ]
