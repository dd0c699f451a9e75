"""A step that is taken again: at a smaller loss scale, or because it failed before a weight had changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from memtrain.data.rows import Batch
from memtrain.features.update import Update
from memtrain.plan import DuringBackward, Plan
from memtrain.run import Run, StepResult

# Tries of one step, each at half the scale of the last: from the usual 65536 down to 1/16.
MOST_TRIES = 20


def step_until_finite(run: Run, micro_batches: Callable[[], Sequence[Batch]]) -> tuple[StepResult, int]:
    """A step whose gradient is finite, and how often it overflowed first: the same rows again, at half the scale.

    A step that no scale makes finite is given back as it was last tried, with no weight changed and the scale of before: one whose
    loss is not finite, which no scale is in, or that has overflowed ``MOST_TRIES`` times. Without a scaled loss the first try is
    taken as it is.

    Args:
        micro_batches: makes those of the step anew, so that nothing holds them when the step returns.
    """
    before = run.scaler.state_dict()
    for overflows in range(MOST_TRIES):
        scale = run.scaler.get_scale()
        result = run.step(micro_batches())
        if run.scaler.get_scale() >= scale:
            return result, overflows
        if not result.loss.isfinite():
            break
    run.scaler.load_state_dict(before)
    return result, overflows + 1


class Changes:
    """Whether a step has begun to change weights or state, after which it is never taken again in place (rule 8).

    An update after backward counts from its beginning: kernels change state before they allocate, and not all of them tell.
    One during backward is seen by torch's counts of in-place writes (``Tensor._version``) in weights and state, and by the
    counters of steps that some optimizers keep as numbers.
    """

    def __init__(self, run: Run, plan: Plan) -> None:
        self._run = run
        self._entered = False
        self._before = _writes(run) if isinstance(plan.update, DuringBackward) else None

    def noting(self) -> Run:
        """The run, whose update tells that it has begun."""

        def update() -> Update:
            self._entered = True
            return self._run.update()

        return replace(self._run, update=update)

    @property
    def begun(self) -> bool:
        """Whether an update has begun."""
        return self._entered or (self._before is not None and _writes(self._run) != self._before)


def _writes(run: Run) -> tuple[int, float]:
    """How many tensors of weights and state there are, and how often they were written."""
    count, written = 0, 0.0
    for parameter in (one for group in run.optimizer.param_groups for one in group["params"]):
        for value in (parameter, *run.optimizer.state.get(parameter, {}).values()):
            count += 1
            if isinstance(value, torch.Tensor):
                written += value._version
            elif isinstance(value, int | float):
                written += value
    return count, written
