"""What takes far longer than usual is told, with the stacks of all threads; time is a number that the test gives."""

from __future__ import annotations

import io
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from memtrain.watchdog import Watchdog, print_stacks


class Watch:
    """A watchdog that is asked to look by hand, at any second."""

    def __init__(self, **given: Any) -> None:
        self.told: list[str] = []
        self.stacks = io.StringIO()
        self.dog = Watchdog(self.told.append, stream=self.stacks, look_seconds=1000, **given)

    def told_at(self, *seconds: float) -> list[float]:
        """The seconds of these at which it tells."""
        found = []
        for second in seconds:
            before = len(self.told)
            self.dog.look(second)
            found += [second] * (len(self.told) - before)
        return found


def test_a_step_is_told_of_at_ten_times_the_expected_and_again_at_twice_that() -> None:
    watch = Watch(usual={"step": 40.0})
    with watch.dog.watching("step", "step 37"):
        assert watch.told_at(0, 399, 400, 401, 799, 800, 1599, 1600) == [400, 800, 1600]
    assert watch.told[0] == (
        "step 37 has run for 6 min 40 s, and 40 s are usual: what every thread does is printed, and the run goes on."
    )
    assert watch.told_at(10_000) == []


def test_what_is_usually_short_has_the_least_seconds() -> None:
    watch = Watch(usual={"step": 0.1})
    with watch.dog.watching("step", "step 2"):
        assert watch.told_at(0, 59, 60) == [60]


def test_of_what_is_unknown_the_unknown_seconds_are_the_limit() -> None:
    watch = Watch(usual={"step": 40.0})
    with watch.dog.watching("evaluation", "the evaluation after step 5"):
        assert watch.told_at(0, 599, 600) == [600]
    assert watch.told[0].startswith("the evaluation after step 5 has run for 10 min 00 s, and how long it takes is not known: ")


def test_the_usual_duration_is_the_median_of_what_has_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(usual={"step": 40.0})
    ends = iter((0.0, 2.0, 10.0, 13.0, 20.0, 120.0, 200.0))
    monkeypatch.setattr("memtrain.watchdog.time.monotonic", lambda: next(ends))
    assert watch.dog.usual_seconds("step") == 40.0
    for _ in range(3):
        with watch.dog.watching("step", "a step"):
            pass
    assert watch.dog.usual_seconds("step") == 3.0
    with pytest.raises(RuntimeError, match="failed"), watch.dog.watching("step", "a step"):
        raise RuntimeError("failed")
    assert watch.dog.usual_seconds("step") == 3.0
    assert watch.dog.usual_seconds("save") is None
    assert watch.told_at(0, 10_000) == []


def test_what_stands_in_another_is_told_of_by_itself() -> None:
    watch = Watch(usual={"step": 100.0, "save": 10.0})
    with watch.dog.watching("step", "step 3"):
        assert watch.told_at(0, 50) == []
        with watch.dog.watching("save", "saving step 3"):
            assert watch.told_at(50, 150) == [150]
        assert watch.told_at(999, 1000) == [1000]
    assert [sentence.partition(" has run")[0] for sentence in watch.told] == ["saving step 3", "step 3"]


def test_a_machine_that_slept_is_no_hang() -> None:
    watch = Watch(usual={"step": 600.0})
    with watch.dog.watching("step", "step 1"):
        # Five looks of 1000 s are the most that a gap between two counts.
        assert watch.told_at(0, 10, 900_000, 900_989, 900_990) == [900_990]
    assert watch.told[0].startswith("step 1 has run for 1 h 40 min, and 10 min 00 s are usual: ")


def test_the_thread_looks_by_itself_and_shows_where_the_step_stands(tmp_path: Path) -> None:
    told = threading.Event()
    sentences: list[str] = []

    def tell(sentence: str) -> None:
        sentences.append(sentence)
        told.set()

    def a_step_that_hangs() -> None:
        assert told.wait(10)

    with (tmp_path / "stacks").open("w") as stream:
        dog = Watchdog(tell, unknown_seconds=0.02, look_seconds=0.01, stream=stream)
        with dog, dog.watching("step", "step 4"):
            a_step_that_hangs()
        assert not any(thread.name == "watchdog" for thread in threading.enumerate())
    assert re.match(r"step 4 has run for \d+ ms, and how long it takes is not known: ", sentences[0])
    assert "in a_step_that_hangs\n" in (tmp_path / "stacks").read_text()


def test_stacks_of_every_thread_go_to_a_stream_without_a_file_too() -> None:
    here, over = threading.Event(), threading.Event()

    def a_worker_that_waits() -> None:
        here.set()
        assert over.wait(10)

    worker = threading.Thread(target=a_worker_that_waits, name="worker 3")
    worker.start()
    assert here.wait(10)
    stream = io.StringIO()
    print_stacks(stream)
    over.set()
    worker.join()
    written = stream.getvalue()
    assert "Thread worker 3 (most recent call first):\n" in written
    assert "in a_worker_that_waits\n" in written
    assert "in test_stacks_of_every_thread_go_to_a_stream_without_a_file_too\n" in written


def test_stacks_go_to_standard_error_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    print_stacks()
    assert "in test_stacks_go_to_standard_error_where_there_is_one\n" in stream.getvalue()
    monkeypatch.setattr(sys, "stderr", None)
    print_stacks()
