"""What is refused before several processes train, and what a plan leaves as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cards import CARD, CPU
from torch import nn
from toys import CASES

from memtrain import distributed, machine
from memtrain.check import PlanRefused
from memtrain.data.rows import fingerprint
from memtrain.job import Job
from memtrain.plan import DataParallel, Plan
from memtrain.precision import AutocastFp16, Fp32
from memtrain.run import prepare
from memtrain.trace.simulate import simulate
from memtrain.trainer import Trainer

LLAMA = CASES["llama"]
ROWS = [LLAMA.row(number) for number in range(8)]


def refused(make: Any) -> str:
    with pytest.raises(ValueError, match=r".+") as refusal:
        make()
    return str(refusal.value)


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the second of two processes says, as the first hears it."""
    said: dict[str, object] = {}

    def gather(found: list[Any], mine: Any) -> None:
        found[:] = [mine, {**mine, **said}]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    return said


def test_processes_with_other_rows_are_refused(two_processes: dict[str, object]) -> None:
    facts = {"the job": "one", "data": fingerprint(ROWS)}
    distributed.check_same(facts)
    two_processes["data"] = fingerprint(ROWS[:7])
    assert refused(lambda: distributed.check_same(facts)) == (
        f"data of process 1 is {fingerprint(ROWS[:7])} and that of process 0 is {fingerprint(ROWS)}, and all train one job: "
        f"give every process the same arguments and the same rows in the same order."
    )


def test_rows_are_told_apart_by_their_number_their_values_and_their_order() -> None:
    assert fingerprint(ROWS) == fingerprint([LLAMA.row(number) for number in range(8)])
    assert len({fingerprint(rows) for rows in (ROWS, ROWS[1:], ROWS[::-1], [*ROWS[:7], ROWS[0]])}) == 4


def test_one_process_has_nobody_to_agree_with() -> None:
    distributed.check_same({"data": "mine"})


def test_a_variable_of_torchrun_without_the_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(machine.processes) == "WORLD_SIZE is 2 and RANK is not set: start with torchrun, or unset WORLD_SIZE."


def test_processes_that_are_only_planned_for_share_the_memory_of_a_processor() -> None:
    alone, shared = (machine.budget_for(CPU, 1 << 40, ranks=ranks).limits[1] for ranks in (1, 4))
    assert (shared.source, shared.bytes) == ("installed, a share of 1/4", alone.bytes // 4)


def trainer(**changes: Any) -> Trainer:
    arguments = {"model": LLAMA.build().load(), "data": ROWS, "budget": "64MiB", "global_batch_size": 4, "steps": 2}
    return Trainer(**{**arguments, "progress": False, **changes})


def test_training_alone_for_several_is_refused_before_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(constraints={"sharding": DataParallel(2)})
    monkeypatch.setattr(made._session, "plan", None)
    assert refused(made.train).startswith("the plan is for 2 processes and 1 runs: start it with torchrun --nproc_per_node=2")


def test_fewer_rows_to_evaluate_on_than_processes_are_refused_before_they_are_planned_on() -> None:
    made = trainer(eval_data=ROWS[:1], constraints={"sharding": DataParallel(2)})
    assert refused(lambda: made.choice) == (
        "eval_data has 1 rows for 2 processes, and each evaluates one or more: give more rows, or start fewer processes."
    )


def test_planning_with_tf32_leaves_the_process_as_it_was() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    job = Job(model="toy", global_batch_size=4, steps=2, precision=Fp32(tf32=True))
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in ROWS[0].items()}
    simulate(job, Plan(micro_batch_size=4), LLAMA.build(), shapes, CARD)
    assert before != "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


class Normed(nn.Module):
    """A layer with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).square().mean()


@pytest.mark.parametrize(
    ("changes", "plan", "sentence"),
    [
        (
            {"precision": AutocastFp16()},
            Plan(micro_batch_size=4),
            "norm counts each forward in its running statistics, and a step that overflows in fp16 is taken again: "
            "set precision to autocast_bf16.",
        ),
        (
            {},
            Plan(micro_batch_size=2, sharding=DataParallel(2)),
            "norm normalises over the rows that a process has, which is another thing: train in one process.",
        ),
    ],
)
def test_a_batch_norm_goes_with_neither(changes: dict[str, Any], plan: Plan, sentence: str) -> None:
    job = Job(model="toy", global_batch_size=4, steps=2, **changes)
    with pytest.raises(PlanRefused, match=f"^{re.escape(sentence)}$"):
        prepare(job, plan, Normed())
