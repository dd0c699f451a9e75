"""Watching every operator of a run, and letting memory run out in some of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.measure import Meter
from memtrain.planner.choice import Side
from memtrain.planner.compare import counted_side
from memtrain.trace.event import Phase, Trace
from memtrain.trace.layouts import tensors_in

# Where an operator runs, by the file and the name of a function below it; the first that is found from the inside counts.
_PHASES = {
    ("loop.py", "rehearse"): "rehearsal",
    ("smaller.py", "next_smaller"): "planning",
    ("smaller.py", "ways_out"): "planning",
    ("training.py", "_save"): "saving",
    ("trainer.py", "save_model"): "saving",
    ("run.py", "evaluate"): "evaluation",
    ("update.py", "update_one"): "update",
    ("recovery.py", "update"): "update",
    ("graph.py", "_engine_run_backward"): "backward",
    ("run.py", "forward_backward"): "forward",
    ("training.py", "_taken"): "around the step",
}
# What is inside these is theirs.
_WHOLE = ("rehearsal", "planning")


class Watch(TorchDispatchMode):
    """Numbers the operators of a run, and raises in the place of those that are to fail.

    Args:
        fails: whether the operator of this number fails; asked before it runs.
        too_large: whether an allocation of so many bytes fails; asked when it was made.
        located: whether to note where each allocation is made, which takes time.

    Attributes:
        allocations: of the operators with a new storage, by number: phase, step from 1 and bytes; where ``located``.
        failures: how often memory ran out.
        on_rows: called with the first token of each row that is trained on.
    """

    def __init__(
        self,
        fails: Callable[[int], bool] = lambda number: False,
        too_large: Callable[[int], bool] | None = None,
        *,
        located: bool = False,
    ) -> None:
        super().__init__()
        self._fails = fails
        self._too_large = too_large
        self._located = located
        self._number = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.allocations: dict[int, tuple[str, int, int]] = {}
        self.failures = 0
        self.on_rows: Callable[[list[int]], None] = lambda numbers: None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The guard against compilation costs as much as a small operator, and nothing here is compiled.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._number += 1
        number = self._number
        if self._fails(number):
            self._fail(f"operator {number}, {func}")
        if func is torch.ops.aten.embedding.default and torch.is_grad_enabled() and args[1].device.type == "cpu":
            self.on_rows(args[1][:, 0].tolist())
        given = {_storage(tensor) for tensor in tensors_in(args)}
        result = func(*args, **(kwargs or {}))
        size = 0
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            # The planner's tensors have no data.
            if storage._cdata not in given and tensor.device.type == "cpu" and storage.nbytes():
                size += storage.nbytes()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if size and self._too_large is not None and self._too_large(size):
            del result
            self._fail(f"operator {number}, {func}. Tried to allocate {size} bytes")
        if size and self._located:
            self.allocations[number] = (*place(sys._getframe(1)), size)
        return result

    def _fail(self, where: str) -> None:
        self.failures += 1
        raise torch.OutOfMemoryError(f"injected in {where}")

    def held(self) -> tuple[int, int]:
        """Storages made in the run that are alive, and their bytes."""
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        return len(self._made), sum(size for _, size in self._made.values())


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def place(frame: FrameType | None) -> tuple[str, int]:
    """The phase that runs above a frame, and the step (from 1) that is taken, or was last, as the run counts them."""
    phase, step = "elsewhere", 0
    while frame is not None:
        file = os.path.basename(frame.f_code.co_filename)
        named = _PHASES.get((file, frame.f_code.co_name))
        if named is not None and (phase == "elsewhere" or named in _WHOLE):
            phase = named
        if file == "training.py" and "self" in frame.f_locals:
            step = frame.f_locals["self"]._done + (phase not in ("evaluation", "saving"))
        frame = frame.f_back
    return phase, step


class NoMeter(Meter):
    """Measures nothing: a profiler takes longer than the steps that it watches."""

    peak_bytes = 0

    def window(self, name: str, phase: Phase) -> AbstractContextManager[None]:
        return nullcontext()

    def in_update(self, update: Callable[[], Any]) -> Callable[[], Any]:
        return update

    def note_failure(self) -> None:
        pass

    def held_bytes(self) -> int:
        return 0

    def side(self, step_seconds: float) -> Side:
        return counted_side({"nothing": 1}, 1, 1, step_seconds)

    def trace(self, name: str) -> Trace | None:
        return None
