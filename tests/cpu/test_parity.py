"""G1: the simulated step does to memory exactly what the real step does, for every policy and every model shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from types import UnionType
from typing import Any, get_args, get_type_hints

import parity
import pytest
from parity import differences, events
from toys import CASES, Case, batch

import memtrain.job
import memtrain.method
import memtrain.plan
import memtrain.precision
from memtrain.device import Cpu
from memtrain.features import chunked_loss
from memtrain.job import Approximation, Job
from memtrain.memory.timeline import MemoryTimeline
from memtrain.method import Int8, Lora, Nf4
from memtrain.plan import (
    POLICIES,
    ChunkedLogits,
    DataParallel,
    DuringBackward,
    Eager,
    EightBit,
    FlashAttention,
    Foreach,
    OnHost,
    Paged,
    PagedEightBit,
    Plan,
    Recompute,
    RecomputeAttention,
    RecomputeFirst,
    RecomputeMlp,
    Sdpa,
    Single,
)
from memtrain.precision import Bf16, Rounding
from memtrain.trace.event import DEVICE, HOST, Kind, Phase, Trace
from memtrain.trace.processes import processes_of
from memtrain.trace.simulate import RowShapes, dataless_model, simulate

PROCESSOR = Cpu(name="cpu", threads=2, flops_per_second=1e11, bytes_per_second=2e10, operator_seconds=1e-5)

EVALUATION_ROWS = 3

# Each policy with settings other than the default where it has any; a new policy is tested from the day it is added.
SETTINGS = {
    Recompute: [Recompute(1), Recompute(2)],
    RecomputeFirst: [RecomputeFirst(1), RecomputeFirst(2)],
    ChunkedLogits: [ChunkedLogits(16)],
}
# Models without such a part or choice, or with one that goes by another name; tests/cpu/test_recompute.py and
# test_attention.py hold that they are refused.
UNSUITED = {
    "bert_masked_lm": (RecomputeMlp,),
    "plain_module": (RecomputeAttention, RecomputeMlp, Eager, Sdpa),
}
# What cannot run in one process on a processor, with the reason and the test that holds it instead.
ELSEWHERE = {
    Paged: "bitsandbytes pages on a card only: tests/cpu/test_managed.py",
    PagedEightBit: "bitsandbytes pages on a card only: tests/cpu/test_managed.py",
    FlashAttention: "flash-attn runs on a card only: tests/cpu/test_attention.py",
    DataParallel: "takes several processes: tests/cpu/test_data_parallel.py",
}


def settings(policy: type) -> list[Any]:
    """The policy as it is tested, once or with several settings."""
    return SETTINGS.get(policy, [policy()])


def plans() -> dict[Plan, Job]:
    """Every policy of every union against the plainest plan, with and without accumulation, and some together."""
    allow = frozenset(Approximation)
    found: dict[Plan, Job] = {}
    for field, policies in POLICIES.items():
        for policy in itertools.chain.from_iterable(map(settings, policies)):
            for size in (2, 4):
                plan = Plan(micro_batch_size=size // getattr(policy, "ranks", 1), **{field: policy})
                clips = None if field == "update" else 1.0
                if field != "update" or size == 4:
                    found[plan] = Job(model="toy", global_batch_size=4, steps=2, max_grad_norm=clips, allow=allow)
    savers = Plan(micro_batch_size=2, activations=Recompute(1), loss=ChunkedLogits(16), optimizer_kernel=Foreach())
    found[savers] = Job(model="toy", global_batch_size=8, steps=2)
    for state in (OnHost(), EightBit()):
        during = Plan(micro_batch_size=4, activations=Recompute(2), update=DuringBackward(), optimizer_state=state)
        found[during] = Job(model="toy", global_batch_size=4, steps=2, max_grad_norm=None, allow=allow)
    return found


def held_elsewhere(plan: Plan) -> str | None:
    """Why a plan is not run here, None where it is."""
    return next((ELSEWHERE[policy] for field in POLICIES if (policy := type(getattr(plan, field))) in ELSEWHERE), None)


def cases() -> Iterator[Any]:
    """A plan and its job, skipped where no processor runs it."""
    for plan, job in plans().items():
        reason = held_elsewhere(replace(plan, sharding=Single()))
        yield pytest.param(plan, job, id=str(plan), marks=[pytest.mark.skip(reason)] if reason else [])


def shapes_of(case: Case) -> RowShapes:
    """Shape and type of each tensor of a row."""
    return parity.shapes_of(batch(case, 1))


def real_trace(case: Case, job: Job, plan: Plan) -> Trace:
    rows = batch(case, job.global_batch_size)
    return parity.real_trace(job, plan, case.build(), rows, evaluation_rows=EVALUATION_ROWS)


def both(case: Case, job: Job, plan: Plan) -> tuple[Trace, Trace]:
    """The real trace and the simulated one, which does the same from the first step on."""
    predicted = simulate(job, plan, case.build(), shapes_of(case), PROCESSOR, evaluation_rows=EVALUATION_ROWS)
    # Other processes are not there in either; tests/cpu/test_data_parallel.py holds this against two that are.
    with processes_of(plan.ranks):
        measured = real_trace(case, job, plan)
    real, simulated = events(measured), events(predicted)
    assert real == simulated, "\n".join(differences(real, simulated)[:40])
    assert held_as_weights(measured) == held_as_weights(predicted)
    return measured, predicted


def held_as_weights(trace: Trace) -> int:
    return sum(event.bytes for event in trace.events if event.kind is Kind.WEIGHT and event.bytes > 0)


def load_peak(trace: Trace) -> int:
    """The peak of loading, without scratch inside kernels, which is not seen where they run."""
    seen = replace(trace, events=tuple(event for event in trace.events if event.kind is not Kind.WORKSPACE))
    return MemoryTimeline(seen).peak_by_phase()[Phase.LOAD]


def assert_alike(case: Case, job: Job, plan: Plan) -> Trace:
    """The simulated trace, which does what the real one does, loading included."""
    measured, predicted = both(case, job, plan)
    # Building draws random numbers only with data; what it holds at once is the same.
    assert load_peak(measured) == load_peak(predicted)
    return predicted


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("plan", "job"), list(cases()))
def test_the_simulated_step_allocates_what_the_real_step_allocates(name: str, plan: Plan, job: Job) -> None:
    case = CASES[name]
    if isinstance(plan.loss, ChunkedLogits) and chunked_loss.refusal(dataless_model(case.build())) is not None:
        pytest.skip(f"the loss of {name} is refused for chunking")
    unsuited = UNSUITED.get(name, ())
    if isinstance(plan.activations, unsuited) or isinstance(plan.attention, unsuited):
        pytest.skip(f"{name} has no such part or choice")
    predicted = assert_alike(case, job, plan)
    # Only a mask's values can matter to what these models do, and an unknown mask is taken to hide something.
    assert bool(predicted.assumed) == ("attention_mask" in case.row(0))
    places = {event.place for event in predicted.events}
    assert places == ({DEVICE, HOST} if isinstance(plan.optimizer_state, OnHost) else {DEVICE})


# The facts of a job that are classes of a union; a new class is tested from the day it is added, and so is a new union.
FACTS = {
    name: get_args(kind)
    for name, kind in get_type_hints(Job).items()
    if get_args(kind) and all(is_dataclass(member) for member in get_args(kind))
}
FACT_SETTINGS: dict[type, list[Any]] = {
    Bf16: [Bf16(rounding) for rounding in Rounding],
    Lora: [Lora(rank=4), Lora(rank=4, use_rslora=True, use_dora=True)],
    Nf4: [Nf4(), Nf4(double_quantization=False)],
    Int8: [Int8(), Int8(threshold=0.0)],
}


def facts() -> Iterator[Any]:
    """A job for each class of each union of a job."""
    for field, classes in FACTS.items():
        for fact in itertools.chain.from_iterable(FACT_SETTINGS.get(cls, [cls()]) for cls in classes):
            job = Job(model="toy", global_batch_size=4, steps=2)
            # What is held in few bits cannot be trained.
            method = {"method": Lora(rank=4)} if field == "quantization" else {}
            yield pytest.param(replace(job, **method, **{field: fact}), id=f"{field}={fact}")


@pytest.mark.parametrize("job", list(facts()))
def test_a_fact_of_the_job_is_simulated_as_it_is(job: Job) -> None:
    measured, predicted = both(CASES["llama"], job, Plan(micro_batch_size=2))
    # Adapters are cast one after another where they have data (test_adapter_parity.py).
    assert load_peak(measured) <= load_peak(predicted)


def test_every_union_of_classes_is_a_field_of_the_plan_or_of_the_job() -> None:
    unions = {
        frozenset(get_args(value))
        for module in (memtrain.plan, memtrain.job, memtrain.precision, memtrain.method)
        for value in vars(module).values()
        if isinstance(value, UnionType) and all(is_dataclass(member) for member in get_args(value))
    }
    assert unions == {frozenset(classes) for classes in (*POLICIES.values(), *FACTS.values())}


@pytest.mark.parametrize("name", ["llama", "gpt2_with_dropout"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(micro_batch_size=2),
        Plan(micro_batch_size=2, activations=Recompute(1), loss=ChunkedLogits(16), optimizer_state=OnHost()),
        Plan(micro_batch_size=2, optimizer_state=EightBit()),
    ],
    ids=str,
)
def test_in_16_bits_the_simulated_step_allocates_what_the_real_step_allocates(name: str, plan: Plan) -> None:
    job = Job(model="toy", global_batch_size=4, steps=2, precision=Bf16(), allow=frozenset(Approximation))
    predicted = assert_alike(CASES[name], job, plan)
    weights = sum(event.bytes for event in predicted.events if event.kind is Kind.WEIGHT and event.bytes > 0)
    parameters = sum(parameter.numel() for parameter in dataless_model(CASES[name].build()).parameters())
    # Buffers keep their own types.
    assert 2 * parameters <= weights < 2.5 * parameters
