"""What each optimizer takes of memory on a model: its real update, simulated on the model's parameters without data.

An update knows parameters and gradients alone, so neither rows nor forward and backward are needed, and a whole model of
7 billion parameters takes seconds for all optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import get_args

import torch
from torch import nn

from memtrain.check import PlanRefused, check, suits
from memtrain.device import Device
from memtrain.job import Approximation, Job, Optimizer
from memtrain.memory.timeline import MemoryTimeline
from memtrain.models.build import ModelSource, weight_dtype
from memtrain.plan import EightBit, Foreach, Fused, OnDevice, OptimizerKernel, OptimizerState, Plan, policy_name
from memtrain.planner.optimizers import OptimizerBytes, OptimizerTable
from memtrain.precision import Precision
from memtrain.run import prepare
from memtrain.trace.event import Kind, Phase
from memtrain.trace.kernels import kernels_of
from memtrain.trace.simulate import DatalessRecorder, dataless_model, track_state
from memtrain.trace.supported import as_if_supported

# Kernels and states that are shown: those beside the weights. Of state elsewhere the device holds nothing.
_KERNELS: tuple[OptimizerKernel, ...] = (Fused(), Foreach())
_STATES: tuple[OptimizerState, ...] = (OnDevice(), EightBit())


def optimizer_table(source: ModelSource, device: Device, precisions: tuple[Precision, ...]) -> OptimizerTable:
    """Every rule with every kernel and state beside the weights that it has, in each precision that the device computes in.

    The hyper-parameters are the rules' own defaults. Two others change bytes: an Sgd without momentum has no state, and
    one with a weight decay takes a copy of the gradients in the foreach form.

    Raises:
        ValueError: the model cannot be built or trained.
    """
    rows, left_out = [], dict[str, None]()
    for precision in precisions:
        if not suits(precision, device):
            left_out[f"{device.name} does not compute in {policy_name(type(precision))}."] = None
            continue
        model = dataless_model(source, weight_dtype(precision))
        for job, plan in _variants(precision):
            try:
                rows.append(update_bytes(job, plan, model, device))
            except PlanRefused as refused:
                left_out[str(refused)] = None
    return OptimizerTable(tuple(rows), tuple(left_out))


def _variants(precision: Precision) -> Iterator[tuple[Job, Plan]]:
    """Each job and plan that fit together."""
    rules: tuple[type[Optimizer], ...] = get_args(Optimizer)
    for rule, kernel, state in product(rules, _KERNELS, _STATES):
        job = Job(
            model="table",
            global_batch_size=1,
            steps=2,
            optimizer=rule(),
            precision=precision,
            max_grad_norm=None,
            allow=frozenset(Approximation),
        )
        plan = Plan(micro_batch_size=1, optimizer_kernel=kernel, optimizer_state=state)
        try:
            check(plan, job)
        except PlanRefused:
            continue
        yield job, plan


def update_bytes(job: Job, plan: Plan, model: nn.Module, device: Device) -> OptimizerBytes:
    """What one rule takes, by two updates of a data-less model, the first of which makes the state.

    Raises:
        PlanRefused: the plan would not train what the job says, or bitsandbytes is asked for and not there.
    """
    recorder = DatalessRecorder(device, model)
    with as_if_supported(), kernels_of(device):
        run = prepare(job, plan, model)
        parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
        try:
            with recorder:
                for _ in range(2):
                    for parameter in parameters:
                        parameter.grad = torch.empty_like(parameter)
                    recorder.inside(Phase.UPDATE, run.update)()
                    track_state(recorder, run)
                    recorder.first_step_done()
        finally:
            run.release()
    timeline = MemoryTimeline(recorder.trace())
    weights = gradients = sum(parameter.nbytes for parameter in parameters)
    state = sum(event.bytes for event in timeline.live_at(len(timeline.events)) if event.kind is Kind.OPTIMIZER_STATE)
    return OptimizerBytes(
        optimizer=type(job.optimizer).__name__,
        kernel=policy_name(type(plan.optimizer_kernel)),
        state=policy_name(type(plan.optimizer_state)),
        precision=policy_name(type(job.precision)),
        parameters=sum(parameter.numel() for parameter in parameters),
        weights=weights,
        gradients=gradients,
        optimizer_state=state,
        temporaries=timeline.peak_bytes - gradients - state,
    )
