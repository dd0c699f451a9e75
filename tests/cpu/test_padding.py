"""Padding: at the right, to lengths that are known, and without a trace in the loss of a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain.data.padding import Padded
from memtrain.data.rows import IGNORED
from memtrain.models.build import source
from memtrain.models.objective import objective

VALUES = {"input_ids": 9, "labels": IGNORED}


def row(length: int, labels: int | None = None, first: int = 3) -> dict[str, Tensor]:
    """Distinct tokens, and as many labels unless told otherwise."""
    ids = (torch.arange(length) * 7 + first) % 80 + 3
    return {"input_ids": ids, "labels": (torch.arange(length if labels is None else labels) * 5 + first) % 80 + 3}


def padded(**settings: Any) -> Padded:
    return Padded(**{"values": VALUES, "limits": {"input_ids": 20, "labels": 20}, **settings})


def test_rows_are_filled_up_at_the_right_to_a_multiple_of_eight() -> None:
    batch = padded()([row(3), row(9)])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 16)
    assert batch["input_ids"][0].tolist() == [*row(3)["input_ids"].tolist(), *[9] * 13]
    assert batch["labels"][1].tolist() == [*row(9)["labels"].tolist(), *[IGNORED] * 7]


@pytest.mark.parametrize(("lengths", "width"), [((8, 2), 8), ((17, 1), 20), ((20, 20), 20), ((1, 1), 8)])
def test_no_batch_is_longer_than_the_longest_row(lengths: tuple[int, int], width: int) -> None:
    assert padded()([row(length) for length in lengths])["input_ids"].shape == (2, width)


def test_each_tensor_has_a_length_of_its_own() -> None:
    pad = padded(limits={"input_ids": 30, "labels": 6}, multiple=4)
    batch = pad([row(9, labels=2), row(5, labels=5)])
    assert [batch[name].shape for name in ("input_ids", "labels")] == [(2, 12), (2, 6)]
    longest = pad([row(9, labels=2)], longest={"input_ids": 30, "labels": 6})
    assert [longest[name].shape for name in ("input_ids", "labels")] == [(1, 30), (1, 6)]


def test_a_mask_tells_tokens_from_padding() -> None:
    batch = padded(mask=True, multiple=1)([row(2), row(4)])
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["attention_mask"].dtype == torch.int64


def test_what_is_as_long_in_all_rows_stays_as_it_is() -> None:
    rows = [{**row(length), "score": torch.tensor(0.5), "label_set": torch.tensor([1, 2, 3])} for length in (2, 5)]
    batch = padded()(rows)
    assert batch["score"].tolist() == [0.5, 0.5]
    assert batch["label_set"].shape == (2, 3)


def test_the_shapes_of_the_largest_batch_are_those_that_it_has() -> None:
    pad = padded(mask=True, limits={"input_ids": 13, "labels": 4})
    rows = [{**row(13, labels=1), "score": torch.tensor(0.5)}, {**row(2, labels=4), "score": torch.tensor(0.5)}]
    batch = pad(rows, longest=pad.limits)
    without_data = {name: tensor.to("meta") for name, tensor in rows[0].items()}
    assert pad.shapes(without_data) == {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in batch.items()}


def test_a_tensor_of_unequal_lengths_needs_something_to_fill_it_up_with() -> None:
    with pytest.raises(ValueError, match="'pixels'") as caught:
        padded(limits={"pixels": 5})
    assert str(caught.value) == (
        "'pixels' has rows of unequal length, and nothing says with what it is filled up: make all as long, or give a data_collator."
    )


# ---------------------------------------------------------------------- what padding does to a loss

TINY = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "llama": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "t5": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return source({"model_type": kind, **TINY, **MODELS[kind]}).load()


@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_of_padded_rows_is_that_of_the_rows_alone(kind: str) -> None:
    model = model_of(kind)
    what = objective(model)
    # Of unequal lengths on both sides where the two differ, and with labels that do not count.
    rows = [row(5, labels=3), row(9, labels=8, first=11)] if kind == "t5" else [row(5), row(9, first=11), row(2, first=30)]
    rows[1]["labels"][:2] = IGNORED
    pad = padded(mask=kind == "t5")

    def summed(batch: dict[str, Tensor]) -> tuple[float, list[Tensor], int]:
        model.zero_grad()
        count = what.count(batch)
        loss = what.loss(model, batch) * count
        loss.backward()
        return loss.item(), [one.grad.clone() for one in model.parameters() if one.grad is not None], int(count)

    together, gradients, count = summed(pad(rows))
    alone = [summed(Padded(values=VALUES, limits={}, mask=pad.mask)([one])) for one in rows]
    assert count == sum(found[2] for found in alone) == (9 if kind == "t5" else 4 + 7 + 1)
    assert together == pytest.approx(sum(found[0] for found in alone), rel=1e-6)
    for number, gradient in enumerate(gradients):
        torch.testing.assert_close(gradient, sum(found[1][number] for found in alone), rtol=1e-4, atol=1e-6)


def test_without_its_mask_an_encoder_would_see_the_padding() -> None:
    model = model_of("t5")
    what = objective(model)
    losses = []
    for mask in (True, False):
        batch = padded(mask=mask)([row(5, labels=3), row(9, labels=8)])
        with torch.no_grad():
            losses.append(what.loss(model, batch).item())
    assert abs(losses[0] - losses[1]) > 1e-3
