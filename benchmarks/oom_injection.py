"""Memory that runs out at every allocation in turn: ``python benchmarks/oom_injection.py [--stride N] [--at-once 2]``.

A tiny run of four steps is trained undisturbed under each of a set of plans, and every operator whose result is a new storage is
numbered. Then it is trained again and forked at each of them: the child raises ``torch.OutOfMemoryError`` in that operator's
place and goes on to its end. So it is in the rehearsal, in the update that makes the optimizer's state, in the forward, backward
and update of the third step, in evaluation and in saving. Each child has to end; its losses, evaluations and weights have to be
those of the undisturbed run up to rounding, each step logged once and taken with the same rows; and nothing may stay alive that
the undisturbed run has not. Then failures that stay: one that only smaller micro-batches pass, and one that nothing cures, which
has to end with the report.

Needs Linux. Exits with 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict
from unittest.mock import patch

import torch
from left_behind import last_taken, logged, rows
from oom_cases import LENGTH, Case, cases
from oom_watch import NoMeter, Watch, place
from torch import Tensor

from memtrain.checkpoint_writer import Writer

STEPS, ROWS, GLOBAL_BATCH = 4, 20, 8
# Sums in another order: the losses are about 4, and a step changes weights by about 0.01.
LOSS_TOLERANCE = 1e-5
# A few numbers for each micro-batch, and bitsandbytes' two tables of 1 KiB, of which a state that is put back brings its own;
# the smallest activation is larger.
_HELD_TOLERANCE = 4096
_HANGS_SECONDS = 120.0
FIRST_UPDATE = "update that makes state"


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


def trained(case: Case, watch: Watch, folder: Path, **changed: Any) -> Outcome:
    """Train a case from its beginning in a new folder, watched from the rehearsal on."""
    from memtrain import AdamW, Constant, Trainer

    outcome = Outcome()
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
        run_dir=folder / "run",
        checkpoint_every=2,
        progress=False,
        **{**case.settings, **changed},
    )
    taken: list[tuple[int, list[int]]] = []

    def note(numbers: list[int]) -> None:
        step = len(logged(folder)) + 1
        taken.append((step, numbers))
        if step == STEPS and not outcome.held_bytes:
            gc.collect()
            outcome.held_bytes = watch.held()[1]

    assert trainer.choice is not None
    watch.on_rows = note
    try:
        with watch:
            trainer.train()
    except Exception as error:
        outcome.ended = f"{type(error).__name__}: {error}"
        outcome.report = isinstance(error, ValueError) and "memory" in str(error)
        if not outcome.report:
            outcome.ended = traceback.format_exc()[-2500:]
    outcome.log = logged(folder, evaluations=True)
    outcome.rows = last_taken(taken, ROWS, GLOBAL_BATCH)
    outcome.weights = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    gc.collect()
    outcome.held = watch.held()[0]
    if case.copies:
        # The copies are held until a thread has written them.
        outcome.held_bytes = 0
    return outcome


def worst_loss(expected: Outcome, found: Outcome) -> float:
    """The largest difference of a loss, relative to the undisturbed run's."""
    names = ("loss", "eval_loss")
    pairs = zip(expected.log, found.log, strict=False)
    return max((abs(b[n] / a[n] - 1) for a, b in pairs for n in names if n in a and n in b), default=0.0)


def problems(expected: Outcome, found: Outcome, *, recovers: bool, weights_within: float = 1e-5) -> list[str]:
    """A sentence for each thing that is not as it has to be after memory ran out."""
    if found.ended and not found.report:
        return [f"it ended with {found.ended}"]
    if found.ended:
        return [f"it ended, and a smaller plan was there: {found.ended[:200]}"] if recovers else []
    wrong = []
    steps = [
        [(row["step"], *(name for name in ("loss", "eval_loss") if name in row)) for row in one.log]
        for one in (expected, found)
    ]
    if steps[0] != steps[1]:
        wrong.append(f"what is logged is {steps[1]} instead of {steps[0]}")
    if (worst := worst_loss(expected, found)) > LOSS_TOLERANCE:
        wrong.append(f"a loss differs by {worst:.1e} of it")
    if found.rows != expected.rows:
        wrong.append(f"the rows are {found.rows} instead of {expected.rows}")
    for name, weight in expected.weights.items():
        if (apart := (found.weights[name] - weight).abs().max().item()) > weights_within:
            wrong.append(f"{name} differs by {apart:.1e}")
    if found.held != expected.held:
        wrong.append(f"{found.held} storages are alive after the run instead of {expected.held}")
    if abs(found.held_bytes - expected.held_bytes) > _HELD_TOLERANCE:
        wrong.append(f"{found.held_bytes} bytes are alive in the last step instead of {expected.held_bytes}")
    return wrong


# ---------------------------------------------------------------------- one case


class Found(TypedDict):
    """What came of one failure: where it was, the worst difference of a loss, and what is wrong."""

    phase: str
    worst: float
    ended: bool
    wrong: list[str]


def targets(allocations: Mapping[int, tuple[str, int, int]], stride: int, only: str | None) -> dict[int, str]:
    """The operators that fail in turn, every ``stride``-th of each phase, and the phase of each.

    All of the third step, which the profiler does not watch, and of the update that makes state; the evaluation and the
    checkpoint before that step; every fourth of the rehearsal, which is two steps, and of what is around a step.

    Args:
        only: the one phase to take; None for all.
    """
    wanted = {
        ("update", 1): FIRST_UPDATE,
        **{(phase, 2): phase for phase in ("evaluation", "saving")},
        ("rehearsal", 1): "rehearsal",
    }
    wanted |= {(phase, 3): phase for phase in ("forward", "backward", "update", "around the step")}
    by_phase: dict[str, list[int]] = {}
    for number, (phase, step, _) in allocations.items():
        if (name := wanted.get((phase, step))) is not None and only in (None, name):
            by_phase.setdefault(name, []).append(number)
    strides = {"rehearsal": 4 * stride, "around the step": 4 * stride}
    return {number: name for name, numbers in by_phase.items() for number in numbers[:: strides.get(name, stride)]}


def one_by_one(case: Case, folder: Path, stride: int) -> tuple[dict[str, int], list[Found]]:
    """Allocations by phase, and what comes of a failure of each that is chosen."""
    # What is made once in a process is made in a first run that nobody counts.
    trained(case, Watch(), folder / "first")
    # Recovery collects garbage; what the libraries hold is none, and is much.
    gc.freeze()
    watch = Watch(located=True)
    expected = trained(case, watch, folder / "undisturbed")
    if expected.ended:
        return {}, [Found(phase="elsewhere", worst=0.0, ended=False, wrong=[f"undisturbed: {expected.ended}"])]
    chosen = targets(watch.allocations, stride, "saving" if case.copies else None)
    results, parent = folder / "results.jsonl", os.getpid()
    results.touch()
    run = folder / "forked" / "run"
    failed_at: list[int] = []

    def fails(number: int) -> bool:
        if number not in chosen or failed_at:
            return False
        # The child writes into the folder of the run, and the parent goes on with it as it was.
        before = folder / "before"
        shutil.copytree(run, before)
        pid = os.fork()
        if not pid:
            failed_at.append(number)
            return True
        _wait(pid, results, chosen[number])
        shutil.rmtree(run)
        before.rename(run)
        return False

    found = trained(case, Watch(fails), folder / "forked")
    if os.getpid() != parent:
        phase = chosen[failed_at[0]]
        # There is no checkpoint before the first update, and a module that was given cannot be loaded again.
        recovers = case.recovers and (phase != FIRST_UPDATE or case.loads_again)
        wrong = problems(expected, found, recovers=recovers, weights_within=case.weights_within)
        line = Found(phase=phase, worst=worst_loss(expected, found), ended=found.report, wrong=wrong)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        os._exit(0)
    outcomes = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    if wrong := problems(expected, found, recovers=True):
        outcomes.append(Found(phase="elsewhere", worst=0.0, ended=False, wrong=["the forking run itself", *wrong]))
    return dict(Counter(phase for phase, _, _ in watch.allocations.values())), outcomes


def _wait(pid: int, results: Path, phase: str) -> None:
    """Wait for a child, and note one that does not come to its end."""
    end = time.monotonic() + _HANGS_SECONDS
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
            break
        time.sleep(0.002)
    if ended[1]:
        wrong = [f"the process ended with {os.waitstatus_to_exitcode(ended[1])}"]
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(Found(phase=phase, worst=0.0, ended=False, wrong=wrong)) + "\n")


def staying(case: Case, folder: Path) -> list[Found]:
    """A failure of all that two rows do not need, from the second step on, and one of all that a step computes."""
    expected = trained(case, Watch(), folder / "whole")
    small = Watch(located=True)
    trained(case, small, folder / "small", constraints={"micro_batch_size": 2})
    enough = max(size for phase, _, size in small.allocations.values() if phase in ("forward", "backward"))

    def in_step(above: int) -> Callable[[int], bool]:
        def too_large(size: int) -> bool:
            if size <= above:
                return False
            phase, step = place(sys._getframe(2))
            return step >= 2 and phase in ("forward", "backward")

        return too_large

    found = []
    for name, above, recovers in (("only small micro-batches pass", enough, True), ("nothing cures it", 0, False)):
        watch = Watch(too_large=in_step(above))
        outcome = trained(case, watch, folder / name)
        wrong = problems(expected, outcome, recovers=recovers)
        if not watch.failures or outcome.report == recovers:
            wrong.append(f"memory ran out {watch.failures} times, and it ended with {outcome.ended or 'no report'}")
        found.append(Found(phase=name, worst=worst_loss(expected, outcome), ended=outcome.report, wrong=wrong))
    return found


def _copying(*given: Any, **named: Any) -> Writer:
    return Writer(*given, **{**named, "copy_bytes": 2**24})


def _serve(name: str, stride: int, folder: Path) -> None:
    logging.disable(logging.WARNING)
    case, started = cases()[name], time.perf_counter()
    with ExitStack() as replaced:
        # The picture is drawn after all that is compared here.
        replaced.enter_context(patch("memtrain.ending.plot_run"))
        if not case.measured:
            replaced.enter_context(patch("memtrain.session.meter", lambda *given: NoMeter()))
        if case.copies:
            replaced.enter_context(patch("memtrain.keeper.Writer", _copying))
        allocations, found = one_by_one(case, folder, stride)
        if case.stays:
            found += staying(case, folder)
    content = {"allocations": allocations, "found": found, "seconds": time.perf_counter() - started}
    (folder / "result.json").write_text(json.dumps(content), encoding="utf-8")


# ---------------------------------------------------------------------- all cases


def injected(name: str, stride: int) -> dict[str, Any]:
    """What a process of its own finds for a case: ``allocations`` by phase, ``found``, ``seconds``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", name, "--stride", str(stride), "--folder", folder]
        # One thread: a pool of them does not survive a fork.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        file = Path(folder) / "result.json"
        if file.exists():
            result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return result
        wrong = [f"its process ended with {done.returncode}: {done.stderr[-2000:]}"]
        return {"allocations": {}, "found": [Found(phase="elsewhere", worst=0.0, ended=False, wrong=wrong)], "seconds": 0.0}


def main() -> None:
    """Inject and print."""
    names = list(cases())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="1 for every allocation, 5 for each fifth")
    parser.add_argument("--at-once", type=int, default=2, help="processes beside one another")
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--serve", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        _serve(given.serve, given.stride, given.folder)
        return
    started = time.perf_counter()
    with ThreadPoolExecutor(given.at_once) as pool:
        results = list(pool.map(injected, given.cases, [given.stride] * len(given.cases)))
    for name, result in zip(given.cases, results, strict=True):
        _print(name, result)
    found: list[Found] = [one for result in results for one in result["found"]]
    wrong = sum(bool(one["wrong"]) for one in found)
    ended = sum(one["ended"] and not one["wrong"] for one in found)
    worst = max((one["worst"] for one in found), default=0.0)
    print(
        f"{len(found)} failures: {len(found) - ended - wrong} recovered with losses within {worst:.1e}, {ended} ended with the report, "
        f"{wrong} were not survived; {time.perf_counter() - started:.0f} s"
    )
    sys.exit(1 if wrong else 0)


def _print(name: str, result: Mapping[str, Any]) -> None:
    print(f"{name:32}{'allocations':>12}{'failed':>8}{'recovered':>11}{'reported':>10}{'wrong':>7}{'worst loss':>12}")
    by_phase: dict[str, list[Found]] = {}
    for one in result["found"]:
        by_phase.setdefault(one["phase"], []).append(one)
    for phase, found in by_phase.items():
        wrong = sum(bool(one["wrong"]) for one in found)
        ended = sum(one["ended"] for one in found)
        recovered = sum(not one["ended"] and not one["wrong"] for one in found)
        worst = max(one["worst"] for one in found)
        print(
            f"  {phase:30}{result['allocations'].get(phase, 0):12}{len(found):8}{recovered:11}{ended:10}{wrong:7}{worst:12.1e}"
        )
        told = dict.fromkeys("; ".join(one["wrong"]) for one in found if one["wrong"])
        for text in list(told)[:3]:
            print(f"    {text[:1500]}")


if __name__ == "__main__":
    main()
