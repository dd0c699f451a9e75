"""Memory that runs out at some allocations of tiny runs; ``benchmarks/oom_injection.py`` does it at every one."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from oom_injection import Outcome, injected, problems, targets
from oom_watch import Watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the runs are forked")
STEP = ["forward", "backward", "evaluation", "saving"]


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("two micro-batches", [*STEP, "update"]),
        # Its update allocates nothing of its own.
        ("during backward", STEP),
    ],
)
def test_a_run_goes_on_from_wherever_memory_runs_out(name: str, phases: list[str]) -> None:
    found = injected(name, 15)["found"]
    assert not [one for one in found if one["wrong"]]
    recovered = Counter(one["phase"] for one in found if not one["ended"])
    assert all(recovered[phase] for phase in phases)


def test_each_phase_gives_the_operators_that_fail_in_turn() -> None:
    step = dict.fromkeys(range(1, 7), ("forward", 3, 64))
    allocations = {**step, 7: ("update", 1, 4), 8: ("saving", 2, 4), 9: ("forward", 4, 64)}
    assert targets(allocations, 2, None) == {
        1: "forward",
        3: "forward",
        5: "forward",
        7: "update that makes state",
        8: "saving",
    }
    assert targets(allocations, 1, "saving") == {8: "saving"}


def outcome(**changed: Any) -> Outcome:
    log = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    whole = {"log": log, "rows": {1: [0, 1], 2: [2, 3]}, "weights": {"w": torch.zeros(2)}, "held": 3, "held_bytes": 4096}
    return Outcome(**{**whole, **changed})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"log": [{"step": 1, "loss": 2.0}]}, r"what is logged is \[\(1, 'loss'\)\] instead of"),
        ({"log": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.001}]}, "a loss differs by 1.0e-03 of it"),
        ({"rows": {1: [0, 1], 2: [3, 2]}}, r"the rows are \{1: \[0, 1\], 2: \[3, 2\]\} instead of"),
        ({"weights": {"w": torch.tensor([0.0, 1e-3])}}, "w differs by 1.0e-03"),
        ({"held": 4}, "4 storages are alive after the run instead of 3"),
        ({"held_bytes": 16384}, "16384 bytes are alive in the last step instead of 4096"),
        ({"ended": "ValueError: memory ran out", "report": True}, "it ended, and a smaller plan was there: ValueError"),
        ({"ended": "OutOfMemoryError: injected"}, "it ended with OutOfMemoryError: injected"),
    ],
)
def test_what_a_failure_leaves_wrong_is_found(changed: dict[str, Any], told: str) -> None:
    (wrong,) = problems(outcome(), outcome(**changed), recovers=True)
    assert re.search(told, wrong)


def test_what_differs_by_rounding_is_not_wrong() -> None:
    rounded = outcome(log=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.000001}], weights={"w": torch.full((2,), 1e-6)})
    assert problems(outcome(), rounded, recovers=True) == []


def test_an_operator_fails_in_the_place_of_its_number_and_what_lives_is_counted() -> None:
    watch = Watch(lambda number: number == 3, located=True)
    with watch:
        kept = torch.zeros(4)
        kept.view(2, 2)
        with pytest.raises(torch.OutOfMemoryError, match=r"injected in operator 3, aten.add.Tensor"):
            kept + 1
        torch.ones(8)
    assert {number: size for number, (_, _, size) in watch.allocations.items()} == {1: 16, 4: 32}
    assert (watch.failures, watch.held()) == (1, (1, 16))


def test_an_allocation_that_is_too_large_fails() -> None:
    with Watch(too_large=lambda size: size > 16):
        torch.zeros(4)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 32 bytes"):
            torch.zeros(8)


def test_rows_are_told_where_they_are_trained_on() -> None:
    watch = Watch()
    told: list[list[int]] = []
    watch.on_rows = told.append
    table = torch.nn.Embedding(8, 2)
    with watch:
        table(torch.tensor([[3, 0], [5, 0]]))
        with torch.no_grad():
            table(torch.tensor([[1, 0]]))
    assert told == [[3, 5]]
