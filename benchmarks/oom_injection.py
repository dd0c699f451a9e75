"""Memory that runs out at every allocation in turn: ``python benchmarks/oom_injection.py [--stride N] [--at-once 2]``.

A tiny run of three steps is trained undisturbed under each of a set of plans, and every operator whose result is a new storage is
numbered. Then it is trained again once for each of them, and ``torch.OutOfMemoryError`` is raised in that operator's place: in the
rehearsal, in a step's forward, backward and update, in evaluation and in saving. Each run has to end; its losses, evaluations
and weights have to be those of the undisturbed run up to rounding, each step logged once and taken with the same rows; and
nothing may stay alive that the undisturbed run has not. Then failures that stay: one that only smaller micro-batches pass, and
one that nothing cures, which has to end with the report.

Exits with 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from kill_test import last_taken, logged, rows
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STEPS, ROWS, GLOBAL_BATCH, LENGTH = 3, 20, 8, 8
# Sums in another order: the losses are about 4, and a step changes weights by about 0.01.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-5
# What a step holds for each of its micro-batches is a few numbers; the smallest activation is larger than this.
_HELD_TOLERANCE = 512
LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Where an operator runs, by the file and the name of a function below it; the first that is found from the inside counts.
_PHASES = {
    ("loop.py", "rehearse"): "rehearsal",
    ("keeper.py", "save"): "saving",
    ("trainer.py", "save_model"): "saving",
    ("run.py", "evaluate"): "evaluation",
    ("update.py", "update_one"): "update",
    ("recovery.py", "update"): "update",
    ("graph.py", "_engine_run_backward"): "backward",
    ("run.py", "forward_backward"): "forward",
    ("training.py", "_taken"): "around the step",
}
PHASES = (*dict.fromkeys(_PHASES.values()), "elsewhere")


class Normalised(nn.Module):
    """A model whose batch norm counts each forward in its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 100))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a batch of shape (rows, length)."""
        logits = self.layers(self.table(input_ids).flatten(0, 1))
        return nn.functional.cross_entropy(logits, labels.flatten())


@dataclass(frozen=True)
class Case:
    """A plan that a run begins with.

    Attributes:
        settings: what a Trainer is given beside what all have.
        model: makes the model.
        recovers: whether a smaller plan is left to go on with.
    """

    settings: Mapping[str, Any]
    model: Callable[[], Any] = lambda: dict(LLAMA)
    recovers: bool = True


def cases() -> dict[str, Case]:
    """The plans by name."""
    from memtrain.job import Approximation
    from memtrain.method import Lora

    def plan(size: int, **fields: Any) -> dict[str, Any]:
        return {"constraints": {"micro_batch_size": size, **fields}}

    found: dict[str, dict[str, Any]] = {
        "fused update": plan(8, optimizer_kernel="fused"),
        "foreach update": plan(4, optimizer_kernel="foreach"),
        "four micro-batches": plan(2),
        "recomputed": plan(4, activations="recompute"),
        "logits in chunks": plan(4, loss={"policy": "chunked_logits", "chunk_tokens": 16}),
        "during backward": {"constraints": {"update": "during_backward"}, "max_grad_norm": None},
        "8-bit state": {**plan(4, optimizer_state="eight_bit"), "allow": (Approximation.EIGHT_BIT_STATE,)},
        "adapters": {**plan(4), "method": Lora(rank=2)},
    }
    return {
        **{name: Case(settings) for name, settings in found.items()},
        "batch norm": Case({}, Normalised, recovers=False),
    }


# ---------------------------------------------------------------------- watching a run


class Watch(TorchDispatchMode):
    """Numbers the operators of a run, and raises in the place of those that are to fail.

    Args:
        fails: whether the operator of this number fails; asked before it runs.
        too_large: whether an allocation of so many bytes fails; asked when it was made.
        located: whether to note where each allocation is made, which takes time.

    Attributes:
        allocations: of the operators with a new storage, by number: phase, step from 1 and bytes; where ``located``.
        failures: how often memory ran out.
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._number += 1
        number = self._number
        if self._fails(number):
            self._fail(f"operator {number}, {func}")
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        size = 0
        for leaf in tree_leaves(result):
            # The planner's tensors have no data.
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.untyped_storage().nbytes():
                key = _storage(leaf)
                if key not in given:
                    size += leaf.untyped_storage().nbytes()
                    self._made[key] = StorageWeakRef(leaf.untyped_storage()), leaf.untyped_storage().nbytes()
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
    return tensor.untyped_storage()._cdata


def place(frame: FrameType | None) -> tuple[str, int]:
    """The phase that runs above a frame, and the step (from 1) that is taken, or was last, as the run counts them."""
    phase, step = "elsewhere", 0
    while frame is not None:
        file = os.path.basename(frame.f_code.co_filename)
        named = _PHASES.get((file, frame.f_code.co_name))
        if named is not None and (phase == "elsewhere" or named == "rehearsal"):
            phase = named
        if file == "training.py" and "self" in frame.f_locals:
            step = frame.f_locals["self"]._done + (phase not in ("evaluation", "saving"))
        frame = frame.f_back
    return phase, step


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        log: the rows of the metrics, without times.
        rows: of each step, those that it was taken with the last time.
        weights: by name, copies.
        held: storages that are alive after it.
        held_bytes: bytes that are alive at the last step's first forward.
        ended: with what it ended if it did not come to its end.
        report: whether that is the report to a person, a ValueError about memory.
    """

    log: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[int, list[int]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    held: int = 0
    held_bytes: int = 0
    ended: str = ""
    report: bool = False


def trained(case: Case, watch: Watch, **changed: Any) -> Outcome:
    """Train a case from its beginning, watched from the first step of the rehearsal on."""
    from memtrain import AdamW, Constant, Trainer

    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        trainer = Trainer(
            model=case.model(),
            data=rows(ROWS, LENGTH),
            eval_data=rows(4, LENGTH),
            budget="16MiB",
            global_batch_size=GLOBAL_BATCH,
            steps=STEPS,
            # With a larger eps a gradient near zero does not turn rounding into a part of a step.
            optimizer=AdamW(learning_rate=1e-2, eps=1e-3),
            schedule=Constant(),
            evaluate_every=2,
            run_dir=Path(folder) / "run",
            checkpoint_every=2,
            progress=False,
            **{**case.settings, **changed},
        )
        taken: list[tuple[int, list[int]]] = []

        def note(module: Any, args: Any, given: Mapping[str, Any]) -> None:
            if module.training:
                step = len(logged(Path(folder))) + 1
                taken.append((step, given["input_ids"][:, 0].tolist()))
                if step == STEPS and not outcome.held_bytes:
                    gc.collect()
                    outcome.held_bytes = watch.held()[1]

        assert trainer.choice is not None
        hook = trainer.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            with watch:
                trainer.train()
        except Exception as error:
            outcome.ended = f"{type(error).__name__}: {error}"
            outcome.report = isinstance(error, ValueError) and "memory" in str(error)
            if not outcome.report:
                outcome.ended = traceback.format_exc()[-2500:]
        hook.remove()
        outcome.log = logged(Path(folder), evaluations=True)
        outcome.rows = last_taken(taken, GLOBAL_BATCH)
        outcome.weights = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
        gc.collect()
        outcome.held = watch.held()[0]
    return outcome


def worst_loss(expected: Outcome, found: Outcome) -> float:
    """The largest difference of a loss, relative to the undisturbed run's."""
    names = ("loss", "eval_loss")
    pairs = zip(expected.log, found.log, strict=False)
    return max((abs(b[n] / a[n] - 1) for a, b in pairs for n in names if n in a and n in b), default=0.0)


def problems(expected: Outcome, found: Outcome, *, recovers: bool) -> list[str]:
    """A sentence for each thing that is not as it has to be after memory ran out."""
    if found.ended and not found.report:
        return [f"it ended with {found.ended}"]
    if found.ended:
        return [f"it ended, and a smaller plan was there: {found.ended[:200]}"] if recovers else []
    wrong = []
    steps = [[(row["step"], *(name for name in ("loss", "eval_loss") if name in row)) for row in one.log] for one in (expected, found)]
    if steps[0] != steps[1]:
        wrong.append(f"what is logged is {steps[1]} instead of {steps[0]}")
    if (worst := worst_loss(expected, found)) > LOSS_TOLERANCE:
        wrong.append(f"a loss differs by {worst:.1e} of it")
    if found.rows != expected.rows:
        wrong.append(f"the rows are {found.rows} instead of {expected.rows}")
    for name, weight in expected.weights.items():
        if (apart := (found.weights[name] - weight).abs().max().item()) > WEIGHT_TOLERANCE:
            wrong.append(f"{name} differs by {apart:.1e}")
    if found.held != expected.held:
        wrong.append(f"{found.held} storages are alive after the run instead of {expected.held}")
    if abs(found.held_bytes - expected.held_bytes) > _HELD_TOLERANCE:
        wrong.append(f"{found.held_bytes} bytes are alive in the last step instead of {expected.held_bytes}")
    return wrong
