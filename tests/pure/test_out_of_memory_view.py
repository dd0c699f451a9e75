"""What a person reads when memory runs out has what was predicted, what was held and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cards import CARD, CPU

from memtrain.device import Device
from memtrain.job import Budget, Job, Limit
from memtrain.memory.footprint import Footprint
from memtrain.memory.timeline import Owner
from memtrain.plan import ChunkedLogits, OnHost, Plan, Recompute
from memtrain.planner.choice import Choice, Side
from memtrain.report.out_of_memory import nothing_left, recovery_lines, requested_bytes
from memtrain.trace.event import Kind, Phase, Trace

MIB = 2**20

TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. "
    "Error code 12 (Cannot allocate memory)"
)
CUDA = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 12.00 MiB is free."
PLAN = "micro-batch 4, recompute every block, logits in chunks of 512 tokens, fused update after backward"


MODULE = "model.layers.*.mlp.gate_proj"
CHOICE = Choice(
    job=Job(model="tiny", global_batch_size=32, steps=4),
    budget=Budget(limits=(Limit("asked for", 152 * MIB),)),
    device=CPU,
    plan=Plan(micro_batch_size=4, activations=Recompute(), loss=ChunkedLogits(512)),
    footprint=Footprint(
        peak_allocated_bytes=100 * MIB,
        peak_reserved_bytes=100 * MIB,
        total_device_bytes=100 * MIB,
        by_kind={Kind.WEIGHT: 40 * MIB, Kind.SAVED_ACTIVATION: 60 * MIB},
        by_phase={Phase.LOAD: 90 * MIB, Phase.FORWARD: 95 * MIB, Phase.BACKWARD: 100 * MIB},
        peak_phase=Phase.BACKWARD,
        peak_module=MODULE,
        peak_operator="aten.mm",
        owners=(Owner(40 * MIB, Kind.SAVED_ACTIVATION, Phase.FORWARD, MODULE, "aten.silu", 24),),
    ),
    trace=Trace(()),
    step_seconds=0.83,
    rejected=(),
    planning_seconds=0.0,
)
"""A peak of 100 MiB under a budget of 152 MiB."""


ON_A_CARD = replace(
    CHOICE,
    device=CARD,
    footprint=replace(CHOICE.footprint, peak_reserved_bytes=105 * MIB, total_device_bytes=115 * MIB),
)
"""The same on a card that takes 10 MiB for its context and 5 MiB for free blocks."""
HALVED = replace(
    CHOICE,
    plan=replace(CHOICE.plan, micro_batch_size=2),
    footprint=replace(CHOICE.footprint, peak_allocated_bytes=60 * MIB, total_device_bytes=60 * MIB),
    step_seconds=0.9,
)


def measured(allocated_mib: int, total_mib: int, phases: dict[str, int]) -> Side:
    """What counters tell: peaks in MiB, of which the context takes 10, and nothing about kinds."""
    return Side(
        peak_allocated_bytes=allocated_mib * MIB,
        peak_reserved_bytes=(total_mib - 10) * MIB,
        total_device_bytes=total_mib * MIB,
        by_kind={},
        by_phase={phase: size * MIB for phase, size in phases.items()},
        step_seconds=0.0,
    )


# ---------------------------------------------------------------------------------------------- going on


def test_on_a_processor_a_run_says_what_ran_out_what_was_predicted_and_how_it_goes_on() -> None:
    lines = recovery_lines(CHOICE, HALVED, said=TORCH, phase="backward", step=3, measured=measured(140, 140, {}))
    assert lines == [
        "Memory ran out in backward of step 3 when 4.00 KiB were asked for: 100 MiB of the budget of 152 MiB were predicted, and "
        "140 MiB were held at the most.",
        "Going on with micro-batch 2 instead of 4: 60.0 MiB predicted, 900 ms a step instead of 830 ms; the 32 rows of each step "
        "stay.",
    ]


def test_beside_a_card_what_is_allocated_is_told_from_what_is_taken() -> None:
    lines = recovery_lines(ON_A_CARD, HALVED, said=CUDA, phase="forward", step=1, measured=measured(130, 150, {}))
    assert lines[0] == (
        "Memory of the card ran out in forward of step 1 when 20.0 MiB were asked for: 115 MiB of the budget of 152 MiB were "
        "predicted (100 MiB allocated), and 150 MiB were held at the most (130 MiB allocated)."
    )


def test_outside_a_step_and_unmeasured_it_says_so() -> None:
    first, _ = recovery_lines(CHOICE, HALVED, said="MemoryError", phase="evaluate")
    assert first == (
        "Memory ran out in evaluate: 100 MiB of the budget of 152 MiB were predicted, and what was held is not known."
    )


@pytest.mark.parametrize(
    ("said", "memory"),
    [
        (CUDA, "Memory of the card"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "Memory of the card"),
        (TORCH, "Memory of the host"),
        ("MemoryError", "Memory of the host"),
    ],
)
def test_beside_a_card_the_allocator_tells_which_memory_ran_out(said: str, memory: str) -> None:
    assert recovery_lines(ON_A_CARD, HALVED, said=said, phase="update")[0].startswith(f"{memory} ran out in update")


def test_every_field_that_changes_is_said_with_what_it_was() -> None:
    after = replace(CHOICE, plan=replace(CHOICE.plan, micro_batch_size=1, activations=Recompute(2), optimizer_state=OnHost()))
    assert recovery_lines(CHOICE, after, said=CUDA, phase="forward")[1].startswith(
        "Going on with micro-batch 1 instead of 4, activations recompute one block in 2 instead of recompute every block, "
        "optimizer state on the host instead of on the device: "
    )


@pytest.mark.parametrize(
    ("said", "size"),
    [
        (CUDA, 20 * MIB),
        (TORCH, 4096),
        ("Unable to allocate 1.00 PiB for an array with shape (1125899906842624,) and data type uint8", 2**50),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        ("CUDA error: out of memory", None),
        ("Tried to allocate 0 bytes", None),
        ("MemoryError", None),
    ],
)
def test_what_was_asked_for_is_read_from_what_each_allocator_says(said: str, size: int | None) -> None:
    assert requested_bytes(said) == size


# ---------------------------------------------------------------------------------------------- nothing is left


def words(text: str) -> str:
    return " ".join(text.split())


WAYS = (("rows of 8 tokens", 95 * MIB, False), ("precision bf16", 70 * MIB, True), ("method lora", 30 * MIB, True))


def test_the_first_line_is_a_sentence_with_the_value_the_rule_and_the_first_change_that_is_enough() -> None:
    text = nothing_left(CHOICE, said=TORCH, phase="backward", step=3, ways_out=WAYS)
    assert text.splitlines()[0] == (
        f"memory ran out in backward of step 3 when 4.00 KiB were asked for with the smallest plan ({PLAN}), which was predicted to "
        f"take 100 MiB of the budget of 152 MiB: free memory, or change to precision bf16, which is predicted to take 70.0 MiB."
    )


@pytest.mark.parametrize("ways", [(), WAYS[:1]], ids=["no change takes less", "none is enough"])
def test_where_no_change_is_enough_the_sentence_names_none(ways: tuple[tuple[str, int, bool], ...]) -> None:
    first = nothing_left(CHOICE, said=TORCH, phase="load", ways_out=ways).splitlines()[0]
    assert first.startswith("memory ran out in load when ")
    assert first.endswith(": free memory, or take a larger machine or a smaller model.")


def test_changes_stand_in_a_list_and_those_that_are_enough_first() -> None:
    lines = nothing_left(CHOICE, said=TORCH, phase="load", ways_out=WAYS).splitlines()
    assert [words(line) for line in lines[-3:]] == [
        "instead 70.0 MiB precision bf16",
        "30.0 MiB method lora",
        "95.0 MiB rows of 8 tokens, still too much",
    ]
    assert "instead" not in words(nothing_left(CHOICE, said=TORCH, phase="load"))


def test_owners_kinds_and_the_place_of_the_peak_are_there_and_all_that_was_said() -> None:
    report = words(nothing_left(CHOICE, said=TORCH, phase="backward", step=3))
    for part in (
        f"said {TORCH}",
        "peak 100 MiB allocated of 152 MiB (65.8 %), predicted",
        "weight 40.0 MiB 40.0 %",
        "reached in backward, by aten.mm in model.layers.*.mlp.gate_proj",
        "held by 40.0 MiB saved activation forward: 24 × aten.silu in model.layers.*.mlp.gate_proj",
        "measured nothing",
    ):
        assert part in report


@pytest.mark.parametrize("width", [80, 120])
def test_predicted_stands_beside_measured_in_the_phases_that_were_measured(width: int) -> None:
    side = measured(130, 150, {"load": 95, "forward and backward": 130})
    report = words(nothing_left(ON_A_CARD, said=CUDA, phase="forward", measured=side, width=width))
    for row in (
        "measured predicted measured difference peak 100 MiB 130 MiB -30.0 MiB -23.08 %",
        "reserved 105 MiB 140 MiB -35.0 MiB -25.00 %",
        "in total 115 MiB 150 MiB -35.0 MiB -23.33 %",
        "peak in load 90.0 MiB 95.0 MiB -5.00 MiB -5.26 %",
    ):
        assert row in report


@pytest.mark.parametrize("device", [CHOICE.device, CARD])
@pytest.mark.parametrize("width", [80, 120])
def test_below_the_sentence_no_line_is_wider_than_asked(device: Device, width: int) -> None:
    choice = replace(ON_A_CARD, device=device)
    text = nothing_left(
        choice, said=CUDA, phase="forward", measured=measured(130, 150, {"load": 95}), ways_out=WAYS, width=width
    )
    below = text.splitlines()[1:]
    assert all(len(line) <= width for line in below)
    assert all(line == line.rstrip() for line in below)
    assert "\x1b" not in text
