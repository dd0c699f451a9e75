"""Runs killed at random moments and resumed until they end: ``python benchmarks/kill_test.py [--kills 200] [--seed 0]``.

Jobs of several kinds are each trained once undisturbed. Then the same call is made with ``resume="auto"`` and the same folder
and killed by SIGKILL, again and again until it has ended, and what it leaves must be that of the undisturbed run to the bit:
weights, the last checkpoint, what was logged of every step (each once), evaluations, and the rows that each step trained on.
Half of the kills come at a moment drawn evenly over the time that a run takes; the others inside what is hard to survive, such
as half-way through a file or between two renames, where the process kills itself at the n-th such place. Now and then a byte of
the newest checkpoint is turned over before the run goes on, which then has to go on from the one before.

A process per job imports the libraries once and forks one for each attempt. Needs Linux. Exits with 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kill_places import PLACES, Aim, Place, aim_
from left_behind import differences, last_taken, logged, rows

STEPS, ROWS, GLOBAL_BATCH, CHECKPOINT_EVERY = 14, 20, 8, 3
# Where a kill came that was sent from outside.
ANY = "any moment"
# An attempt takes about a second, and a run is killed some ten times.
_HANGS_SECONDS = 120.0
_MOST_ATTEMPTS = 100
# Of one job; what is wrong comes again.
_MOST_TROUBLES = 5
# torch's workers look every five seconds whether their parent lives (torch/utils/data/_utils/worker.py).
_WORKERS_END_SECONDS = 20.0
JOBS = ("plain", "written by a thread", "during backward", "8-bit state", "adapters", "fp16", "a worker")


def settings(job: str) -> dict[str, Any]:
    """What a Trainer is given for a job beside what all jobs have."""
    from memtrain.job import Approximation
    from memtrain.method import Lora
    from memtrain.precision import AutocastFp16

    halves = {"micro_batch_size": GLOBAL_BATCH // 2}
    found: dict[str, dict[str, Any]] = {
        "plain": {"constraints": halves},
        # Its settings are the plain ones.
        "written by a thread": {"constraints": halves},
        "during backward": {"constraints": {"update": "during_backward"}, "max_grad_norm": None},
        "8-bit state": {"constraints": {**halves, "optimizer_state": "eight_bit"}, "allow": (Approximation.EIGHT_BIT_STATE,)},
        "adapters": {"constraints": halves, "method": Lora(rank=2, dropout=0.1)},
        # It overflows at first, and doubles again later.
        "fp16": {"constraints": halves, "precision": AutocastFp16(initial_scale=2.0**24, growth_interval=3)},
        "a worker": {"constraints": halves, "workers": 1},
    }
    return found[job]


# ---------------------------------------------------------------------- one attempt, in a process of its own


def train(job: str, folder: Path, aim: Aim) -> None:
    """The call that is made again and again."""
    from memtrain import AdamW, Trainer

    # Tables with enough values for 8-bit state; it drops, so that a generator that is put back wrongly is seen.
    model = {"model_type": "gpt2", "vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    trainer = Trainer(
        model={**model, "bos_token_id": 1, "eos_token_id": 2},
        data=rows(ROWS, 16),
        eval_data=rows(6, 16),
        budget="64MiB",
        global_batch_size=GLOBAL_BATCH,
        steps=STEPS,
        optimizer=AdamW(learning_rate=3e-3, weight_decay=0.1),
        evaluate_every=4,
        run_dir=folder / "run",
        checkpoint_every=CHECKPOINT_EVERY,
        keep_checkpoints=2,
        resume="auto",
        progress=False,
        **settings(job),
    )
    taken = os.open(folder / "rows.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def watch(module: Any, args: Any, given: Mapping[str, Any]) -> None:
        if not module.training:
            aim.passes(Place.EVALUATION)
            return
        numbers = given["input_ids"][:, 0].tolist()
        os.write(taken, f"{len(logged(folder)) + 1} {json.dumps(numbers)}\n".encode())

    trainer.model.register_forward_pre_hook(watch, with_kwargs=True)
    trainer.train()


def _threaded() -> AbstractContextManager[Any]:
    """Let checkpoints be copied and written by a thread, as they are where there is a card."""
    from memtrain.checkpoint_writer import Writer

    def copying(*given: Any, **named: Any) -> Writer:
        return Writer(*given, **{**named, "copy_bytes": 2**24})

    return patch("memtrain.keeper.Writer", copying)


def _attempt(job: str, folder: Path, place: str, number: int) -> None:
    """The whole life of the forked process; it does not return."""
    status = 1
    try:
        # A session of its own, by which its workers are found.
        os.setsid()
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        aim = Aim(place, number)
        aim_(aim, folder / "run")
        with _threaded() if job == "written by a thread" else nullcontext():
            train(job, folder, aim)
        (folder / "passed.json").write_text(json.dumps(aim.passed), encoding="utf-8")
        (folder / "modules.json").write_text(json.dumps(sorted(sys.modules)), encoding="utf-8")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# ---------------------------------------------------------------------- what a run left


def outcome(folder: Path) -> dict[str, Any]:
    """What is compared of a run that has ended, by name."""
    from memtrain.checkpoint import latest

    run = folder / "run"
    lines = logged(folder, evaluations=True)
    newest, troubles = latest(run / "checkpoints")
    if newest is None:
        raise ValueError(f"there is no whole checkpoint: {troubles}")
    found: dict[str, Any] = {f"line {number} of the metrics": line for number, line in enumerate(lines, 1)}
    found |= {"steps logged": [line["step"] for line in lines], "step of the checkpoint": newest.step}
    for file in sorted((run / "model").glob("*.safetensors")):
        found[f"weights in {file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    for group in newest.files:
        for name, tensor in newest.tensors(group):
            found[f"{group} {name}"] = hashlib.sha256(tensor.contiguous().reshape(-1).numpy().tobytes()).hexdigest()
    found |= {f"checkpoint's {name}": value for name, value in newest.facts.items()}
    words = [line.partition(" ") for line in (folder / "rows.txt").read_text(encoding="utf-8").splitlines()]
    taken = last_taken(((int(step), json.loads(numbers)) for step, _, numbers in words), ROWS, GLOBAL_BATCH)
    return found | {f"rows of step {step}": numbers for step, numbers in taken.items()}


# ---------------------------------------------------------------------- the process that forks


class Server:
    """Kills the runs of one job and compares what they leave."""

    def __init__(self, job: str, folder: Path, seed: int) -> None:
        self._job = job
        self._folder = folder
        self._random = random.Random(f"{seed} {job}")
        self._sessions: list[int] = []
        self.kills: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.troubles: list[str] = []
        self.runs = 0

    def serve(self, kills: int) -> None:
        """Train undisturbed, then kill until so many kills have been survived or not."""
        # What a killed run leaves behind becomes a child of this process, which can then tell when it has ended.
        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, linux/prctl.h
        undisturbed = self._new("undisturbed")
        self._run(undisturbed)  # loads what is loaded on first use
        for name in json.loads((undisturbed / "modules.json").read_text(encoding="utf-8")):
            with warnings.catch_warnings(), suppress(Exception):
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        expected = outcome(undisturbed)
        # Runs collect garbage; what the libraries hold is none, and is much.
        gc.freeze()
        again = self._new("again")
        seconds = self._run(again)
        passed = Counter(json.loads((again / "passed.json").read_text(encoding="utf-8")))
        if found := differences(expected, outcome(again)):
            raise RuntimeError(f"{self._job} does not train the same twice: {'; '.join(found[:5])}")
        while sum(self.kills.values()) < kills and len(self.troubles) < _MOST_TROUBLES:
            folder, places = self._new(str(self.runs)), list[str]()
            try:
                for place in self._killed_until_it_ends(folder, kills, seconds, passed):
                    places.append(place)
                found = differences(expected, outcome(folder))
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"]
            if found:
                self.lost.update(places)
                self.troubles.append(f"{self._job}, run {folder.name}, killed {', '.join(places)}: {'; '.join(found[:5])}")
            self.runs += 1
        self.troubles += left_over(self._sessions)

    def _new(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        return folder

    def _run(self, folder: Path) -> float:
        started = time.perf_counter()
        if not self._try(folder, "", 0, None):
            raise RuntimeError(f"the undisturbed run of {self._job} was killed")
        return time.perf_counter() - started

    def _killed_until_it_ends(self, folder: Path, kills: int, seconds: float, passed: Counter[str]) -> Iterator[str]:
        """The place of each kill."""
        for _ in range(_MOST_ATTEMPTS):
            place, number, moment = "", 0, None
            if sum(self.kills.values()) < kills:
                place = self._random.choice([ANY] * len(PLACES) + list(PLACES))
                if place == ANY:
                    moment = self._random.uniform(0, seconds)
                else:
                    if place == Place.ASIDE and not _turn_a_byte_over(folder / "run" / "checkpoints"):
                        continue
                    # A resumed run passes fewer.
                    number = self._random.randint(1, max(1, passed[place] // 2))
            if self._try(folder, place, number, moment):
                return
            self.kills[place] += 1
            yield place
        raise RuntimeError(f"it has not ended after {_MOST_ATTEMPTS} attempts")

    def _try(self, folder: Path, place: str, number: int, moment: float | None) -> bool:
        """Whether a run came to its end, and not to a kill.

        Raises:
            RuntimeError: it came to neither.
        """
        # Another thread may hold a lock that nobody would give back in the forked process.
        assert len(os.listdir("/proc/self/task")) == 1
        pid = os.fork()
        if not pid:
            _attempt(self._job, folder, place, number)
        self._sessions.append(pid)
        started = time.perf_counter()
        end = started + (_HANGS_SECONDS if moment is None else moment)
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.perf_counter() >= end:
                os.kill(pid, signal.SIGKILL)
                ended = os.waitpid(pid, 0)
                break
            time.sleep(0.001)
        status = os.waitstatus_to_exitcode(ended[1])
        if status == 0:
            return True
        if status != -signal.SIGKILL or time.perf_counter() - started >= _HANGS_SECONDS:
            output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"it ended with {status}, aimed {place or 'nowhere'}:\n{output[-3000:]}")
        return False


def _turn_a_byte_over(checkpoints: Path) -> bool:
    """Damage the newest checkpoint as a disk might, where there is one before it."""
    from memtrain.checkpoint import places

    found = [place for place in places(checkpoints) if (place / "model-00001.safetensors").exists()]
    if len(found) < 2:
        return False
    file = found[0] / "model-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return True


def left_over(sessions: Sequence[int], seconds: float = _WORKERS_END_SECONDS) -> list[str]:
    """A sentence for each session of an attempt that has ended and still has a process after so many seconds."""
    end = time.monotonic() + seconds
    living = list(sessions)
    while living and time.monotonic() < end:
        living = [session for session in living if _lives(session)]
        time.sleep(0.05)
    return [f"the attempt in process {session} left another behind" for session in living]


def _lives(session: int) -> bool:
    with suppress(ChildProcessError):
        # Those that have ended and nobody has asked for.
        while os.waitpid(-session, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


# ---------------------------------------------------------------------- all jobs


def killed(job: str, kills: int, seed: int) -> dict[str, Any]:
    """What a process that serves one job found: ``kills`` and ``lost`` by place, ``runs``, ``troubles``, ``seconds``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", job, "--kills", str(kills), "--seed", str(seed), "--folder", folder]
        # One thread: a pool of them does not survive a fork.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        file = Path(folder) / "result.json"
        if not file.exists():
            return {"kills": {}, "lost": {}, "runs": 0, "seconds": 0.0, "troubles": [f"{job}: {done.stderr[-3000:]}"]}
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def _serve(job: str, kills: int, seed: int, folder: Path) -> None:
    started = time.perf_counter()
    server = Server(job, folder, seed)
    try:
        server.serve(kills)
    except Exception:
        server.troubles.append(traceback.format_exc())
    found = {name: getattr(server, name) for name in ("kills", "lost", "runs", "troubles")}
    (folder / "result.json").write_text(json.dumps({**found, "seconds": time.perf_counter() - started}), encoding="utf-8")


def main() -> None:
    """Kill and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, help="processes that kill beside one another")
    parser.add_argument("--serve", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        _serve(given.serve, given.kills, given.seed, given.folder)
        return
    started = time.perf_counter()
    shares = [given.kills // len(JOBS) + (number < given.kills % len(JOBS)) for number in range(len(JOBS))]
    with ThreadPoolExecutor(given.at_once) as pool:
        found = list(pool.map(killed, JOBS, shares, [given.seed] * len(JOBS)))
    _print("job", JOBS, {job: sum(one["kills"].values()) for job, one in zip(JOBS, found, strict=True)}, {})
    kills, lost = (sum((Counter(one[what]) for one in found), Counter()) for what in ("kills", "lost"))
    _print("killed", (*PLACES, ANY), kills, lost)
    troubles = [trouble for one in found for trouble in one["troubles"]]
    print(*troubles, sep="\n")
    print(
        f"{sum(kills.values())} kills in {sum(one['runs'] for one in found)} runs, {sum(lost.values())} lost, "
        f"{len(troubles)} troubles, {time.perf_counter() - started:.0f} s"
    )
    sys.exit(1 if troubles or sum(kills.values()) < given.kills else 0)


def _print(what: str, names: Sequence[str], kills: Mapping[str, int], lost: Mapping[str, int]) -> None:
    print(f"{what:56}{'kills':>8}{'lost':>8}")
    for name in names:
        print(f"{name:56}{kills.get(name, 0):8}{lost.get(name, 0):8}")
    print()


if __name__ == "__main__":
    main()
