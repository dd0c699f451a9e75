"""The course of a training run: its steps, evaluations and checkpoints, and what it does when something goes wrong.

A run that resumes, and one that goes back to a checkpoint after running out of memory, take the same way: a checkpoint is put
into a prepared run, and the steps after it are taken again with the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from memtrain import machine
from memtrain.data.batches import StepBatches
from memtrain.device import Cuda
from memtrain.keeper import Keeper
from memtrain.leaks import LeakWatch
from memtrain.loop import Loop
from memtrain.metrics import RunFolder, RunLog
from memtrain.out_of_memory import OutOfMemory, attempt
from memtrain.planner.choice import NoPlanFits, Side
from memtrain.recovery import Changes
from memtrain.report.out_of_memory import nothing_left, recovery_lines
from memtrain.report.tell import Tell
from memtrain.report.terminal import TrainingProgress
from memtrain.resume import Start
from memtrain.session import Session
from memtrain.signals import Requests
from memtrain.state import remember
from memtrain.trace.event import Phase
from memtrain.watchdog import Watchdog

T = TypeVar("T")

# What memory may grow by between step 3 and any later one. Beside tensors the C heap of a processor holds what libraries keep
# for themselves and the rows of the log; a card's allocator holds tensors alone.
_CARD_GROWTH_BYTES, _HEAP_GROWTH_BYTES = 2**20, 2**24


class Stopped(Exception):
    """A signal has asked the run to stop, and it is between two micro-batches or two batches of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a run talks to.

    Attributes:
        log: the rows of metrics so far.
        folder: where plan and prediction go when they change; None for nowhere.
        keeper: its checkpoints.
        requests: what signals ask for.
        watchdog: tells of a step that takes too long.
        tell: takes a sentence for the person who reads.
        bar: shows how far it is.
    """

    log: RunLog
    folder: RunFolder | None
    keeper: Keeper
    requests: Requests
    watchdog: Watchdog
    tell: Tell
    bar: TrainingProgress


class Training:
    """One run, from its start or from a checkpoint to its last step."""

    def __init__(self, session: Session, batches: StepBatches, around: Around, *, evaluate_every: int | None) -> None:
        self._session = session
        self._batches = batches
        self._around = around
        self._evaluate_every = evaluate_every
        self._steps = session.given.job.steps
        self._done = 0
        self._speed = 0.0
        device = session.given.device
        self._leaks = LeakWatch(
            # A copy that is being written is memory of its own.
            lambda: None if around.keeper.is_writing else machine.used_bytes(device),
            _CARD_GROWTH_BYTES if isinstance(device, Cuda) else _HEAP_GROWTH_BYTES,
        )
        self._loop: Loop | None = None

    @property
    def loop(self) -> Loop:
        """The steps under the plan in force."""
        assert self._loop is not None
        return self._loop

    def run(self, start: Start) -> None:
        """Take all steps that are left.

        Raises:
            Stopped: a signal came; what could be saved is saved.
            ValueError: the loss is not finite, or memory ran out and nothing is left to give.
        """
        try:
            self._begin(start)
            while True:
                self._evaluate_if_due()
                self._save_if_due()
                if self._done == self._steps:
                    return
                self._ask()
                self._advance()
        except Stopped:
            self._save()
            raise

    # ------------------------------------------------------------------ beginning

    def _begin(self, start: Start) -> None:
        around = self._around
        self._done = 0 if start.checkpoint is None else start.checkpoint.step
        around.log.cut_back(-1 if start.checkpoint is None else self._done)
        self._loop = self._session.begin(self._batches, self._done, self._ask)
        if start.checkpoint is None:
            self._rehearse()
        else:
            around.keeper.restore(start.checkpoint, self.loop.run, self.loop.plan)

    def _rehearse(self) -> None:
        """Take the memory of a step, and of one beside the optimizer's state, before a weight changes (rule 7)."""
        while True:
            put_back = remember(self.loop.run)
            with self._around.watchdog.watching("step", "the rehearsal of step 1"):
                failure = attempt(self.loop.rehearse)
            # At a learning rate of 0 no weight has changed; the rest goes.
            self.loop.run.optimizer.state.clear()
            put_back()
            machine.release_cached(self._session.given.device)
            if not isinstance(failure, OutOfMemory):
                return
            self._make_smaller(failure, "the rehearsal", step=None)
            self._loop = self._session.go_on(self.loop, self._done)

    # ------------------------------------------------------------------ steps

    def _advance(self) -> None:
        """The next step; or back to the last checkpoint, where memory ran out after a weight had changed."""
        around, step = self._around, self._done
        row = self._taken(step)
        if row is None:
            return
        self._done = step + 1
        around.log.add(row)
        self._show(row)
        if grown := self._leaks.after(self._done):
            around.tell(grown)

    def _show(self, row: Mapping[str, float]) -> None:
        bar, meter, step = self._around.bar, self._session.meter, int(row["step"])
        # The profiler slows the steps that it watches: the speed shown is that of the last one it did not.
        if not self._speed or not self.loop.watches(step - 1):
            self._speed = row[f"{self.loop.counts}_per_second"]
        # Every weight and its state is asked for its size, for nobody where nothing is shown.
        held = 0 if bar.console.quiet else meter.held_bytes()
        bar.update(step, loss=row["loss"], per_second=self._speed, memory_bytes=held, peak_bytes=meter.peak_bytes)

    def _taken(self, step: int) -> dict[str, float] | None:
        while True:
            loop = self.loop
            put_back, changes = remember(loop.run), Changes(loop.run, loop.plan)
            try:
                with self._around.watchdog.watching("step", f"step {step + 1}"):
                    row = attempt(partial(replace(loop, run=changes.noting()).step, step))
            except Stopped:
                put_back()
                raise
            if not isinstance(row, OutOfMemory):
                return row
            # Which updates were made is known to nobody once one has begun (rule 8).
            if changes.begun:
                self._make_smaller(row, "the update", step + 1)
                self._go_back()
                return None
            put_back()
            self._make_smaller(row, "forward and backward", step + 1)
            self._loop = self._session.go_on(loop, step)

    def _make_smaller(self, failure: OutOfMemory, phase: str, step: int | None) -> None:
        """Take the next smaller plan into force, or end with what there is to know."""
        session, around = self._session, self._around
        failed, measured = session.choice, self._measured()
        assert failed is not None
        machine.release_cached(session.given.device)
        try:
            smaller = session.plan_smaller(None if measured is None else measured.total_device_bytes)
        except NoPlanFits:
            raise ValueError(
                nothing_left(
                    failed, said=failure.said, phase=phase, step=step, measured=measured, ways_out=tuple(session.ways_out())
                )
            ) from None
        for line in recovery_lines(failed, smaller, said=failure.said, phase=phase, step=step, measured=measured):
            around.tell(line)
        if around.folder is not None:
            # The disk may be full; the plan is in the next checkpoint, too.
            with suppress(ValueError):
                smaller.write(around.folder)
        self._leaks.rebase()

    def _measured(self) -> Side | None:
        """What was measured until now, with what failed where that is known; None before anything was."""
        self._session.meter.note_failure()
        return self._session.meter.side(0.0) if self._session.meter.peak_bytes else None

    def _go_back(self) -> None:
        """Put the last checkpoint into a run under the plan in force, or begin again where the model can be had again."""
        session, around = self._session, self._around
        last = around.keeper.last()
        if last is None:
            if not session.loads_again:
                raise ValueError(
                    f"memory ran out in the update of step {self._done + 1}, after weights had changed and before the first "
                    f"checkpoint: begin again with the module as it was, and with checkpoint_every smaller."
                )
            self._loop = None
            session.forget_model()
        else:
            session.end()
        around.tell(f"Weights had changed, so the run goes back to {'its beginning' if last is None else f'step {last.step}'}.")
        self._begin(Start(last))

    # ------------------------------------------------------------------ evaluating, saving, stopping

    def _evaluate_if_due(self) -> None:
        log, given = self._around.log, self._session.given
        if given.eval_rows is None or any(step == self._done for step, _ in log.evaluations):
            return
        every = self._evaluate_every
        if self._done in (0, self._steps) or (every is not None and self._done % every == 0):
            with self._around.watchdog.watching("evaluation", f"the evaluation after step {self._done}"):
                loss = self._evaluated(lambda: self.loop.evaluate())
            log.add({"step": self._done, "eval_loss": loss})

    def _evaluated(self, work: Callable[[], T]) -> T:
        """What an evaluation gives, in smaller batches where memory runs out; training keeps its micro-batch."""
        while True:
            result = attempt(work)
            if not isinstance(result, OutOfMemory):
                return result
            size = self.loop.evaluation_batch_size
            if size == 1:
                raise ValueError(
                    f"memory ran out in the evaluation after step {self._done} with one row at a time ({result.said}): leave "
                    f"eval_data out, or give shorter rows."
                )
            machine.release_cached(self._session.given.device)
            self._loop = replace(self.loop, evaluation_batch_size=size // 2)
            self._around.tell(f"Memory ran out in evaluation: it goes on in batches of {size // 2} instead of {size} rows.")

    def _save_if_due(self) -> None:
        if self._around.keeper.is_due(self._done, self._steps) or self._around.requests.takes_save():
            self._save()

    def _save(self) -> None:
        around, loop = self._around, self._loop
        # Before the first step there is nothing that is not there already.
        if loop is None or not self._done:
            return
        with around.watchdog.watching("checkpoint", f"the checkpoint of step {self._done}"):
            around.log.sync()
            tokens = self._done * loop.job.global_batch_size * (loop.row_tokens or 1)
            around.keeper.save(self._done, loop.run, loop.plan, around.log.evaluations, tokens)

    def _ask(self) -> None:
        if self._around.requests.stop is not None:
            raise Stopped

    # ------------------------------------------------------------------ the end

    def measure_the_end(self, save: Callable[[], None] | None) -> None:
        """Measure evaluation and saving beside the optimizer's state; ``save`` writes the model."""
        session = self._session
        if session.given.eval_rows is not None:
            self._evaluated(lambda: self.loop.measure_evaluation())
        if save is None:
            return
        with session.meter.window("save", Phase.SAVE):
            failure = attempt(save)
        if isinstance(failure, OutOfMemory):
            # Nothing needs the optimizer's state any more.
            self._around.tell("Memory ran out in saving the model: it is saved again without the optimizer's state.")
            session.end()
            machine.release_cached(session.given.device)
            save()
