"""What is inferred for a micro-batch size is what is simulated for it, on real models, for every policy and size."""

from __future__ import annotations

import dataclasses

import pytest
from test_same_numbers import policies
from toys import CASES

from memtrain.device import Device
from memtrain.features.chunked_loss import refusal
from memtrain.job import Job
from memtrain.memory.footprint import footprint
from memtrain.plan import ChunkedLogits, DuringBackward, Plan, micro_batch_sizes
from memtrain.planner.predict import Predictor
from memtrain.trace.simulate import dataless_model

DEVICE = Device(name="cpu", kind="cpu", threads=2, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-6)
JOB = Job(model="toy", global_batch_size=16, steps=2, max_grad_norm=None)


@pytest.mark.parametrize("evaluation_rows", [0, 11])
@pytest.mark.parametrize("name", ["llama", "gpt2_with_dropout", "plain_module"])
def test_the_inferred_footprint_is_the_simulated_one(name: str, evaluation_rows: int) -> None:
    case = CASES[name]
    source = case.build()
    shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in case.row(0).items()}
    predictor = Predictor(JOB, source, shapes, DEVICE, evaluation_rows=evaluation_rows)
    chunks = refusal(dataless_model(source)) is None
    inferred = 0
    for _, policy in policies():
        field = next(field for field, value in policies() if value == policy)
        if isinstance(policy, DuringBackward) or (isinstance(policy, ChunkedLogits) and not chunks):
            continue
        for size in micro_batch_sizes(JOB):
            plan = dataclasses.replace(Plan(micro_batch_size=size), **{field: policy})
            told = predictor.inferred(plan)
            inferred += plan not in predictor._simulated
            assert footprint(told) == footprint(predictor.trace(plan)), plan
    assert inferred or evaluation_rows, "nothing was inferred, so nothing was tested"


def test_the_parameters_that_are_updated_are_those_that_require_gradients() -> None:
    source = CASES["plain_module"].build()
    next(source.build().parameters()).requires_grad = False
    shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in CASES["plain_module"].row(0).items()}
    cost = Predictor(JOB, source, shapes, DEVICE).cost_model(lambda size: Plan(micro_batch_size=size))
    trainable = [parameter for parameter in source.build().parameters() if parameter.requires_grad]
    assert (cost.parameters, cost.parameter_bytes) == (len(trainable), sum(parameter.nbytes for parameter in trainable))
    assert cost.blocks == 6
