"""A gradient that is not finite changes no weight and no state, with every plan, and the run goes on as if it had not been."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from cards import CPU
from test_parity import both
from test_parity import cases as plans_and_jobs
from test_search import Told, budget
from torch import Tensor, nn
from toys import CASES, Mlp, batch

from memtrain.check import PlanRefused
from memtrain.features.host_state import update_on_host_
from memtrain.features.update import Update, update_after_backward
from memtrain.job import Job, NotFinite, Optimizer
from memtrain.plan import AfterBackward, DuringBackward, EightBit, Foreach, OnHost, Plan
from memtrain.planner.search import choose
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Bf16Master, Fp32, Precision, Rounding
from memtrain.run import Run, StepResult, prepare
from memtrain.trace.event import Phase
from memtrain.trace.simulate import DatalessRecorder

# No dropout, and an output layer of its own, so that a spoilt embedding is met by the rows that hold its token alone.
QWEN = CASES["qwen3"]
JOB = Job(model="toy", global_batch_size=4, steps=4)
SKIPPING = dataclasses.replace(JOB, max_grad_norm=None, on_not_finite=NotFinite.SKIP)
NAN, INFINITY = float("nan"), float("inf")


def run_of(job: Job, plan: Plan) -> Run:
    """A run whose first four rows are sound; the fifth to eighth hold a token whose embedding is NaN."""
    torch.manual_seed(0)
    model = QWEN.build().load(torch.bfloat16 if isinstance(job.precision, Bf16 | Bf16Master) else torch.float32)
    sound, spoilt = (set(batch(QWEN, 4, first)["input_ids"].flatten().tolist()) for first in (0, 4))
    with torch.no_grad():
        model.get_input_embeddings().weight[min(spoilt - sound)] = NAN  # type: ignore[operator]
    return prepare(job, plan, model)


def step(run: Run, plan: Plan, *, first: int = 0) -> StepResult:
    """A step on the four rows from ``first``."""
    return run.step([batch(QWEN, plan.micro_batch_size, start) for start in range(first, first + 4, plan.micro_batch_size)])


def bits(run: Run) -> dict[str, bytes]:
    """Weights and state as bytes, so that NaN is equal to itself."""
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    held: dict[str, Any] = dict(run.model.named_parameters())
    for parameter, state in run.optimizer.state.items():
        held |= {f"{names[parameter]}/{name}": value for name, value in state.items()}
    return {name: _bytes(value) for name, value in held.items()}


def _bytes(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    return value.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_left_out(job: Job, plan: Plan) -> None:
    """A step whose loss is NaN changes nothing, with state there or not, and what comes after it is what would have come."""
    run, undisturbed = run_of(job, plan), run_of(job, plan)
    for number in range(2):
        before, scaler = bits(run), run.scaler.state_dict()
        result = step(run, plan, first=4)
        assert result.loss.isnan()
        assert result.grad_norm is None or not result.grad_norm.isfinite()
        assert not result.updated
        assert bits(run) == before
        assert all(parameter.grad is None for parameter in run.model.parameters())
        # What a caller does who knows that no smaller scale helps; no-op without a scale.
        run.scaler.load_state_dict(scaler)
        torch.manual_seed(number)
        expected = step(undisturbed, plan)
        torch.manual_seed(number)
        result = step(run, plan)
        assert result.updated
        assert torch.equal(result.loss, expected.loss)
        assert bits(run) == bits(undisturbed) != before
    assert run.scaler.state_dict() == undisturbed.scaler.state_dict()


def plans() -> Iterator[Any]:
    """Every plan that updates after backward, as the parity tests go through them."""
    for one in plans_and_jobs():
        plan, job = one.values
        if isinstance(plan.update, AfterBackward) and plan.ranks == 1:
            yield pytest.param(plan, dataclasses.replace(job, steps=4, global_batch_size=4), id=one.id, marks=one.marks)


@pytest.mark.parametrize(("plan", "job"), list(plans()))
def test_with_every_plan_a_step_that_is_not_finite_is_left_out(plan: Plan, job: Job) -> None:
    assert_left_out(dataclasses.replace(job, max_grad_norm=1.0), plan)


UPDATES = [
    Plan(micro_batch_size=2),
    Plan(micro_batch_size=2, optimizer_kernel=Foreach()),
    Plan(micro_batch_size=2, optimizer_state=OnHost()),
    Plan(micro_batch_size=4, optimizer_state=EightBit()),
]


@pytest.mark.parametrize("plan", UPDATES, ids=str)
def test_without_clipping_it_is_left_out_where_that_is_asked_for(plan: Plan) -> None:
    assert_left_out(dataclasses.replace(SKIPPING, allow=frozenset({"eight_bit_state"})), plan)


@pytest.mark.parametrize("rule", get_args(Optimizer))
@pytest.mark.parametrize("state", [None, OnHost()], ids=["on the device", "on the host"])
def test_with_every_optimizer_it_is_left_out(rule: type[Optimizer], state: OnHost | None) -> None:
    plan = Plan(micro_batch_size=4) if state is None else Plan(micro_batch_size=4, optimizer_state=state)
    assert_left_out(dataclasses.replace(JOB, optimizer=rule()), plan)


@pytest.mark.parametrize("precision", [AutocastFp16(), AutocastBf16(), Bf16Master(), *map(Bf16, Rounding)], ids=str)
@pytest.mark.parametrize("job", [JOB, SKIPPING], ids=["clipped", "unclipped and skipping"])
def test_in_every_precision_it_is_left_out(job: Job, precision: Precision) -> None:
    assert_left_out(dataclasses.replace(job, precision=precision), Plan(micro_batch_size=2))


def test_a_scaled_loss_leaves_it_out_without_clipping_and_a_norm() -> None:
    plan = Plan(micro_batch_size=2)
    job = dataclasses.replace(JOB, max_grad_norm=None, precision=AutocastFp16())
    assert_left_out(job, plan)
    assert step(run_of(job, plan), plan).grad_norm is None


# ---------------------------------------------------------------------------------------------- what stays as it was


@pytest.mark.parametrize(
    "plan", [Plan(micro_batch_size=4), Plan(micro_batch_size=4, optimizer_state=OnHost()), UPDATES[1]], ids=str
)
def test_skipping_without_clipping_trains_what_is_trained_without_it_and_tells_the_norm(plan: Plan) -> None:
    skips, plain = run_of(SKIPPING, plan), run_of(dataclasses.replace(SKIPPING, on_not_finite=NotFinite.STOP), plan)
    for _ in range(2):
        norm = step(skips, plan).grad_norm
        assert step(plain, plan).grad_norm is None
        assert norm is not None
        assert (norm.shape, norm.item() > 0) == ((), True)
    assert bits(skips) == bits(plain)


@pytest.mark.parametrize("update", [AfterBackward(), DuringBackward()], ids=str)
def test_without_a_norm_the_weights_are_spoilt_and_the_step_says_that_it_changed_them(update: Any) -> None:
    plan = Plan(micro_batch_size=4, update=update)
    run = run_of(dataclasses.replace(JOB, max_grad_norm=None), plan)
    result = step(run, plan, first=4)
    assert result.loss.isnan()
    assert (result.grad_norm, result.updated) == (None, True)
    assert any(weight.isnan().any() for name, weight in run.model.named_parameters() if "embed_tokens" not in name)


def test_running_statistics_cannot_leave_a_step_out() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).square().mean()  # type: ignore[no-any-return]

    sentence = "norm counts each forward in its running statistics, and a step that is left out would stay in them: "
    with pytest.raises(PlanRefused, match=f"^{sentence}set on_not_finite to stop\\.$"):
        prepare(SKIPPING, Plan(micro_batch_size=4), Normalised())


# ---------------------------------------------------------------------------------------------- the norm decides


def on_device(optimizer: torch.optim.Optimizer, bound: float | None) -> Callable[[], Update]:
    return update_after_backward(optimizer, bound)


def on_host(optimizer: torch.optim.Optimizer, bound: float | None) -> Callable[[], Update]:
    return update_on_host_(optimizer, bound)[0]


@pytest.mark.parametrize("prepared", [on_device, on_host])
@pytest.mark.parametrize("bound", [1.0, INFINITY])
@pytest.mark.parametrize(
    ("gradients", "norm"),
    [((1.0, NAN), NAN), ((INFINITY, 1.0), INFINITY), ((-INFINITY, NAN), NAN), ((1e38, 3e38), INFINITY)],
)
def test_one_value_or_a_sum_that_is_not_finite_is_enough(
    prepared: Callable[..., Callable[[], Update]], bound: float, gradients: tuple[float, float], norm: float
) -> None:
    weights = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD(weights, lr=1.0, momentum=0.5)
    update = prepared(optimizer, bound)
    sum(weight.sum() * gradient for weight, gradient in zip(weights, gradients, strict=True)).backward()  # type: ignore[union-attr]
    found, updated = update()
    assert found is not None
    assert (str(found.item()), updated) == (str(norm), False)
    assert [weight.item() for weight in weights] == [1.0, 1.0]
    assert not optimizer.state
    # The next gradient is not added to what was left.
    (3.0 * weights[0].sum() + 4.0 * weights[1].sum()).backward()
    assert update() == (5.0, True)


@pytest.mark.parametrize("prepared", [on_device, on_host])
def test_an_infinite_bound_clips_nothing_and_tells_the_norm(prepared: Callable[..., Callable[[], Update]]) -> None:
    weight = nn.Parameter(torch.zeros(2))
    update = prepared(torch.optim.SGD([weight], lr=1.0), INFINITY)
    (weight * torch.tensor([3e6, 4e6])).sum().backward()
    assert update() == (5e6, True)
    assert weight.tolist() == [-3e6, -4e6]


def test_without_a_bound_an_infinity_goes_into_the_weights() -> None:
    weight = nn.Parameter(torch.zeros(1))
    update = update_after_backward(torch.optim.SGD([weight], lr=1.0), None)
    weight.grad = torch.tensor([INFINITY])
    assert update() == (None, True)
    assert weight.item() == -INFINITY


def test_a_scale_is_not_lowered_for_a_norm_that_overflows_by_itself() -> None:
    job = dataclasses.replace(JOB, precision=AutocastFp16(initial_scale=8.0))
    run = run_of(job, Plan(micro_batch_size=4))
    weights = list(run.model.parameters())
    before = bits(run)
    run.scaler.scale(torch.ones(()))
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e38)
    norm, updated = run.update()
    assert norm is not None
    assert (norm.item(), updated, run.scaler.get_scale()) == (INFINITY, False, 8.0)
    assert bits(run) == before


# ---------------------------------------------------------------------------------------------- the simulation


@pytest.mark.parametrize(
    "job",
    [
        SKIPPING,
        JOB,
        dataclasses.replace(JOB, precision=AutocastFp16()),
        dataclasses.replace(SKIPPING, precision=AutocastFp16()),
        dataclasses.replace(SKIPPING, on_not_finite=NotFinite.STOP, precision=AutocastFp16()),
        dataclasses.replace(SKIPPING, precision=Bf16Master()),
    ],
    ids=lambda job: f"{job.precision} {job.on_not_finite} {job.max_grad_norm}",
)
def test_the_simulated_step_does_what_the_real_one_does_and_nothing_is_assumed(job: Job) -> None:
    for plan in (Plan(micro_batch_size=2), *(UPDATES[1:3] if isinstance(job.precision, Fp32) else ())):
        _, predicted = both(CASES["llama"], job, plan)
        assert predicted.assumed == ()


def test_only_what_decides_on_an_update_is_no_assumption() -> None:
    weight = nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def assumed_of(ask: Callable[[], object], phase: Phase) -> list[str]:
        recorder = DatalessRecorder(CPU)
        with recorder, recorder.phase(phase):
            ask()
        return list(recorder.assumed)

    def norm() -> float:
        return weight.detach().norm().item()

    said = ["a float32 value that only data can tell was taken for 0.0"]
    assert assumed_of(norm, Phase.UPDATE) == []
    assert assumed_of(norm, Phase.FORWARD) == said
    weight.grad = torch.empty_like(weight)

    def asked_by_the_optimizer(*_: object) -> None:
        norm()

    optimizer.register_step_post_hook(asked_by_the_optimizer)
    # What an optimizer multiplies by, as Adafactor does.
    assert assumed_of(optimizer.step, Phase.UPDATE) == said
    assert assumed_of(lambda: (weight.detach() > 0).all().item(), Phase.UPDATE) != []


# ---------------------------------------------------------------------------------------------- the planner


def test_skipping_takes_the_update_after_backward() -> None:
    def takes(plan: Plan) -> int:
        return 1000 if isinstance(plan.update, DuringBackward) else 2000

    stops = dataclasses.replace(SKIPPING, on_not_finite=NotFinite.STOP)
    assert choose(Told(stops, takes), budget(1500)).plan.update == DuringBackward()
    assert choose(Told(SKIPPING, takes), budget(2500)).plan.update == AfterBackward()
    with pytest.raises(PlanRefused, match=r"^an update during backward changes weights .* on_not_finite skip comes too late"):
        prepare(SKIPPING, Plan(micro_batch_size=4, update=DuringBackward()), Mlp())
