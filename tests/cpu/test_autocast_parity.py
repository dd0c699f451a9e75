"""Autocast as a feature: what it does to a model, and the simulated step in 16 bits against the real one, event by event."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from test_chunked_loss import LABELS, gradients, parts, whole
from test_parity import assert_alike
from torch import Tensor, nn
from toys import CASES, Case, batch, without_dropout

from memtrain.features import chunked_loss
from memtrain.features.autocast import autocast_, tf32_
from memtrain.features.chunked_loss import chunk_loss_, chunked_cross_entropy
from memtrain.job import Job
from memtrain.models.build import source
from memtrain.models.objective import objective
from memtrain.plan import ChunkedLogits, Foreach, Plan, Recompute
from memtrain.precision import AutocastBf16, AutocastFp16
from memtrain.run import prepare
from memtrain.trace.event import Kind, Phase, Trace
from memtrain.trace.simulate import dataless_model

IN_BF16, IN_FP16 = (
    Job(model="toy", global_batch_size=4, steps=2, precision=precision) for precision in (AutocastBf16(), AutocastFp16())
)
PLANS = [
    Plan(micro_batch_size=2),
    Plan(micro_batch_size=2, activations=Recompute(1)),
    Plan(micro_batch_size=2, loss=ChunkedLogits(16), optimizer_kernel=Foreach()),
]


def casts(trace: Trace) -> int:
    return sum(event.operator == "_to_copy" for event in trace.events)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_under_autocast_the_simulated_step_allocates_what_the_real_step_allocates(name: str, plan: Plan) -> None:
    case = CASES[name]
    if isinstance(plan.loss, ChunkedLogits) and chunked_loss.refusal(dataless_model(case.build())) is not None:
        pytest.skip(f"the loss of {name} is refused for chunking")
    predicted = assert_alike(case, IN_BF16, plan)
    assert casts(predicted) > 100
    assert bool(predicted.assumed) == ("attention_mask" in case.row(0))


@pytest.mark.parametrize("name", ["llama", "gpt2_with_dropout"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_in_fp16_with_a_scaled_loss_the_simulated_step_allocates_what_the_real_step_allocates(name: str, plan: Plan) -> None:
    predicted = assert_alike(CASES[name], IN_FP16, plan)
    # The scale's inverse is taken in double precision, once in each update.
    inverses = [event.phase for event in predicted.events if event.operator == "reciprocal" and event.bytes == 8]
    assert inverses == [Phase.FIRST_UPDATE, Phase.UPDATE]
    assert casts(predicted) > 100


class Normalised(nn.Module):
    """Norms whose input is in 16 bits and whose weights are in 32."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.groups = nn.Conv1d(12, 12, 3, padding=1), nn.GroupNorm(3, 12)
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.norm(self.linear(self.groups(self.convolution(x)))), x)


def test_norms_of_16_bits_with_weights_of_32_keep_their_statistics_in_32() -> None:
    def rows(number: int) -> dict[str, Tensor]:
        return {"x": torch.full((12, 16), float(number))}

    predicted = assert_alike(Case(lambda: source(Normalised()), rows), IN_BF16, PLANS[0])
    sizes = {event.bytes for event in predicted.events if event.operator == "native_group_norm"}
    # Of one row, which is evaluated, and of two: the result, and mean or rstd of three groups.
    assert sizes == {2 * 12 * 16, 4 * 3, 2 * 2 * 12 * 16, 2 * 4 * 3}


# ---------------------------------------------------------------------------------------------- the feature


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return without_dropout(CASES[name].build().load())


def test_products_are_in_16_bits_and_the_loss_and_all_gradients_in_32() -> None:
    model = model_of("llama")
    autocast_(model, torch.bfloat16)
    types: list[torch.dtype] = []
    model.lm_head.register_forward_hook(lambda _, __, out: types.append(out.dtype))
    loss = model(**batch(CASES["llama"], 2)).loss
    loss.backward()
    assert types == [torch.bfloat16]
    assert loss.dtype is torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_it_is_torchs_autocast_around_forward_and_loss() -> None:
    model, rows = model_of("plain_module"), batch(CASES["plain_module"], 2)
    with torch.autocast("cpu", dtype=torch.float16):
        expected = model(**rows)
    before = model(**rows)
    undo = autocast_(model, torch.float16)
    assert torch.equal(model(**rows), expected)
    assert not torch.equal(before, expected)
    assert not torch.is_autocast_enabled("cpu")
    undo()
    assert torch.equal(model(**rows), before)
    assert "forward" not in vars(model)


def test_what_forward_takes_can_still_be_read() -> None:
    model = model_of("llama")
    expected, settings = inspect.signature(model.forward), objective(model).settings
    autocast_(model, torch.bfloat16)
    assert inspect.signature(model.forward) == expected
    assert objective(model).settings == settings == {"use_cache": False}


def test_recomputation_under_autocast_gives_the_same_gradients() -> None:
    rows, gradients = batch(CASES["llama"], 4), []
    for plan in PLANS[:2]:
        model = model_of("llama")
        run = prepare(IN_BF16, plan, model)
        run.forward_backward([rows])
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def test_evaluation_is_under_autocast_too() -> None:
    model, rows = model_of("llama"), batch(CASES["llama"], 2)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**rows, use_cache=False).loss
    run = prepare(IN_BF16, PLANS[0], model)
    assert torch.equal(run.evaluate([rows]), expected)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_no_copy_of_a_weight_is_left_when_weights_are_updated_or_a_batch_is_evaluated(plan: Plan) -> None:
    predicted = assert_alike(CASES["llama"], IN_BF16, plan)
    copies: dict[int, int] = {}
    ends = []
    was = Phase.LOAD
    for event in predicted.events:
        if event.phase is not was and (event.phase in (Phase.FIRST_UPDATE, Phase.UPDATE) or was is Phase.EVALUATE):
            ends.append((event.phase, sorted(copies.values())))
        was = event.phase
        # A gradient is the cast of one in 16 bits.
        if event.operator == "_to_copy" and event.kind is not Kind.GRADIENT:
            copies[event.storage] = event.bytes
        elif event.bytes < 0:
            copies.pop(event.storage, None)
    assert {phase for phase, _ in ends} == {Phase.FORWARD, Phase.FIRST_UPDATE, Phase.UPDATE}
    assert [left for _, left in ends] == [[]] * len(ends)


def test_tf32_is_allowed_for_products_and_convolutions_until_it_is_undone() -> None:
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv

    def precisions() -> list[str]:
        return [products.fp32_precision, convolutions.fp32_precision]

    usual = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        before = precisions()
        assert "tf32" not in before
        undo = tf32_()
        assert precisions() == ["tf32", "tf32"]
        undo()
        assert precisions() == before
        # Torch refuses this question where its older settings and these disagree.
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        convolutions.fp32_precision = usual


# ---------------------------------------------------------------------------------------------- the chunked loss


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", [4, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_rounded_as_in_the_whole_form_and_gradients_come_in_the_type_of_the_tensors(
    dtype: torch.dtype, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "_ROWS", rows)
    hidden, weight, offset = parts(bias=bias)
    target = torch.tensor(LABELS["the last are ignored"])
    with torch.autocast("cpu", dtype=dtype):
        expected = whole(hidden, weight, target, offset)
        loss = chunked_cross_entropy(hidden, weight, target, bias=offset, chunk_tokens=3)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert not torch.equal(loss, whole(hidden, weight, target, offset))
    held = [gradient.dtype for gradient in loss.grad_fn.gradients if gradient is not None]  # type: ignore[union-attr]
    assert set(held) == {torch.float32}
    for found, wanted in zip(
        gradients(loss / 3, hidden, weight, offset), gradients(expected / 3, hidden, weight, offset), strict=True
    ):
        assert found.dtype is torch.float32
        assert (found - wanted).norm() < 2 * torch.finfo(dtype).eps * wanted.norm()


def test_under_autocast_many_chunks_round_no_more_than_one() -> None:
    tokens = 2000
    hidden, weight = torch.ones(tokens, 1), torch.zeros(3, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, torch.zeros(tokens, dtype=torch.long), chunk_tokens=1)
    (found,) = gradients(loss, weight)
    # Each token adds 1/3; added up in bfloat16 the sum would stand still at 128.
    torch.testing.assert_close(found.flatten(), torch.tensor([-2.0, 1.0, 1.0]) * tokens / 3, rtol=2**-8, atol=0)


def test_a_gradient_in_float16_that_the_whole_form_keeps_is_kept() -> None:
    scale = torch.tensor(65536.0)
    hidden, weight = torch.eye(3)[:1].requires_grad_(), torch.tensor([[20.0, 0, 0], [0, 1, 0], [0, 0, 1]], requires_grad=True)
    target = torch.tensor([0])

    def unscaled(loss: Tensor) -> list[Tensor]:
        return [gradient / scale for gradient in gradients(loss * scale, hidden, weight)]

    with torch.autocast("cpu", dtype=torch.float16):
        exact = whole(hidden, weight, target, None)
        without, with_factor = (chunked_cross_entropy(hidden, weight, target, factor=factor) for factor in (None, scale))
    expected, kept, lost = unscaled(exact), unscaled(with_factor), unscaled(without)
    # exp(-20), 2e-9, is less than half of the smallest number of float16, 6e-8.
    assert [gradient.count_nonzero().item() for gradient in expected] == [2, 2]
    assert [gradient.count_nonzero().item() for gradient in lost] == [0, 0]
    for found, wanted in zip(kept, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2**-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_under_autocast_give_the_loss_and_the_gradients_of_the_whole_logits(dtype: torch.dtype) -> None:
    plain, rows = model_of("gpt2_with_dropout"), batch(CASES["gpt2_with_dropout"], 4)
    chunked = copy.deepcopy(plain)
    chunk_loss_(chunked, 16)
    losses = []
    for model in (plain, chunked):
        autocast_(model, dtype)
        losses.append(model(**rows).loss)
        # A gradient in float16 needs a scale.
        (losses[-1] * 1024).backward()
    # Logits are rounded alike and losses computed in fp32.
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for part, same in zip(chunked.parameters(), plain.parameters(), strict=True):
        assert part.grad.dtype is torch.float32
        # Of the whole gradient, since small elements are differences of large ones.
        assert (part.grad - same.grad).norm() < 2 * torch.finfo(dtype).eps * same.grad.norm()
