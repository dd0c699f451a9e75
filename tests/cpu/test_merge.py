"""Adapters that are written, and models with their adapters added in: read again, they compute what was trained."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_adapters import job, moved_, trained
from torch import Tensor, nn

from memtrain.method import Lora
from memtrain.models.adapters import add_adapters_
from memtrain.models.build import FromModule, source
from memtrain.models.load import load_model
from memtrain.models.merge import merged
from memtrain.models.save import save_merged, save_model
from memtrain.precision import Bf16

VOCABULARY, WIDTH = 96, 16
IDS = torch.arange(3, 15).view(2, 6)
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 8},
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 8,
    },
    "t5": {
        "model_type": "t5",
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
}
# What trains whole; each is tied to another module, or holds one that is.
WHOLE = [
    ("llama", ()),
    ("llama", ("mlp",)),
    ("gpt2", ()),
    ("gpt2", ("lm_head",)),
    ("gpt2", ("wte",)),
    ("bert", ()),
    ("bert", ("cls",)),
    ("bert", ("word_embeddings",)),
    ("bert", ("decoder",)),
    ("t5", ()),
    ("t5", ("lm_head",)),
    ("t5", ("embed_tokens",)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models that have been saved, no bias of theirs zero."""
    made: dict[str, Path] = {}

    def saved(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            model = source({**SIZES, **SHAPES[name]}).build()
            for parameter in model.parameters():
                parameter.data += 0.1 * torch.randn(parameter.shape)
            save_model(model, None, made[name])
        return made[name]

    return saved


def logits(model: Any) -> Tensor:
    labels = {"labels": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        out: Tensor = model.eval()(input_ids=IDS, **labels).logits
    return out.float()


def adapted(path: Path, whole: tuple[str, ...] = (), **lora: Any) -> Any:
    torch.manual_seed(0)
    return moved_(load_model(source(str(path)), job(Lora(rank=2, modules_to_save=whole, **lora))))


@pytest.mark.parametrize(("name", "whole"), WHOLE)
def test_adapters_of_every_shape_are_read_by_peft(
    name: str, whole: tuple[str, ...], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    from peft import AutoPeftModel, AutoPeftModelForCausalLM

    model = adapted(folder(name), whole)
    save_model(model, None, tmp_path)
    reader = AutoPeftModelForCausalLM if name in ("llama", "gpt2") else AutoPeftModel
    with warnings.catch_warnings():
        # Of tied weights, for which peft has another way.
        warnings.simplefilter("ignore")
        again = reader.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert (logits(model) - logits(source(str(folder(name))).load())).abs().max() > 1e-2


@pytest.mark.parametrize(("name", "whole"), WHOLE)
def test_a_merged_model_of_every_shape_is_read_without_peft(
    name: str, whole: tuple[str, ...], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    made = source(str(folder(name)))
    model = adapted(folder(name), whole)
    save_merged(model, made, torch.float32, None, tmp_path)
    again = source(str(tmp_path)).load()
    assert type(again) is type(model)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_in_16_bits_the_product_of_the_adapters_is_rounded_once(name: str, folder: Callable[[str], Path]) -> None:
    base = source(str(folder(name)))
    model = adapted(folder(name), dtype="bfloat16")
    before, whole = dict(base.load().named_parameters()), dict(merged(model, base.load()).named_parameters())
    layers = [(path, module) for path, module in model.named_modules() if hasattr(module, "lora_A")]
    assert layers
    for path, layer in layers:
        down, up = (part["default"].weight.detach().float() for part in (layer.lora_A, layer.lora_B))
        added = layer.scaling["default"] * up @ down
        added = added.T if layer.fan_in_fan_out else added
        torch.testing.assert_close(whole[f"{path}.weight"], before[f"{path}.weight"] + added, rtol=0, atol=1e-6)


def test_untying_says_so_in_each_configuration_and_leaves_no_tie() -> None:
    base: Any = source({**SIZES, **SHAPES["llama"]}).build()
    model = add_adapters_(source({**SIZES, **SHAPES["llama"]}).build(), Lora(rank=2, modules_to_save=("lm_head",)))
    inner = type(base.config)(tie_word_embeddings=True)
    base.config.get_text_config = lambda: inner
    out: Any = merged(model, base)
    assert out.config.tie_word_embeddings is inner.tie_word_embeddings is False
    out.tie_weights(recompute_mapping=False)
    assert out.lm_head.weight is not out.model.embed_tokens.weight


def test_what_is_written_with_adapters_names_the_base_and_how_it_is_loaded(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for name, task, mapping in (
        ("llama", "CAUSAL_LM", None),
        (
            "bert",
            None,
            {"base_model_class": "BertForMaskedLM", "parent_library": "transformers.models.bert.modeling_bert"},
        ),
    ):
        model = adapted(folder(name))
        save_model(model, None, tmp_path)
        written = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
        assert written["base_model_name_or_path"] == str(folder(name))
        assert (written["task_type"], written["auto_mapping"]) == (task, mapping)
        assert written["inference_mode"] is True
        assert model.peft_config["default"].inference_mode is False


def test_adapters_name_the_path_that_their_base_was_given_by(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder("llama")
    monkeypatch.chdir(path.parent)
    model: Any = load_model(source(f"./{path.name}"), job(Lora(rank=2)))
    assert model.peft_config["default"].base_model_name_or_path == path.name
    itself: Any = load_model(FromModule(source(str(path)).load()), job(Lora(rank=2)))
    assert itself.peft_config["default"].base_model_name_or_path == str(path)
    built: Any = load_model(source({**SIZES, **SHAPES["llama"]}), job(Lora(rank=2)))
    assert built.peft_config["default"].base_model_name_or_path is None


# ---------------------------------------------------------------------------------------------- buffers, missing weights


class Normed(nn.Module):
    """Two layers with a norm between them that remembers what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.norm(self.a(x))).pow(2).mean()
        return out


def test_running_statistics_of_a_module_that_trains_whole_are_written_and_merged(tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    given = FromModule(Normed())
    model = moved_(load_model(given, job(Lora(rank=2, modules_to_save=("norm",))))).train()
    x = torch.arange(8.0).view(2, 4)
    for _ in range(3):
        model(x)
    model.eval()
    save_model(model, None, tmp_path / "adapters")
    save_merged(model, given, torch.float32, None, tmp_path / "merged")
    again, whole = PeftModel.from_pretrained(Normed(), tmp_path / "adapters").eval(), Normed().eval()
    whole.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    assert whole.norm.num_batches_tracked == 3
    assert torch.equal(again(x), model(x))
    torch.testing.assert_close(whole(x), model(x), rtol=1e-5, atol=1e-6)


def test_running_statistics_of_a_frozen_module_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"^norm of Normed keeps running statistics, which move though the model is frozen and are not saved with adapters: "
        r"name it in modules_to_save\.$",
    ):
        add_adapters_(Normed(), Lora())


def test_weights_that_are_not_saved_are_trained_whole_or_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_model(source(str(folder("bert"))).load(), None, base)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["BertForSequenceClassification"]
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made = source(str(base))
    for whole, missing in (((), "bert.pooler.dense, classifier"), (("pooler",), "classifier")):
        with pytest.raises(
            ValueError,
            match=rf"^the weights of {missing} are not at '{base}', so they would stay as they are drawn: name \w+ in modules_to_save\.$",
        ):
            load_model(made, job(Lora(rank=2, modules_to_save=whole)))
    model = adapted(base, ("pooler", "classifier"))
    save_merged(model, made, torch.float32, None, tmp_path / "merged")
    again = source(str(tmp_path / "merged")).load()
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------- the types around what trains whole


@pytest.mark.parametrize("name", ["self_attn", "mlp", "input_layernorm", "model"])
def test_what_trains_whole_in_32_bits_in_a_model_of_16_takes_keywords_and_gives_tuples(
    name: str, folder: Callable[[str], Path]
) -> None:
    lora = Lora(rank=2, target_modules=("q_proj",) if name != "model" else ("lm_head",), modules_to_save=(name,))
    lora = lora if name != "self_attn" else Lora(rank=2, target_modules=("up_proj",), modules_to_save=(name,))
    model: Any = load_model(source(str(folder("llama"))), job(lora, precision=Bf16()))
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16
    assert all(parameter.grad is not None for parameter in trained(model).values())
