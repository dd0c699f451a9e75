"""Making room when memory has run out: a smaller plan for steps, smaller batches for evaluations."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from memtrain import distributed
from memtrain.loop import Loop
from memtrain.metrics import RunFolder
from memtrain.out_of_memory import OutOfMemory
from memtrain.planner.choice import NoPlanFits, Side
from memtrain.report.out_of_memory import nothing_left, recovery_lines, requested_bytes
from memtrain.report.tell import Tell
from memtrain.session import Session


class Phase(StrEnum):
    """What a run does, as a person is told where memory ran out."""

    BEGINNING = "putting the run together"
    REHEARSAL = "the rehearsal of a step"
    STEP = "forward and backward"
    UPDATE = "the update"
    EVALUATION = "evaluation"
    SAVING = "saving"
    BETWEEN = "waiting for other processes"


@dataclass(frozen=True)
class Where:
    """How far a process had come when memory ran out in one of them.

    Attributes:
        done: steps taken.
        changed: whether a weight may have been changed since.
    """

    phase: Phase
    done: int
    changed: bool


def make_smaller(session: Session, memory: OutOfMemory, where: Where, folder: RunFolder | None, tell: Tell) -> None:
    """Take the next smaller plan into force, the same in all processes.

    Args:
        where: the process whose memory ran out.
        folder: where plan and prediction are written.

    Raises:
        ValueError: none is left; with what is known about the peak.
    """
    before, measured = session.choice, _measured(session)
    assert before is not None
    held = 0 if measured is None else measured.total_device_bytes + (requested_bytes(memory.said) or 0)
    (needed,) = distributed.agree([held])
    step = None if where.phase in (Phase.BEGINNING, Phase.REHEARSAL) else where.done + 1
    try:
        smaller = session.plan_smaller(needed or None)
    except NoPlanFits:
        # In the first process, whose plans they are; the others say that it has stopped.
        ways = session.ways_out(needed or None)
        report = nothing_left(before, said=memory.said, phase=where.phase, step=step, measured=measured, ways_out=ways)
        raise ValueError(report) from None
    for line in recovery_lines(before, smaller, said=memory.said, phase=where.phase, step=step, measured=measured):
        tell(line)
    if folder is not None:
        # The disk may be full; the plan is in the next checkpoint, too.
        with suppress(ValueError):
            smaller.write(folder)


def _measured(session: Session) -> Side | None:
    """What was measured until now, with what failed where that is known; None before anything was."""
    session.meter.note_failure()
    return session.meter.side(0.0) if session.meter.peak_bytes else None


def evaluate_fewer(loop: Loop, memory: OutOfMemory, where: Where, tell: Tell) -> Loop:
    """The same steps with half as many rows in a batch of an evaluation; training keeps its micro-batch.

    Raises:
        ValueError: a batch has one row.
    """
    size = loop.evaluation_batch_size
    if size == 1:
        raise ValueError(
            f"memory ran out in the evaluation after step {where.done} with one row at a time ({memory.said}): leave eval_data out, "
            f"or give shorter rows."
        )
    tell(f"Memory ran out in evaluation: it goes on in batches of {size // 2} instead of {size} rows.")
    return replace(loop, evaluation_batch_size=size // 2)
