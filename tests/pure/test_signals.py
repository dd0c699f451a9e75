"""Signals are noted, told once, and put back as they were."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtrain.signals import EXIT_UNSAVED, exit_code, listen

SIGUSR1 = getattr(signal, "SIGUSR1", None)
pytestmark = pytest.mark.skipif(SIGUSR1 is None, reason="Windows has no SIGUSR1, and os.kill ends the process there")


def ignore_it(number: int, frame: object) -> None:
    """A handler of the caller's."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Whatever a test sets is gone after it, and signals do not end the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, SIGUSR1)}
    signal.signal(signal.SIGTERM, ignore_it)
    # What a script starts in the background ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def run(script: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own."""
    header = "import os, signal, sys\nfrom memtrain.signals import listen\nme = os.getpid()\n"
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", header + script], capture_output=True, text=True, cwd=root, timeout=60)


@pytest.mark.parametrize(("number", "again"), [(signal.SIGTERM, ""), (signal.SIGINT, " again")])
def test_the_first_stop_is_noted_and_told(number: signal.Signals, again: str) -> None:
    told: list[str] = []
    with listen(None, told.append) as requests:
        assert requests.stop is None
        send(number)
        assert requests.stop is number
    assert told == [f"{number.name} came: the run finishes its micro-batch, saves and ends; Ctrl-C{again} stops it at once."]


def test_the_time_that_is_left_is_told_and_called_off_by_leaving() -> None:
    told: list[str] = []
    with listen(3600, told.append):
        send(signal.SIGTERM)
    (sentence,) = told
    assert "saves and ends, after 1 h 00 min at the latest;" in sentence
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_ctrl_c_while_a_stop_is_asked_for_stops_at_once(first: signal.Signals) -> None:
    told: list[str] = []
    with listen(None, told.append) as requests:
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert requests.stop is first
    assert len(told) == 1


def test_another_sigterm_changes_nothing() -> None:
    told: list[str] = []
    with listen(None, told.append) as requests:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            send(number)
        assert requests.stop is signal.SIGINT
    assert len(told) == 1


def test_a_save_is_taken_once_for_what_came_before_it() -> None:
    told: list[str] = []
    with listen(None, told.append) as requests:
        assert not requests.takes_save()
        send(SIGUSR1)
        send(SIGUSR1)
        assert [requests.takes_save(), requests.takes_save()] == [True, False]
        send(SIGUSR1)
        assert requests.takes_save()
        assert requests.stop is None
    assert told == []


def test_a_system_without_sigusr1_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGUSR1")
    with listen(None, print) as requests:
        send(signal.SIGTERM)
    assert requests.stop is signal.SIGTERM
    assert not requests.takes_save()


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, ignore_it, signal.default_int_handler])
def test_the_handlers_from_before_are_put_back(before: signal.Handlers) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, SIGUSR1)
    for number in numbers:
        signal.signal(number, before)
    with pytest.raises(RuntimeError, match="a step failed"), listen(None, print):
        raise RuntimeError("a step failed")
    assert [signal.getsignal(number) for number in numbers] == [before] * 3


def test_what_is_ignored_or_handled_outside_python_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = signal.getsignal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What getsignal says of a handler that an embedding program has set.
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == SIGUSR1 else real(number))
    untouched = real(SIGUSR1)
    with listen(None, print) as requests:
        assert real(SIGUSR1) is untouched
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert requests.stop is None
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert requests.stop is signal.SIGTERM


def test_the_inner_of_two_is_asked_and_then_the_outer_again() -> None:
    outer_told: list[str] = []
    inner_told: list[str] = []
    with listen(None, outer_told.append) as outer:
        with listen(None, inner_told.append) as inner:
            send(signal.SIGTERM)
        assert (inner.stop, outer.stop) == (signal.SIGTERM, None)
        assert (len(inner_told), len(outer_told)) == (1, 0)
        send(signal.SIGINT)
        assert outer.stop is signal.SIGINT
    assert (len(inner_told), len(outer_told)) == (1, 1)


def test_signals_of_an_event_loop_reach_it() -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno())
        hangup = signal.signal(signal.SIGHUP, ignore_it)
        try:
            with listen(None, print):
                send(signal.SIGHUP)
                send(signal.SIGTERM)
            assert reader.recv(8) == bytes((signal.SIGHUP,))
            assert signal.set_wakeup_fd(writer.fileno()) == writer.fileno()
        finally:
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGHUP, hangup)


def test_outside_the_main_thread_nothing_is_asked() -> None:
    asked: list[object] = []

    def listens() -> None:
        with listen(0.0, print) as requests:
            asked.extend((requests.stop, requests.takes_save(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=listens)
    thread.start()
    thread.join()
    assert asked == [None, False, ignore_it]


def test_a_run_that_hangs_in_one_call_ends_in_time_and_says_so() -> None:
    # No bytecode runs during the call, and so no handler of Python's.
    ended = run(
        "import hashlib, threading\n"
        "threading.Timer(0.05, os.kill, (me, signal.SIGTERM)).start()\n"
        "with listen(0.1, lambda sentence: print(sentence, file=sys.stderr, flush=True)):\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    assert (ended.returncode, ended.stdout) == (EXIT_UNSAVED, "")
    assert ended.stderr.splitlines() == [
        "SIGTERM came: the run finishes its micro-batch, saves and ends, after 100 ms at the latest; Ctrl-C stops it at once.",
        "memtrain: the run has not stopped 100 ms after SIGTERM: it ends here with exit code 75, and what was done since the last "
        "checkpoint is lost.",
    ]


def test_a_forked_child_is_ended_by_sigterm_and_its_parent_goes_on() -> None:
    ended = run(
        "import time\n"
        "with listen(0.0, print) as requests:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(60)\n"
        "    status = os.waitpid(child, 0)[1]\n"
        "print(os.WTERMSIG(status), requests.stop)\n"
    )
    assert ended.stdout == f"{int(signal.SIGTERM)} None\n", ended.stderr


def test_exit_codes_are_those_that_shells_report() -> None:
    assert {stop: exit_code(stop) for stop in (signal.SIGINT, signal.SIGTERM)} == {signal.SIGINT: 130, signal.SIGTERM: 143}
    assert EXIT_UNSAVED == 75
