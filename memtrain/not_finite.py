"""A step whose loss or gradient is not finite: which rows are to blame, what is said, and when going on makes no sense."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import torch
from torch import nn

from memtrain.data.rows import Batch
from memtrain.run import Run, StepResult

# Of the last so many steps more than half left out, and a run does not train: its weights or its rate are beyond help.
_WATCHED_STEPS = 100
# Where a scale that begins at the usual 65536 has been halved 20 times. Below it gradients are smaller than without a scale
# by more than the 10 bits of a float16, so most of them are rounded to 0.
SMALLEST_SCALE = 1 / 16


class NotFiniteStep(ValueError):
    """A loss or gradient is not finite, and the job says to stop; the message says which and why.

    Attributes:
        updated: whether the weights have been changed by the step.
    """

    def __init__(self, message: str, *, updated: bool) -> None:
        super().__init__(message)
        self.updated = updated


def rows_not_finite(run: Run, rows: Iterable[tuple[int, Batch]]) -> list[int]:
    """The numbers of the rows whose loss is not finite by itself, with dropout off and without a gradient.

    Args:
        rows: each row's number and a batch of it alone; of several processes all take the same rows.
    """
    return [number for number, row in rows if run.objective.count(row) and not run.evaluate([row]).isfinite()]


def why_not_finite(run: Run, rows: Iterable[tuple[int, Batch]], numbers: list[int]) -> str:
    """What is to blame for a step that is not finite and has changed no weight: weights, rows or the gradient."""
    if path := weight_not_finite(run.model):
        return f"{path} was not finite before it: go back to an earlier checkpoint"
    blamed = rows_not_finite(run, rows)
    if not blamed:
        return f"the loss of each of its rows alone is finite, so the gradient overflows: look at rows {numbers}"
    return f"the loss of row{'s' if len(blamed) > 1 else ''} {', '.join(map(str, blamed))} alone is not finite: look there"


@torch.no_grad()
def weight_not_finite(model: nn.Module) -> str:
    """The path of a weight that trains and is not finite; empty where there is none."""
    for path, weight in model.named_parameters():
        # The largest value and not a mask, which would take memory as large as the weight.
        if weight.requires_grad and weight.numel() and not math.isfinite(torch.linalg.vector_norm(weight, math.inf).item()):
            return path
    return ""


def what_happened(step: int, loss: float, result: StepResult, tries: int, scale: float | None) -> str:
    """What of a step (from 1) is not finite, as the beginning of a sentence.

    Args:
        tries: how often it was taken, each time at half the loss scale.
        scale: the last loss scale that was tried; None without one.
    """
    if not math.isfinite(loss):
        return f"the loss of step {step} is {loss}"
    if scale is not None and tries:
        return f"the gradient of step {step} is not finite at a loss scale of {scale:g}, after {tries} tries"
    assert result.grad_norm is not None
    return f"the gradient of step {step} has a norm of {result.grad_norm.item()}"


class Health:
    """What is remembered of the last steps, to end a run that only leaves them out.

    It begins anew when a run is resumed.
    """

    def __init__(self) -> None:
        self._left_out: deque[bool] = deque(maxlen=_WATCHED_STEPS)

    def check(self, step: int, *, finite: bool, updated: bool, scale: float | None) -> None:
        """Take note of a step (from 1).

        Args:
            updated: whether it has changed weights.

        Raises:
            NotFiniteStep: more than half of the last 100 steps were left out, or the loss scale has collapsed.
        """
        self._left_out.append(not finite)
        if sum(self._left_out) > _WATCHED_STEPS // 2:
            raise NotFiniteStep(
                f"{sum(self._left_out)} of the last {len(self._left_out)} steps up to step {step} were not finite and left out: lower "
                f"the learning rate, look at the rows that were named, or go back to an earlier checkpoint.",
                updated=updated,
            )
        if scale is not None and scale < SMALLEST_SCALE:
            raise NotFiniteStep(
                f"the loss scale has fallen to {scale:g} at step {step}, where most of the gradient is rounded to 0 in float16: set "
                f"precision to autocast_bf16, or lower the learning rate.",
                updated=updated,
            )
