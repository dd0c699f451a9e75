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
from toys import CASES, batch

from memtrain.data.rows import IGNORED
from memtrain.models.build import source
from memtrain.models.objective import Objective, check_suits, objective, predicts_next_token

TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Returns(nn.Module):
    """Returns what it is told to."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
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


@pytest.mark.parametrize(
    ("output", "described"),
    [
        (torch.ones(3), "a tensor of shape (3,)"),
        (torch.ones(1), "a tensor of shape (1,)"),
        ({"loss": torch.ones(2, 2)}, "a tensor of shape (2, 2)"),
        ({"logits": torch.ones(3)}, "a NoneType"),
        (SimpleNamespace(loss=None), "a NoneType"),
        ((torch.ones(3), LOSS), "a tensor of shape (3,)"),
        (2.5, "a float"),
        ([LOSS], "a list"),
        (None, "a NoneType"),
    ],
)
def test_a_model_without_a_scalar_loss_is_told_what_it_returned(output: Any, described: str) -> None:
    model = Returns(output)
    expected = (
        f"Returns returned {described} where its loss was expected: return a scalar loss, alone, as 'loss' of a mapping or an "
        f"output object, or first in a tuple, and put what it needs (labels) into the rows."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        objective(model).loss(model, {"x": torch.ones(1)})


def test_a_transformers_model_without_labels_is_told_so() -> None:
    model = built("llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM returned a NoneType where its loss was expected"):
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


def test_nothing_but_the_loss_outlives_the_call() -> None:
    import gc
    import weakref

    case = CASES["llama"]
    model, kept = case.build().load(), []
    model.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output.logits)))
    loss = objective(model).loss(model, batch(case, 1))
    gc.collect()
    assert [reference() for reference in kept] == [None]
    loss.backward()


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


def test_a_forward_that_takes_any_name_takes_all() -> None:
    class Open(nn.Module):
        def forward(self, **anything: Tensor) -> None: ...

    check_suits(Open(), [{"x": torch.ones(1), "z": torch.ones(1)}], "data")
