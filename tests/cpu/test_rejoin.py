"""Memory that runs out in one of two processes: they meet again and train on. A process that is really gone is told of."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from toys import CASES

from memtrain import distributed, machine
from memtrain.distributed import Setback, together
from memtrain.job import Constant, Job, Sgd
from memtrain.out_of_memory import OutOfMemory
from memtrain.plan import DataParallel, Plan
from memtrain.run import Run, prepare

LLAMA = CASES["llama"]
STEPS = 3
JOB = Job(model="toy", global_batch_size=4, steps=STEPS, optimizer=Sgd(learning_rate=0.1, momentum=0.0), schedule=Constant())
# One micro-batch in each process, so that backward sums while it goes on; and two, of which only the second sums.
PLAN = Plan(micro_batch_size=2, sharding=DataParallel(2))
SMALLER = Plan(micro_batch_size=1, sharding=DataParallel(2))
SAID = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
# In which processes memory runs out, and where, in the second step.
FAILURES: dict[str, tuple[set[int], str]] = {
    "forward": ({1}, "forward"),
    "backward, in the one that has the store": ({0}, "backward"),
    "both": ({0, 1}, "backward"),
    "update": ({1}, "update"),
}
TAKEN_AGAIN = [failure for failure in FAILURES if failure != "update"]


@contextmanager
def running_out(run: Run, where: str) -> Iterator[None]:
    """Let forward or backward run out of memory in the middle of the model."""
    middle = run.model.get_submodule("model.layers.1")

    def fail(*_: object) -> None:
        raise RuntimeError(SAID)

    hooks = []
    if where == "forward":
        hooks.append(middle.register_forward_pre_hook(fail))
    if where == "backward":
        hooks.append(middle.register_full_backward_hook(fail))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def micro_batches(rank: int, plan: Plan) -> list[dict[str, Tensor]]:
    rows = [LLAMA.row(2 * rank + number) for number in range(2)]
    size = plan.micro_batch_size
    return [{name: torch.stack([row[name] for row in rows[at : at + size]]) for name in rows[0]} for at in range(0, 2, size)]


class Course:
    """Steps in one process, the second of which fails where it is told to, once."""

    def __init__(self, rank: int, failure: str | None) -> None:
        torch.manual_seed(0)
        self.rank, self.plan, self.model = rank, PLAN, LLAMA.build().load()
        self.failing, self.where = FAILURES[failure] if failure else (set(), "")
        self.setbacks: list[Setback[tuple[int, bool]]] = []
        self.step, self.changed = 0, False
        self.run = prepare(JOB, self.plan, self.model)

    def taken(self) -> None:
        self.changed = False
        fails = self.step == 1 and self.rank in self.failing and not self.setbacks
        with running_out(self.run, self.where) if fails else nullcontext():
            self.run.forward_backward(micro_batches(self.rank, self.plan))
        self.changed = True
        if fails and self.where == "update":
            raise RuntimeError(SAID)
        self.run.update()

    def facts(self) -> tuple[int, bool]:
        return self.step, self.changed

    def trained(self, next_plan: Plan = PLAN) -> Course:
        """All steps; where the second one failed it is taken again by ``next_plan``."""
        while self.step < STEPS:
            taken = together(self.taken, self.facts)
            if isinstance(taken, Setback):
                self.setbacks.append(taken)
                self.run.release()
                self.plan = next_plan
                self.run = prepare(JOB, self.plan, self.model)
            else:
                self.step += 1
        self.run.release()
        return self

    def result(self) -> tuple[Tensor, list[Setback[tuple[int, bool]]]]:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()]), self.setbacks


def first_setback(course: Course) -> Setback[tuple[int, bool]]:
    """What is said after a failure for which the caller would go back to a checkpoint."""
    for course.step in range(STEPS):
        taken = together(course.taken, course.facts)
        if isinstance(taken, Setback):
            course.run.release()
            return taken
    raise AssertionError("nothing failed")


def in_each_process(rank: int, folder: Path, port: int) -> None:
    """All that is asked of two real processes, in one go: starting them takes most of the time."""
    warnings.simplefilter("error")
    world = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    distributed.start(machine.processes(), cards=False)
    answers: dict[str, Any] = {
        "agreed": distributed.agree([[0, 5], [3, 1]][rank]),
        "gathered": distributed.gathered(f"process {rank}"),
        "undisturbed": Course(rank, None).trained().result(),
        "taken again": {failure: Course(rank, failure).trained().result() for failure in TAKEN_AGAIN},
        "smaller": Course(rank, "forward").trained(SMALLER).result(),
        "update": first_setback(Course(rank, "update")),
    }
    torch.save(answers, folder / f"{rank}.pt")
    distributed.agree([0])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ValueError, match="lost") as lost, distributed.naming_a_lost_process():
        together(lambda: distributed.agree([0]), lambda: None)
    (folder / "lost").write_text(str(lost.value))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [mp.get_context("spawn").Process(target=in_each_process, args=(rank, path, port)) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in started] == [0, -signal.SIGKILL]
    return path


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_processes_agree_on_the_largest(answers: list[dict[str, Any]]) -> None:
    assert [answer["agreed"] for answer in answers] == [[3, 5]] * 2


def test_each_process_hears_what_all_say(answers: list[dict[str, Any]]) -> None:
    assert [answer["gathered"] for answer in answers] == [["process 0", "process 1"]] * 2


@pytest.mark.parametrize("failure", TAKEN_AGAIN)
def test_a_step_that_failed_is_taken_again_and_the_weights_are_those_of_an_undisturbed_run(
    failure: str, answers: list[dict[str, Any]]
) -> None:
    failing, _ = FAILURES[failure]
    told = Setback(tuple(OutOfMemory(SAID) if rank in failing else None for rank in range(2)), ((1, False), (1, False)))
    undisturbed, nothing = answers[0]["undisturbed"]
    assert nothing == []
    for answer in answers:
        found, setbacks = answer["taken again"][failure]
        assert setbacks == [told]
        assert torch.equal(found, undisturbed)


def test_processes_go_on_with_a_smaller_micro_batch(answers: list[dict[str, Any]]) -> None:
    undisturbed, _ = answers[0]["undisturbed"]
    (first, setbacks), (second, _) = (answer["smaller"] for answer in answers)
    assert len(setbacks) == 1
    assert torch.equal(first, second)
    torch.testing.assert_close(first, undisturbed, rtol=1e-5, atol=1e-6)


def test_a_failure_in_the_update_reaches_the_other_process_in_its_next_step(answers: list[dict[str, Any]]) -> None:
    told = Setback((None, OutOfMemory(SAID)), ((2, False), (1, True)))
    assert [answer["update"] for answer in answers] == [told] * 2


def test_a_process_that_was_killed_is_told_of(folder: Path, answers: list[dict[str, Any]]) -> None:
    told = (folder / "lost").read_text()
    assert told.startswith("process 0 has lost another of the 2 processes (")
    assert told.endswith("): look for what that one said, and start all of them again.")


# ---------------------------------------------------------------------- one process


def out_of_memory() -> None:
    raise RuntimeError(SAID)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r".") as refused:
        call()
    return str(refused.value)


def joined(store: HashStore, *, cards: bool) -> distributed._Joined:
    return distributed._Joined(machine.Processes(rank=1, ranks=2, local_rank=1, local_ranks=2), cards, store)


def test_one_process_has_nobody_to_wait_for() -> None:
    assert distributed.agree([2, 7]) == [2, 7]
    assert distributed.gathered("alone") == ["alone"]
    assert together(lambda: 3, lambda: "asked without need") == 3
    assert together(out_of_memory, lambda: "step 2") == Setback((OutOfMemory(SAID),), ("step 2",))


def test_other_errors_are_left_as_they_are() -> None:
    def fail() -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match=r"^something else$"):
        together(fail, lambda: None)


def test_a_process_that_does_not_come_back_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_joined", joined(HashStore(), cards=False))
    told = refusal(lambda: distributed.rejoin(patience=datetime.timedelta(milliseconds=10)))
    assert told.startswith("process 1 has lost another of the 2 processes (")


@pytest.mark.parametrize(("cards", "joint"), [(True, "nccl"), (False, "gloo whose connections are not known")])
def test_processes_that_cannot_meet_again_end(cards: bool, joint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_joined", joined(HashStore(), cards=cards))
    assert refusal(lambda: together(out_of_memory, lambda: None)) == (
        f"process 1 ran out of memory ({SAID}), and processes over {joint} cannot meet again: start all of them again with a "
        f"smaller micro-batch, from the last checkpoint."
    )
