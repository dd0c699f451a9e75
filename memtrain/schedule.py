"""The learning rate of each step, as a pure function of the job: nothing to save, nothing to resume.

With peak ``p``, warm-up over ``W`` steps, ``N`` steps in all and ``s`` counted from 0::

    s < W            p · (s + 1) / W
    Constant         p
    Cosine           p · (f + (1 - f) · (1 + cos(π · t)) / 2),   t = (s - a) / (N - 1 - a),   a = max(W - 1, 0)
    Linear           p · (1 - (1 - f) · (s - a) / (N - a))

The first step trains with ``p / W``, not with 0, and step ``a`` is the first with the full peak. The cosine (Loshchilov and
Hutter, arXiv 1608.03983, equation 5, one period without restarts) runs from there to exactly ``f · p`` at the last step. The line
would reach ``f · p`` a step later, so that no step trains with 0; without warm-up it is transformers' linear schedule, which with
warm-up begins at 0 and has its peak a step later.
Where warm-up takes all steps, or there is only one, there is no room to decay and the last step trains with the peak.
"""

from __future__ import annotations

import math

from memtrain.job import Constant, Cosine, Job, Linear


def learning_rate(job: Job, step: int) -> float:
    """The learning rate that ``step`` trains with.

    Args:
        job: its optimizer names the peak, its schedule the shape.
        step: counted from 0, below ``job.steps``.

    >>> from memtrain.job import AdamW
    >>> job = Job(model="m", global_batch_size=1, steps=5, optimizer=AdamW(learning_rate=0.5), schedule=Cosine(warmup_steps=2))
    >>> [round(learning_rate(job, step), 3) for step in range(5)]
    [0.25, 0.5, 0.375, 0.125, 0.0]
    """
    assert 0 <= step < job.steps
    peak = job.optimizer.learning_rate
    warmup_steps = job.schedule.warmup_steps
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    at_peak, last = max(warmup_steps - 1, 0), job.steps - 1
    match job.schedule:
        case Constant():
            return peak
        case Linear(final_fraction=final_fraction):
            return peak * (1 - (1 - final_fraction) * ((step - at_peak) / (job.steps - at_peak)))
        case Cosine(final_fraction=final_fraction):
            if at_peak == last:
                return peak
            progress = (step - at_peak) / (last - at_peak)
            return peak * (final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * progress)) / 2)
