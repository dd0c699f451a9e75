"""Which models keep packed rows apart: found by running them, and refused before training where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_models import CONFIGS, LEAKING, NOT_TOLD, TINY, attend_with, model_of
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from memtrain.features.autocast import autocast_
from memtrain.features.packed_flash import separate_rows_
from memtrain.features.recompute import recompute_blocks_
from memtrain.models.blocks import blocks
from memtrain.models.build import source
from memtrain.models.packed import check_packable, check_separates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_these_keep_rows_apart(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = model_of(kind).to(dtype)
    for attention in ("eager", "sdpa", "flash_attention_2"):
        if (kind, attention) in NOT_TOLD:
            continue
        undo = separate_rows_(attend_with(model, attention, monkeypatch))
        check_separates(model)
        undo()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", LEAKING)
def test_these_let_rows_see_each_other(kind: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="lets packed rows see each other") as caught:
        check_separates(model_of(kind).to(dtype))
    assert str(caught.value).endswith("): set packing to false, or take another model.")


def test_flash_attention_sees_across_rows_in_batches_of_two_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attend_with(model_of("llama"), "flash_attention_2", monkeypatch)
    with pytest.raises(ValueError, match="LlamaForCausalLM lets packed rows see each other"):
        check_separates(model)
    separate_rows_(model)
    check_separates(model)


def test_recomputed_in_autocast_and_in_training_they_stay_apart() -> None:
    model = model_of("llama").train()
    recompute_blocks_(list(blocks(model).values()))
    autocast_(model, torch.bfloat16)
    check_separates(model)


def test_the_check_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt2", resid_pdrop=0.5).train()
    assert isinstance(model, nn.Module)
    model.get_submodule("transformer.h.0").eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    forward = model.forward

    def drawing(*args: Any, use_cache: bool = False, position_ids: Tensor | None = None, **given: Any) -> Any:
        torch.rand(1)
        return forward(*args, use_cache=use_cache, position_ids=position_ids, **given)

    monkeypatch.setattr(model, "forward", drawing)
    check_separates(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


class WithoutPositions(LlamaForCausalLM):
    """Takes positions, and goes by its own."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = True) -> Any:
        packed = super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
        packed.logits = packed.logits + torch.arange(input_ids.shape[1]).unsqueeze(-1)
        return packed


class Remembering(LlamaForCausalLM):
    """Does not say that it has a cache, so that none is turned off, and with one there is no mask of packed rows."""

    def forward(self, position_ids: Tensor | None = None, **settings: Any) -> Any:
        return super().forward(position_ids=position_ids, **settings)


class FirstOnly(LlamaForCausalLM):
    """Takes the positions of the first row for those of all."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = True) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids[:1].expand_as(input_ids), use_cache=use_cache)


class WithoutNumbers(LlamaForCausalLM):
    def forward(self, position_ids: Tensor | None = None, use_cache: bool = True, **settings: Any) -> Any:
        packed = super().forward(position_ids=position_ids, use_cache=use_cache, **settings)
        packed.logits = packed.logits * torch.nan
        return packed


def test_positions_that_go_on_are_found() -> None:
    model = model_of("llama")
    model.__class__ = WithoutPositions
    with pytest.raises(ValueError, match="does not count positions anew") as caught:
        check_separates(model)
    assert str(caught.value).startswith(
        "WithoutPositions does not count positions anew in packed rows (a row's logits differ by "
    )
    assert str(caught.value).endswith(" from those of the row alone): set packing to false, or take another model.")


@pytest.mark.parametrize("kind", [Remembering, FirstOnly, WithoutNumbers])
def test_what_only_looks_like_keeping_rows_apart_is_found(kind: type) -> None:
    model = model_of("llama")
    model.__class__ = kind
    with pytest.raises(ValueError, match=f"{kind.__name__} lets packed rows see each other"):
        check_separates(model)


BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "bloom",
        {"n_layer": 1, "n_head": 2, "hidden_size": 16},
        "BloomForCausalLM.forward takes no position_ids, by which packed",
    ),
    ("mamba", {"state_size": 4}, "MambaForCausalLM.forward takes no position_ids, by which packed rows are kept apart"),
    (
        "t5",
        {"d_model": 16, "num_layers": 1},
        "T5ForConditionalGeneration is no causal language model of transformers, and rows",
    ),
    ("bart", BART, "BartForConditionalGeneration is no causal language model of transformers, and rows are packed"),
    ("bert", {}, "BertForMaskedLM is no causal language model of transformers, and rows are packed for those only"),
]


@pytest.mark.parametrize(("kind", "config", "words"), REFUSED, ids=[kind for kind, *_ in REFUSED])
def test_what_its_class_tells_is_refused_without_data(kind: str, config: dict[str, Any], words: str) -> None:
    with torch.device("meta"):
        model = source({"model_type": kind, **TINY, **config}).build()
    for check in (check_packable, check_separates):
        with pytest.raises(ValueError, match="packing to false") as caught:
            check(model)
        assert str(caught.value).startswith(words)


def test_a_plain_module_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^Linear is no causal language model of transformers, and rows are packed for those only: "
    ):
        check_packable(nn.Linear(2, 2))


def test_a_causal_model_is_packable_without_data() -> None:
    with torch.device("meta"):
        check_packable(source({"model_type": "llama", **TINY}).build())
