"""Which checkpoint is found and which are kept; a run goes on while one is written, and neither a mistake, nor its end, nor a kill loses what was complete."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memtrain import checkpoint_writer
from memtrain.checkpoint import Checkpoint, latest, places, read, remove_older, write
from memtrain.checkpoint_writer import Writer

ROOM = 2**20


def number(value: int) -> dict[str, dict[str, Tensor]]:
    return {"model": {"w": torch.full((3,), float(value))}}


def values(found: Checkpoint) -> list[float]:
    return [value for _, tensor in found.tensors("model") for value in tensor.tolist()]


def write_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        write(folder, step, number(step), {})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------- finding and removing


def damage(place: Path) -> None:
    (place / "model-00001.safetensors").write_bytes(b"")


def test_the_latest_whole_one_is_found_and_what_is_wrong_with_newer_ones_is_said(tmp_path: Path) -> None:
    write_steps(tmp_path, 3, 20, 100, 1_000_000_000)
    for step in (100, 1_000_000_000):
        damage(tmp_path / f"step-{step:09d}")
    (tmp_path / "step-2000000000.partial").mkdir()
    (tmp_path / "step-last").mkdir()
    found, wrong = latest(tmp_path)
    assert found is not None
    assert found.step == 20
    assert [sentence.removeprefix(f"{tmp_path}/").partition(" has ")[0] for sentence in wrong] == [
        "step-1000000000 is no whole checkpoint: model-00001.safetensors",
        "step-000000100 is no whole checkpoint: model-00001.safetensors",
    ]
    assert latest(tmp_path / "elsewhere") == (None, ())


def test_the_last_ones_and_the_named_ones_are_kept(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3, 4, 5)
    remove_older(tmp_path, 2, also={2, 9})
    assert [read(place).step for place in places(tmp_path)] == [5, 4, 2]
    assert names(tmp_path) == ["step-000000002", "step-000000004", "step-000000005"]


def test_none_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^keep is 0, and one checkpoint at least has to stay: give 1 or more\.$"):
        remove_older(tmp_path, 0)


def test_one_that_is_not_whole_pushes_none_out(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-000000003")
    remove_older(tmp_path, 1)
    found, _ = latest(tmp_path)
    assert found is not None
    assert found.step == 2


def test_one_that_is_half_removed_is_taken_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, 1, 2)
    # Killed between the rename and the removal.
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    remove_older(tmp_path, 1)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-000000001.partial", "step-000000002"]
    write_steps(tmp_path, 3)
    assert names(tmp_path) == ["step-000000002", "step-000000003"]


# ---------------------------------------------------------------------- writing beside the run


def test_what_is_saved_is_what_was_there_when_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = write

    def slow(*arguments: Any) -> Path:
        assert go_on.wait(10)
        return real(*arguments)

    monkeypatch.setattr(checkpoint_writer, "write", slow)
    writer = Writer(tmp_path, keep=2, copy_bytes=ROOM)
    weight, rows = torch.ones(3), [1]
    assert writer.save(1, {"model": {"w": weight}}, {"rows": rows}) is None
    weight.zero_()
    rows.append(2)
    assert list(tmp_path.iterdir()) == []
    go_on.set()
    assert writer.wait() is None
    found = read(tmp_path / "step-000000001")
    assert (values(found), found.facts) == ([1.0, 1.0, 1.0], {"rows": [1]})


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_last_ones_and_the_best_are_kept(tmp_path: Path, asynchronous: bool) -> None:
    writer = Writer(tmp_path, keep=2, copy_bytes=ROOM * asynchronous)
    for step in (1, 2, 3, 4):
        assert writer.save(step, number(step), {}, also={1}) is None
    assert writer.wait() is None
    assert [read(place).step for place in places(tmp_path)] == [4, 3, 1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_one_just_written_stays_among_later_ones(tmp_path: Path, asynchronous: bool) -> None:
    for step in (8, 9):
        write(tmp_path, step, number(step), {})
    writer = Writer(tmp_path, keep=1, copy_bytes=ROOM * asynchronous)
    writer.save(5, number(5), {})
    writer.wait()
    assert [read(place).step for place in places(tmp_path)] == [9, 5]


def test_without_a_thread_nothing_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(checkpoint_writer, "write", lambda folder, step, groups, facts: written.append(groups))
    groups = number(1)
    Writer(tmp_path, keep=1, copy_bytes=0).save(1, groups, {})
    assert written[0] is groups


def test_a_host_without_room_for_the_copy_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensor: Tensor) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(checkpoint_writer, "to_host", full)
    assert Writer(tmp_path, keep=1, copy_bytes=ROOM).save(1, number(1), {}) is None
    assert read(tmp_path / "step-000000001").step == 1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_went_wrong_is_told_once_and_the_run_goes_on(tmp_path: Path, asynchronous: bool) -> None:
    blocked = tmp_path / "run"
    blocked.write_text("a file")
    writer = Writer(blocked, keep=1, copy_bytes=ROOM * asynchronous)
    told = [writer.save(1, number(1), {}), writer.wait()]
    assert [sentence is None for sentence in told] == [asynchronous, not asynchronous]
    assert f"the checkpoint of step 1 cannot be written to {blocked} (File exists)" in str(told)
    blocked.unlink()
    assert writer.save(2, number(2), {}) is None
    assert writer.wait() is None
    assert read(blocked / "step-000000002").step == 2


def test_a_save_tells_what_went_wrong_before(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=1, copy_bytes=ROOM)
    writer.save(1, {"model": {"w": torch.ones(1, dtype=torch.complex64)}}, {})
    assert str(writer.save(2, number(2), {})).startswith("w is torch.complex64")
    assert writer.wait() is None


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_mistake_in_the_thread_is_raised_where_it_is_waited_for(tmp_path: Path, asynchronous: bool) -> None:
    writer = Writer(tmp_path, keep=0, copy_bytes=ROOM * asynchronous)
    if asynchronous:
        assert writer.save(1, number(1), {}) is None
    with pytest.raises(ValueError, match="keep is 0"):
        writer.wait() if asynchronous else writer.save(1, number(1), {})


# ---------------------------------------------------------------------- processes that end


def in_a_process(what: str, folder: Path) -> str:
    """Run a function below in an interpreter of its own, which has imported torch once and is free to fork."""
    command = [sys.executable, "-W", "error", __file__, what, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_that_ends_waits_for_its_checkpoint(tmp_path: Path) -> None:
    assert in_a_process("end", tmp_path) == "ended\n"
    assert values(read(tmp_path / "step-000000001")) == [1.0, 1.0, 1.0]


def end(folder: Path) -> None:
    real = write

    def slow(*arguments: Any) -> Path:
        time.sleep(0.3)
        return real(*arguments)

    vars(checkpoint_writer)["write"] = slow
    Writer(folder, keep=1, copy_bytes=ROOM).save(1, number(1), {})
    print("ended")


def test_a_kill_at_any_moment_loses_no_checkpoint_that_was_complete(tmp_path: Path) -> None:
    lines = in_a_process("kill", tmp_path).splitlines()
    assert len(lines) == 20
    for line in lines:
        announced, found, value = (int(word) for word in line.split())
        assert announced <= found <= announced + 1
        assert value == found
    assert int(lines[-1].split()[0]) > 20


def kill(folder: Path) -> None:
    """Twenty times: a child writes, announces, and is killed; print what it announced last, and what is found."""
    moments = random.Random(6)
    announced = 0
    for turn in range(20):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            write_until_killed(folder, announced, writing, asynchronous=turn % 2 == 0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            # Two are complete first, so that kills strike the steady state.
            said = pipe.read(16)
            time.sleep(moments.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            said += pipe.read()
        announced = int.from_bytes(said[len(said) // 8 * 8 - 8 : len(said) // 8 * 8], "little")
        found, wrong = latest(folder)
        assert found is not None
        assert wrong == ()
        (value,) = set(values(found))
        print(announced, found.step, int(value))
        announced = found.step


def write_until_killed(folder: Path, step: int, pipe: int, *, asynchronous: bool) -> None:
    writer = Writer(folder, keep=1, copy_bytes=ROOM * asynchronous)
    while True:
        step += 1
        wrong = writer.save(step, number(step), {}) or writer.wait()
        os.write(pipe, (step if wrong is None else 0).to_bytes(8, "little"))


if __name__ == "__main__":
    {"end": end, "kill": kill}[sys.argv[1]](Path(sys.argv[2]))
