"""What is inferred for a micro-batch size is what is simulated for it, and what is said without simulating is never too much."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from test_bytes_freed import WIDTH, Stack
from test_parity import UNSUITED, settings, shapes_of
from torch import nn
from toys import CASES, VOCABULARY

from memtrain.check import PlanRefused, check, micro_batch_sizes
from memtrain.device import Cpu, Cuda, Device
from memtrain.features.chunked_loss import refusal
from memtrain.job import Approximation, Job
from memtrain.memory.footprint import footprint
from memtrain.memory.timeline import MemoryTimeline
from memtrain.models.build import ModelSource, source
from memtrain.plan import (
    POLICIES,
    AfterBackward,
    ChunkedLogits,
    DuringBackward,
    EightBit,
    Keep,
    OnDevice,
    OnHost,
    Paged,
    PagedEightBit,
    Plan,
    Recompute,
    RecomputeAttention,
    RecomputeFirst,
    RecomputeMlp,
    RecomputeSelective,
    WholeLogits,
)
from memtrain.planner.predict import Predictor
from memtrain.trace.event import DEVICE, Phase
from memtrain.trace.simulate import RowShapes, dataless_model

PROCESSOR = Cpu(name="cpu", threads=2, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-6)
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
JOB = Job(model="toy", global_batch_size=16, steps=2, max_grad_norm=None, allow=frozenset(Approximation))


def accepted(plan: Plan, job: Job, device: Device) -> bool:
    try:
        check(plan, job, device)
    except PlanRefused:
        return False
    return True


# ---------------------------------------------------------------------------------------------- inferred


def plans(policies: Iterator[tuple[str, Any]], device: Device) -> Iterator[Plan]:
    """Each policy at every micro-batch size that the job may have with it on the device."""
    for field, policy in policies:
        for size in micro_batch_sizes(JOB):
            plan = dataclasses.replace(Plan(micro_batch_size=size), **{field: policy})
            if accepted(plan, JOB, device):
                yield plan


def assert_inferred_is_simulated(predictor: Predictor, tried: Iterator[Plan]) -> int:
    """How many plans were inferred without being simulated."""
    inferred = 0
    for plan in tried:
        told = predictor.inferred(plan)
        inferred += plan not in predictor._simulated
        assert footprint(told, predictor.device) == footprint(predictor.trace(plan), predictor.device), plan
    return inferred


@pytest.mark.parametrize("evaluation_rows", [0, 11])
@pytest.mark.parametrize("name", ["llama", "gpt2_with_dropout", "plain_module"])
def test_the_inferred_footprint_is_the_simulated_one(name: str, evaluation_rows: int) -> None:
    case = CASES[name]
    built = case.build()
    predictor = Predictor(JOB, built, shapes_of(case), PROCESSOR, evaluation_rows=evaluation_rows)
    chunks = refusal(dataless_model(built)) is None
    policies = (
        (field, policy)
        for field, classes in POLICIES.items()
        for one in classes
        for policy in settings(one)
        if not isinstance(policy, UNSUITED.get(name, ()))
        if chunks or not isinstance(policy, ChunkedLogits)
    )
    inferred = assert_inferred_is_simulated(predictor, plans(policies, PROCESSOR))
    assert inferred or evaluation_rows, "nothing was inferred, so nothing was tested"


@pytest.mark.parametrize("name", ["llama", "gpt2_with_dropout"])
def test_beside_a_card_the_inferred_footprint_is_the_simulated_one_wherever_the_state_is(name: str) -> None:
    pytest.importorskip("bitsandbytes")
    case = CASES[name]
    predictor = Predictor(JOB, case.build(), shapes_of(case), CARD)
    states = (("optimizer_state", state()) for state in POLICIES["optimizer_state"])
    assert assert_inferred_is_simulated(predictor, plans(states, CARD)) >= len(POLICIES["optimizer_state"])


# ---------------------------------------------------------------------------------------------- at the least


def small_llama(**changed: Any) -> ModelSource:
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return source({**config, **changed})


ROWS: RowShapes = dict.fromkeys(("input_ids", "labels"), ((128,), torch.int64))
FOUR = dataclasses.replace(JOB, global_batch_size=4)


def assert_never_too_much(predictor: Predictor, tried: list[Plan]) -> None:
    """Bounds before anything of a plan is simulated, and again when all of them are, against the simulation of each."""
    before = {plan: (predictor.least_bytes(plan), predictor.least_host_bytes(plan)) for plan in tried}
    found = {plan: predictor.footprint(predictor.trace(plan)) for plan in tried}
    for plan, footprint_ in found.items():
        raw = MemoryTimeline(predictor.trace(plan)).peak_bytes
        for least, of_the_host in (before[plan], (predictor.least_bytes(plan), predictor.least_host_bytes(plan))):
            assert 0 < least <= raw <= footprint_.total_device_bytes, plan
            assert 0 <= of_the_host <= footprint_.host_bytes, plan


def every_plan(size: int, job: Job, device: Device, activations: list[Any]) -> list[Plan]:
    fields = product(activations, (WholeLogits(), ChunkedLogits(64)), (AfterBackward(), DuringBackward()))
    listed = [
        Plan(micro_batch_size=size, activations=kept, loss=loss, update=update, optimizer_state=state())
        for kept, loss, update in fields
        for state in POLICIES["optimizer_state"]
    ]
    return [plan for plan in listed if accepted(plan, job, device)]


LEVELS = [
    *(Keep(), Recompute(4), Recompute(2), Recompute(1), RecomputeFirst(1), RecomputeFirst(3)),
    *(RecomputeSelective(), RecomputeAttention(), RecomputeMlp()),
]


def levels_of(predictor: Predictor) -> list[Any]:
    """Those that the model's blocks admit."""
    needs: dict[type, Callable[[Any], bool]] = {
        Recompute: lambda level: level.every <= predictor.blocks,
        RecomputeFirst: lambda level: level.blocks <= predictor.blocks,
        RecomputeAttention: lambda _: "attention" in predictor.parts,
        RecomputeMlp: lambda _: "mlp" in predictor.parts,
    }
    return [level for level in LEVELS if needs.get(type(level), lambda _: True)(level)]


@pytest.mark.parametrize("size", [2, 4])
def test_beside_a_card_no_plan_takes_less_than_was_said_without_simulating_it(size: int) -> None:
    pytest.importorskip("bitsandbytes")
    predictor = Predictor(FOUR, small_llama(), ROWS, CARD)
    # An update during backward is what only the whole batch has; chunks are told with the state where it is most often.
    tried = [
        plan
        for plan in every_plan(size, FOUR, CARD, LEVELS)
        if (isinstance(plan.update, DuringBackward) or size < 4)
        and (isinstance(plan.loss, WholeLogits) or isinstance(plan.optimizer_state, OnHost))
    ]
    assert len(tried) >= 20
    assert_never_too_much(predictor, tried)


@pytest.mark.parametrize("device", [PROCESSOR, CARD], ids=lambda device: device.name)
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"num_hidden_layers": 1}, id="one block"),
        pytest.param({"hidden_size": 96, "intermediate_size": 96}, id="as wide as the vocabulary"),
        pytest.param({"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}, id="narrow"),
    ],
)
def test_models_of_another_shape_take_no_less_than_was_said(changed: dict[str, Any], device: Device) -> None:
    rows: RowShapes = dict.fromkeys(("input_ids", "labels"), ((32,), torch.int64))
    predictor = Predictor(FOUR, small_llama(**changed), rows, device)
    assert_never_too_much(predictor, [Plan(micro_batch_size=4, activations=kept) for kept in levels_of(predictor)])


@pytest.mark.parametrize("device", [PROCESSOR, CARD], ids=lambda device: device.name)
@pytest.mark.parametrize("name", ["gpt2_with_dropout", "plain_module", "smaller than a generator's state"])
def test_models_of_another_kind_take_no_less_than_was_said(name: str, device: Device) -> None:
    """A recomputed block keeps a state of the processor's generator, which is more than all activations of a tiny model."""
    tiny: tuple[ModelSource, RowShapes] = source(Stack()), {"x": ((WIDTH,), torch.float32)}
    built, rows = (CASES[name].build(), shapes_of(CASES[name])) if name in CASES else tiny
    predictor = Predictor(FOUR, built, rows, device)
    states = [
        state for state in (OnDevice(), OnHost()) if accepted(Plan(micro_batch_size=4, optimizer_state=state), FOUR, device)
    ]
    tried = [
        Plan(micro_batch_size=4, activations=kept, optimizer_state=state) for kept in levels_of(predictor) for state in states
    ]
    assert_never_too_much(predictor, tried)


class Wide(nn.Module):
    """Two weights of 320 × 320 elements, one of them frozen, and a bias of 320."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(320, 320, bias=False), nn.Linear(320, 320)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.trained(self.frozen(x)).sum()
        return out


class Idle(nn.Module):
    """A weight that is used beside one that is not, and that has neither gradient nor state."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(8, 8), nn.Linear(320, 320)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x).sum()
        return out


def test_a_weight_that_is_never_used_has_no_gradient_and_no_state() -> None:
    pytest.importorskip("bitsandbytes")
    predictor = Predictor(FOUR, source(Idle()), {"x": ((8,), torch.float32)}, CARD)
    states = [OnDevice(), OnHost(), Paged(), EightBit(), PagedEightBit()]
    assert_never_too_much(predictor, [Plan(micro_batch_size=4, optimizer_state=state) for state in states])


LARGE, BIAS = 320 * 320, 320
WEIGHTS, TRAINED = 4 * (2 * LARGE + BIAS), LARGE + BIAS


@pytest.mark.parametrize(
    ("state", "during", "on_device", "on_host"),
    [
        (OnDevice(), False, WEIGHTS + 12 * TRAINED, 0),
        (OnDevice(), True, WEIGHTS + 8 * TRAINED, 0),
        (OnHost(), False, WEIGHTS, 12 * TRAINED),
        (OnHost(), True, WEIGHTS, 8 * TRAINED),
        # Managed memory is for weights of 100,000 elements and more.
        (Paged(), False, WEIGHTS + 4 * TRAINED, 8 * LARGE),
        (EightBit(), False, WEIGHTS + 6 * TRAINED, 0),
        (PagedEightBit(), False, WEIGHTS + 4 * TRAINED, 2 * LARGE),
    ],
    ids=str,
)
def test_a_plan_of_which_nothing_alike_was_simulated_takes_weights_gradients_and_state(
    state: Any, during: bool, on_device: int, on_host: int
) -> None:
    predictor = Predictor(FOUR, source(Wide()), {"x": ((320,), torch.float32)}, CARD)
    update = DuringBackward() if during else AfterBackward()
    plan = Plan(micro_batch_size=4, update=update, optimizer_state=state)
    other = Plan(micro_batch_size=1)
    predictor.trace(other)
    assert (predictor.least_bytes(plan), predictor.least_host_bytes(plan)) == (on_device, on_host)
    assert list(predictor._simulated) == [other]


def test_what_was_simulated_with_every_activation_kept_bounds_what_recomputes() -> None:
    predictor = Predictor(FOUR, small_llama(), ROWS, CARD)
    kept, recomputed = Plan(micro_batch_size=4), Plan(micro_batch_size=4, activations=Recompute(2))
    before = predictor.least_bytes(recomputed)
    timeline = MemoryTimeline(predictor.trace(kept))
    # Of blocks 1 and 3 what they saved is gone, of all else nothing.
    saved = sum(
        event.bytes
        for event in timeline.live_at(timeline.peak_position)
        if event.module.startswith(("model.layers.1", "model.layers.3")) and event.kind == "saved activation"
    )
    assert saved > 0
    assert predictor.least_bytes(recomputed) == timeline.peak_bytes - saved > before
    assert list(predictor._simulated) == [kept]


def test_the_first_blocks_are_bounded_by_fewer_of_them_and_parts_by_what_they_hold() -> None:
    predictor = Predictor(FOUR, small_llama(), ROWS, CARD)
    kept = Plan(micro_batch_size=4)

    def least(activations: Any) -> int:
        return predictor.least_bytes(dataclasses.replace(kept, activations=activations))

    def held(plan: Plan, *paths: str) -> int:
        timeline = MemoryTimeline(predictor.trace(plan))
        live = [event for event in timeline.live_at(timeline.peak_position) if event.kind == "saved activation"]
        return sum(event.bytes for event in live if any(path in f".{event.module}." for path in paths))

    def peak(plan: Plan) -> int:
        return MemoryTimeline(predictor.trace(plan)).peak_bytes

    whole = peak(kept)
    assert least(RecomputeFirst(2)) == whole - held(kept, ".layers.0.", ".layers.1.")
    assert least(RecomputeAttention()) == whole - held(kept, ".self_attn.")
    assert least(RecomputeMlp()) == whole - held(kept, ".mlp.")
    # Products are kept: only what follows from them is gone.
    assert whole - held(kept, ".layers.") < least(RecomputeSelective()) < whole
    # Nearer to the truth once one block less is known: of what is freed a block's input stays.
    before, one = least(RecomputeFirst(2)), dataclasses.replace(kept, activations=RecomputeFirst(1))
    nearer = peak(one) - held(one, ".layers.1.")
    assert before < nearer == least(RecomputeFirst(2))


def test_nothing_of_the_hosts_is_on_the_device() -> None:
    predictor = Predictor(FOUR, small_llama(), ROWS, CARD)
    trace = predictor.trace(Plan(micro_batch_size=4, optimizer_state=OnHost()))
    assert not [event for event in trace.events if event.place == DEVICE and event.kind == "optimizer state"]


# ---------------------------------------------------------------------------------------------- the cost model


def test_the_parameters_that_are_updated_are_those_that_require_gradients() -> None:
    built = CASES["plain_module"].build()
    next(built.build().parameters()).requires_grad = False
    predictor = Predictor(JOB, built, shapes_of(CASES["plain_module"]), PROCESSOR)
    cost = predictor.cost_model(lambda size: Plan(micro_batch_size=size), [1, 2])
    trainable = [parameter for parameter in built.build().parameters() if parameter.requires_grad]
    assert (cost.parameters, cost.parameter_bytes) == (len(trainable), sum(parameter.nbytes for parameter in trainable))
    assert cost.elements == sum(parameter.numel() for parameter in trainable)
    assert cost.blocks == 6


@pytest.mark.parametrize(("sizes", "measured"), [([1, 2, 4], (1, 2)), ([4], (4, 4)), ([2, 16], (2, 16))])
def test_the_work_is_measured_at_the_two_smallest_sizes(sizes: list[int], measured: tuple[int, int]) -> None:
    predictor = Predictor(JOB, CASES["plain_module"].build(), shapes_of(CASES["plain_module"]), PROCESSOR)
    cost = predictor.cost_model(lambda size: Plan(micro_batch_size=size), sizes)
    assert (cost.small_size, cost.large_size) == measured
    assert {plan.micro_batch_size for plan in predictor._simulated} == set(measured)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_work_of_a_micro_batch_is_the_same_however_many_are_simulated(steps: int) -> None:
    job = dataclasses.replace(FOUR, steps=steps)
    predictor = Predictor(job, CASES["plain_module"].build(), shapes_of(CASES["plain_module"]), PROCESSOR)
    cost = predictor.cost_model(lambda size: Plan(micro_batch_size=size), [2, 4])
    # Twelve products forward, each of 10 × 24 × 48 per row, and but for the input's twice as many backward.
    product = 2 * 10 * 24 * 48
    for work, rows in ((cost.small, 2), (cost.large, 4)):
        assert work[Phase.FORWARD].flops == rows * 12 * product
        assert work[Phase.BACKWARD].flops == rows * 23 * product


def test_the_device_computes_no_more_where_the_state_is_on_the_host() -> None:
    predictor = Predictor(FOUR, small_llama(), ROWS, CARD)

    def work(state: Any) -> Any:
        cost = predictor.cost_model(lambda size: Plan(micro_batch_size=size, optimizer_state=state), [2, 4])
        return {phase: (work.flops, work.operators) for phase, work in cost.small.items()}

    beside, elsewhere = work(OnDevice()), work(OnHost())
    assert {phase: flops for phase, (flops, _) in beside.items()} == {phase: flops for phase, (flops, _) in elsewhere.items()}
