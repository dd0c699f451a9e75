"""What a loss is a mean over, and what a model that returns none is told."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import CASES, VOCABULARY, batch

from memtrain.data.rows import IGNORED, Batch
from memtrain.models.build import source
from memtrain.models.objective import Objective, check_suits, objective, predicts_next_token

TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Returns(nn.Module):
    """Returns what it is told to."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return self.output


def built(model_type: str, **settings: Any) -> nn.Module:
    return source({"model_type": model_type, **TINY, **SPECIAL, **settings}).build()


# ---------------------------------------------------------------------------------------------- counts

I = IGNORED  # noqa: E741  (so that a row of labels can be read)


@pytest.mark.parametrize(
    ("labels", "shifted", "plain"),
    [
        ([[5, 6, 7], [5, 6, 7]], 4, 6),
        ([[I, 6, 7], [5, I, 7]], 3, 4),
        ([[5, I, I], [I, I, 7]], 1, 2),
        ([[5, I, I]], 0, 1),
        ([[5]], 0, 1),
    ],
)
def test_a_causal_model_counts_all_but_the_first_label_of_a_row_and_others_count_each(
    labels: list[list[int]], shifted: int, plain: int
) -> None:
    rows = {"input_ids": torch.ones(len(labels), len(labels[0]), dtype=torch.long), "labels": torch.tensor(labels)}
    causal, other = objective(built("llama")), objective(CASES["t5"].build().build())
    for counted, expected in ((causal.count(rows), shifted), (other.count(rows), plain)):
        assert (counted.item(), counted.shape, counted.dtype) == (expected, (), torch.int64)


@pytest.mark.parametrize(
    ("model", "rows", "expected"),
    [
        ("no labels", {"x": torch.ones(3, 2)}, 3),
        ("labels that are no classes", {"x": torch.ones(3, 2), "labels": torch.ones(3, 4)}, 3),
        ("a class per row", {"x": torch.ones(3, 2), "labels": torch.tensor([0, IGNORED, 2])}, 2),
    ],
)
def test_other_models_count_rows_where_there_are_no_classes(model: str, rows: dict[str, Tensor], expected: int) -> None:
    counted = objective(Returns(None)).count(rows)
    assert (counted.item(), counted.shape, counted.dtype) == (expected, (), torch.int64)


def test_rows_are_counted_on_their_device() -> None:
    assert objective(Returns(None)).count({"x": torch.ones(3, 2, device="meta")}).is_meta


@pytest.mark.parametrize(
    ("name", "causal"),
    [("llama", True), ("qwen3", True), ("gpt2_with_dropout", True), ("bert_masked_lm", False), ("t5", False)],
)
def test_only_causal_models_shift_their_labels(name: str, causal: bool) -> None:
    assert predicts_next_token(CASES[name].build().build()) is causal


def test_an_encoder_that_decodes_is_causal_and_a_classifier_is_not() -> None:
    assert predicts_next_token(built("bert", is_decoder=True))
    assert not predicts_next_token(built("llama", architectures=["LlamaForSequenceClassification"]))
    assert not predicts_next_token(nn.Linear(2, 2))


def test_a_model_of_other_making_does_not_import_transformers() -> None:
    code = """
import sys, torch
from memtrain.models.objective import objective
class Model(torch.nn.Module):
    def forward(self, x): return x.sum()
what = objective(Model())
assert what.count({"x": torch.ones(3, 2)}).item() == 3
assert what.loss(Model(), {"x": torch.ones(3, 2)}).item() == 6
assert not [name for name in sys.modules if name.partition(".")[0] == "transformers"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------- the loss

Output = namedtuple("Output", ["loss", "logits"])
LOSS = torch.tensor(2.5)


@pytest.mark.parametrize(
    "output",
    [
        LOSS,
        {"loss": LOSS, "logits": None},
        SimpleNamespace(loss=LOSS),
        (LOSS, torch.ones(3)),
        Output(LOSS, torch.ones(3)),
    ],
    ids=["alone", "mapping", "object", "tuple", "named tuple"],
)
def test_a_loss_is_found_alone_by_name_or_first(output: Any) -> None:
    model = Returns(output)
    assert objective(model).loss(model, {"x": torch.ones(1)}) is LOSS


NEEDS = (
    "return a scalar loss (of several the mean), alone, as 'loss' of a mapping or an output object, or first in a tuple, put what it "
    "needs (labels) into the rows, which have x (4, 3), labels (4,), or give loss, a function of what it returns and of the batch."
)
MEAN = "take the mean of its loss."


@pytest.mark.parametrize(
    ("output", "described", "remedy"),
    [
        (torch.ones(3), "a tensor of shape (3,)", NEEDS),
        (torch.ones(1), "a tensor of shape (1,)", NEEDS),
        ({"loss": torch.ones(2, 2)}, "loss (a tensor of shape (2, 2))", MEAN),
        (SimpleNamespace(loss=torch.ones(4)), "loss (a tensor of shape (4,))", MEAN),
        (Output(torch.ones(4), None), "loss (a tensor of shape (4,)), logits (None)", MEAN),
        ({"logits": torch.ones(3), "states": [1]}, "logits (a tensor of shape (3,)), states (a list)", NEEDS),
        ({"loss": None, "logits": torch.ones(3)}, "loss (None), logits (a tensor of shape (3,))", NEEDS),
        (SimpleNamespace(loss=None), "loss (None)", NEEDS),
        ((torch.ones(3), LOSS), "a tuple of a tensor of shape (3,), a tensor of shape ()", NEEDS),
        ((), "a tuple of nothing", NEEDS),
        (2.5, "a float", NEEDS),
        ([LOSS], "a list of a tensor of shape ()", NEEDS),
        (None, "None", NEEDS),
    ],
)
def test_a_model_without_a_scalar_loss_is_told_what_it_returned_and_got(output: Any, described: str, remedy: str) -> None:
    model = Returns(output)
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'Returns returned {described} where its loss was expected: {remedy}')}$"
    ):
        objective(model).loss(model, {"x": torch.ones(4, 3), "labels": torch.ones(4)})


def test_a_transformers_model_without_labels_is_told_so() -> None:
    model = built("llama")
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM returned logits \(a tensor of shape \(1, 3, 32\)\) where its loss was"
    ):
        objective(model).loss(model, {"input_ids": torch.ones(1, 3, dtype=torch.long)})


def test_no_cache_is_kept_where_the_model_knows_one() -> None:
    assert objective(built("llama")).settings == {"use_cache": False}
    assert objective(Returns(None)).settings == {}


def test_settings_go_into_each_forward() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            return x.sum() * scale

    what = Objective(count=lambda rows: torch.tensor(1), settings={"scale": 3.0})
    assert what.loss(Scaled(), {"x": torch.ones(2)}).item() == 6.0


@pytest.mark.parametrize("shown", [False, True])
def test_nothing_but_the_loss_outlives_the_call(shown: bool) -> None:
    import gc
    import weakref

    case = CASES["llama"]
    model, kept, seen = case.build().load(), [], []
    model.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output.logits)))

    def see(rows: Batch, output: Any) -> None:
        seen.append((sorted(rows), tuple(output.logits.shape)))

    loss = objective(model).loss(model, batch(case, 1), *((see,) if shown else ()))
    gc.collect()
    assert [reference() for reference in kept] == [None]
    assert seen == [(["input_ids", "labels"], (1, 20, VOCABULARY))] * shown
    loss.backward()


# ---------------------------------------------------------------------------------------------- a loss of the user's


class Scores(nn.Module):
    """Takes x and nothing else, and returns its scores in the form that it is told to."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(2 * x)


X, Y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [5.0], [4.0]])


@pytest.mark.parametrize(
    ("form", "take"),
    [
        (lambda scores: scores, lambda output: output),
        (lambda scores: (scores, None), lambda output: output[0]),
        (lambda scores: {"logits": scores}, lambda output: output["logits"]),
        (lambda scores: SimpleNamespace(logits=scores), lambda output: output.logits),
    ],
    ids=["tensor", "tuple", "mapping", "object"],
)
def test_a_loss_of_the_users_gets_what_came_back_and_all_of_the_batch(form: Any, take: Any) -> None:
    what = objective(Scores(form), lambda output, rows: (take(output) - rows["labels"]).square().mean())
    assert what.loss(Scores(form), {"x": X, "labels": Y}).item() == (1 + 1 + 4) / 3
    assert what.count({"x": X, "labels": Y}).item() == 3


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(None, 3), (torch.ones(3, 4), 3), (torch.tensor([1, I, 2]), 2), (torch.tensor([[1, I], [I, 2], [2, 2]]), 4)],
)
def test_with_it_integer_labels_are_counted_and_else_rows(labels: Tensor | None, expected: int) -> None:
    rows = {"x": X} if labels is None else {"x": X, "labels": labels}
    assert objective(Scores(None), lambda output, batch: LOSS).count(rows).item() == expected


def test_with_it_a_causal_model_counts_the_labels_that_it_predicts() -> None:
    what = objective(built("llama"), lambda output, rows: LOSS)
    assert (
        what.count({"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.tensor([[5, 6, I], [5, 6, 7]])}).item()
        == 3
    )
    assert what.count({"input_ids": torch.ones(2, 3, dtype=torch.long)}).item() == 2


def test_a_transformers_model_gets_what_it_names_and_the_loss_the_rest() -> None:
    model = built("llama")
    ids = torch.tensor([[3, 4, 5]])
    rows = {"input_ids": ids, "labels": ids, "weight": torch.tensor([2.0])}
    whole = model(input_ids=ids, labels=ids).loss
    found = objective(model, lambda output, batch: output.loss * batch["weight"].mean()).loss(model, rows)
    assert torch.equal(found, 2 * whole)


def test_a_forward_that_takes_any_name_gets_all_with_it() -> None:
    class Open(nn.Module):
        def forward(self, **anything: Tensor) -> Any:
            return sorted(anything)

    def loss(output: Any, rows: Batch) -> Tensor:
        assert output == ["labels", "x"]
        return LOSS

    assert objective(Open(), loss).loss(Open(), {"x": X, "labels": Y}) is LOSS


@pytest.mark.parametrize(
    ("returned", "described", "remedy"),
    [
        (torch.ones(3), "a tensor of shape (3,)", "take its mean"),
        (2.5, "a float", "return a tensor without dimensions"),
        (None, "None", "return a tensor without dimensions"),
    ],
)
def test_a_loss_of_the_users_that_is_no_scalar_is_refused(returned: Any, described: str, remedy: str) -> None:
    model = Scores(lambda scores: scores)
    expected = (
        f"the loss that was given returned {described} for x (3, 1), labels (3, 1), and it must return the mean over the counted "
        f"items, a scalar tensor: {remedy}."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        objective(model, lambda output, rows: returned).loss(model, {"x": X, "labels": Y})


def test_no_forward_is_told_how_many_items_there_are() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
            assert num_items_in_batch is None
            return x.sum()

    assert objective(Asks()).loss(Asks(), {"x": X}).item() == 6.0


# ---------------------------------------------------------------------------------------------- names


def test_rows_with_a_name_that_forward_does_not_take_are_refused() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None = None) -> None: ...

    class Nothing(nn.Module):
        def forward(self) -> None: ...

    one = torch.ones(1)
    check_suits(Two(), [{"x": one}], "data")
    check_suits(Two(), [{"x": one, "y": one}], "data")
    with pytest.raises(
        ValueError,
        match=r"^data has 'z' in its rows, and Two\.forward takes x, y: name the rows' tensors like its arguments\.$",
    ):
        check_suits(Two(), [{"x": one, "z": one}], "data")
    with pytest.raises(ValueError, match=r"data has 'x' in its rows, and Nothing\.forward takes nothing: name"):
        check_suits(Nothing(), [{"x": one}], "data")
    with pytest.raises(
        ValueError, match=r"^data has no 'x' in its rows, and Two needs it for its loss: add it to every row\.$"
    ):
        check_suits(Two(), [{"y": one}], "data")


def test_a_causal_model_needs_labels_that_count_and_tokens_that_it_knows() -> None:
    model, ids = built("llama"), torch.tensor([3, 4, 5])
    check_suits(model, [{"input_ids": ids, "labels": ids}], "data")
    with pytest.raises(ValueError, match="data has no 'labels' in its rows, and LlamaForCausalLM needs it for its loss"):
        check_suits(model, [{"input_ids": ids}], "data")
    only_first = torch.tensor([3, IGNORED, IGNORED])
    with pytest.raises(
        ValueError, match=r"row 1 of data has no label that counts \(a causal model predicts none for the first"
    ):
        check_suits(model, [{"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": only_first}], "data")
    with pytest.raises(ValueError, match="row 0 of data has tokens from 3 to 32, and LlamaForCausalLM knows 0 to 31: take the"):
        check_suits(model, [{"input_ids": torch.tensor([3, 32]), "labels": torch.tensor([3, 32])}], "data")


def test_a_loss_of_the_users_may_read_what_forward_does_not_take() -> None:
    def loss(output: Any, rows: Batch) -> Tensor:
        return LOSS

    check_suits(Scores(None), [{"x": X, "labels": Y}], "data", loss)
    with pytest.raises(ValueError, match=r"data has no 'x' in its rows, and Scores needs it"):
        check_suits(Scores(None), [{"labels": Y}], "data", loss)
    # A causal model's own loss would need labels.
    check_suits(built("llama"), [{"input_ids": torch.tensor([3, 4])}], "data", loss)


def test_a_forward_that_takes_any_name_takes_all() -> None:
    class Open(nn.Module):
        def forward(self, **anything: Tensor) -> None: ...

    check_suits(Open(), [{"x": torch.ones(1), "z": torch.ones(1)}], "data")
