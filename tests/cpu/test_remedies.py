"""What people change in a job when nothing fits: what is named, that each runs without data, and what it would take."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from test_load import CARD
from test_parity import PROCESSOR, shapes_of
from toys import CASES, VOCABULARY

from memtrain.check import check
from memtrain.device import Device
from memtrain.job import Approximation, Budget, Job
from memtrain.memory.footprint import footprint
from memtrain.method import Lora, Nf4, Unquantized
from memtrain.models.build import ModelSource, source
from memtrain.plan import EightBit, Foreach, Fused, OnDevice, OnHost, PagedEightBit, Plan, Recompute
from memtrain.planner.choice import NoPlanFits
from memtrain.planner.predict import Predictor
from memtrain.planner.remedies import cheaper
from memtrain.planner.search import choose
from memtrain.precision import Bf16
from memtrain.trace.event import Kind
from memtrain.trace.simulate import RowShapes, dataless_model_of, simulate

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

HIDDEN, INNER, LENGTH = 64, 128, 16
JOB = Job(model="tiny", global_batch_size=2, steps=2)
PLAN = Plan(micro_batch_size=1, activations=Recompute(), optimizer_state=OnHost())
ROWS: RowShapes = dict.fromkeys(("input_ids", "labels", "attention_mask"), ((LENGTH,), torch.int64))
ALLOW = frozenset(Approximation)
BF16 = "precision bf16"
SHORTER, EIGHT, PAGED, LORA, NF4 = (
    "rows of 8 tokens",
    "8-bit state (allow=[eight_bit_state])",
    "paged 8-bit state (allow=[eight_bit_state])",
    "method lora (adapters of rank 16)",
    "method lora with quantization nf4",
)


def llama(**config: Any) -> ModelSource:
    return source(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **config,
        }
    )


def changes(job: Job = JOB, device: Device = CARD, rows: RowShapes = ROWS, plan: Plan = PLAN) -> dict[str, Any]:
    """By name: job, model, rows and plan."""
    return {name: changed for name, *changed in cheaper(job, llama(), rows, plan, device)}


# ---------------------------------------------------------------------------------------------- what is named


def test_bf16_shorter_rows_8_bit_state_adapters_and_4_bits_are_named_in_this_order() -> None:
    assert list(changes()) == [BF16, SHORTER, EIGHT, PAGED, LORA, NF4]


@pytest.mark.parametrize(
    ("job", "device", "rows", "missing"),
    [
        (dataclasses.replace(JOB, allow=ALLOW), CARD, ROWS, {EIGHT, PAGED}),
        (JOB, PROCESSOR, ROWS, {EIGHT, PAGED}),
        (JOB, CARD, dict.fromkeys(ROWS, ((3,), torch.int64)), {SHORTER}),
        (JOB, CARD, {"x": ((LENGTH,), torch.float32)}, {BF16, SHORTER, EIGHT, PAGED, LORA, NF4}),
        (dataclasses.replace(JOB, precision=Bf16()), CARD, ROWS, {BF16}),
        (dataclasses.replace(JOB, method=Lora(), quantization=Nf4()), CARD, ROWS, {LORA, NF4}),
        (JOB, dataclasses.replace(CARD, compute_capability=(7, 5)), ROWS, {BF16}),
    ],
    ids=[
        "allowed already",
        "on a processor",
        "short rows",
        "no tokens",
        "in 16 bits already",
        "adapters and 4 bits already",
        "a card without bfloat16",
    ],
)
def test_what_a_job_has_already_or_cannot_have_is_not_named(
    job: Job, device: Device, rows: RowShapes, missing: set[str]
) -> None:
    assert set(changes(job, device, rows)) == {BF16, SHORTER, EIGHT, PAGED, LORA, NF4} - missing


def test_of_a_users_module_nothing_is_named_and_of_a_users_language_model_no_other_weights() -> None:
    case = CASES["plain_module"]
    assert list(cheaper(JOB, case.build(), shapes_of(case), PLAN, CARD)) == []
    given = source(llama().build())
    assert [name for name, *_ in cheaper(JOB, given, ROWS, PLAN, CARD)] == [SHORTER, EIGHT, PAGED, LORA]


def test_with_adapters_4_bits_are_named_alone_and_of_experts_in_one_tensor_not() -> None:
    adapters = dataclasses.replace(JOB, method=Lora(rank=4))
    (changed,) = (job for name, job, *_ in cheaper(adapters, llama(), ROWS, PLAN, CARD) if name == "quantization nf4")
    assert changed == dataclasses.replace(adapters, quantization=Nf4())
    experts = llama(model_type="mixtral", num_local_experts=2)
    named = [name for name, *_ in cheaper(JOB, experts, ROWS, PLAN, CARD)]
    assert LORA in named
    assert NF4 not in named


# ---------------------------------------------------------------------------------------------- what each is


def test_half_as_many_tokens_change_nothing_but_the_rows() -> None:
    rows = {**ROWS, "image": ((3, LENGTH, 5), torch.float32), "number": ((), torch.int64)}
    job, _, shorter, plan = changes(rows=rows)[SHORTER]
    assert (job, plan) == (JOB, PLAN)
    half = LENGTH // 2
    assert {name: shape for name, (shape, _) in shorter.items()} == {
        **dict.fromkeys(ROWS, (half,)),
        "image": (3, half, 5),
        "number": (),
    }
    assert {name: dtype for name, (_, dtype) in shorter.items()} == {name: dtype for name, (_, dtype) in rows.items()}


@pytest.mark.parametrize(("name", "state"), [(EIGHT, EightBit()), (PAGED, PagedEightBit())])
def test_8_bit_state_is_allowed_and_planned(name: str, state: Any) -> None:
    plan = dataclasses.replace(PLAN, optimizer_state=OnDevice(), optimizer_kernel=Foreach())
    job, _, rows, changed = changes(plan=plan)[name]
    assert (job, rows) == (dataclasses.replace(JOB, allow=ALLOW), ROWS)
    assert changed == dataclasses.replace(PLAN, optimizer_state=state, optimizer_kernel=Fused())
    check(changed, job, CARD)


@pytest.mark.parametrize(("name", "quantization"), [(LORA, Unquantized()), (NF4, Nf4())])
def test_adapters_change_the_job_and_keep_their_state_on_the_device(name: str, quantization: Any) -> None:
    job, model, rows, plan = changes()[name]
    assert job == dataclasses.replace(JOB, method=Lora(), quantization=quantization)
    assert rows == ROWS
    assert plan == dataclasses.replace(PLAN, optimizer_state=OnDevice())
    check(plan, job, CARD)
    # Two matrices of rank 16 for each linear layer but the head: four projections, and three layers of the other part.
    trained = [one for one in dataless_model_of(job, model).parameters() if one.requires_grad]
    assert sum(one.numel() for one in trained) == 2 * 16 * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))


def test_looking_for_adapters_leaves_the_loggers_as_they_were() -> None:
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    list(changes())
    assert logger.level == level


# ---------------------------------------------------------------------------------------------- what each takes


@pytest.mark.parametrize("name", [SHORTER, EIGHT, PAGED, LORA, NF4])
def test_each_runs_without_data(name: str) -> None:
    job, model, rows, plan = changes()[name]
    found = footprint(simulate(job, plan, model, rows, CARD), CARD)
    plain = footprint(simulate(JOB, PLAN, llama(), ROWS, CARD), CARD)
    if name == SHORTER:
        assert found.peak_allocated_bytes < plain.peak_allocated_bytes
        assert found.host_by_kind[Kind.OPTIMIZER_STATE] == plain.host_by_kind[Kind.OPTIMIZER_STATE]
    else:
        assert found.host_by_kind.get(Kind.OPTIMIZER_STATE, 0) == 0
        assert found.host_bytes < plain.host_bytes


def test_a_predictor_predicts_what_each_would_take() -> None:
    found = {
        name: other.footprint(other.trace(plan)) for name, other, plan in Predictor(JOB, llama(), ROWS, CARD).cheaper_jobs(PLAN)
    }
    assert list(found) == [BF16, SHORTER, EIGHT, PAGED, LORA, NF4]
    job, model, rows, plan = changes()[SHORTER]
    assert found[SHORTER] == footprint(simulate(job, plan, model, rows, CARD), CARD)


def test_what_would_take_no_less_is_not_in_the_message() -> None:
    # The allocator's segments are larger than all that a model this small could save.
    with pytest.raises(
        NoPlanFits,
        match=r"more; raise the budget, leave plan\.optimizer_state to the planner, shorten the rows or take a smaller model\.$",
    ):
        choose(Predictor(JOB, llama(), ROWS, CARD), Budget.of("8 MiB"), {"optimizer_state": OnDevice(), "micro_batch_size": 1})
