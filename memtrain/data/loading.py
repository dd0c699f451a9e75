"""Rows that worker processes make while the run computes, in the order and with the values that they have in any case.

For map-style datasets whose ``__getitem__`` does work. The processes, their queues and the shared memory are those of torch's
``DataLoader``; here is what it leaves open: which micro-batch comes next, random numbers, signals, and what is said when a
worker fails. What workers need to know of a micro-batch is its place in the run, so they can begin at any step.
"""

from __future__ import annotations

import copy
import hashlib
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pickle import PicklingError
from types import FrameType
from typing import Any, Final

import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, Dataset, get_worker_info

from memtrain import generators
from memtrain.data.batches import Batches, StepBatches
from memtrain.data.rows import Batch, Row
from memtrain.data.rowset import TRAINING_ROWS, RowSet
from memtrain.require import require

_PREFETCHED: Final = 2
"""Micro-batches that each worker makes ahead."""
_GRACE_SECONDS: Final = 2.0
"""How long :meth:`WorkerBatches.close` lets workers finish the row that they are making."""
_NO_ROW: Final = -1

# Step, position of the first row within it, and numbers of the rows.
_Key = tuple[int, int, list[int]]


def step_batches(order: StepBatches, *, seed: int, steps: int, workers: int = 0) -> Batches:
    """The rows of each step of a run, made by so many worker processes, or in this process with 0.

    Workers are started here. Call it before weights are loaded: where processes are forked, memory that this one writes to
    afterwards is copied, so weights that were there before would be there twice. Call ``close()`` at the end.

    Args:
        order: the rows of each step.
        seed: of the random numbers that rows draw in workers.
        steps: of the run; nothing is made beyond them.
        workers: processes.

    Raises:
        ValueError: ``workers`` is no number of processes, they cannot be started, or the rows cannot be sent to them.
    """
    whole = isinstance(workers, int) and not isinstance(workers, bool)
    require(whole and workers >= 0, "workers", workers, "a whole number of 0 or more: 0 makes rows in the training process")
    if workers == 0:
        return order
    return WorkerBatches(order, seed=seed, steps=steps, workers=workers)


@dataclass(frozen=True)
class _Place:
    step: int
    micro_batch_size: int
    rank: int
    ranks: int


@dataclass
class _Ahead:
    """What DataLoader asks for the next micro-batch to make: all from ``place`` on, none where that is None."""

    order: StepBatches
    steps: int
    place: _Place | None = None

    def __iter__(self) -> Iterator[_Key]:
        if self.place is None:
            return
        size, rank, ranks = self.place.micro_batch_size, self.place.rank, self.place.ranks
        for step in range(self.place.step, self.steps):
            for position, numbers in self.order.cuts(step, size, rank=rank, ranks=ranks):
                yield step, position, numbers


@dataclass(frozen=True)
class _Refused:
    """Why there is no batch, and the traceback in the worker where the reason is an exception of a row.

    A value and no exception, because DataLoader puts a traceback in place of an exception's message.
    """

    sentence: str
    cause: str


class WorkerTraceback(Exception):
    """The cause of a ValueError about a row: its text is the traceback of what the row raised in the worker."""


class _MicroBatches(Dataset[Batch | _Refused]):
    """Makes micro-batches in a worker, and notes in ``making``, which is shared, the row that each worker makes."""

    def __init__(self, rows: RowSet, seed: int, making: MutableSequence[int]) -> None:
        self._rows = rows
        self._seed = seed
        self._making = making

    def __getitem__(self, key: _Key) -> Batch | _Refused:
        worker = get_worker_info()
        assert worker is not None
        try:
            batch = self._rows.batch(self._made(key, worker.id))
            return _shared(batch, key)
        except ValueError as error:
            cause = error.__cause__
            return _Refused(str(error), "" if cause is None else "".join(traceback.format_exception(cause)))
        finally:
            self._making[worker.id] = _NO_ROW

    def _made(self, key: _Key, worker: int) -> Iterator[tuple[int, Row]]:
        step, position, numbers = key
        for offset, number in enumerate(numbers):
            self._making[worker] = number
            _seed_generators(self._seed, step, position + offset)
            try:
                row = self._rows.row(number, step)
            except Exception as error:
                raise ValueError(
                    f"row {number} of {TRAINING_ROWS} cannot be made ({_first_line(error)}): mend the row, or leave it out."
                ) from error
            yield number, row


def _shared(batch: Batch, key: _Key) -> Batch:
    # Here, because DataLoader would do it in a thread that drops what it cannot send, and the run would wait for ever.
    try:
        return {name: tensor.detach().share_memory_() if tensor.numel() else tensor for name, tensor in batch.items()}
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"the micro-batch that begins with row {key[2][0]} of {TRAINING_ROWS} does not fit into shared memory "
            f"({_first_line(error)}), through which workers hand over rows: make /dev/shm larger (docker run --shm-size), or "
            "set fewer workers."
        ) from error


def _seed_generators(seed: int, step: int, position: int) -> None:
    """Let the generators of Python, NumPy and torch begin at a place that belongs to this row of this step."""
    digest = hashlib.sha256(f"row values, seed {seed}, step {step}, position {position}".encode()).digest()
    generators.begin_at(int.from_bytes(digest[:16]))


def _go_on(signum: int, frame: FrameType | None) -> None:
    pass


def _leave_signals_to_the_run(worker: int) -> None:
    """Let a worker go on when its process group is told to stop.

    A terminal sends SIGINT to the whole group, and schedulers SIGTERM or SIGUSR1. The run then finishes its step, for which it
    needs the workers, and ends them; if it is killed they notice (DataLoader's watchdog). Whatever other signal the training
    process handles, its handler is not for a worker, which inherits it by fork.
    """
    for number in signal.valid_signals():
        name = getattr(number, "name", "")
        if callable(signal.getsignal(number)) or name in ("SIGINT", "SIGTERM", "SIGUSR1"):
            # A handler that does nothing, where SIG_IGN would pass on to programs that a row starts, and they could not be ended.
            signal.signal(number, signal.SIG_DFL if name == "SIGCHLD" else _go_on)
    signal.set_wakeup_fd(-1)


def _as_made(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class _Running:
    """Worker processes at work; ``making[n]`` is the row that number n makes, and ``kill`` is for a run that forgets them."""

    loader: DataLoader[Batch | _Refused]
    iterator: Any
    processes: list[BaseProcess]
    making: MutableSequence[int]
    kill: Finalize


class WorkerBatches:
    """What :class:`~memtrain.data.batches.StepBatches` gives, from workers that run ahead of the step.

    Asked for the step after the last one it has the micro-batches ready. Asked for another step or size, the workers begin
    anew there, after what they have in hand.
    """

    def __init__(self, order: StepBatches, *, seed: int, steps: int, workers: int) -> None:
        """Start the workers. The arguments are those of :func:`step_batches`, with one worker or more."""
        assert workers >= 1
        self._seed = seed
        self._workers = workers
        self._order = order
        # Of its own, since an order keeps the permutation of one epoch, and the workers may be an epoch ahead.
        self._ahead = _Ahead(copy.copy(self._order), steps)
        self._next: _Place | None = None
        self._running: _Running | None = self._started()

    def indices(self, step: int) -> list[int]:
        """The numbers of the rows of ``step`` (counted from 0), in order."""
        return self._order.indices(step)

    def largest(self, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> list[Batch]:
        """The micro-batches of one process in the largest step that there can be, made in this process."""
        return self._order.largest(micro_batch_size, rank=rank, ranks=ranks)

    def tokens(self, step: int) -> int | None:
        """The tokens of the rows of ``step``, padding not counted; None where rows are no text."""
        return self._order.tokens(step)

    def epoch(self, steps: int) -> float:
        """How often each row has been seen after so many steps."""
        return self._order.epoch(steps)

    def seen(self, steps: int) -> int:
        """The tokens of all rows of so many steps; rows where they are no text."""
        return self._order.seen(steps)

    def micro_batches(self, step: int, micro_batch_size: int, *, rank: int = 0, ranks: int = 1) -> list[Batch]:
        """The rows of ``step`` in micro-batches, as :meth:`memtrain.data.batches.StepBatches.micro_batches` gives them.

        Raises:
            ValueError: a row differs from row 0 (:func:`memtrain.data.rows.check_row`), raised an exception or ended a worker.
        """
        assert step < self._ahead.steps
        count = len(self._order.cuts(step, micro_batch_size, rank=rank, ranks=ranks))
        place = _Place(step, micro_batch_size, rank, ranks)
        # Unknown until all of the step is here, so that after a failure the workers begin anew.
        expected, self._next = self._next, None
        if self._running is None:
            self._running = self._started()
        running = self._running
        with self._closed_on_failure(running):
            if place != expected:
                self._ahead.place = place
                iter(running.loader)
            made = [_own(next(running.iterator)) for _ in range(count)]
        batches: list[Batch] = []
        for batch in made:
            if isinstance(batch, _Refused):
                raise ValueError(batch.sentence) from (WorkerTraceback(batch.cause) if batch.cause else None)
            batches.append(batch)
        self._next = replace(place, step=step + 1)
        return batches

    def close(self) -> None:
        """End the workers: each may finish its row within two seconds, and is killed after that."""
        if self._running is None:
            return
        # In a thread, because DataLoader waits five seconds for each worker in turn, and for ever where one was killed while it
        # held a lock.
        ending = threading.Thread(target=self._running.iterator._shutdown_workers, daemon=True)
        with _child_signal_kept():
            ending.start()
            ending.join(_GRACE_SECONDS)
            for process in self._running.processes:
                process.kill()
            # It also waits for them; of two threads that wait for one process, one does not see it end.
            ending.join(_GRACE_SECONDS)
            _kill(self._running.processes)
        self._running.kill.cancel()
        self._running, self._next = None, None

    def _started(self) -> _Running:
        making = multiprocessing.get_context().RawArray("q", [_NO_ROW] * self._workers)
        self._ahead.place = None
        loader: DataLoader[Batch | _Refused] = DataLoader(
            _MicroBatches(self._order.rows, self._seed, making),
            batch_size=None,
            sampler=self._ahead,
            num_workers=self._workers,
            collate_fn=_as_made,
            worker_init_fn=_leave_signals_to_the_run,
            # Of its own: DataLoader draws a seed for the workers, else from the generator that dropout draws from.
            generator=torch.Generator(),
            prefetch_factor=_PREFETCHED,
            persistent_workers=True,
        )
        with _child_signal_kept(), warnings.catch_warnings():
            # What cannot be pickled is refused below. Python warns of locks that threads held when a process was forked;
            # forking is DataLoader's way on this system, and the one that its users have.
            warnings.filterwarnings("ignore", "Got pickle error", UserWarning)
            warnings.filterwarnings("ignore", ".* is multi-threaded, use of fork", DeprecationWarning)
            try:
                iterator: Any = iter(loader)
            except (TypeError, AttributeError, PicklingError) as error:
                raise ValueError(
                    f"{TRAINING_ROWS} are a {type(self._order.rows.rows).__name__} that cannot be sent to worker processes started by "
                    f"{multiprocessing.get_start_method()} ({_first_line(error)}): make it of classes and functions that stand at "
                    "the top of a module, or set workers to 0."
                ) from error
            except OSError as error:
                raise ValueError(
                    f"workers is {self._workers}, and the system did not start as many processes ({_first_line(error)}): set fewer."
                ) from error
        processes: list[BaseProcess] = iterator._workers
        # At exit, before multiprocessing waits for the workers, to which it only sends the SIGTERM that they pass over.
        kill = Finalize(None, _kill, args=(processes,), exitpriority=1)
        return _Running(loader, iterator, processes, making, kill)

    @contextmanager
    def _closed_on_failure(self, running: _Running) -> Iterator[None]:
        """End the workers on any exception, after which a queue may hold half of a message; if one has died, say so."""
        try:
            if fate := _fate(running):
                raise ValueError(fate)
            yield
        except BaseException as error:
            fate = ""
            if isinstance(error, OSError | EOFError | RuntimeError):
                # A worker's end of a connection may be gone a moment before the worker.
                for process in running.processes:
                    process.join(0.1)
                fate = _fate(running)
            self.close()
            if fate:
                raise ValueError(fate) from error
            raise


def _own(batch: Batch | _Refused) -> Batch | _Refused:
    """A batch in memory of this process.

    Each tensor in shared memory holds an open file, of which a step of many micro-batches would need more than there are; and
    its bytes would be missing where a run is measured.
    """
    return batch if isinstance(batch, _Refused) else {name: tensor.clone() for name, tensor in batch.items()}


def _fate(running: _Running) -> str:
    """What became of a worker that has died, in a sentence; nothing where all live."""
    for process, row in zip(running.processes, running.making, strict=True):
        if process.is_alive():
            continue
        code = process.exitcode
        assert code is not None
        number = -code
        end = f"was killed by {signal.Signals(number).name}" if code < 0 else f"ended with exit code {code}"
        remedy = "take the row with workers set to 0 to see why, or leave it out"
        if number == getattr(signal, "SIGKILL", None):
            remedy = "set fewer workers if host memory ran out, which is when the system kills, or start the run again"
        elif number == getattr(signal, "SIGBUS", None):
            remedy = "make /dev/shm larger (docker run --shm-size), which is full when this happens, or set fewer workers"
        when = "between two micro-batches" if row == _NO_ROW else f"while it made row {row}"
        return f"worker process {process.pid} {end} {when} of {TRAINING_ROWS}, and a run needs all of its workers: {remedy}."
    return ""


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        # Longer only where the system itself holds a process, as on a disk that is gone.
        process.join(_GRACE_SECONDS)


@contextmanager
def _child_signal_kept() -> Iterator[None]:
    """Whatever is done about SIGCHLD is as before, and nothing is done meanwhile.

    DataLoader installs a handler that raises when a worker dies, wherever the training process is then, be it in an update.
    Here a death is found where rows are asked for.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") and on_main_thread else None
    # None is also a handler that was not set from Python, which could not be put back.
    if before is None:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _first_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[0].strip().partition("\n")[0]
