"""Signals as requests: SIGTERM and Ctrl-C ask a run to stop once it has saved, SIGUSR1 asks it to save and go on.

A handler of Python's runs between two of the main thread's bytecodes, and one backward is one call into torch, which may take
minutes. So the handlers note what is asked and no more; a thread that the system wakes by itself, through a socket, tells that a
request has come and keeps the time until the run must be over.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Final

from memtrain.units import format_seconds

EXIT_UNSAVED: Final = 75
"""Exit code of a run that was to stop and did not in time: EX_TEMPFAIL of sysexits.h, by which a queue knows to try again.

What was done since the last checkpoint is lost; the checkpoint is there.
"""

STOPS: Final = (signal.SIGTERM, signal.SIGINT)


def exit_code(stop: signal.Signals) -> int:
    """The exit code of a run that saved and stopped for a signal: 128 and its number, as shells report it.

    >>> exit_code(signal.SIGINT), exit_code(signal.SIGTERM)
    (130, 143)
    """
    return 128 + stop


class Requests:
    """What signals have asked for so far; it can be read after :func:`listen` has ended, too.

    Attributes:
        stop: the first SIGTERM or SIGINT that came, None before.
    """

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        self._save = False
        self._process = os.getpid()

    def takes_save(self) -> bool:
        """Whether SIGUSR1 has come since this was last True."""
        # Cleared only where it was set: a signal between the two lines is answered by the save that follows.
        if self._save:
            self._save = False
            return True
        return False

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler. It prints nothing: the stream that it interrupts may be in the middle of a line."""
        if number not in STOPS:
            self._save = True
        elif number == signal.SIGTERM and os.getpid() != self._process:
            # A forked child has inherited the handler, and its parent, such as a pool, means SIGTERM to end it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.stop is None:
            self.stop = signal.Signals(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def listen(stop_seconds: float | None, tell: Callable[[str], None]) -> Iterator[Requests]:
    """Turn signals into requests, for a run that asks for them between its micro-batches.

    The first SIGTERM or SIGINT is noted and told. A SIGINT after it raises KeyboardInterrupt wherever the run is; another
    SIGTERM changes nothing. A signal that is ignored (as nohup and shells do for what runs in the background) stays so, and one
    whose handler was not set from Python is left to it. Where a handler cannot be set, outside the main thread, nothing is ever
    asked. On leaving, the handlers are those from before.

    Args:
        stop_seconds: the process ends with :data:`EXIT_UNSAVED` where this context has not been left so long after the stop was
            asked for; None for no limit. It needs Python to run at all: a call that holds its lock holds this up.
        tell: told one sentence, from another thread, when a stop is asked for.
    """
    requests = Requests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    _children_write_nothing()
    wanted = (*STOPS, *filter(None, (getattr(signal, "SIGUSR1", None),)))
    taken = [number for number in wanted if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    with ExitStack() as leaving:
        leaving.enter_context(reader)
        ending = _Ending(stop_seconds)
        leaving.callback(ending.called_off)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        attending = threading.Thread(target=_attend, args=(reader, taken, before, ending, tell), name="signals", daemon=True)
        attending.start()
        # In reverse: the handlers, the socket that the system writes to, and the thread, which reads to the socket's end.
        leaving.callback(attending.join)
        leaving.callback(writer.close)
        leaving.callback(signal.set_wakeup_fd, before)
        for number in taken:
            leaving.callback(signal.signal, number, signal.signal(number, requests._note))
        yield requests


class _Ending:
    """The end of the process, so long after it was asked to stop."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    def begins(self, stop: signal.Signals) -> str:
        """Start the time; returns how the sentence about the stop ends."""
        if self._seconds is None:
            return ""
        self._timer = threading.Timer(self._seconds, self._end, args=(stop,))
        self._timer.daemon = True
        self._timer.start()
        return f", after {format_seconds(self._seconds)} at the latest"

    def called_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _end(self, stop: signal.Signals) -> None:
        assert self._seconds is not None
        sentence = (
            f"memtrain: the run has not stopped {format_seconds(self._seconds)} after {stop.name}: it ends here with exit code "
            f"{EXIT_UNSAVED}, and what was done since the last checkpoint is lost.\n"
        )
        # Not through sys.stderr: the thread that hangs may hold its lock.
        with suppress(OSError):
            os.write(2, sentence.encode())
        os._exit(EXIT_UNSAVED)


def _attend(
    reader: socket.socket, taken: list[signal.Signals], before: int, ending: _Ending, tell: Callable[[str], None]
) -> None:
    """Read the numbers of the signals that come, until the other end is closed."""
    stop: signal.Signals | None = None
    while numbers := reader.recv(64):
        for number in numbers:
            if number not in taken:
                # Of whoever listened before, such as an event loop.
                with suppress(OSError):
                    os.write(before, bytes((number,)))
            elif number in STOPS and stop is None:
                stop = signal.Signals(number)
                again = " again" if stop == signal.SIGINT else ""
                limit = ending.begins(stop)
                tell(
                    f"{stop.name} came: the run finishes its micro-batch, saves and ends{limit}; Ctrl-C{again} stops it at once."
                )


@functools.cache
def _children_write_nothing() -> None:
    """From now on a forked child does not write its signals into the socket that it shares with its parent."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))
