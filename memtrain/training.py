"""The course of a training run: its steps, evaluations and checkpoints, and what it does when something goes wrong.

A run that resumes, and one that goes back to a checkpoint after running out of memory, take the same way: a checkpoint is put
into a prepared run, and the steps after it are taken again with the same rows.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

from memtrain import distributed, machine
from memtrain.around import Around, Stopped, WentBack
from memtrain.callbacks import Action, Event, Record
from memtrain.data.batches import Batches
from memtrain.device import Cuda
from memtrain.distributed import Setback
from memtrain.leaks import LeakWatch
from memtrain.loop import Loop
from memtrain.not_finite import NotFiniteStep, weight_not_finite
from memtrain.out_of_memory import OutOfMemory, attempt
from memtrain.recovery import Changes
from memtrain.resume import Start
from memtrain.session import Session
from memtrain.setbacks import Phase, Where, evaluate_fewer, make_smaller
from memtrain.trace.event import Phase as Measured

T = TypeVar("T")

# What memory may grow by between step 3 and any later one. Beside tensors the C heap of a processor holds what libraries keep
# for themselves and the rows of the log; a card's allocator holds tensors alone.
_CARD_GROWTH_BYTES, _HEAP_GROWTH_BYTES = 2**20, 2**24


class Training:
    """One run, from its start or from a checkpoint to its last step."""

    def __init__(self, session: Session, batches: Batches, around: Around, *, evaluate_every: int | None) -> None:
        self._session = session
        self._batches = batches
        self._around = around
        self._evaluate_every = evaluate_every
        self._steps = session.given.job.steps
        self._done = 0
        self._evaluated: set[int] = set()
        self._asked: set[Action] = set()
        self._evaluate_at = 0
        self._speed, self._loss = 0.0, math.nan
        self._is_whole = False
        device = session.given.device
        self._leaks = LeakWatch(
            # A copy that is being written is memory of its own.
            lambda: None if around.keeper.is_writing else machine.used_bytes(device),
            _CARD_GROWTH_BYTES if isinstance(device, Cuda) else _HEAP_GROWTH_BYTES,
        )
        self._loop: Loop | None = None

    @property
    def done(self) -> int:
        """Steps taken."""
        return self._done

    @property
    def loop(self) -> Loop:
        """The steps under the plan in force."""
        assert self._loop is not None
        return self._loop

    def run(self, start: Start, save_model: Callable[[], None] | None) -> None:
        """Take all steps that are left, and measure the end.

        Args:
            save_model: writes the model.

        Raises:
            Stopped: a signal came; what could be saved is saved.
            ValueError: the loss is not finite, or memory ran out and nothing is left to give.

        What ends the run before a weight has changed, such as a row that cannot be read, lets it save first.
        """
        pending: Start | None = start
        try:
            while True:
                try:
                    if pending is not None:
                        self._begin(pending)
                        pending = None
                    self._evaluate_if_due()
                    self._heed()
                    # What was heeded may have made it due.
                    self._evaluate_if_due()
                    if self._around.keeper.is_due(self._done, self._steps):
                        self._save()
                    if self._done == self._steps:
                        return self._end(save_model)
                    self._advance()
                except WentBack as back:
                    pending = back.start
        except Exception as ends:
            # Of several processes one alone may have met it, and the others would not come.
            met_by_all = isinstance(ends, Stopped | NotFiniteStep) or self._session.given.processes.ranks == 1
            if self._is_whole and met_by_all:
                try:
                    self._save()
                except Exception as failure:
                    # What ends the run is raised all the same.
                    self._around.tell(f"The run could not be saved at its end ({failure}).")
            raise

    # ------------------------------------------------------------------ beginning

    def _begin(self, start: Start) -> None:
        around = self._around
        self._is_whole = False
        self._done = 0 if start.checkpoint is None else start.checkpoint.step
        around.log.cut_back(-1 if start.checkpoint is None else self._done)
        # The first process has the log.
        self._evaluated = distributed.from_first(lambda: {step for step, _ in around.log.evaluations})
        self._steps, self._asked = self._session.given.job.steps, set()
        # Callbacks go by what they have seen, which is what led here.
        self._show_callbacks("begin", {})
        for row in around.log.rows:
            if "eval_loss" in row:
                self._show_callbacks("evaluation", row)
        outcome = self._tried(Phase.BEGINNING, lambda: self._put_together(start))
        if isinstance(outcome, Setback):
            self._make_room(outcome, in_place=False)
        if start.checkpoint is None:
            self._rehearse()
        self._is_whole = True
        # One from another folder becomes this run's own, so that a kill from here on loses nothing.
        if start.checkpoint is not None:
            self._save()

    def _put_together(self, start: Start) -> None:
        self._loop = self._session.begin(self._batches, self._done, ask=self._ask, tell=self._around.tell)
        if start.checkpoint is not None:
            self._around.keeper.restore(start.checkpoint, self.loop.run, self.loop.plan)

    def _rehearse(self) -> None:
        """Take the memory of a step, and of one beside the optimizer's state, before a weight changes (rule 7)."""
        while True:
            put_back = self._secured(Phase.REHEARSAL, lambda: self.loop.remember())
            try:
                with self._around.watchdog.watching("step", "the rehearsal of step 1"):
                    outcome = self._tried(Phase.REHEARSAL, self.loop.rehearse)
                if not isinstance(outcome, Setback):
                    self._around.keeper.check_room(self.loop.run)
            finally:
                # At a learning rate of 0 no weight has changed; the rest goes.
                self.loop.run.optimizer.state.clear()
                put_back()
            machine.release_cached(self._session.given.device)
            if not isinstance(outcome, Setback):
                return
            self._make_room(outcome)

    # ------------------------------------------------------------------ steps

    def _advance(self) -> None:
        row = self._taken(self._done)
        self._done += 1
        self._around.log.add(row)
        self._show_callbacks("step", row)
        self._show(row)
        if grown := self._leaks.after(self._done):
            self._around.tell(grown)

    def _taken(self, step: int) -> dict[str, float]:
        """The row of a step, which is taken again as often as memory runs out before a weight changes."""
        while True:
            put_back = self._secured(Phase.STEP, lambda: self.loop.remember())
            changes = Changes(self.loop.run, self.loop.plan)
            take = partial(replace(self.loop, run=changes.noting()).step, step)
            try:
                with self._around.watchdog.watching("step", f"step {step + 1}"):
                    outcome = self._tried(Phase.STEP, take, changes)
            except Exception as error:
                self._is_whole = not error.updated if isinstance(error, NotFiniteStep) else not changes.begun
                if self._is_whole:
                    put_back()
                raise
            if not isinstance(outcome, Setback):
                return outcome
            put_back()
            self._make_room(outcome)

    def _show(self, row: Mapping[str, float]) -> None:
        bar, meter, step = self._around.bar, self._session.meter, int(row["step"])
        # The profiler slows the steps that it watches: the speed shown is that of the last one it did not.
        if not self._speed or not self.loop.watches(step - 1):
            self._speed = row[f"{self.loop.counts}_per_second"]
        if math.isfinite(row["loss"]):
            self._loss = row["loss"]
        # Every weight and its state is asked for its size, for nobody where nothing is shown.
        held = 0 if bar.console.quiet else meter.held_bytes()
        bar.update(step, loss=self._loss, per_second=self._speed, memory_bytes=held, peak_bytes=meter.peak_bytes)

    # ------------------------------------------------------------------ out of memory

    def _tried(self, phase: Phase, work: Callable[[], T], changes: Changes | None = None) -> T | Setback[Where]:
        """What ``work`` returns, or that memory ran out, in this process or another."""

        def where() -> Where:
            # Which updates were made is known to nobody once one has begun (rule 8).
            changed = changes is not None and changes.begun
            return Where(Phase.UPDATE if changed else phase, self._done, changed)

        return distributed.together(work, where)

    def _secured(self, phase: Phase, work: Callable[[], T]) -> T:
        """What ``work`` returns, tried again when room was made."""
        while isinstance(outcome := self._tried(phase, work), Setback):
            self._make_room(outcome)
        return outcome

    def _make_room(self, setback: Setback[Where], *, in_place: bool = True) -> None:
        """Make room after memory ran out, so that the same can be tried again.

        Args:
            in_place: whether it can where all processes are in one place and no weight has changed.

        Raises:
            WentBack: it cannot.
            ValueError: nothing is left to give.
        """
        # The same in all processes, which have to go the same way.
        memory, failed = next((memory, where) for memory, where in zip(setback.ran_out, setback.facts, strict=True) if memory)
        session, around, plan = self._session, self._around, self._session.plan_in_force
        machine.release_cached(session.given.device)
        match failed.phase:
            case Phase.EVALUATION:
                self._loop = evaluate_fewer(self.loop, memory, failed, around.tell)
            case Phase.SAVING:
                around.tell(f"Memory ran out in saving step {failed.done} ({memory.said}): the checkpoint before it stays.")
            case _:
                make_smaller(session, memory, failed, around.folder, around.tell)
                self._leaks.rebase()
        changed = any(where.changed for where in setback.facts)
        # Processes that are not where the others are have taken part in an update that one of them has not made.
        if changed or not in_place or len(set(setback.facts)) > 1:
            self._go_back(failed, changed=changed)
        # What was made for several processes is of no use among those that have met again.
        if session.plan_in_force != plan or len(setback.facts) > 1:
            loop = self.loop
            outcome = self._tried(Phase.BEGINNING, lambda: session.go_on(loop, self._done))
            if isinstance(outcome, Setback):
                self._make_room(outcome, in_place=False)
            else:
                self._loop = outcome

    def _go_back(self, failed: Where, *, changed: bool) -> None:
        """End the run under way, and begin again at the last checkpoint, or where there is none with the model as it was."""
        session, around = self._session, self._around
        last = around.keeper.last()
        untouched = self._done == 0 and not changed
        if last is None and not session.loads_again and not untouched:
            raise ValueError(
                f"memory ran out in {failed.phase} after step {failed.done}, when weights had changed and before the first checkpoint: "
                f"begin again with the module as it was, and with checkpoint_every smaller."
            )
        why = "Weights had changed, so the run goes back to" if changed else "The run is put together again at"
        around.tell(f"{why} {'its beginning' if last is None else f'step {last.step}'}.")
        self._loop = None
        self._is_whole = False
        session.end()
        if last is None and not untouched:
            session.forget_model()
        raise WentBack(Start(last))

    # ------------------------------------------------------------------ evaluating, saving, stopping

    def _evaluate_if_due(self) -> None:
        if self._session.given.eval_rows is None or self._done in self._evaluated:
            return
        every = self._evaluate_every
        if self._done in (0, self._steps, self._evaluate_at) or (every is not None and self._done % every == 0):
            with self._around.watchdog.watching("evaluation", f"the evaluation after step {self._done}"):
                found = self._secured(Phase.EVALUATION, lambda: self.loop.evaluate())
            self._evaluated.add(self._done)
            row = {"step": self._done, "epoch": self._batches.epoch(self._done), **found}
            self._around.log.add(row)
            self._show_callbacks("evaluation", row)

    def _save(self) -> None:
        # Before the first step there is nothing that is not there already.
        if self._loop is None or not self._done:
            return
        self._around.log.catch_up()
        written = f"the checkpoint of step {self._done}"
        # One that is there takes no time, which says nothing of how long others take.
        there = self._around.keeper.holds(self._done)
        with nullcontext() if there else self._around.watchdog.watching("checkpoint", written):
            outcome = self._tried(Phase.SAVING, self._write)
        if isinstance(outcome, Setback):
            self._make_room(outcome)
        elif self._around.keeper.has_folder and not there:
            self._show_callbacks("checkpoint", {})

    def _write(self) -> None:
        loop, around = self.loop, self._around
        if path := weight_not_finite(loop.run.model):
            self._is_whole = False
            raise ValueError(
                f"{path} is not finite after step {self._done}, which is not saved: lower the learning rate, or set max_grad_norm, "
                f"with which a gradient that is not finite changes no weight."
            )
        tokens = loop.batches.seen(self._done)
        around.keeper.save(self._done, loop.run, loop.plan, around.log.evaluations, tokens)

    def _ask(self) -> None:
        """Between two micro-batches or batches of an evaluation; several processes stop between two steps alone."""
        if self._session.given.processes.ranks == 1 and self._around.requests.stop is not None:
            raise Stopped(self._around.requests.stop)

    def _heed(self) -> None:
        """Stop, save or evaluate where a signal in any of the processes or a callback has asked for it."""
        requests, asked, self._asked = self._around.requests, self._asked, set()
        wishes = [int(action in asked) for action in (Action.STOP, Action.SAVE, Action.EVALUATE)]
        mine = [requests.stop or 0, int(requests.takes_save()), *wishes]
        stop, saves, ends, keeps, evaluates = self._secured(Phase.BETWEEN, lambda: distributed.agree(mine))
        if stop:
            raise Stopped(signal.Signals(stop))
        if evaluates:
            self._evaluate_at = self._done
        if ends and self._done < self._steps:
            self._around.tell(f"The run ends after step {self._done} of {self._steps}, as a callback asked.")
            self._steps = self._done
        if saves or keeps:
            self._save()
            self._around.keeper.wait()
            if saves and self._around.keeper.holds(self._done):
                self._around.tell(f"Saved after step {self._done}, as it was told.")

    def _show_callbacks(self, event: Event, row: Mapping[str, float]) -> None:
        metrics = {name: value for name, value in row.items() if name not in ("step", "epoch")}
        step = int(row.get("step", self._done))
        record = Record(event=event, step=step, steps=self._steps, epoch=self._batches.epoch(step), metrics=metrics)
        self._asked |= self._around.callbacks.tell(record)

    # ------------------------------------------------------------------ the end

    def _end(self, save_model: Callable[[], None] | None) -> None:
        """Measure evaluation and saving beside the optimizer's state."""
        session = self._session
        self._show_callbacks("end", {})
        skipped = sum(1 for row in self._around.log.rows if "skipped" in row)
        if skipped:
            self._around.tell(f"{skipped} of {self._steps} steps were left out, since they were not finite.")
        if session.given.eval_rows is not None:
            self._secured(Phase.EVALUATION, lambda: self.loop.measure_evaluation())
        if save_model is None:
            return
        with session.meter.window("save", Measured.SAVE):
            failure = attempt(save_model)
        if isinstance(failure, OutOfMemory):
            # Nothing needs the optimizer's state any more.
            self._around.tell("Memory ran out in saving the model: it is saved again without the optimizer's state.")
            session.end()
            machine.release_cached(session.given.device)
            save_model()
