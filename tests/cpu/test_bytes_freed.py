"""G4: each policy frees exactly what it says, in bytes, on a toy."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from toys import VOCABULARY

from memtrain.device import Cpu, Cuda, Device
from memtrain.job import Approximation, Job
from memtrain.memory.footprint import footprint
from memtrain.memory.timeline import MemoryTimeline
from memtrain.models.build import source, weight_dtype
from memtrain.plan import (
    Activations,
    AfterBackward,
    ChunkedLogits,
    DuringBackward,
    EightBit,
    Foreach,
    Keep,
    OnDevice,
    OnHost,
    OptimizerState,
    Paged,
    PagedEightBit,
    Plan,
    Recompute,
    RecomputeAttention,
    RecomputeFirst,
    RecomputeMlp,
    RecomputeSelective,
    Update,
)
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Bf16Master, Fp32, Precision, Rounding, updates_in_fp32
from memtrain.trace.event import DEVICE, HOST, MANAGED, Kind, Phase, Place, Trace
from memtrain.trace.simulate import RowShapes, simulate

PROCESSOR = Cpu(name="cpu", threads=1, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-6)
CARD = Cuda(
    name="card",
    compute_capability=(8, 0),
    multiprocessors=4,
    usable_bytes=2**30,
    context_bytes=2**20,
    flops_per_second={"float32": 1e13},
    bytes_per_second=1e12,
    operator_seconds=1e-5,
    link_bytes_per_second=1e10,
    host_bytes_per_second=1e11,
)
ROWS, WIDTH, BLOCKS = 4, 8, 6
ACTIVATION = 4 * ROWS * WIDTH
WEIGHT = 4 * WIDTH * WIDTH
# A block of Linear, ReLU, Linear saves its input, the result of its ReLU and nothing else; the last also feeds the loss.
PLAIN = Plan(micro_batch_size=ROWS)
JOB = Job(model="toy", global_batch_size=ROWS, steps=2, max_grad_norm=None, allow=frozenset(Approximation))


class Stack(nn.Module):
    """Six blocks of Linear, ReLU, Linear, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
                for _ in range(BLOCKS)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).sum()


@pytest.mark.parametrize(
    ("precision", "weight", "gradient", "state"),
    [
        (Fp32(), 4, 4, 8),
        (AutocastBf16(), 4, 4, 8),
        (AutocastFp16(), 4, 4, 8),
        (Bf16Master(), 2, 2, 12),
        (Bf16(), 2, 2, 4),
        (Bf16(Rounding.COMPENSATED), 2, 2, 6),
        (Bf16(Rounding.STOCHASTIC), 2, 2, 4),
    ],
    ids=str,
)
def test_a_precision_holds_what_its_page_says(precision: Precision, weight: int, gradient: int, state: int) -> None:
    """Bytes a parameter: weights and state after the run, gradients at their most."""
    dtype = weight_dtype(precision)
    job = dataclasses.replace(JOB, precision=precision)
    trace = simulate(job, PLAIN, source(Stack().to(dtype)), {"x": ((WIDTH,), dtype)}, PROCESSOR)
    timeline = MemoryTimeline(trace)
    held = dict.fromkeys(Kind, 0)
    for event in timeline.live_at(len(timeline.events)):
        held[event.kind] += event.bytes
    gradients = max(sums[Kind.GRADIENT] for _, sums in timeline.curves())
    parameters, tensors = 2 * BLOCKS * WIDTH * WIDTH, 2 * BLOCKS
    assert held[Kind.WEIGHT] == weight * parameters
    # An update in fp32 casts one gradient at a time, which is gone before the next.
    assert gradients == gradient * parameters + (4 * WIDTH * WIDTH if updates_in_fp32(precision) else 0)
    # Each step count is 4 bytes.
    assert held[Kind.OPTIMIZER_STATE] == state * parameters + 4 * tensors


def traced(plan: Plan, job: Job = JOB, device: Device = PROCESSOR) -> Trace:
    return simulate(job, plan, source(Stack()), {"x": ((WIDTH,), torch.float32)}, device)


def saved_after_forward(trace: Trace) -> int:
    """Bytes of saved activations when the last step's backward begins."""
    timeline = MemoryTimeline(trace)
    start, stop = trace.section("step 2")
    backward = next(position for position in range(start, stop) if trace.events[position].phase is Phase.BACKWARD)
    return timeline.by_kind(backward - 1).get(Kind.SAVED_ACTIVATION, 0)


@pytest.mark.parametrize(("every", "recomputed"), [(None, 0), (1, 6), (2, 3), (3, 2), (6, 1)], ids=["keep", "1", "2", "3", "6"])
def test_a_recomputed_block_keeps_its_input_and_the_generators_state(every: int | None, recomputed: int) -> None:
    plan = PLAIN if every is None else dataclasses.replace(PLAIN, activations=Recompute(every))
    # Of a kept block the result of its ReLU, and each block's result but the last's, which the next block keeps as its
    # input. The scalar loss, its weight and the count are three more numbers of 4 or 8 bytes.
    kept = (BLOCKS - recomputed) * ACTIVATION + (BLOCKS - 1) * ACTIVATION
    states = recomputed * torch.get_rng_state().nbytes
    assert saved_after_forward(traced(plan)) - kept - states in range(4, 40)


@pytest.mark.parametrize("count", [1, 4, 6])
def test_the_first_blocks_free_as_much_as_any_others(count: int) -> None:
    kept = (BLOCKS - count) * ACTIVATION + (BLOCKS - 1) * ACTIVATION + count * torch.get_rng_state().nbytes
    assert saved_after_forward(traced(dataclasses.replace(PLAIN, activations=RecomputeFirst(count)))) - kept in range(4, 40)


def test_selective_recomputation_keeps_the_results_of_both_products_of_a_block() -> None:
    # Before the ReLU instead of behind it, and also the last block's result, which nothing else keeps.
    kept = 2 * BLOCKS * ACTIVATION + BLOCKS * torch.get_rng_state().nbytes
    assert saved_after_forward(traced(dataclasses.replace(PLAIN, activations=RecomputeSelective()))) - kept in range(4, 40)


class Block(nn.Module):
    """Attention and MLP in name only: Linear, ReLU, Linear, the second twice as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = (
            nn.Sequential(nn.Linear(WIDTH, inner, bias=False), nn.ReLU(), nn.Linear(inner, WIDTH, bias=False))
            for inner in (WIDTH, 2 * WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(self.self_attn(x))
        return out


class Parted(nn.Module):
    """Six such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).sum()


@pytest.mark.parametrize(
    ("activations", "freed"),
    [(Keep(), 0), (RecomputeAttention(), 1), (RecomputeMlp(), 2), (RecomputeFirst(BLOCKS), 4), (Recompute(), 4)],
    ids=str,
)
def test_a_recomputed_part_keeps_its_input_only(activations: Activations, freed: int) -> None:
    """Of each block the result of one ReLU, of the other, or both with what lies between attention and MLP."""
    plan = dataclasses.replace(PLAIN, activations=activations)
    trace = simulate(JOB, plan, source(Parted()), {"x": ((WIDTH,), torch.float32)}, PROCESSOR)
    # The results of the ReLUs, 1 + 2, and of the parts but the last, 2.
    kept = BLOCKS * (5 - freed) * ACTIVATION - ACTIVATION
    states = BLOCKS * (activations != Keep()) * torch.get_rng_state().nbytes
    assert saved_after_forward(trace) - kept - states in range(4, 40)


def test_an_update_during_backward_holds_one_gradient_at_a_time() -> None:
    def most_gradients(plan: Plan) -> int:
        return max(sums[Kind.GRADIENT] for _, sums in MemoryTimeline(traced(plan)).curves())

    assert most_gradients(PLAIN) == 2 * BLOCKS * WEIGHT
    assert most_gradients(dataclasses.replace(PLAIN, update=DuringBackward())) == WEIGHT


def test_foreach_holds_temporaries_as_large_as_the_weights_and_fused_none() -> None:
    def temporaries(plan: Plan) -> int:
        trace = traced(plan)
        return max(
            (sums[Kind.TEMPORARY] for event, sums in MemoryTimeline(trace).curves() if event.phase is Phase.UPDATE), default=0
        )

    assert temporaries(PLAIN) == 0
    assert temporaries(dataclasses.replace(PLAIN, optimizer_kernel=Foreach())) == 2 * BLOCKS * WEIGHT


def test_weights_gradients_and_state_are_4_4_and_8_bytes_a_parameter_and_a_step_count_each() -> None:
    by_kind = MemoryTimeline(traced(PLAIN)).by_kind()
    parameters = 2 * BLOCKS * WIDTH * WIDTH
    assert by_kind[Kind.WEIGHT] == 4 * parameters
    assert by_kind[Kind.OPTIMIZER_STATE] == 8 * parameters + 4 * 2 * BLOCKS


@pytest.mark.parametrize(("chunk_tokens", "most"), [(None, 3 * 64), (16, 16), (8, 8), (64, 64)])
def test_chunked_logits_exist_a_chunk_at_a_time(chunk_tokens: int | None, most: int) -> None:
    """Whole: the logits in log-softmax and their gradient twice. Chunked: one chunk, which becomes its own gradient."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    rows: RowShapes = dict.fromkeys(("input_ids", "labels"), ((16,), torch.int64))
    plan = PLAIN if chunk_tokens is None else dataclasses.replace(PLAIN, loss=ChunkedLogits(chunk_tokens))
    trace = simulate(JOB, plan, source(config), rows, PROCESSOR)
    assert max(sums[Kind.LOGITS] for _, sums in MemoryTimeline(trace).curves()) == 4 * most * VOCABULARY


@pytest.mark.parametrize("size", [1, 2, 4])
def test_activations_are_in_proportion_to_the_micro_batch(size: int) -> None:
    job = dataclasses.replace(JOB, global_batch_size=4)
    trace = traced(Plan(micro_batch_size=size), job)
    assert saved_after_forward(trace) - (2 * BLOCKS - 1) * ACTIVATION * size // ROWS in range(4, 60)


# ---------------------------------------------------------------------------------------------- optimizer state

PARAMETER_BYTES = 2 * BLOCKS * WEIGHT
STATE = 2 * PARAMETER_BYTES + 4 * 2 * BLOCKS


def most(trace: Trace, place: Place, phases: tuple[Phase, ...] = tuple(Phase)) -> dict[Kind, int]:
    """The most bytes of each kind that are at a place at once, within some phases; kinds without any left out."""
    found = dict.fromkeys(Kind, 0)
    for event, sums in MemoryTimeline(trace, place).curves():
        if event.phase in phases:
            found = {kind: max(found[kind], sums[kind]) for kind in Kind}
    return {kind: size for kind, size in found.items() if size and kind is not Kind.WORKSPACE}


def test_state_on_the_host_frees_gradients_and_state_on_the_device_and_takes_as_much_there() -> None:
    updates = (Phase.FIRST_UPDATE, Phase.UPDATE)
    held = {Kind.WEIGHT: PARAMETER_BYTES, Kind.GRADIENT: PARAMETER_BYTES, Kind.OPTIMIZER_STATE: STATE}
    beside = most(traced(PLAIN, device=CARD), DEVICE, updates)
    assert {kind: beside.get(kind, 0) for kind in held} == held
    trace = traced(dataclasses.replace(PLAIN, optimizer_state=OnHost()), device=CARD)
    assert Kind.OPTIMIZER_STATE not in most(trace, DEVICE)
    # One gradient at a time, until it is sent.
    assert most(trace, DEVICE)[Kind.GRADIENT] == WEIGHT
    # And one weight at a time while it is updated.
    del held[Kind.WEIGHT]
    assert most(trace, HOST, updates) == {**held, Kind.TEMPORARY: WEIGHT}
    found = footprint(trace, CARD)
    assert found.host_bytes == PARAMETER_BYTES + STATE + WEIGHT
    assert Kind.OPTIMIZER_STATE not in found.by_kind


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_gradient_is_on_the_device_until_its_copy_is_on_the_host(size: int, max_grad_norm: float | None) -> None:
    plan = Plan(micro_batch_size=size, optimizer_state=OnHost())
    trace = traced(plan, dataclasses.replace(JOB, max_grad_norm=max_grad_norm), device=CARD)
    seen = [event for event in trace.events if event.kind is not Kind.WORKSPACE]
    copied = 0
    for position, born in enumerate(seen):
        if born.kind is Kind.GRADIENT and born.place == DEVICE and born.bytes > 0:
            gone = next(number for number, event in enumerate(seen) if event.storage == born.storage and event.bytes < 0)
            made = [(event.place, event.bytes) for event in seen[position + 1 : gone] if event.bytes > 0]
            # The last thing that is made while it is there is its copy.
            assert made[-1] == (HOST, WEIGHT)
            assert made.count((HOST, WEIGHT)) == 1
            copied += 1
    # In the first step one micro-batch, in the second at most two.
    assert copied == 2 * BLOCKS * (1 + min(2, ROWS // size))
    assert most(trace, DEVICE)[Kind.GRADIENT] == WEIGHT
    # What further micro-batches send is added to what is there, and gone.
    on_host = most(trace, HOST)
    assert on_host[Kind.GRADIENT] == PARAMETER_BYTES
    assert on_host[Kind.OPTIMIZER_STATE] == STATE


def test_during_backward_only_one_gradient_is_on_the_host_at_a_time() -> None:
    plan = dataclasses.replace(PLAIN, optimizer_state=OnHost(), update=DuringBackward())
    trace = traced(plan, device=CARD)
    assert most(trace, DEVICE)[Kind.GRADIENT] == WEIGHT
    assert most(trace, HOST)[Kind.GRADIENT] == WEIGHT


class Wide(nn.Module):
    """Three weights of 320 × 320 elements: enough for 8 bits, and for managed memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(320, 320, bias=False) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x).sum()
        return out


ELEMENTS = 320 * 320
# A scale for 256 values, of each of two moments; the two tables of 256 values are shared.
SCALES, TABLES = 2 * 4 * ELEMENTS // 256, 2 * 4 * 256


def widely_traced(state: OptimizerState, update: Update) -> Trace:
    pytest.importorskip("bitsandbytes")
    plan = dataclasses.replace(PLAIN, optimizer_state=state, update=update)
    return simulate(JOB, plan, source(Wide()), {"x": ((320,), torch.float32)}, CARD)


@pytest.mark.parametrize("update", [AfterBackward(), DuringBackward()], ids=str)
@pytest.mark.parametrize(
    ("state", "bytes_by_place"),
    [
        (OnDevice(), {DEVICE: 3 * (8 * ELEMENTS + 4)}),
        (OnHost(), {HOST: 3 * (8 * ELEMENTS + 4)}),
        (Paged(), {MANAGED: 3 * 8 * ELEMENTS}),
        (EightBit(), {DEVICE: 3 * (2 * ELEMENTS + SCALES) + TABLES}),
        (PagedEightBit(), {MANAGED: 3 * 2 * ELEMENTS, DEVICE: 3 * SCALES + TABLES}),
    ],
    ids=lambda value: str(value) if isinstance(value, OptimizerState) else "",
)
def test_the_state_lies_where_the_plan_says_in_as_many_bits(
    state: OptimizerState, bytes_by_place: dict[Place, int], update: Update
) -> None:
    trace = widely_traced(state, update)
    held = {place: most(trace, place).get(Kind.OPTIMIZER_STATE, 0) for place in (DEVICE, HOST, MANAGED)}
    assert {place: size for place, size in held.items() if size} == bytes_by_place
    # Made once, and there in the second step.
    born = [event.phase for event in trace.events if event.kind is Kind.OPTIMIZER_STATE and event.bytes > 0]
    assert set(born) == {Phase.FIRST_UPDATE}


@pytest.mark.parametrize("update", [AfterBackward(), DuringBackward()], ids=str)
@pytest.mark.parametrize(("state", "moments"), [(Paged(), 8), (PagedEightBit(), 2)], ids=str)
def test_managed_memory_counts_on_the_host_and_that_of_one_weight_on_the_card(
    state: OptimizerState, moments: int, update: Update
) -> None:
    found = footprint(widely_traced(state, update), CARD)
    assert found.total_device_bytes - found.peak_reserved_bytes - CARD.context_bytes == moments * ELEMENTS
    # While the model is saved its weights are on the host too.
    assert found.host_bytes == 3 * (moments + 4) * ELEMENTS
