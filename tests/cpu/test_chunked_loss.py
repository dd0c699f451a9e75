"""The chunked loss: equal to torch's cross-entropy, frugal, and refused where it would train something else."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import CASES, VOCABULARY, batch, without_dropout

from memtrain.data.rows import IGNORED
from memtrain.features.chunked_loss import chunk_loss_, chunked_cross_entropy, refusal
from memtrain.models.build import source
from memtrain.trace.record import Recorder

TOKENS, WIDTH, CLASSES = 7, 5, 11

LABELS = {
    "all count": [3, 0, 10, 1, 1, 7, 2],
    "the first is ignored": [IGNORED, 0, 10, 1, 1, 7, 2],
    "the last are ignored": [3, 0, 10, 1, IGNORED, IGNORED, IGNORED],
    "a whole chunk is ignored": [3, 0, 10, IGNORED, IGNORED, IGNORED, 2],
    "one counts": [IGNORED, IGNORED, IGNORED, 4, IGNORED, IGNORED, IGNORED],
}


def parts(*, bias: bool = True, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, offset = (
        torch.randn(shape, generator=generator) for shape in ((TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    )
    return hidden.requires_grad_(), weight.requires_grad_(), offset.requires_grad_() if bias else None


def whole(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
    logits = nn.functional.linear(hidden, weight, bias)
    return nn.functional.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum")


def gradients(loss: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None]))


# ---------------------------------------------------------------------------------------------- the function


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("chunk_tokens", [1, 3, TOKENS, 100])
@pytest.mark.parametrize("labels", LABELS)
def test_loss_and_gradients_are_those_of_cross_entropy(labels: str, chunk_tokens: int, bias: bool) -> None:
    hidden, weight, offset = parts(bias=bias)
    target = torch.tensor(LABELS[labels])
    expected = whole(hidden, weight, target, offset)
    loss = chunked_cross_entropy(hidden, weight, target, bias=offset, chunk_tokens=chunk_tokens)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    torch.testing.assert_close(loss, expected)
    # A factor that is no power of two, as the mean over an odd number of tokens brings it.
    for found, wanted in zip(
        gradients(loss / 3, hidden, weight, offset), gradients(expected / 3, hidden, weight, offset), strict=True
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_where_no_label_counts_loss_and_gradients_are_zero(chunk_tokens: int) -> None:
    hidden, weight, bias = parts()
    loss = chunked_cross_entropy(hidden, weight, torch.full((TOKENS,), IGNORED), bias=bias, chunk_tokens=chunk_tokens)
    assert loss.item() == 0.0
    assert [gradient.count_nonzero().item() for gradient in gradients(loss, hidden, weight, bias)] == [0, 0, 0]


def test_no_token_gives_zero() -> None:
    _, weight, _ = parts()
    hidden = torch.empty(0, WIDTH, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.empty(0, dtype=torch.long))
    assert loss.item() == 0.0
    assert [tuple(gradient.shape) for gradient in gradients(loss, hidden, weight)] == [(0, WIDTH), (CLASSES, WIDTH)]


def test_an_ignored_token_has_no_gradient() -> None:
    hidden, weight, bias = parts()
    target = torch.tensor(LABELS["a whole chunk is ignored"])
    (d_hidden,) = gradients(chunked_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=2), hidden)
    assert (d_hidden.abs().sum(dim=1) > 0).tolist() == [True, True, True, False, False, False, True]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_large_logits_stay_finite(scale: float, chunk_tokens: int) -> None:
    hidden = torch.tensor([[1.0], [1.0], [0.0], [-1.0]], requires_grad=True)
    weight = torch.tensor([[scale], [0.0], [-scale]], requires_grad=True)
    target = torch.tensor([0, 2, 1, 1])
    loss = chunked_cross_entropy(hidden, weight, target, chunk_tokens=chunk_tokens)
    expected = whole(hidden, weight, target, None)
    assert loss.isfinite()
    torch.testing.assert_close(loss, expected)
    for found, wanted in zip(gradients(loss, hidden, weight), gradients(expected, hidden, weight), strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, wanted)


def test_hidden_states_of_16_bits_give_a_loss_in_32_and_gradients_in_16() -> None:
    hidden, weight, bias = (part.detach().bfloat16().requires_grad_() for part in parts() if part is not None)
    target = torch.tensor(LABELS["all count"])
    loss = chunked_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=3)
    expected = whole(hidden.float(), weight.float(), target, bias.float())
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    for found, wanted in zip(gradients(loss, hidden, weight, bias), gradients(expected, hidden, weight, bias), strict=True):
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found, wanted, rtol=5e-2, atol=2e-2)


def buffers(loss: Tensor) -> list[bool]:
    """Which of the gradients of hidden states, weight and bias were made in forward."""
    return [gradient is not None for gradient in loss.grad_fn.gradients]  # type: ignore[union-attr]


def test_a_gradient_that_is_not_wanted_is_not_made() -> None:
    hidden, weight, bias = parts()
    target = torch.tensor(LABELS["all count"])
    assert bias is not None
    assert buffers(chunked_cross_entropy(hidden, weight, target, bias=bias)) == [True, True, True]
    assert buffers(chunked_cross_entropy(hidden, weight, target)) == [True, True, False]
    frozen = chunked_cross_entropy(hidden, weight.detach(), target, bias=bias.detach())
    assert buffers(frozen) == [True, False, False]
    torch.testing.assert_close(gradients(frozen, hidden), gradients(whole(hidden, weight, target, bias), hidden))
    head_only = chunked_cross_entropy(hidden.detach(), weight, target, bias=bias)
    assert buffers(head_only) == [False, True, True]
    torch.testing.assert_close(gradients(head_only, weight), gradients(whole(hidden, weight, target, bias), weight))


def made(run: Any) -> set[tuple[int, str]]:
    with Recorder(nn.Identity()) as recorder:
        run()
    return {(event.bytes, event.operator) for event in recorder.trace().events if event.bytes > 0}


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_none_is_made_and_the_loss_is_the_same(off: Any) -> None:
    hidden, weight, bias = parts()
    target = torch.tensor(LABELS["all count"])
    loss = chunked_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=3)
    with off():
        alone = chunked_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=3)
    assert torch.equal(alone, loss)
    assert not alone.requires_grad

    def without() -> None:
        with off():
            chunked_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=3)

    # As large as the weight or as all hidden states is nothing that the loss alone needs.
    large = {4 * TOKENS * WIDTH, 4 * CLASSES * WIDTH}
    assert large <= {size for size, _ in made(lambda: chunked_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=3))}
    assert not large & {size for size, _ in made(without)}


def test_logits_exist_one_chunk_at_a_time() -> None:
    hidden, weight, bias = parts()
    target = torch.tensor(LABELS["all count"])
    sizes = {
        size for size, _ in made(lambda: chunked_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=2).backward())
    }
    assert 4 * 2 * CLASSES in sizes
    assert 4 * TOKENS * CLASSES not in sizes


def test_a_second_backward_is_refused() -> None:
    hidden, weight, bias = parts()
    loss = chunked_cross_entropy(hidden, weight, torch.tensor(LABELS["all count"]), bias=bias)
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError,
        match="the chunked loss frees its gradients in backward, so backward runs once: call forward again",
    ):
        loss.backward()


@pytest.mark.parametrize("factor", [0.75, 1024.0])
def test_the_factor_does_not_change_the_gradients(factor: float) -> None:
    hidden, weight, bias = parts()
    target = torch.tensor(LABELS["the first is ignored"])
    expected, loss = (
        chunked_cross_entropy(hidden, weight, target, bias=bias, chunk_tokens=3, factor=given)
        for given in (None, torch.tensor(factor))
    )
    assert torch.equal(loss, expected)
    for found, wanted in zip(
        gradients(loss / 3, hidden, weight, bias), gradients(expected / 3, hidden, weight, bias), strict=True
    ):
        torch.testing.assert_close(found, wanted)


# ---------------------------------------------------------------------------------------------- on a model


def causal(name: str = "llama") -> Any:
    torch.manual_seed(0)
    return without_dropout(CASES[name].build().load())


def from_config(**config: Any) -> Any:
    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    return source({**small, "intermediate_size": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **config}).load()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2_with_dropout"])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_a_model_with_labels_gives_the_same_loss_and_gradients_and_no_logits(name: str, chunk_tokens: int) -> None:
    plain, rows = causal(name), batch(CASES[name], 3)
    chunked = copy.deepcopy(plain)
    chunk_loss_(chunked, chunk_tokens)
    expected, output = plain(**rows), chunked(**rows)
    assert expected.logits is not None
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.loss)
    output.loss.backward()
    expected.loss.backward()
    for weight, same in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, same.grad)


def test_without_labels_a_model_answers_with_logits_as_before() -> None:
    model, rows = causal(), batch(CASES["llama"], 2)
    before = model(input_ids=rows["input_ids"])
    chunk_loss_(model, 8)
    for after in (model(input_ids=rows["input_ids"]), model(rows["input_ids"]), model(rows["input_ids"], labels=None)):
        assert torch.equal(after.logits, before.logits)
        assert after.loss is None
    assert model(**rows).logits is None
    assert torch.equal(model(input_ids=rows["input_ids"]).logits, before.logits)


def test_undoing_gives_the_model_its_own_loss_back() -> None:
    model, rows = causal(), batch(CASES["llama"], 2)
    attributes = [dict(module.__dict__) for module in model.modules()]
    expected = model(**rows)
    undo = chunk_loss_(model, 8)
    model(**rows)
    undo()
    assert [dict(module.__dict__) for module in model.modules()] == attributes
    assert torch.equal(model(**rows).logits, expected.logits)


def test_a_forward_that_raises_leaves_head_and_loss_in_place() -> None:
    model, rows = causal(), batch(CASES["llama"], 2)
    expected = model(input_ids=rows["input_ids"]).logits
    chunk_loss_(model, 8)
    with pytest.raises(IndexError):
        model(input_ids=rows["input_ids"] + 10**6, labels=rows["labels"])
    assert torch.equal(model(input_ids=rows["input_ids"]).logits, expected)


def test_the_factor_is_asked_once_in_a_forward_that_wants_gradients_and_divided_by_the_tokens_that_count() -> None:
    model, rows = causal(), batch(CASES["llama"], 2)
    asked: list[Tensor] = []

    def factor() -> Tensor:
        asked.append(torch.tensor(1024.0))
        return asked[-1]

    chunk_loss_(model, 8, factor)
    with torch.no_grad():
        model(**rows)
    assert not asked
    loss = model(**rows).loss
    assert len(asked) == 1
    (summed, _), *_ = loss.grad_fn.next_functions
    assert torch.equal(summed.factor, asked[0] / (rows["labels"][:, 1:] != IGNORED).sum())


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_proof_does_not_depend_on_autocast(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        assert refusal(causal()) is None
        assert refusal(capped()) == CHANGED


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2_with_dropout"])
def test_a_plain_linear_head_passes_and_is_left_as_it_was(name: str) -> None:
    model = causal(name)
    attributes = [dict(module.__dict__) for module in model.modules()]
    state, weights = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    assert refusal(model) is None
    assert [dict(module.__dict__) for module in model.modules()] == attributes
    assert all(torch.equal(value, weights[path]) for path, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def capped() -> Any:
    return from_config(model_type="gemma2", num_key_value_heads=1, head_dim=8, final_logit_softcapping=30.0)


def with_another_head() -> Any:
    class Head(nn.Linear):
        """A head with mathematics of its own, perhaps."""

    model = causal()
    model.lm_head = Head(32, VOCABULARY, bias=False)
    return model


def failing() -> Any:
    model = causal()

    def forward(input_ids: Tensor, labels: Tensor | None = None) -> None:
        raise ArithmeticError("no such thing")

    model.forward = forward
    return model


class Tagger(nn.Module):
    """Not of transformers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


CHANGED = "its head changes the logits before the loss (a cap, a scale) and the chunks would not"
NOT_CAUSAL = "it is not a causal language model of transformers"


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (capped, CHANGED),
        (with_another_head, "its head is a Head and not an nn.Linear"),
        (failing, "its head could not be tried out (ArithmeticError: no such thing)"),
        (lambda: CASES["bert_masked_lm"].build().load(), NOT_CAUSAL),
        (lambda: CASES["t5"].build().load(), NOT_CAUSAL),
        (Tagger, NOT_CAUSAL),
    ],
)
def test_a_loss_that_would_change_is_refused_with_the_reason(build: Any, reason: str) -> None:
    model = build()
    assert refusal(model) == reason
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (compared as a whole below)
        chunk_loss_(model, 8)
    assert str(raised.value) == f"the loss of {type(model).__name__} cannot be chunked, {reason}: keep the whole logits."


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": None},
        # A scale of the logits is one of the hidden states where the head has no bias.
        {"model_type": "cohere", "logit_scale": 0.0625},
    ],
    ids=["no cap", "scale"],
)
def test_a_head_whose_logits_are_linear_in_the_hidden_states_passes_and_trains_the_same(config: dict[str, Any]) -> None:
    model, rows = from_config(num_key_value_heads=1, **config), batch(CASES["llama"], 2)
    expected = model(**rows).loss
    assert refusal(model) is None
    chunk_loss_(model, 8)
    torch.testing.assert_close(model(**rows).loss, expected)


def test_the_proof_leaves_nothing_behind() -> None:
    model = CASES["llama"].build().load()
    gc.collect()
    gc.disable()
    try:
        assert refusal(model) is None
        left = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter) and one.shape == (VOCABULARY, 8)]
    finally:
        gc.enable()
    assert left == []
