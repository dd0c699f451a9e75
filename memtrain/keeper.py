"""The checkpoints of a run: what is in them, when they are due, which one is the best, and putting one back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from memtrain import distributed
from memtrain.checkpoint import Checkpoint, latest, require_space
from memtrain.checkpoint_writer import Writer
from memtrain.generators import as_bytes, as_tensors
from memtrain.out_of_memory import OutOfMemory, attempt
from memtrain.plan import OnHost, Plan, to_dict
from memtrain.resume import origin_of
from memtrain.run import Run
from memtrain.state import restore_, state_of


class Keeper:
    """The checkpoints of one run, which the first process writes for all.

    Args:
        folder: where they go; None to keep none.
        rank: number of this process.
        every: steps between two; None for none but that of a run that is stopped.
        keep: so many of the latest stay, and the best.
        facts: plain data that every checkpoint holds: the identity of the job, and the plan's fields that are set.
        start: the checkpoint that the run goes on from, wherever it lies.
        copy_bytes: host memory that a copy may take while it is written.
        tell: takes a sentence about a checkpoint that could not be written.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        rank: int,
        every: int | None,
        keep: int,
        facts: Mapping[str, Any],
        start: Checkpoint | None,
        copy_bytes: int,
        tell: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._every = every
        self._facts = {**facts, "origin": origin_of(start, folder)}
        self._start = start
        self._tell = tell
        self._writer = None if folder is None or rank else Writer(folder, keep, copy_bytes=copy_bytes)
        own = start is not None and folder is not None and start.path.parent.resolve() == folder.resolve()
        self._saved = start.step if start is not None and own else -1
        best = None if start is None else start.facts["best"]
        self._best: tuple[int, float] | None = None if best is None else (best[0], best[1])
        # What they were before the last save, should it fail.
        self._before = self._saved, self._best

    def is_due(self, step: int, steps: int) -> bool:
        """Whether a checkpoint is written after so many of all steps."""
        return self._every is not None and (step % self._every == 0 or step == steps)

    def check_room(self, run: Run) -> None:
        """Tell where the disk has no room for a checkpoint of a run that has its optimizer's state."""
        if self._folder is None or self._writer is None:
            return
        size = sum(tensor.nbytes for tensors in state_of(run).groups.values() for tensor in tensors.values())
        there = next(place for place in (self._folder, *self._folder.absolute().parents) if place.is_dir())
        try:
            require_space(there, size)
        except OSError as error:
            self._tell(
                f"No checkpoint can be written to {self._folder} ({error.strerror}): free space there, or name another folder."
            )

    def save(self, step: int, run: Run, plan: Plan, evaluations: Collection[tuple[int, float]], tokens: int) -> None:
        """Write a checkpoint, unless this step's is there; all processes call it. What goes wrong is told.

        Args:
            evaluations: (step, loss) pairs so far, one of this step among them where it was evaluated.
            tokens: that were trained on so far; rows where they are no text.
        """
        if self._folder is None:
            return
        self.wait()
        # The first process knows what is on the disk.
        if distributed.from_first(lambda: self.holds(step)):
            self._best = self._best_with(step, evaluations)
            return
        state = state_of(run)
        random = distributed.gathered((as_bytes(state.groups["random"]), state.facts["python"], state.facts["numpy"]))
        if self._writer is not None:
            best = self._best_with(step, evaluations)
            others = {f"random_{rank}": as_tensors(tensors) for rank, (tensors, _, _) in enumerate(random) if rank}
            facts = {
                **self._facts,
                "plan": to_dict(plan),
                "tokens": tokens,
                "best": best,
                "torch": torch.__version__,
                "state": state.facts,
                "random": [[python, numpy] for _, python, numpy in random],
            }
            groups, writer = {**state.groups, **others}, self._writer
            # The best so far stays until this one is on the disk.
            kept = () if self._best is None else (self._best[0],)
            self._saved, self._before, self._best = step, (self._saved, self._best), best
            # Caught here, since the other processes have gone on.
            trouble = attempt(lambda: writer.save(step, groups, facts, kept))
            if isinstance(trouble, OutOfMemory):
                trouble = f"Memory ran out in saving step {step} ({trouble.said}): the checkpoint before it stays."
            if trouble:
                self._not_saved(trouble)

    def last(self) -> Checkpoint | None:
        """The checkpoint to go back to: the latest of this run, or what it went on from; the same in all processes."""
        self.wait()
        found = distributed.from_first(self._last)
        # One that was passed over because it is damaged is written again.
        self._saved = min(self._saved, -1 if found is None else found.step)
        return found

    def _last(self) -> Checkpoint | None:
        own = None if self._folder is None else latest(self._folder)[0]
        return max((one for one in (own, self._start) if one is not None), key=lambda one: one.step, default=None)

    def restore(self, checkpoint: Checkpoint, run: Run, plan: Plan) -> None:
        """Put a checkpoint into a run of the same job, so that it goes on as if undisturbed.

        Raises:
            OtherRun: the model or the form of the optimizer's state is another.
            NotReadable: a file is not readable.
        """
        rank = self._rank
        facts, known = dict(checkpoint.facts["state"]), checkpoint.facts["random"]
        own = "random" if rank == 0 else f"random_{rank}"
        groups = {group: checkpoint.tensors(group) for group in ("model", "optimizer")}
        groups["random"] = checkpoint.tensors(own if rank < len(known) else "random")
        if rank < len(known):
            facts["python"], facts["numpy"] = known[rank]
        restore_(run, groups, facts, state_on_host=isinstance(plan.optimizer_state, OnHost))
        if rank >= len(known):
            distributed.differ_by_rank(checkpoint.step, rank)

    @property
    def is_writing(self) -> bool:
        """Whether a copy of a checkpoint is on its way to the disk."""
        return self._writer is not None and self._writer.is_writing

    def wait(self) -> None:
        """Wait for what is being written."""
        if self._writer is not None and (trouble := self._writer.wait()):
            self._not_saved(trouble)

    def _not_saved(self, trouble: str) -> None:
        self._saved, self._best = self._before
        self._tell(trouble)

    @property
    def has_folder(self) -> bool:
        """Whether there are checkpoints at all."""
        return self._folder is not None

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of a step is there, or on its way; asked of the first process."""
        return step == self._saved

    def where_to_go_on(self, done: int) -> str:
        """A sentence about where a run that has stopped after so many steps goes on."""
        last = self._last()
        if last is None:
            return f"The run has stopped after step {done}, and nothing of it is saved."
        lost = f", so that {done - last.step} steps are taken again" if done > last.step else ""
        return f"The run has stopped after step {done}; the same call goes on from step {last.step}, in {last.path}{lost}."

    def abandon(self) -> None:
        """Wait for nothing: the program ends at once."""
        if self._writer is not None:
            self._writer.abandon()

    def _best_with(self, step: int, evaluations: Collection[tuple[int, float]]) -> tuple[int, float] | None:
        """The best checkpoint with that of a step among them: its step and its evaluation loss."""
        here = [one for one in evaluations if one[0] == step and math.isfinite(one[1])]
        found = [*([] if self._best is None else [self._best]), *here]
        return min(found, key=lambda one: one[1], default=None)
