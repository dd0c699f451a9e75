"""A watch on what takes far longer than usual: it says so and shows where every thread stands. It ends nothing.

A thread looks once a second at what is going on. Who is watched writes down two times and no more, so that watching a step
costs a few microseconds.
"""

from __future__ import annotations

import faulthandler
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self, TextIO

from memtrain.units import format_seconds

# The usual duration is the median of so many, the latest.
_REMEMBERED: Final = 1000
# The longest time between two looks that counts, in looks: beyond it the process, or the machine, was asleep.
_LONGEST_LOOKS: Final = 5


class _Watched:
    """Something that is going on.

    Attributes:
        kind, name: as given.
        since: the watchdog's own time when it first saw it, None before.
        told_seconds: how long it had run when it was last told of, 0 before.
    """

    __slots__ = ("kind", "name", "since", "told_seconds")

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self.since: float | None = None
        self.told_seconds = 0.0


class Watchdog:
    """Tells of what has run longer than ``times`` its usual duration and ``least_seconds``, and again after twice that, and so on.

    As a context it runs the thread that looks. The time in which the process or the machine sleeps does not count.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        *,
        usual: Mapping[str, float] | None = None,
        times: float = 10,
        least_seconds: float = 60,
        unknown_seconds: float = 600,
        look_seconds: float = 1,
        stream: TextIO | None = None,
    ) -> None:
        """
        Args:
            tell: told one sentence, from the watchdog's thread, before the stacks are printed.
            usual: seconds that each kind is expected to take, for as long as none of it has ended.
            unknown_seconds: the limit for a kind of which nothing is known or expected.
            look_seconds: time between two looks.
            stream: where the stacks of all threads go; by default to ``sys.stderr``.
        """
        self._tell = tell
        self._expected = dict(usual or {})
        self._times = times
        self._least_seconds = least_seconds
        self._unknown_seconds = unknown_seconds
        self._look_seconds = look_seconds
        self._stream = stream
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._going_on: dict[int, _Watched] = {}
        self._now = 0.0
        self._looked: float | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._over.clear()
        self._thread = threading.Thread(target=self._looks, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._thread is not None
        self._over.set()
        self._thread.join()

    @contextmanager
    def watching(self, kind: str, name: str) -> Iterator[None]:
        """Watch what happens inside; contexts may stand in one another, and in any thread.

        Args:
            kind: what its duration is compared with, such as ``"step"``.
            name: what it is called in the sentence, such as ``"step 37"``.
        """
        watched = _Watched(kind, name)
        started = time.monotonic()
        self._going_on[id(watched)] = watched
        try:
            yield
            # What has failed says nothing of how long it takes.
            self._seconds[kind].append(time.monotonic() - started)
        finally:
            del self._going_on[id(watched)]

    def usual_seconds(self, kind: str) -> float | None:
        """The median duration of a kind so far, before the first what was expected, None where nothing is known."""
        seconds = self._seconds.get(kind)
        return statistics.median(seconds.copy()) if seconds else self._expected.get(kind)

    def look(self, now: float) -> None:
        """Tell of what has run too long by ``now``, in the seconds of a clock that never goes back."""
        if self._looked is not None:
            self._now += min(now - self._looked, _LONGEST_LOOKS * self._look_seconds)
        self._looked = now
        for watched in tuple(self._going_on.values()):
            if watched.since is None:
                watched.since = self._now
            seconds = self._now - watched.since
            if seconds < max(2 * watched.told_seconds, min(self._least_seconds, self._unknown_seconds)):
                continue
            usual = self.usual_seconds(watched.kind)
            limit = self._unknown_seconds if usual is None else max(self._least_seconds, self._times * usual)
            if seconds >= limit:
                watched.told_seconds = seconds
                known = "how long it takes is not known" if usual is None else f"{format_seconds(usual)} are usual"
                self._tell(
                    f"{watched.name} has run for {format_seconds(seconds)}, and {known}: what every thread does is printed, "
                    f"and the run goes on."
                )
                print_stacks(self._stream)

    def _looks(self) -> None:
        while not self._over.wait(self._look_seconds):
            self.look(time.monotonic())


def print_stacks(stream: TextIO | None = None) -> None:
    """Print where every thread of Python's stands, the latest call first; to ``sys.stderr`` by default.

    A stream without a file descriptor, as in notebooks and tests, is written to as text.
    """
    stream = sys.stderr if stream is None else stream
    # A program without a console has none.
    if stream is None:
        return
    try:
        stream.flush()
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            calls = "".join(reversed(traceback.format_stack(frame)))
            stream.write(f"Thread {names.get(ident, ident)} (most recent call first):\n{calls}\n")
        stream.flush()
    else:
        faulthandler.dump_traceback(file=descriptor, all_threads=True)
