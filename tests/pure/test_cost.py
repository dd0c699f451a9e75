"""The cost model in round numbers: a device of 100 flop/s, 10 B/s and 1 s per operator, and rows of known work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.device import Device
from memtrain.job import Job
from memtrain.plan import ChunkedLogits, DuringBackward, Foreach, Plan, Recompute
from memtrain.planner.cost import CostModel
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
    device=Device(name="round", kind="cpu", threads=1, flops_per_second=100.0, bytes_per_second=10.0, operator_seconds=1.0),
    small=WORK[1],
    small_size=1,
    large=WORK[2],
    large_size=2,
    tokens_per_row=10,
    blocks=4,
    parameters=2,
    parameter_bytes=20,
)
# One micro-batch of n rows: n × 4 s + 2 s forward, n × 3 s + 3 s backward. The update: 14 s and one operator.
UPDATE = 15.0


@pytest.mark.parametrize(("rows", "seconds"), [(1, 8 * 12), (2, 4 * 19), (4, 2 * 33), (8, 61)])
def test_a_phase_takes_the_longer_of_arithmetic_and_traffic_and_a_time_per_operator(rows: int, seconds: int) -> None:
    assert COST.step_seconds(Plan(micro_batch_size=rows)) == seconds + UPDATE


@pytest.mark.parametrize(("every", "extra"), [(1, 34.0), (2, 17.0), (3, 8.5), (4, 8.5)])
def test_recomputing_takes_the_recomputed_blocks_share_of_forward_again(every: int, extra: float) -> None:
    assert COST.step_seconds(Plan(micro_batch_size=8, activations=Recompute(every))) == 61 + extra + UPDATE


@pytest.mark.parametrize(("chunk_tokens", "chunks"), [(100, 1), (80, 1), (79, 2), (27, 3), (1, 80)])
def test_a_chunked_loss_takes_sixteen_operators_per_chunk_begun(chunk_tokens: int, chunks: int) -> None:
    assert COST.step_seconds(Plan(micro_batch_size=8, loss=ChunkedLogits(chunk_tokens))) == 61 + 16 * chunks + UPDATE


def test_a_chunked_loss_counts_the_chunks_of_every_micro_batch() -> None:
    assert COST.step_seconds(Plan(micro_batch_size=4, loss=ChunkedLogits(40))) == 2 * (33 + 16) + UPDATE


def test_an_update_during_backward_launches_once_per_parameter() -> None:
    assert COST.step_seconds(Plan(micro_batch_size=8, update=DuringBackward())) == 61 + 16


def test_a_foreach_update_moves_the_parameters_more_often() -> None:
    assert COST.step_seconds(Plan(micro_batch_size=8, optimizer_kernel=Foreach())) == 61 + 61


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
