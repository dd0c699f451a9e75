"""Which plans go with which precision, device and number of processes; each refusal names the remedy."""

from __future__ import annotations

import dataclasses
import re

import pytest
from cards import CARD, CPU

from memtrain.check import PlanRefused, check
from memtrain.device import Device
from memtrain.job import Approximation, Job, NotFinite
from memtrain.method import Full, Lora
from memtrain.plan import (
    ChunkedLogits,
    DataParallel,
    DuringBackward,
    EightBit,
    FlashAttention,
    Foreach,
    Fused,
    OnDevice,
    OnHost,
    OptimizerKernel,
    OptimizerState,
    Paged,
    Plan,
)
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Bf16Master, Fp32, Precision, Rounding

OLD_CARD = dataclasses.replace(CARD, name="t4", compute_capability=(7, 5))


def test_bf16_needs_a_card_that_has_it() -> None:
    job = Job(model="tiny", global_batch_size=1, steps=1, precision=Bf16())
    sentence = (
        "precision bf16 needs a card with bfloat16 (compute capability 8.0 or newer), and t4 has none: "
        "set precision to autocast_fp16 or fp32, or take another card."
    )
    with pytest.raises(PlanRefused, match=f"^{re.escape(sentence)}$"):
        check(Plan(micro_batch_size=1), job, OLD_CARD)
    check(Plan(micro_batch_size=1), job, dataclasses.replace(OLD_CARD, compute_capability=(8, 0)))
    check(Plan(micro_batch_size=1), dataclasses.replace(job, precision=Fp32()), OLD_CARD)


def refusal_of(plan: Plan, job: Job, device: Device | None = None) -> str:
    with pytest.raises(PlanRefused) as refused:
        check(plan, job, device)
    return str(refused.value)


@pytest.mark.parametrize(
    ("plan", "precision", "sentence"),
    [
        (
            Plan(micro_batch_size=4, update=DuringBackward()),
            AutocastFp16(),
            "an update during backward changes weights before the whole gradient is known to be finite, which the loss scale of "
            "precision autocast_fp16 needs: set precision to autocast_bf16 or update after backward.",
        ),
        (
            Plan(micro_batch_size=4, optimizer_state=OnHost()),
            AutocastFp16(),
            "the loss scale of precision autocast_fp16 looks for overflows in gradients on the device, and with optimizer state on "
            "the host they are there: set precision to autocast_bf16, or optimizer_state to on_device.",
        ),
        (
            Plan(micro_batch_size=4, optimizer_state=EightBit()),
            Bf16Master(),
            "optimizer state in 8 bits is updated by bitsandbytes in the type of the weights, and precision bf16_master updates in "
            "fp32: set optimizer_state to on_device or on_host.",
        ),
        (
            Plan(micro_batch_size=4, optimizer_kernel=Foreach()),
            Bf16(rounding=Rounding.STOCHASTIC),
            "precision bf16 updates in fp32 weight by weight, and a foreach update takes all weights at once: "
            "set optimizer_kernel to fused.",
        ),
    ],
)
def test_what_a_precision_cannot_go_with_is_refused_with_the_remedy(plan: Plan, precision: Precision, sentence: str) -> None:
    allow = frozenset(Approximation)
    job = Job(model="tiny", global_batch_size=4, steps=1, precision=precision, max_grad_norm=None, allow=allow)
    assert refusal_of(plan, job) == sentence
    check(dataclasses.replace(plan), dataclasses.replace(job, precision=AutocastBf16()))


def test_an_update_during_backward_comes_too_early_to_be_left_out() -> None:
    plan = Plan(micro_batch_size=4, update=DuringBackward())
    job = Job(model="tiny", global_batch_size=4, steps=1, max_grad_norm=None, on_not_finite=NotFinite.SKIP)
    assert refusal_of(plan, job) == (
        "an update during backward changes weights before the whole gradient is known to be finite, so that on_not_finite skip "
        "comes too late: set on_not_finite to stop or update after backward."
    )
    check(Plan(micro_batch_size=4), job)
    check(plan, dataclasses.replace(job, on_not_finite=NotFinite.STOP))


@pytest.mark.parametrize(("state", "kernel"), [(Paged(), Fused()), (EightBit(), Fused()), (OnDevice(), Foreach())], ids=str)
def test_adapters_in_fp32_are_updated_as_they_are_whatever_the_frozen_weights_are_in(
    state: OptimizerState, kernel: OptimizerKernel
) -> None:
    plan = Plan(micro_batch_size=4, optimizer_state=state, optimizer_kernel=kernel)
    job = Job(model="tiny", global_batch_size=4, steps=1, method=Lora(), precision=Bf16Master(), allow=frozenset(Approximation))
    check(plan, job)
    for method in (Full(), Lora(dtype="bfloat16")):
        assert refusal_of(plan, dataclasses.replace(job, method=method))


def test_tf32_is_for_the_matrix_units_of_newer_cards() -> None:
    job = Job(model="tiny", global_batch_size=1, steps=1, precision=Fp32(tf32=True))
    plan = Plan(micro_batch_size=1)
    assert refusal_of(plan, job, CPU) == (
        "precision fp32 with tf32 is for the matrix units of a card, and cpu is a processor: set tf32 to false."
    )
    assert refusal_of(plan, job, OLD_CARD) == (
        "tf32 needs a card of compute capability 8.0 or newer, and t4 is older: set tf32 to false."
    )
    check(plan, job, dataclasses.replace(OLD_CARD, compute_capability=(8, 0)))


def test_the_ranks_share_the_rows_of_a_step_equally() -> None:
    job = Job(model="tiny", global_batch_size=12, steps=1, max_grad_norm=None)
    plan = Plan(micro_batch_size=3, sharding=DataParallel(2))
    assert (plan.ranks, plan.accumulation(12)) == (2, 2)
    check(plan, job)
    assert refusal_of(dataclasses.replace(plan, micro_batch_size=4), job) == (
        "micro_batch_size 4 does not divide the 6 rows that each of 2 processes has: choose one of 6, 3, 2, 1."
    )
    assert refusal_of(dataclasses.replace(plan, sharding=DataParallel(5)), job) == (
        "global_batch_size 12 cannot be shared equally by 5 processes: choose a multiple of 5, or another number of processes."
    )
    stochastic = dataclasses.replace(job, precision=Bf16(rounding=Rounding.STOCHASTIC))
    assert refusal_of(plan, stochastic) == (
        "precision bf16 with stochastic rounding draws other numbers in each of 2 processes, so that their weights would part: "
        "set rounding to compensated, or train in one process."
    )
    check(plan, dataclasses.replace(job, precision=Bf16(rounding=Rounding.COMPENSATED)))
    during = dataclasses.replace(plan, micro_batch_size=6, update=DuringBackward())
    assert refusal_of(during, job) == (
        "an update during backward would come before the gradients of 2 processes are averaged: "
        "update after backward, or train in one process."
    )
    assert refusal_of(dataclasses.replace(plan, optimizer_state=OnHost()), job) == (
        "optimizer state on the host takes each gradient before those of 2 processes are averaged: "
        "set optimizer_state to on_device, or train in one process."
    )


def test_the_flash_attention_package_is_for_newer_cards_in_16_bits() -> None:
    job = Job(model="tiny", global_batch_size=1, steps=1, precision=AutocastBf16())
    plan = Plan(micro_batch_size=1, attention=FlashAttention())
    assert refusal_of(plan, job, CPU) == (
        "attention flash_attention needs a card, and cpu is a processor: set attention to sdpa."
    )
    in_fp16 = dataclasses.replace(job, precision=AutocastFp16())
    assert refusal_of(plan, in_fp16, OLD_CARD) == (
        "attention flash_attention needs a card of compute capability 8.0 or newer, and t4 is older: set attention to sdpa."
    )
    newer = dataclasses.replace(OLD_CARD, compute_capability=(8, 0))
    assert refusal_of(plan, dataclasses.replace(job, precision=Fp32()), newer) == (
        "attention flash_attention computes in 16 bits, and precision fp32 in 32: "
        "set precision to autocast_bf16, or attention to sdpa."
    )
    check(plan, job, newer)


def test_a_loss_of_the_users_needs_the_whole_logits() -> None:
    job = Job(model="tiny", global_batch_size=1, steps=1, loss=lambda output, rows: output)
    sentence = "the loss is the job's own, and the chunked loss is that of the model: keep the whole logits."
    assert refusal_of(Plan(micro_batch_size=1, loss=ChunkedLogits()), job) == sentence
    check(Plan(micro_batch_size=1, loss=ChunkedLogits()), dataclasses.replace(job, loss=None))
    check(Plan(micro_batch_size=1), job)
