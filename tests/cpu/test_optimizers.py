"""Every optimizer of a job: the numbers are torch's own, simulated and real updates are alike, and state has its exact bytes."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from test_kernels_cpu import CPU, allocated_inside, dataless
from test_parity import assert_alike
from test_same_numbers import JOB, PLAIN, ROWS, assert_same
from torch import Tensor, nn
from toys import CASES, batch, without_dropout

from memtrain.check import PlanRefused, check
from memtrain.features.bitsandbytes_adamw import bitsandbytes_lion
from memtrain.features.lion import lion
from memtrain.features.muon import hidden_matrices, muon
from memtrain.features.update import update_during_backward_
from memtrain.job import Adafactor, Adam, AdamW, Approximation, Job, Lion, Muon, Optimizer, Sgd
from memtrain.plan import DuringBackward, EightBit, Foreach, OnHost, Paged, PagedEightBit, Plan
from memtrain.precision import Bf16, Fp32
from memtrain.run import prepare
from memtrain.schema import ALTERNATIVES
from memtrain.trace.event import MANAGED, Kind
from memtrain.trace.kernels import scratch_bytes
from memtrain.trace.managed import paged_state
from memtrain.trace.simulate import DatalessRecorder

TOYS = ["llama", "plain_module"]
OPTIMIZERS: dict[type, Optimizer] = {
    AdamW: AdamW(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-6),
    Adam: Adam(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-6),
    Sgd: Sgd(learning_rate=1e-2, weight_decay=0.1, momentum=0.8),
    Adafactor: Adafactor(learning_rate=1e-2, weight_decay=0.1, beta2_decay=-0.7, min_scale=1e-2, clip_threshold=1.5),
    Lion: Lion(learning_rate=1e-3, weight_decay=0.1, betas=(0.8, 0.95)),
    Muon: Muon(learning_rate=1e-2, weight_decay=0.1, momentum=0.9, betas=(0.9, 0.95), eps=1e-6),
}
WITH_FOREACH = (AdamW, Adam, Sgd)


def job_of(optimizer: Optimizer, **changed: Any) -> Job:
    return dataclasses.replace(JOB, optimizer=optimizer, **changed)


def test_every_optimizer_is_tested_and_can_be_chosen_by_its_name() -> None:
    assert OPTIMIZERS.keys() == set(get_args(Optimizer))
    classes = ALTERNATIVES["optimizer"].classes
    assert set(classes.values()) == OPTIMIZERS.keys()
    assert list(classes) == ["adamw", "adam", "sgd", "adafactor", "lion", "muon"]


# ---------------------------------------------------------------------------------------------- numbers


def of_torch(rule: Optimizer, model: nn.Module, fused: bool) -> list[torch.optim.Optimizer]:
    """torch's own classes over the groups that the page promises."""
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    form: dict[str, Any] = {"fused": fused, "foreach": not fused}
    match rule:
        case AdamW():
            return [torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, **form)]
        case Adam():
            return [torch.optim.Adam(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, **form)]
        case Sgd():
            return [torch.optim.SGD(groups, lr=1e-2, momentum=0.8, **form)]
        case Adafactor():
            return [torch.optim.Adafactor(groups, lr=1e-2, beta2_decay=-0.7, eps=(None, 1e-2), d=1.5, foreach=False)]
        case Muon():
            # The toy has neither an embedding nor an output layer that it names.
            orthogonal = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
            rest = torch.optim.AdamW(vectors, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0, fused=True)
            return [orthogonal, rest]
        case Lion():
            raise AssertionError("torch has no Lion")


@pytest.mark.parametrize(
    ("rule", "fused"),
    [(rule, fused) for rule in OPTIMIZERS if rule is not Lion for fused in (True, False) if fused or rule in WITH_FOREACH],
)
def test_a_run_trains_what_a_loop_with_torchs_own_class_trains_to_the_bit(rule: type, fused: bool) -> None:
    case, plan = CASES["plain_module"], PLAIN if fused else dataclasses.replace(PLAIN, optimizer_kernel=Foreach())
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(without_dropout(case.build().load()))
    run = prepare(job_of(OPTIMIZERS[rule]), plan, models[0])
    optimizers = of_torch(OPTIMIZERS[rule], models[1], fused)
    for number in range(4):
        rows = batch(case, ROWS, number * ROWS)
        # As a schedule does it.
        for group in [group for one in (run.optimizer, *optimizers) for group in one.param_groups]:
            group["lr"] = 1e-2 / (number + 1)
        loss = models[1](**rows)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(run.step([rows]).loss, loss)
    for weight, same in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(weight, same)


def test_two_steps_of_lion_are_those_of_the_paper() -> None:
    """Decay by 0.5 × 0.1, then half a unit against the sign of the mixture; the momentum takes 0.1 of each gradient."""
    weight = nn.Parameter(torch.tensor([[2.0, -1.0]]))
    vector = nn.Parameter(torch.tensor([2.0]))
    optimizer = lion([weight, vector], learning_rate=0.5, betas=(0.5, 0.9), weight_decay=0.1)
    weight.grad, vector.grad = torch.tensor([[1.0, -2.0]]), torch.tensor([1.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([[2.0 * 0.95 - 0.5, -1.0 * 0.95 + 0.5]]))
    assert vector.tolist() == [1.5]
    torch.testing.assert_close(optimizer.state[weight]["momentum"], torch.tensor([[0.1, -0.2]]))
    # Mixtures of 0.5 × 0.1 - 0.5 × 0.05 and of 0.5 × -0.2 + 0.5 × 0.4.
    weight.grad, vector.grad = torch.tensor([[-0.05, 0.4]]), None
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([[1.4 * 0.95 - 0.5, -0.45 * 0.95 - 0.5]]))
    assert vector.tolist() == [1.5]


def test_lion_is_that_of_bitsandbytes_up_to_rounding() -> None:
    pytest.importorskip("bitsandbytes")
    rule: dict[str, Any] = {"learning_rate": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.3}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    other = copy.deepcopy(model)
    optimizers = (
        lion(model.parameters(), **rule),
        bitsandbytes_lion(other.parameters(), **rule, bits=32, memory="device"),
    )
    for number in range(5):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        for trained, optimizer in zip((model, other), optimizers, strict=True):
            trained(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for weight, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight, same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize(
    "plan",
    [
        dataclasses.replace(PLAIN, update=DuringBackward()),
        dataclasses.replace(PLAIN, optimizer_state=OnHost()),
        dataclasses.replace(PLAIN, update=DuringBackward(), optimizer_state=OnHost()),
    ],
    ids=str,
)
def test_during_backward_and_on_the_host_every_optimizer_trains_the_same_bits(name: str, rule: type, plan: Plan) -> None:
    assert_same(CASES[name], job_of(OPTIMIZERS[rule]), plan, exact=True)


# ---------------------------------------------------------------------------------------------- memory


def plans(rule: type) -> Iterator[Plan]:
    yield Plan(micro_batch_size=2)
    yield Plan(micro_batch_size=4, update=DuringBackward())
    yield Plan(micro_batch_size=2, optimizer_state=OnHost())
    if rule in WITH_FOREACH:
        yield Plan(micro_batch_size=2, optimizer_kernel=Foreach())
    if rule in (AdamW, Adam, Lion):
        yield Plan(micro_batch_size=2, optimizer_state=EightBit())


@pytest.mark.parametrize(
    ("name", "precision"),
    [("llama", Fp32()), ("llama", Bf16()), ("plain_module", Fp32())],
    ids=["llama in fp32", "llama in bf16", "plain_module"],
)
@pytest.mark.parametrize(
    ("rule", "plan"), [pytest.param(rule, plan, id=f"{rule.__name__} {plan}") for rule in OPTIMIZERS for plan in plans(rule)]
)
def test_the_simulated_update_of_every_optimizer_allocates_what_the_real_one_allocates(
    name: str, precision: Any, rule: type, plan: Plan
) -> None:
    optimizer = OPTIMIZERS[rule]
    if isinstance(plan.optimizer_state, EightBit) and rule is Adam:
        optimizer = Adam(learning_rate=1e-2)
    clips = None if isinstance(plan.update, DuringBackward) else 1.0
    job = Job(
        model="toy",
        global_batch_size=4,
        steps=2,
        optimizer=optimizer,
        precision=precision,
        max_grad_norm=clips,
        allow=frozenset(Approximation),
    )
    assert_alike(CASES[name], job, plan)


class Tiny(nn.Module):
    """An embedding of 10 × 4, a hidden matrix of 8 × 4, its 8 biases, and a head of 10 × 8 that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(10, 4), nn.Linear(4, 8), nn.Linear(8, 10, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(self.embedding(x))).square().mean()
        return out


@pytest.mark.parametrize(
    ("optimizer", "elements", "scalars"),
    [
        # 40 + 32 + 8 + 80 elements; a scalar counts the steps of each of four parameters.
        (AdamW(), 2 * 160, 4),
        (Adam(), 2 * 160, 4),
        (Sgd(), 160, 0),
        (Sgd(momentum=0.0), 0, 0),
        # A row and a column of each matrix, and the biases.
        (Adafactor(), (10 + 4) + (8 + 4) + 8 + (10 + 8), 4),
        (Lion(), 160, 0),
        # One moment of the hidden matrix and two of the others, whose steps are counted.
        (Muon(), 32 + 2 * (40 + 8 + 80), 3),
    ],
    ids=lambda value: str(value) if isinstance(value, get_args(Optimizer)) else None,
)
def test_the_state_has_its_exact_bytes(optimizer: Optimizer, elements: int, scalars: int) -> None:
    model = Tiny()
    run = prepare(dataclasses.replace(JOB, optimizer=optimizer, global_batch_size=1), Plan(micro_batch_size=1), model)
    run.step([{"x": torch.tensor([[1, 2, 3]])}])
    held = [value for state in run.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert sum(tensor.nbytes for tensor in held if tensor.dim()) == 4 * elements
    assert sum(tensor.nbytes for tensor in held if not tensor.dim()) == 4 * scalars


def test_8_bit_lion_takes_a_byte_and_a_scale_per_256_values() -> None:
    pytest.importorskip("bitsandbytes")
    weight = nn.Parameter(torch.zeros(64, 100))
    optimizer = bitsandbytes_lion([weight], learning_rate=0.01, betas=(0.9, 0.99), weight_decay=0.0, bits=8, memory="device")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = {name: value.nbytes for name, value in optimizer.state[weight].items() if isinstance(value, Tensor)}
    assert held == {"state1": 6400, "absmax1": 4 * 25, "qmap1": 4 * 256}


def test_paged_lion_has_its_momentum_in_managed_memory() -> None:
    pytest.importorskip("bitsandbytes")
    model = nn.Linear(400, 250, bias=False, device="meta")
    rule: dict[str, Any] = {"learning_rate": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizer = bitsandbytes_lion(model.parameters(), **rule, bits=32, memory="managed")
    with paged_state(), DatalessRecorder(CPU, model) as recorder:
        model.weight.grad = torch.empty_like(model.weight)
        optimizer.step()
    state = [event for event in recorder.trace().events if event.kind is Kind.OPTIMIZER_STATE]
    assert [(event.bytes, event.place) for event in state] == [(400_000, MANAGED)]


def test_8_bit_lion_allocates_inside_itself_what_the_row_of_the_kernel_table_says() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")

    for dtype in (torch.float32, torch.bfloat16):
        weight, gradient = torch.randn(64, 80, dtype=dtype), torch.randn(64, 80, dtype=dtype)
        momentum, scales = torch.zeros(64, 80, dtype=torch.uint8), torch.zeros(64 * 80 // 256)
        table = functional.create_dynamic_map(signed=True)
        rule = (0.9, 0.99, 0.0, 0.0, 0.0, 1, 1e-3)
        args = ("lion", gradient, weight, momentum, None, *rule, table, None, scales, None, 0.1, 1.0, False)
        operator = torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.default
        assert scratch_bytes(CPU, operator, tuple(map(dataless, args)), {}) == allocated_inside(operator, args, {}) > 0


# ---------------------------------------------------------------------------------------------- Muon's two rules


@pytest.mark.parametrize("name", ["llama", "gpt2_with_dropout", "t5"])
def test_muon_takes_the_matrices_between_the_embeddings_and_the_head(name: str) -> None:
    model = CASES[name].build().load()
    chosen = {id(matrix) for matrix in hidden_matrices(model)}
    names = {name for name, weight in model.named_parameters() if id(weight) in chosen}
    others = {name for name, weight in model.named_parameters() if weight.dim() == 2} - names
    assert names
    assert all(re.search(r"embed|wte|wpe|shared|lm_head|relative_attention_bias", name) for name in others)
    assert not any(re.search(r"embed|wte|wpe|shared|lm_head|relative_attention_bias", name) for name in names)


def test_each_rule_of_muon_has_its_groups_and_a_frozen_weight_has_none() -> None:
    model = Tiny()
    model.head.weight.requires_grad_(False)
    optimizer = muon_of(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        (group["rule"], group["weight_decay"], [names[id(parameter)] for parameter in group["params"]])
        for group in optimizer.param_groups
    ]
    assert groups == [
        ("muon", 0.3, ["hidden.weight"]),
        ("adamw", 0.3, ["embedding.weight"]),
        ("adamw", 0.0, ["hidden.bias"]),
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01] * 3


@pytest.mark.parametrize("layer", [nn.Linear(3, 2, bias=False), nn.LayerNorm(3)], ids=["muon alone", "adamw alone"])
def test_muon_trains_a_model_that_needs_one_of_its_rules(layer: nn.Module) -> None:
    before = [weight.detach().clone() for weight in layer.parameters()]
    optimizer = muon_of(layer)
    layer(torch.tensor([[1.0, 2.0, 4.0]])).square().sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, layer.parameters(), before))


def muon_of(model: nn.Module) -> torch.optim.Optimizer:
    return muon(model, learning_rate=0.01, momentum=0.9, weight_decay=0.3, betas=(0.9, 0.99), eps=1e-6)


def lion_of(model: nn.Module) -> torch.optim.Optimizer:
    return lion(model.parameters(), learning_rate=0.01, betas=(0.9, 0.99), weight_decay=0.3)


@pytest.mark.parametrize("made_by", [muon_of, lion_of])
def test_a_state_that_was_saved_goes_on_where_it_was(made_by: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = made_by(model)
    update_during_backward_(optimizer)
    x = torch.tensor([[1, 2, 3]])
    model(x).backward()
    # A copy has the weights and none of the hooks.
    resumed = Tiny()
    resumed.load_state_dict(model.state_dict())
    loaded = made_by(resumed)
    # Loading does not copy.
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model(x).backward()
    resumed(x).backward()
    loaded.step()
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("rule", [rule for rule in OPTIMIZERS if rule not in WITH_FOREACH])
def test_a_rule_that_is_run_weight_by_weight_has_no_foreach_form(rule: type) -> None:
    sentence = (
        f"optimizer {rule.__name__} is run weight by weight, and a foreach update takes all weights at once: "
        f"set optimizer_kernel to fused."
    )
    with pytest.raises(PlanRefused, match=f"^{re.escape(sentence)}$"):
        check(dataclasses.replace(PLAIN, optimizer_kernel=Foreach()), job_of(OPTIMIZERS[rule]))


@pytest.mark.parametrize("rule", [Sgd, Adafactor, Muon])
@pytest.mark.parametrize("state", [EightBit(), Paged(), PagedEightBit()], ids=str)
def test_state_that_bitsandbytes_updates_is_refused_for_other_rules(rule: type, state: Any) -> None:
    sentence = (
        f"optimizer state {state} is there for AdamW, Adam and Lion, and the optimizer is {rule.__name__}: "
        f"set optimizer_state to on_device or on_host, or take one of these."
    )
    with pytest.raises(PlanRefused, match=f"^{re.escape(sentence)}$"):
        check(dataclasses.replace(PLAIN, optimizer_state=state), job_of(OPTIMIZERS[rule], allow=frozenset(Approximation)))


def test_a_weight_decay_in_the_gradient_is_refused_where_bitsandbytes_updates() -> None:
    sentence = (
        "optimizer state in 8 bits is updated by bitsandbytes, which decays weights as AdamW does, and Adam's weight_decay 0.1 "
        "is a part of the gradient: set weight_decay to 0, or optimizer to adamw."
    )
    plan = dataclasses.replace(PLAIN, optimizer_state=EightBit())
    with pytest.raises(PlanRefused, match=f"^{re.escape(sentence)}$"):
        check(plan, job_of(OPTIMIZERS[Adam], allow=frozenset(Approximation)))
    check(plan, job_of(Adam(), allow=frozenset(Approximation)))
