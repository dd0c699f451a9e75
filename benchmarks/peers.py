"""One job through several trainers: a plain loop, transformers' Trainer, TRL's SFTTrainer and memtrain.

Each runs in a process of its own (peer_trainers.py), which this file starts and talks to, in an environment that has TRL
beside all that is installed here. All get the same module with the same weights, the same rows in the same order, and the
same rules: AdamW (fused) whose weight decay leaves norms out, the gradient bounded, the learning rate of memtrain's
schedule, no dropout, fp32.

Two things are measured, on all in the same way:

* the peak: torch's profiler watches every allocation and free of the whole call of ``train()``, beginning with the weights
  (:class:`memtrain.trace.profile.MemoryProfiler`). The rows, which are made before, do not count; batches do. memtrain's own
  measuring is switched off meanwhile, since there is one profiler per process;
* the time of a step: from one ``optimizer.step`` to the next, by a hook that torch calls in all of them. The processes
  run at the same time and take turns, one step each, while all others wait: what else the machine does then meets all
  of them alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

TRL = ("trl==1.16.0", "datasets==5.2.0")
"""What is installed into the environment, beside what is here."""

MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.01
_TRAINERS = Path(__file__).resolve().with_name("peer_trainers.py")
_ROOT = _TRAINERS.parents[1]
_Measured = TypeVar("_Measured")


@dataclass(frozen=True, kw_only=True)
class Task:
    """The job.

    Attributes:
        model: settings of a Llama, as transformers names them.
        batch, length: rows per step, tokens per row.
        steps: optimizer steps; every row is seen once.
        schedule: "constant", or "cosine" down to 0 at the last step.
    """

    model: dict[str, Any]
    batch: int
    length: int
    steps: int
    learning_rate: float = 1e-3
    schedule: str = "constant"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A trainer with its settings.

    Attributes:
        name: as printed.
        kind: "loop", "hf", "sft" or "memtrain".
        checkpointing: each block is recomputed in backward (transformers and TRL).
        accumulation: micro-batches per step (transformers and TRL).
        budget_bytes: what memtrain may take.
        constraints: plan fields that memtrain must take as given.
    """

    name: str
    kind: str
    checkpointing: bool = False
    accumulation: int = 1
    budget_bytes: int | None = None
    constraints: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a contender.

    Attributes:
        losses: of each step, unrounded.
        peak_bytes: of the whole of ``train()``; None where time was measured.
        cpu_seconds, seconds: between updates, the first from the first update to the second; empty where the peak was.
        plan: memtrain's.
        predicted_bytes: the peak that memtrain predicted.
        versions: of the libraries.
    """

    losses: list[float]
    peak_bytes: int | None
    cpu_seconds: list[float]
    seconds: list[float]
    plan: str | None
    predicted_bytes: int | None
    versions: dict[str, str]


class Failed(Exception):
    """A step outside of this process failed; the message says which and how."""


def install(folder: Path) -> Path:
    """Make an environment with TRL beside what is installed here, unless it is there, and return its interpreter.

    Raises:
        Failed: it cannot be made.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted, done = "\n".join(TRL) + "\n", folder / "installed.txt"
    if done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return python
    # The same torch, transformers and accelerate for all contenders: the packages of this environment are visible in the
    # new one, and pip may not bring others.
    here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    try:
        _command([sys.executable, "-m", "venv", str(folder)], "venv cannot make an environment")
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        there = _command([str(python), "-c", ask], "the new environment does not start").strip()
        lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in here)
        (Path(there) / "beside.pth").write_text(lines, encoding="utf-8")
        fixed = folder / "constraints.txt"
        names = ("torch", "transformers", "accelerate", "numpy")
        fixed.write_text("".join(f"{name}=={version(name)}\n" for name in names), encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _command([*pip, "--constraint", str(fixed), *TRL], f"pip cannot install {' and '.join(TRL)}")
    except OSError as error:
        raise Failed(f"an environment cannot be made in {folder} ({error.strerror}): name another folder.") from error
    done.write_text(wanted, encoding="utf-8")
    return python


def _command(command: Sequence[str], otherwise: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise Failed(f"{otherwise}: {_last_line(found.stderr)}")
    return found.stdout


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["without a word"])[-1]


class _Child:
    """A process that trains, waiting for its turn before each update."""

    def __init__(self, python: Path, task: Task, contender: Contender, measure: str, threads: int) -> None:
        request = {"task": asdict(task), "contender": asdict(contender), "measure": measure, "threads": threads}
        self.name = contender.name
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        paths = (str(_ROOT), os.environ.get("PYTHONPATH"))
        self._process = subprocess.Popen(
            [str(python), str(_TRAINERS), json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in paths if path),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": str(threads),
            },
        )

    def go(self) -> None:
        """Let it take its turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def line(self) -> str:
        """The next line that it says.

        Raises:
            Failed: it has ended without one.
        """
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            self._process.wait()
            self._errors.seek(0)
            raise Failed(f"{self.name} failed: {self._errors.read().strip() or 'without a word'}")
        return said.strip()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


@contextmanager
def _children(python: Path, task: Task, contenders: Sequence[Contender], measure: str, threads: int) -> Iterator[list[_Child]]:
    started: list[_Child] = []
    try:
        for contender in contenders:
            started.append(_Child(python, task, contender, measure, threads))
        yield started
    finally:
        for child in started:
            child.close()


def measure_peak(python: Path, task: Task, contender: Contender, threads: int) -> Run:
    """Train with the profiler on, alone.

    Raises:
        Failed: the child does.
    """
    with _children(python, task, [contender], "peak", threads) as (child,):
        return Run(**json.loads(child.line()))


def measure_steps(python: Path, task: Task, contenders: Sequence[Contender], threads: int) -> list[Run]:
    """Train all of them at once, one step of one at a time; who begins a round moves on by one each round.

    Raises:
        Failed: a child does.
    """
    with _children(python, task, contenders, "steps", threads) as children:
        for child in children:
            _expect_step(child)
        for round_ in range(task.steps - 1):
            for child in rotated(children, round_):
                child.go()
                _expect_step(child)
        runs = []
        for child in children:
            child.go()
            runs.append(Run(**json.loads(child.line())))
        return runs


def _expect_step(child: _Child) -> None:
    if (said := child.line()) != "step":
        raise Failed(f"{child.name} made fewer updates than steps: {said[:200]}")


def rotated(items: Sequence[_Measured], by: int) -> list[_Measured]:
    """The items from number ``by`` on, round to it again.

    >>> rotated("abc", 4)
    ['b', 'c', 'a']
    """
    at = by % len(items)
    return [*items[at:], *items[:at]]


def steady(values: Sequence[_Measured]) -> list[_Measured]:
    """Of the times between updates those that memtrain's watching has no part in, for all contenders alike.

    memtrain watches steps 1 and 2 and the last. The first two times touch step 2, the last one the last step; the third
    begins with the update of step 3.

    >>> steady([12, 23, 34, 45, 56])
    [34, 45]
    """
    return list(values[2:-1])


def machine_line(threads: int) -> str:
    """The machine, in words."""
    import platform

    name = platform.processor() or platform.machine()
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        models = [line.partition(":")[2].strip() for line in listed.read_text().splitlines() if line.startswith("model name")]
        name = models[0] if models else name
    plural = "" if threads == 1 else "s"
    return f"{name}, {os.cpu_count()} processors, {threads} thread{plural}, Python {platform.python_version()}"


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest difference between two runs' losses of the same step; both have as many.

    >>> largest_difference([1.0, 2.5], [1.0, 2.0])
    0.5
    """
    return max(abs(one - other) for one, other in zip(losses, reference, strict=True))
