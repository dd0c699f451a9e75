"""Rows made by workers are the rows made without them, and nothing that happens to a worker is lost or holds up a run."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

from memtrain.data.batches import Batches, StepBatches, evaluation_batches
from memtrain.data.loading import WorkerTraceback, step_batches
from memtrain.data.rows import Batch, Row
from memtrain.data.rowset import alike

ROWS = [{"x": torch.tensor([number]), "labels": torch.tensor([0, number])} for number in range(10)]


class Made:
    """Ten rows, each made by a function of its number."""

    def __init__(self, make: Callable[[int], Row]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Row:
        return self.make(index)


def drawn(index: int) -> Row:
    """A row of random numbers of all three generators."""
    numbers = [random.random(), float(numpy.random.random()), torch.rand((), dtype=torch.float64).item()]
    return {"x": torch.tensor([index, *numbers], dtype=torch.float64)}


def plain(index: int) -> Row:
    return {"x": torch.tensor([index])}


def in_a_worker() -> bool:
    return get_worker_info() is not None


def loaded(rows: Any = ROWS, *, workers: int, steps: int = 6, seed: int = 0, size: int = 4) -> closing[Batches]:
    order = StepBatches(alike(rows), global_batch_size=size, seed=seed)
    return closing(step_batches(order, seed=seed, steps=steps, workers=workers))


def values(batches: list[Batch]) -> list[dict[str, list[Any]]]:
    return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in batches]


def all_ended() -> bool:
    """Whether all workers end within five seconds."""
    for process in multiprocessing.active_children():
        process.join(5)
    return multiprocessing.active_children() == []


@pytest.fixture(autouse=True)
def _by_fork_and_no_worker_is_left() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
    assert multiprocessing.active_children() == []


# ------------------------------------------------------------------------------------------------------- the same rows


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_make_the_same_micro_batches_in_the_same_order(workers: int) -> None:
    plainly = StepBatches(alike(ROWS), global_batch_size=4, seed=5)
    with loaded(workers=workers, seed=5) as batches:
        for step in range(6):
            assert values(batches.micro_batches(step, 3)) == values(plainly.micro_batches(step, 3))
            assert batches.indices(step) == plainly.indices(step)


def test_any_step_can_be_asked_for_again_in_other_pieces_and_by_any_rank() -> None:
    plainly = StepBatches(alike(ROWS), global_batch_size=4, seed=0)
    with loaded(workers=2) as batches:
        for step, size, ranks in ((3, 2, 1), (3, 2, 1), (3, 1, 1), (4, 1, 1), (0, 4, 1), (1, 1, 2), (2, 1, 2), (2, 4, 2)):
            rank = ranks - 1
            found = batches.micro_batches(step, size, rank=rank, ranks=ranks)
            assert values(found) == values(plainly.micro_batches(step, size, rank=rank, ranks=ranks))


def test_workers_have_the_next_step_ready(tmp_path: Path) -> None:
    def noted(index: int) -> Row:
        if in_a_worker():
            (tmp_path / str(index)).touch()
        return plain(index)

    with loaded(Made(noted), workers=1, steps=3) as batches:
        batches.micro_batches(0, 4)
        ahead = {str(index) for step in range(3) for index in batches.indices(step)}
        until(lambda: {path.name for path in tmp_path.iterdir()} == ahead)


def test_random_rows_depend_on_seed_step_and_position_alone() -> None:
    def steps(places: list[int], *, workers: int, size: int = 2, seed: int = 0) -> dict[int, list[list[float]]]:
        with loaded(Made(drawn), workers=workers, seed=seed) as batches:
            found = {step: values(batches.micro_batches(step, size)) for step in places}
        return {step: [row for batch in cut for row in batch["x"]] for step, cut in found.items()}

    whole = steps([0, 1, 2, 3], workers=1)
    assert steps([2, 3], workers=2, size=1) == {step: whole[step] for step in (2, 3)}
    numbers = [tuple(row[1:]) for step in whole.values() for row in step]
    assert len(set(numbers)) == 14  # 4, 4, the 2 that are left of 10, and 4
    other = steps([0], workers=1, seed=1)
    assert {tuple(row[1:]) for row in other[0]}.isdisjoint(numbers)


def test_the_generators_of_the_training_process_stay_where_they_are() -> None:
    def positions() -> tuple[Any, ...]:
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = positions()
    with loaded(Made(drawn), workers=1) as batches:
        batches.micro_batches(0, 2)
        batches.micro_batches(3, 2)
    assert positions() == before


def test_without_workers_a_row_draws_when_its_step_is_taken_and_not_to_tell_its_shape() -> None:
    torch.manual_seed(0)
    batches = StepBatches(alike(Made(drawn)), global_batch_size=2, seed=0)
    next(evaluation_batches(alike([plain(0)]), 1))
    found = [row[3] for batch in batches.micro_batches(0, 1) for row in batch["x"].tolist()]
    torch.manual_seed(0)
    assert found == [torch.rand((), dtype=torch.float64).item() for _ in range(2)]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not list open files")
def test_a_step_of_many_micro_batches_holds_no_open_file_for_each() -> None:
    with loaded(ROWS * 4, workers=1, size=40, steps=1) as batches:
        before = len(os.listdir("/proc/self/fd"))
        step = batches.micro_batches(0, 1)
        assert len(step) == 40
        assert len(os.listdir("/proc/self/fd")) < before + 20
        assert not any(tensor.is_shared() for batch in step for tensor in batch.values())


def test_processes_that_are_spawned_make_the_same_rows() -> None:
    multiprocessing.set_start_method("spawn", force=True)
    with loaded(workers=1) as batches:
        found = values(batches.micro_batches(2, 2))
    assert found == values(StepBatches(alike(ROWS), global_batch_size=4, seed=0).micro_batches(2, 2))


# ------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("workers", [-1, 1.0, "2", True])
def test_a_number_of_workers_that_is_none_is_refused(workers: Any) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^workers is {workers!r}, and it must be a whole number of 0 or more: 0 makes rows in the training process\.$",
    ):
        loaded(workers=workers, steps=1)


def test_rows_that_cannot_be_sent_to_a_spawned_process_are_refused() -> None:
    multiprocessing.set_start_method("spawn", force=True)
    refused = (
        r"^the training rows are a Made that cannot be sent to worker processes started by spawn \(.*lambda.*\): make it of "
    )
    with pytest.raises(ValueError, match=refused):
        loaded(Made(lambda index: plain(index)), workers=1, steps=1)


def test_processes_that_the_system_does_not_start_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(ValueError, match=r"^workers is 2, and the system did not start as many .*unavailable\): set fewer\.$"):
        loaded(workers=2, steps=1)


def test_a_row_that_raises_is_named_with_its_traceback_as_the_cause_and_other_steps_go_on() -> None:
    def make(index: int) -> Row:
        return {} if in_a_worker() and index == 7 and {}["caption"] else plain(index)

    with loaded(Made(make), workers=2, size=5) as batches:
        bad, good = (0, 1) if 7 in batches.indices(0) else (1, 0)
        for _ in range(2):
            with pytest.raises(
                ValueError,
                match=r"^row 7 of the training rows cannot be made \(KeyError: 'caption'\): mend the row, or leave it out\.$",
            ) as refused:
                batches.micro_batches(bad, 1)
            assert isinstance(refused.value.__cause__, WorkerTraceback)
            assert 'index == 7 and {}["caption"]' in str(refused.value.__cause__)
            found = batches.micro_batches(good, 1)
            assert [batch["x"].item() for batch in found] == batches.indices(good)


def test_a_row_unlike_row_0_is_refused_in_the_words_that_it_is_refused_with_without_workers() -> None:
    rows = [*ROWS[:9], {"x": torch.zeros(2), "labels": ROWS[0]["labels"]}]
    said = []
    for workers in (0, 1):
        refusal = pytest.raises(ValueError, match=r"^row 9 of .*: cut or pad")
        with loaded(rows, workers=workers, size=10) as batches, refusal as refused:
            batches.micro_batches(0, 10)
        said.append(str(refused.value))
        assert refused.value.__cause__ is None
    assert said[0] == said[1]


def test_a_batch_that_shared_memory_does_not_hold_is_refused() -> None:
    def make(index: int) -> Row:
        if in_a_worker():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return {"x": torch.zeros(2048)}

    with loaded(Made(make), workers=1, size=1) as batches:
        row = batches.indices(0)[0]
        with pytest.raises(
            ValueError,
            match=rf"^the micro-batch that begins with row {row} of the training rows does not fit into shared memory \(RuntimeError: "
            r".*\), through which workers hand over rows: make /dev/shm larger \(docker run --shm-size\), or set fewer workers\.$",
        ):
            batches.micro_batches(0, 1)


# ------------------------------------------------------------------------------------------------------- how workers end

DEATHS: dict[str, tuple[Callable[[], object], str, str]] = {
    "killed": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "was killed by SIGKILL",
        "set fewer workers if host memory ran out, which is when the system kills, or start the run again",
    ),
    "bus error": (
        lambda: os.kill(os.getpid(), signal.SIGBUS),
        "was killed by SIGBUS",
        r"make /dev/shm larger \(docker run --shm-size\), which is full when this happens, or set fewer workers",
    ),
    "exit": (lambda: os._exit(3), "ended with exit code 3", "take the row with workers set to 0 to see why, or leave it out"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_the_row_that_ended_a_worker_is_named_with_a_remedy_when_rows_are_asked_for(death: str, tmp_path: Path) -> None:
    end, said, remedy = DEATHS[death]
    fatal = StepBatches(alike(ROWS), global_batch_size=5, seed=0).indices(1)[2]
    first_is_here = tmp_path / "first step"

    def make(index: int) -> Row:
        if in_a_worker() and index == fatal:
            until(first_is_here.exists)
            end()
        return plain(index)

    with loaded(Made(make), workers=2, size=5, steps=2) as batches:
        before = signal.getsignal(signal.SIGCHLD)
        assert len(batches.micro_batches(0, 5)) == 1
        # It dies while the training process does something else, which nothing interrupts.
        first_is_here.touch()
        until(lambda: len(multiprocessing.active_children()) < 2)
        assert signal.getsignal(signal.SIGCHLD) is before
        with pytest.raises(
            ValueError,
            match=rf"^worker process \d+ {said} while it made row {fatal} of the training rows, and a run needs all of its workers: "
            rf"{remedy}\.$",
        ):
            batches.micro_batches(1, 5)
        assert all_ended()


def test_a_worker_that_dies_while_the_run_waits_for_it_is_noticed_and_new_ones_go_on_if_asked() -> None:
    # Takes five seconds: DataLoader looks after its workers as often.
    fatal = StepBatches(alike(ROWS), global_batch_size=4, seed=0).indices(0)[0]
    with loaded(Made(lambda index: os._exit(4) if in_a_worker() and index == fatal else plain(index)), workers=1) as batches:
        with pytest.raises(ValueError, match=rf"ended with exit code 4 while it made row {fatal} of the training rows"):
            batches.micro_batches(0, 4)
        assert [batch["x"].item() for batch in batches.micro_batches(1, 1)] == batches.indices(1)


def test_a_worker_that_is_killed_between_two_micro_batches_is_not_blamed_on_a_row() -> None:
    with loaded(workers=1, steps=1) as batches:
        batches.micro_batches(0, 4)
        multiprocessing.active_children()[0].kill()
        assert all_ended()
        with pytest.raises(ValueError, match="was killed by SIGKILL between two micro-batches of the training rows"):
            batches.micro_batches(0, 4)


def test_workers_go_on_when_their_process_group_is_told_to_stop_and_leave_it_to_the_run() -> None:
    handled = []
    told = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, lambda number, frame: handled.append(number)) for number in told]
    try:
        with loaded(Made(lambda index: {"x": torch.tensor([len(handled)])}), workers=2) as batches:
            batches.micro_batches(0, 1)
            workers = multiprocessing.active_children()
            for number in told:
                for worker in workers:
                    os.kill(worker.pid or 0, number)
            assert values(batches.micro_batches(3, 4)) == [{"x": [[0]] * 4}]
            assert multiprocessing.active_children() == workers
            assert handled == []
    finally:
        for number, handler in zip(told, before, strict=True):
            signal.signal(number, handler)


def test_a_program_that_a_row_starts_can_still_be_told_to_end() -> None:
    def make(index: int) -> Row:
        code = 0
        if in_a_worker():
            with subprocess.Popen(["sleep", "60"]) as program:
                program.terminate()
                code = program.wait()
        return {"x": torch.tensor([code])}

    with loaded(Made(make), workers=1, size=1, steps=1) as batches:
        assert values(batches.micro_batches(0, 1)) == [{"x": [[-signal.SIGTERM]]}]


def test_an_interrupted_wait_ends_workers_in_the_middle_of_a_row_and_closing_can_be_done_twice() -> None:
    def interrupt(index: int) -> Row:
        if in_a_worker():
            os.kill(os.getppid(), signal.SIGALRM)
            time.sleep(600)
        return plain(index)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    with loaded(Made(interrupt), workers=1) as batches:
        with pytest.raises(KeyboardInterrupt):
            batches.micro_batches(0, 1)
        assert all_ended()
        batches.close()
    signal.signal(signal.SIGALRM, before)


FORGETS = """
import multiprocessing, os, signal, sys, time
import torch
from memtrain.data.batches import StepBatches
from memtrain.data.loading import step_batches
from memtrain.data.rowset import alike

class Rows:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() and index != first:
            time.sleep(SECONDS)
        return dict(x=torch.tensor([index]))

multiprocessing.set_start_method("fork")
rows = Rows()
order = StepBatches(alike(rows), global_batch_size=1, seed=0)
first = order.indices(0)[0]
batches = step_batches(order, seed=0, steps=8, workers=2)
batches.micro_batches(0, 1)
print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
END
"""


@pytest.mark.parametrize(
    ("end", "seconds", "code"), [("sys.exit(3)", 600, 3), ("os.kill(os.getpid(), signal.SIGKILL)", 1, -signal.SIGKILL)]
)
def test_a_run_that_ends_or_is_killed_without_closing_leaves_no_worker(end: str, seconds: float, code: int) -> None:
    script = FORGETS.replace("END", end).replace("SECONDS", str(seconds))
    program = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert program.returncode == code
    workers = [int(word) for word in program.stdout.split()]
    assert len(workers) == 2
    until(lambda: all(not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie" for worker in workers))


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that must come, at most 30 seconds."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
