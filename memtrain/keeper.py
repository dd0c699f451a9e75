"""The checkpoints of a run: what is in them, when they are due, which one is the best, and putting one back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from memtrain import distributed
from memtrain.checkpoint import Checkpoint, latest
from memtrain.checkpoint_writer import Writer
from memtrain.plan import OnHost, Plan, to_dict
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
        self._facts = facts
        self._start = start
        self._tell = tell
        self._writer = None if folder is None or rank else Writer(folder, keep, copy_bytes=copy_bytes)
        self._saved = -1 if start is None else start.step
        best = None if start is None else start.facts["best"]
        self._best: tuple[int, float] | None = None if best is None else (best[0], best[1])

    def is_due(self, step: int, steps: int) -> bool:
        """Whether a checkpoint is written after so many of all steps."""
        return self._every is not None and (step % self._every == 0 or step == steps)

    def save(self, step: int, run: Run, plan: Plan, evaluations: Collection[tuple[int, float]], tokens: int) -> bool:
        """Write a checkpoint, unless this step's is there; all processes call it.

        Args:
            evaluations: (step, loss) pairs so far, one of this step among them where it was evaluated.
            tokens: that were trained on so far; rows where they are no text.

        Returns:
            Whether one is there, or being written.
        """
        if self._folder is None:
            return False
        if step == self._saved:
            return True
        self.wait()
        state = state_of(run)
        random = distributed.gathered((_plain(state.groups["random"]), state.facts["python"], state.facts["numpy"]))
        if self._writer is not None:
            self._note_best(step, evaluations)
            others = {f"random_{rank}": _tensors(tensors) for rank, (tensors, _, _) in enumerate(random) if rank}
            facts = {
                **self._facts,
                "plan": to_dict(plan),
                "tokens": tokens,
                "best": self._best,
                "torch": torch.__version__,
                "state": state.facts,
                "random": [[python, numpy] for _, python, numpy in random],
            }
            best = () if self._best is None else (self._best[0],)
            groups = {**state.groups, **others}
            if trouble := self._writer.save(step, groups, facts, best):
                self._tell(trouble)
                return False
        self._saved = step
        return True

    def last(self) -> Checkpoint | None:
        """The checkpoint to go back to: the latest of this run, or what it went on from; the same in all processes."""
        self.wait()
        found = distributed.from_first(self._last)
        self._saved = -1 if found is None else found.step
        return found

    def _last(self) -> Checkpoint | None:
        own = None if self._folder is None else latest(self._folder)[0]
        return own or self._start

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
            self._saved = -1
            self._tell(trouble)

    def where_to_go_on(self) -> str:
        """A sentence about where a run that stops goes on."""
        if self._saved < 0 or self._folder is None:
            return "The run has stopped, and nothing of it is saved."
        return f"The run has stopped after step {self._saved} and is saved in {self._folder}; the same call goes on from there."

    def abandon(self) -> None:
        """Wait for nothing: the program ends at once."""
        if self._writer is not None:
            self._writer.abandon()

    def _note_best(self, step: int, evaluations: Collection[tuple[int, float]]) -> None:
        for at, loss in evaluations:
            if at == step and (self._best is None or loss < self._best[1]):
                self._best = step, loss


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.cpu().numpy()) for name, tensor in tensors.items()}


def _tensors(plain: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    return {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in plain.items()}
