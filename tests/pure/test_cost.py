"""The cost model in round numbers: a device of 100 flop/s, 10 B/s and 1 s per operator, and rows of known work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.device import Cpu, Cuda
from memtrain.job import Adafactor, Adam, Approximation, Job, Lion, Muon, Optimizer, Sgd
from memtrain.method import Full, Lora
from memtrain.plan import (
    Activations,
    ChunkedLogits,
    DataParallel,
    DuringBackward,
    EightBit,
    Foreach,
    Fused,
    OnDevice,
    OnHost,
    OptimizerKernel,
    OptimizerState,
    Paged,
    PagedEightBit,
    Plan,
    Recompute,
    RecomputeAttention,
    RecomputeFirst,
    RecomputeMlp,
    RecomputeSelective,
)
from memtrain.planner.cost import CostModel
from memtrain.precision import Bf16, Bf16Master
from memtrain.trace.event import Phase, Work

# Per row: 400 flop and 10 B forward (4 s of arithmetic, 1 s of traffic), 100 flop and 30 B backward (1 s and 3 s);
# per micro-batch of any size: 2 operators forward and 3 backward.
WORK = {
    rows: {Phase.FORWARD: Work(400.0 * rows, 10.0 * rows, 2.0), Phase.BACKWARD: Work(100.0 * rows, 30.0 * rows, 3.0)}
    for rows in (1, 2)
}
# Two tensors of 20 B together: 14 s for the 7 passes of a fused update, 60 s for the 30 of a foreach one.
COST = CostModel(
    job=Job(model="tiny", global_batch_size=8, steps=1, max_grad_norm=None),
    device=Cpu(name="round", threads=1, flops_per_second=100.0, bytes_per_second=10.0, operator_seconds=1.0),
    small=WORK[1],
    small_size=1,
    large=WORK[2],
    large_size=2,
    tokens_per_row=10,
    blocks=4,
    parameters=2,
    parameter_bytes=20,
    elements=5,
)
# One micro-batch of n rows: n × 4 s + 2 s forward, n × 3 s + 3 s backward. The update: 14 s and one operator.
UPDATE = 15.0


@pytest.mark.parametrize(("rows", "seconds"), [(1, 8 * 12), (2, 4 * 19), (4, 2 * 33), (8, 61)])
def test_a_phase_takes_the_longer_of_arithmetic_and_traffic_and_a_time_per_operator(rows: int, seconds: int) -> None:
    assert COST.step_seconds(Plan(micro_batch_size=rows)) == seconds + UPDATE


@pytest.mark.parametrize(("every", "extra"), [(1, 34.0), (2, 17.0), (3, 8.5), (4, 8.5)])
def test_recomputing_takes_the_recomputed_blocks_share_of_forward_again(every: int, extra: float) -> None:
    assert COST.step_seconds(Plan(micro_batch_size=8, activations=Recompute(every))) == 61 + extra + UPDATE


@pytest.mark.parametrize(
    ("activations", "extra"),
    [
        # Of four blocks, and of 34 s of forward.
        (RecomputeFirst(1), 8.5),
        (RecomputeFirst(3), 25.5),
        (RecomputeAttention(), 34.0 / 4),
        (RecomputeMlp(), 34.0 / 2),
        # Traffic without arithmetic: 80 B at 10 B/s, and two operators.
        (RecomputeSelective(), 8 + 2.0),
    ],
    ids=str,
)
def test_a_part_of_forward_is_run_again(activations: Activations, extra: float) -> None:
    cost = replace(COST, attention_share=0.25, mlp_share=0.5)
    assert cost.step_seconds(Plan(micro_batch_size=8, activations=activations)) == 61 + extra + UPDATE


@pytest.mark.parametrize(("chunk_tokens", "chunks"), [(100, 1), (80, 1), (79, 2), (27, 3), (1, 80)])
def test_a_chunked_loss_takes_sixteen_operators_per_chunk_begun(chunk_tokens: int, chunks: int) -> None:
    assert COST.step_seconds(Plan(micro_batch_size=8, loss=ChunkedLogits(chunk_tokens))) == 61 + 16 * chunks + UPDATE


def test_a_chunked_loss_counts_the_chunks_of_every_micro_batch() -> None:
    assert COST.step_seconds(Plan(micro_batch_size=4, loss=ChunkedLogits(40))) == 2 * (33 + 16) + UPDATE


def test_an_update_during_backward_launches_once_per_parameter() -> None:
    assert COST.step_seconds(Plan(micro_batch_size=8, update=DuringBackward())) == 61 + 16


def test_a_foreach_update_moves_the_parameters_more_often() -> None:
    assert COST.step_seconds(Plan(micro_batch_size=8, optimizer_kernel=Foreach())) == 61 + 61


def with_optimizer(cost: CostModel, optimizer: Optimizer) -> CostModel:
    return replace(cost, job=replace(cost.job, optimizer=optimizer))


@pytest.mark.parametrize(
    ("optimizer", "kernel", "passes"),
    [
        (Adam(), Fused(), 7),
        (Adam(), Foreach(), 30),
        (Sgd(), Fused(), 5),
        (Sgd(), Foreach(), 11),
        (Adafactor(), Fused(), 19),
        (Lion(), Fused(), 13),
    ],
)
def test_every_rule_makes_its_passes_over_the_parameters(optimizer: Optimizer, kernel: OptimizerKernel, passes: int) -> None:
    """20 B at 10 B/s each, and one operator."""
    plan = Plan(micro_batch_size=8, optimizer_kernel=kernel)
    assert with_optimizer(COST, optimizer).step_seconds(plan) == 61 + 2 * passes + 1


def test_muon_takes_its_products_too() -> None:
    """26 passes, and of two matrices of 8 elements 30 × 16 × the root of 8 operations, at 100 a second."""
    cost = replace(with_optimizer(COST, Muon()), elements=16)
    assert cost.step_seconds(Plan(micro_batch_size=8)) == pytest.approx(61 + 52 + 1 + 4.8 * 8**0.5)
    # A card takes them at its rate for bfloat16.
    on_card = replace(cost, device=CARD)
    assert on_card.step_seconds(Plan(micro_batch_size=8)) == pytest.approx(61 + 52 + 1 + 1.2 * 8**0.5)


def test_lion_pages_one_moment() -> None:
    """20 B of it there and back at 5 B/s, and 13 passes and two operators."""
    plan = Plan(micro_batch_size=8, optimizer_state=Paged())
    assert with_optimizer(ON_CARD, Lion()).step_seconds(plan) == 61 + 8 + 26 + 2


def test_a_job_of_one_micro_batch_size_needs_only_that_one_measured() -> None:
    cost = replace(COST, job=Job(model="tiny", global_batch_size=1, steps=1), large=WORK[1], large_size=1)
    assert cost.step_seconds(Plan(micro_batch_size=1)) == 12 + UPDATE


work = st.builds(Work, *[st.floats(0, 1e6)] * 3)


@given(forward=st.tuples(work, work), backward=st.tuples(work, work), rows=st.sampled_from([1, 2, 4, 8]))
def test_no_plan_takes_less_than_its_update(forward: tuple[Work, Work], backward: tuple[Work, Work], rows: int) -> None:
    # Work that falls with the rows would reach below zero on the line through the two sizes.
    cost = replace(
        COST,
        small={Phase.FORWARD: forward[0], Phase.BACKWARD: backward[0]},
        large={Phase.FORWARD: forward[1], Phase.BACKWARD: backward[1]},
    )
    plain = cost.step_seconds(Plan(micro_batch_size=rows))
    assert plain >= UPDATE
    assert cost.step_seconds(Plan(micro_batch_size=rows, activations=Recompute())) >= plain


# ---------------------------------------------------------------------------------------------- optimizer state

# The same rates, half of them again for the link to the host, and a fifth for the host's own memory.
CARD = Cuda(
    name="round",
    compute_capability=(8, 0),
    multiprocessors=1,
    usable_bytes=2,
    context_bytes=1,
    # Of which 0.6 is reached, so 100 and 400.
    flops_per_second={"float32": 100.0 / 0.6, "bfloat16": 400.0 / 0.6},
    bytes_per_second=10.0,
    operator_seconds=1.0,
    link_bytes_per_second=5.0,
    host_bytes_per_second=2.0,
)
ON_CARD = replace(COST, device=CARD)


@pytest.mark.parametrize(
    ("state", "seconds"),
    [
        # One operator, and 7 passes over 20 B at 10 B/s.
        (OnDevice(), 1 + 14.0),
        # Two operators; a gradient to the host and a weight there and back, 60 B at 5 B/s; 7 passes at 2 B/s.
        (OnHost(), 2 + 12.0 + 70.0),
        # As on the device, and 40 B of moments there and back at 5 B/s.
        (Paged(), 2 + 14.0 + 16.0),
        # 3 passes over 20 B and 2 over 10 B of moments at 10 B/s.
        (EightBit(), 2 + 8.0),
        # And these 10 B there and back at 5 B/s.
        (PagedEightBit(), 2 + 8.0 + 4.0),
    ],
    ids=str,
)
def test_an_update_takes_its_passes_its_copies_and_a_time_per_operator(state: OptimizerState, seconds: float) -> None:
    plan = Plan(micro_batch_size=8, optimizer_state=state)
    assert ON_CARD.step_seconds(plan) == 61 + seconds
    # One weight at a time is what all of them do but those that take all at once.
    during = replace(plan, update=DuringBackward())
    assert ON_CARD.step_seconds(during) == 61 + seconds + (state == OnDevice())


@pytest.mark.parametrize(("rows", "micro_batches", "step"), [(8, 1, 61), (4, 2, 66), (1, 8, 96)])
def test_every_micro_batch_sends_its_gradients_to_the_host_and_adds_them_there(
    rows: int, micro_batches: int, step: int
) -> None:
    seconds = 2 + (micro_batches + 2) * 20 / 5 + (7 + 3 * (micro_batches - 1)) * 20 / 2
    plan = Plan(micro_batch_size=rows, optimizer_state=OnHost())
    assert ON_CARD.step_seconds(plan) == step + seconds


def test_clipping_on_the_host_passes_over_the_gradients_three_times_more() -> None:
    clipped = replace(ON_CARD, job=replace(ON_CARD.job, max_grad_norm=1.0))
    plan = Plan(micro_batch_size=8, optimizer_state=OnHost())
    assert clipped.step_seconds(plan) == ON_CARD.step_seconds(plan) + 3 * 20 / 2
    plain = Plan(micro_batch_size=8)
    assert clipped.step_seconds(plain) == ON_CARD.step_seconds(plain)


def test_8_bit_state_is_slow_on_a_processor() -> None:
    """40 passes over the 20 B of weights and 20 B of moments at 10 B/s, and two operators."""
    job = replace(COST.job, allow=frozenset({Approximation.EIGHT_BIT_STATE}))
    assert replace(COST, job=job).step_seconds(Plan(micro_batch_size=8, optimizer_state=EightBit())) == 61 + 2 + 82


def test_arithmetic_runs_at_the_rate_of_the_jobs_precision() -> None:
    in_16_bits = replace(ON_CARD, job=replace(ON_CARD.job, precision=Bf16()))
    # Of 8 rows 3200 flop at 400 per second are as long as 80 B of traffic; backward is traffic.
    assert in_16_bits.step_seconds(Plan(micro_batch_size=8)) == (8 + 2) + (24 + 3) + UPDATE
    slow = replace(CARD, flops_per_second={"float32": 100.0 / 0.6})
    assert replace(in_16_bits, device=slow).step_seconds(Plan(micro_batch_size=8)) == 61 + UPDATE


@given(
    rates=st.lists(st.floats(1e-3, 1e12), min_size=2, max_size=2),
    rows=st.sampled_from([1, 2, 4, 8]),
    state=st.sampled_from([OnDevice(), OnHost(), Paged(), EightBit(), PagedEightBit()]),
)
def test_a_faster_link_never_makes_a_plan_slower(rates: list[float], rows: int, state: OptimizerState) -> None:
    slow, fast = (replace(ON_CARD, device=replace(CARD, link_bytes_per_second=rate)) for rate in sorted(rates))
    plan = Plan(micro_batch_size=rows, optimizer_state=state)
    assert fast.step_seconds(plan) <= slow.step_seconds(plan)
    if state in (OnDevice(), EightBit()):
        assert fast.step_seconds(plan) == slow.step_seconds(plan)


@pytest.mark.parametrize(("ranks", "sent"), [(2, 20), (4, 30)])
def test_processes_share_the_micro_batches_and_send_the_gradients_around(ranks: int, sent: int) -> None:
    """Two rows at a time of eight; of 20 B of gradients each goes 2 (n - 1) / n times, in six passes on a processor and at 5 B/s
    between cards."""
    plan = Plan(micro_batch_size=2, sharding=DataParallel(ranks))
    assert COST.step_seconds(plan) == 4 / ranks * 19 + 6 * sent / 10 + UPDATE
    assert ON_CARD.step_seconds(plan) == 4 / ranks * 19 + sent / 5 + UPDATE


def test_adapters_in_fp32_are_updated_at_once_whatever_the_frozen_weights_are_in() -> None:
    jobs = [replace(ON_CARD.job, precision=precision, method=Lora()) for precision in (Bf16(), Bf16Master())]
    plain, wide = (replace(ON_CARD, job=job).step_seconds(Plan(micro_batch_size=2)) for job in jobs)
    assert plain == wide
    trained = replace(ON_CARD, job=replace(jobs[1], method=Full())).step_seconds(Plan(micro_batch_size=2))
    assert trained > wide
