"""What adapters are refused on or would pass by: shared weights, modules that are not called, models inside models, fast paths."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_adapters import job, moved_
from test_load import llama
from torch import Tensor, nn

from memtrain.method import Full, Int8, Lora, Nf4, Quantization, Unquantized
from memtrain.models.adapters import adapted, add_adapters_
from memtrain.models.build import source
from memtrain.models.load import build_model, load_model

T5 = {
    "model_type": "t5",
    "vocab_size": 96,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}


def refused(model: nn.Module, method: Lora, sentence: str) -> None:
    before = [path for path, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        add_adapters_(model, method)
    assert [path for path, _ in model.named_parameters()] == before


class Twins(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight


@pytest.mark.parametrize("targets", ["all-linear", ("a", "b")])
def test_two_targets_that_share_a_weight_are_refused(targets: Any) -> None:
    refused(
        Twins(),
        Lora(target_modules=targets),
        "a and b share one weight, and the adapter of each would be added to both when merged: "
        "name only one of them in target_modules.",
    )
    assert adapted(add_adapters_(Twins(), Lora(target_modules="a")))


def test_a_table_that_only_lends_its_weight_is_not_trained_whole() -> None:
    refused(
        build_model(source(T5), job(Full())),
        Lora(modules_to_save=("shared",)),
        "modules_to_save has shared, whose weight T5ForConditionalGeneration uses in encoder.embed_tokens and "
        "decoder.embed_tokens, so a copy of it would train nothing: name encoder.embed_tokens and decoder.embed_tokens instead.",
    )


def test_layers_inside_what_trains_whole_get_no_adapters() -> None:
    for targets, layers in (("all-linear", 4), (("q_proj", "up_proj"), 1)):
        model = build_model(llama(tied=True), job(Lora(rank=2, target_modules=targets, modules_to_save=("mlp",))))
        paths = [path for path, _ in model.named_parameters() if "lora_A" in path]
        assert len(paths) == layers
        assert not [path for path in paths if "mlp" in path]
    refused(
        llama(tied=True).build(),
        Lora(target_modules="up_proj", modules_to_save=("mlp",)),
        "every target of target_modules=['up_proj'] is trained whole by modules_to_save=['mlp']: take one of the two out.",
    )
    refused(
        llama(tied=True).build(),
        Lora(modules_to_save=("model",)),
        "target_modules is all-linear, and LlamaForCausalLM has no linear layer below its head: name the modules that get adapters.",
    )


def test_a_module_that_takes_no_adapter_is_named_whole() -> None:
    with pytest.raises(ValueError, match="no adapters can be added") as caught:
        add_adapters_(llama(tied=True).build(), Lora(target_modules="mlp"))
    said = str(caught.value)
    assert said.startswith("no adapters can be added to LlamaForCausalLM (Target module LlamaMLP( (gate_proj): Linear(")
    assert ") is not supported" in said
    assert said.endswith("): name linear layers in target_modules.")
    assert "\n" not in said


class Holder(nn.Module):
    """A model that holds another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(4, 4)


def test_a_model_that_holds_one_with_adapters_is_refused_more() -> None:
    refused(
        Holder(add_adapters_(llama(tied=True).build(), Lora())),
        Lora(),
        "Holder has adapters already, and method lora adds new ones: set method to full.",
    )


# ---------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "float16"}, "dtype is 'float16', and it must be one of float32, bfloat16."),
        ({"target_modules": 3}, "target_modules is 3, and it must be all-linear or names of modules."),
        ({"target_modules": ()}, "target_modules is (), and it must be all-linear or names of modules."),
        ({"target_modules": ("a", 1)}, "target_modules is ('a', 1), and it must be all-linear or names of modules."),
        ({"modules_to_save": {"a": 1}}, "modules_to_save is {'a': 1}, and it must be names of modules."),
    ],
)
def test_settings_that_name_nothing_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Lora(**settings)


def test_one_name_may_stand_for_a_list_of_one() -> None:
    one: Any = "lm_head"
    listed: Any = ["lm_head"]
    assert Lora(modules_to_save=one) == Lora(modules_to_save=listed) == Lora(modules_to_save=("lm_head",))
    assert Lora(target_modules="q_proj").target_modules == "q_proj"


# ---------------------------------------------------------------------------------------------- torch's fast paths


class Encoder(nn.Module):
    """torch's own encoder, whose layers read their weights past their modules in evaluation."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers) if layers > 1 else layer

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        out: Tensor = self.encoder(x, src_key_padding_mask=padding)
        return out


@pytest.mark.parametrize("quantization", [Unquantized(), Nf4(), Int8(threshold=0.0)], ids=str)
@pytest.mark.parametrize("layers", [1, 2])
def test_an_encoder_of_torch_is_evaluated_with_its_adapters(layers: int, quantization: Quantization) -> None:
    model = moved_(load_model(source(Encoder(layers)), job(Lora(rank=2), quantization))).eval()
    x = torch.arange(48.0).view(2, 3, 8).sin()
    padding = torch.tensor([[False, False, True], [False, False, False]])
    enabled = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        as_it_is = model(x, padding)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            expected = model(x, padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)
    torch.testing.assert_close(as_it_is[~padding], expected[~padding], rtol=0, atol=1e-6)
