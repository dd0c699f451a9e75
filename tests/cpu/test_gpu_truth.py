"""The comparison with a real card, as far as it goes without one: its jobs, and what it makes of what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gpu_truth
import pytest
import torch
from gpu_jobs import JOBS, RECORDED, GpuJob, batches, constraints_of, row_shapes
from gpu_truth import Result, in_one_order, recorded_bytes, summary, table, with_events

from memtrain import machine
from memtrain.models.build import source
from memtrain.planner.predict import Predictor
from memtrain.planner.search import choose

GIB = 1 << 30
RESULT = Result(
    job="a job",
    plan="a plan",
    allocated_predicted_bytes=3 * GIB,
    allocated_measured_bytes=2 * GIB,
    reserved_predicted_bytes=4 * GIB,
    reserved_measured_bytes=4 * GIB,
    total_predicted_bytes=3 * GIB,
    total_measured_bytes=4 * GIB,
    step_predicted_seconds=0.1,
    step_measured_seconds=0.2,
    planning_seconds=1.0,
)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_each_job_is_planned_as_it_is_written_and_takes_a_few_gigabytes(job: GpuJob) -> None:
    card = machine.named("h200")
    predictor = Predictor(job.job, source(dict(job.model)), row_shapes(job), card)
    choice = choose(predictor, machine.stated_budget(card, None), constraints_of(job.plan))
    assert choice.plan == job.plan
    assert 4 * GIB < choice.footprint.total_device_bytes < 16 * GIB


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_the_batches_of_a_job_are_those_that_were_planned_with(job: GpuJob) -> None:
    (batch, *others) = batches(job, "cpu")
    assert (1 + len(others)) * job.plan.micro_batch_size == job.job.global_batch_size
    shapes = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in batch.items()}
    assert shapes == dict(row_shapes(job))
    assert all(int(tensor.max()) < job.classes for tensor in batch.values() if tensor.dtype is torch.int64)


def test_there_are_ten_jobs_and_one_is_recorded() -> None:
    assert len({job.name for job in JOBS}) == 10
    assert RECORDED in {job.name for job in JOBS}


def test_an_allocators_trace_becomes_the_bytes_asked_for_and_freed() -> None:
    entries = [
        {"action": "alloc", "size": 700, "addr": 1},
        {"action": "segment_alloc", "size": 2 << 20, "addr": 0},
        {"action": "free_requested", "size": 700, "addr": 1},
        {"action": "free_completed", "size": 700, "addr": 1},
    ]
    assert list(recorded_bytes(entries)) == [700, -700]


def test_frees_in_a_row_have_no_order() -> None:
    assert in_one_order([4, 8, -4, -8, 2, -2]) == [4, 8, -8, -4, 2, -2]


def test_the_first_place_where_two_lists_part_is_told() -> None:
    assert with_events(RESULT, [4, 8, -4, -8], [4, 8, -8, -4]) == replace(RESULT, events=4, events_equal=4)
    found = with_events(RESULT, [4, 8, 16, -8], [4, 8, -8])
    assert (found.events, found.events_equal) == (4, 3)
    assert found.first_difference == "at event 2: recorded [16], simulated []"


def test_the_summary_gives_errors_as_fractions_and_the_table_as_percent() -> None:
    found = summary([RESULT, replace(RESULT, events=9, events_equal=8)])
    assert found["median_allocated_error"] == 0.5
    assert found["largest_total_error"] == 0.25
    assert found["median_step_ratio"] == 0.5
    assert (found["events"], found["events_equal"], found["events_of"]) == (9, 8, "a job")
    assert "+50.0000" in table([RESULT])
    assert json.dumps(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_truth.main(tmp_path, ()) == 2
    assert capsys.readouterr().err == "torch finds no CUDA card here: run this where there is one.\n"
    assert not list(tmp_path.iterdir())
