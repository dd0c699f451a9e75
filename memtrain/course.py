"""One run of a Trainer from its start to its end: with signals heard, every step watched, and checkpoints kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrain.around import Around, Stopped
from memtrain.callbacks import Callbacks
from memtrain.conduct import Conduct
from memtrain.data.batches import Batches
from memtrain.device import Cuda
from memtrain.ending import ending, saving
from memtrain.keeper import Keeper
from memtrain.loop import Loop
from memtrain.metrics import RunFolder, RunLog
from memtrain.planner.choice import Choice
from memtrain.report.tell import Tell
from memtrain.report.terminal import TrainingProgress, choice_view
from memtrain.resume import Start, plain_constraints
from memtrain.session import Session
from memtrain.signals import listen
from memtrain.trackers import Tracking
from memtrain.training import Training
from memtrain.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a run needs to know beside its session.

    Attributes:
        session: what is trained.
        conduct: how it is gone about.
        folder: the run's files; None to write none, or in a process that is not the first.
        checkpoints: the folder of the checkpoints; None to keep none.
        identity: what makes the run this one.
        start: where it begins.
    """

    session: Session
    conduct: Conduct
    folder: RunFolder | None
    checkpoints: Path | None
    identity: Mapping[str, Any]
    start: Start

    def keeper(self, choice: Choice, tell: Tell) -> Keeper:
        """What keeps the checkpoints of the run."""
        given, conduct = self.session.given, self.conduct
        host = given.budget.host_bytes
        room = 0 if host is None else max(0, host - choice.footprint.host_bytes)
        return Keeper(
            self.checkpoints,
            rank=given.processes.rank,
            every=conduct.checkpoint_every,
            keep=conduct.keep_checkpoints,
            facts={"job": self.identity, "constraints": plain_constraints(given.constraints)},
            start=self.start.checkpoint,
            # A processor's plan has all of the memory already.
            copy_bytes=room if isinstance(given.device, Cuda) else 0,
            tell=tell,
        )

    def _tracking(self, tell: Tell) -> list[Tracking]:
        names = self.conduct.trackers
        return [Tracking(names, self.folder, self.identity, tell)] if names and self.folder is not None else []

    def run(
        self,
        plan: Callable[[], Choice],
        batches: Batches,
        log: RunLog,
        bar: TrainingProgress,
        tell: Tell,
        save_model: Callable[[str | os.PathLike[str]], None],
    ) -> Loop:
        """The steps of the run, of which the last is taken.

        Args:
            plan: gives the plan in force, which is made by then; workers are forked before that, as it leaves threads.
            batches: the rows of each step.
            save_model: writes the model into a folder.

        Raises:
            ValueError: the run ends before its last step.
            KeyboardInterrupt, SystemExit: it was told to stop.
        """
        session, conduct, checkpoint = self.session, self.conduct, self.start.checkpoint
        steps = session.given.job.steps
        with closing(batches), listen(conduct.stop_seconds, tell) as requests:
            choice = plan()
            bar.console.print(choice_view(choice), "")
            in_use = nullcontext() if self.folder is None else self.folder.held()
            for note in self.start.notes:
                tell(note)
            if checkpoint is not None:
                left = "going on from" if checkpoint.step < steps else "nothing is left to train after"
                tell(f"Resumed: {left} step {checkpoint.step} of {steps}, in {checkpoint.path}.")
            keeper = self.keeper(choice, tell)
            tracking = self._tracking(tell)
            callbacks = Callbacks(() if session.given.processes.rank else (*conduct.callbacks, *tracking))
            with in_use, bar, ExitStack() as ends, Watchdog(tell, usual={"step": choice.step_seconds}) as watchdog:
                for one in tracking:
                    ends.callback(one.close)
                around = Around(
                    log=log,
                    folder=self.folder,
                    keeper=keeper,
                    requests=requests,
                    watchdog=watchdog,
                    tell=tell,
                    bar=bar,
                    callbacks=callbacks,
                )
                training = Training(session, batches, around, evaluate_every=conduct.evaluate_every)
                try:
                    with ending(training, keeper, self.folder, tell):
                        training.run(self.start, saving(save_model, self.folder))
                        if requests.stop is not None:
                            raise Stopped(requests.stop)
                except KeyboardInterrupt:
                    # After Ctrl-C came twice nothing is waited for; after it came once there is nothing to wait for.
                    keeper.abandon()
                    raise
                finally:
                    keeper.wait()
                    log.catch_up()
                    session.end()
        return training.loop
