"""G1: the simulated step does to memory exactly what the real step does, for every policy and every model shape."""

from __future__ import annotations

import difflib
import itertools

import pytest
import torch
from toys import CASES, Case, batch

from memtrain.data.rows import Batch
from memtrain.device import Device
from memtrain.features import chunked_loss
from memtrain.job import Job
from memtrain.plan import POLICIES, ChunkedLogits, Foreach, Plan, Recompute
from memtrain.run import prepare
from memtrain.trace.event import Kind, Trace
from memtrain.trace.record import Recorder
from memtrain.trace.simulate import dataless_model, record, simulate, vocabulary_of

DEVICE = Device(name="cpu", kind="cpu", threads=2, flops_per_second=1e11, bytes_per_second=2e10, operator_seconds=1e-5)

EVALUATION_ROWS = 3
STATE = torch.get_rng_state()

# Each policy with settings other than the default where it has any; a new policy is tested from the day it is added.
SETTINGS = {Recompute: [Recompute(1), Recompute(2)], ChunkedLogits: [ChunkedLogits(16)]}


def plans() -> dict[Plan, Job]:
    """Every policy of every union against the plainest plan, with and without accumulation, and all savers together."""
    found: dict[Plan, Job] = {}
    for field, policies in POLICIES.items():
        for policy in itertools.chain.from_iterable(SETTINGS.get(policy, [policy()]) for policy in policies):
            for size in (2, 4):
                plan = Plan(micro_batch_size=size, **{field: policy})
                clips = None if field == "update" else 1.0
                if field != "update" or size == 4:
                    found[plan] = Job(model="toy", global_batch_size=4, steps=2, max_grad_norm=clips)
    savers = Plan(micro_batch_size=2, activations=Recompute(1), loss=ChunkedLogits(16), optimizer_kernel=Foreach())
    found[savers] = Job(model="toy", global_batch_size=8, steps=2)
    return found


def real_trace(case: Case, job: Job, plan: Plan) -> Trace:
    torch.manual_seed(0)
    model = case.build().load()
    run = prepare(job, plan, model)
    rows = batch(case, job.global_batch_size)

    def new_batch(count: int) -> Batch:
        # Filled, not stacked, so that the operator is the simulation's.
        return {name: torch.empty((count, *t.shape[1:]), dtype=t.dtype).copy_(t[:count]) for name, t in rows.items()}

    with Recorder(model, vocabulary_of(model)) as recorder:
        return record(run, recorder, new_batch, job, plan, EVALUATION_ROWS)


def events(trace: Trace) -> list[tuple[int, str]]:
    """What is compared: bytes and operator in order. Frees without an allocation between them have no order of their own
    (C++ frees the members of a hash map), and scratch inside a kernel is seen by no recorder."""
    # x[i] = 3 makes its scalar below dispatch on a processor and above it elsewhere.
    scalars = {event.storage for event in trace.events if event.operator == "scalar_tensor" and event.bytes <= 8}
    ordered: list[tuple[int, str]] = []
    frees: list[tuple[int, str]] = []
    # Recomputation saves the generator's state, made below dispatch; the simulation counts it all the same.
    scalars |= {event.storage for event in trace.events if event.operator == "given" and event.bytes == STATE.nbytes}
    for event in trace.events:
        if event.kind is Kind.WORKSPACE or event.storage in scalars:
            continue
        if event.bytes < 0:
            frees.append((event.bytes, event.operator))
        else:
            ordered += [*sorted(frees), (event.bytes, event.operator)]
            frees = []
    return ordered + sorted(frees)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("plan", "job"), [pytest.param(plan, job, id=str(plan)) for plan, job in plans().items()])
def test_the_simulated_step_allocates_what_the_real_step_allocates(name: str, plan: Plan, job: Job) -> None:
    case = CASES[name]
    dataless = dataless_model(case.build())
    if isinstance(plan.loss, ChunkedLogits) and chunked_loss.refusal(dataless) is not None:
        pytest.skip(f"the loss of {name} is refused for chunking")
    shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in case.row(0).items()}
    predicted = simulate(job, plan, dataless, shapes, DEVICE, evaluation_rows=EVALUATION_ROWS)
    real, simulated = events(real_trace(case, job, plan)), events(predicted)
    assert real == simulated, "\n".join(itertools.islice(difflib.unified_diff(*map(lines, (real, simulated)), lineterm=""), 40))
    # Only a mask's values can matter to what these models do, and an unknown mask is taken to hide something.
    assert bool(predicted.assumed) == ("attention_mask" in shapes)


def lines(listed: list[tuple[int, str]]) -> list[str]:
    return [f"{size:>10} {operator}" for size, operator in listed]
