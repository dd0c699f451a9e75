"""What a run does when a step fails: today, when the gradient of a scaled loss overflows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memtrain.data.rows import Batch
from memtrain.run import Run, StepResult

# Tries of one step, each at half the scale of the last: from the usual 65536 down to 1/16.
MOST_TRIES = 20


def step_until_finite(
    run: Run, micro_batches: Callable[[], Sequence[Batch]], step: int, rows: Sequence[int]
) -> tuple[StepResult, int]:
    """A step whose gradient is finite, and how often it overflowed first: the same rows again, at half the scale.

    Without a scaled loss the first try is taken as it is.

    Args:
        micro_batches: makes those of the step anew, so that nothing holds them when the step returns.
        step: number of the step, from 1, for the message.
        rows: its rows, for the message.

    Raises:
        ValueError: the gradient overflows at every scale.
    """
    for overflows in range(MOST_TRIES):
        scale = run.scaler.get_scale()
        result = run.step(micro_batches())
        if run.scaler.get_scale() >= scale:
            return result, overflows
    raise ValueError(
        f"the gradient of step {step} is not finite at a loss scale of {run.scaler.get_scale():g}, after {MOST_TRIES} tries: "
        f"set precision to autocast_bf16, or look at rows {list(rows)}."
    )
