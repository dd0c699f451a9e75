"""The implementation of attention: the same numbers, given back exactly, and refused where it would train something else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toys import CASES, Case, batch, without_dropout
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import import_utils

from memtrain.features.attention import Implementation, set_attention_
from memtrain.models.build import FromConfig, source
from memtrain.trace.attention import attention_kernels
from memtrain.trace.record import Recorder

CHOOSABLE = [name for name in CASES if name != "plain_module"]
# No kernel of processors takes a mask that learns, which is what T5 adds to the scores but for attention to the encoder.
FUSED = {name: ("math", "flash kernel") if name == "t5" else ("flash kernel",) for name in CHOOSABLE}
TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny(kind: str, **settings: Any) -> Any:
    """A model of one tiny layer, without data."""
    with torch.device("meta"):
        return source({"model_type": kind, **TINY, **settings}).build()


def toy(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return without_dropout(case.build().load()).train()


def step(model: nn.Module, case: Case) -> tuple[float, list[Tensor], tuple[str, ...]]:
    """Loss, gradients and the kernels of attention of one forward and backward."""
    model.zero_grad()
    with Recorder(model) as recorder:
        loss = model(**batch(case, 3)).loss
        loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), gradients, attention_kernels(recorder.trace())


@pytest.mark.parametrize("name", CHOOSABLE)
def test_eager_and_sdpa_train_the_same_numbers(name: str) -> None:
    case = CASES[name]
    found = {}
    for implementation in ("eager", "sdpa"):
        model = toy(case)
        set_attention_(model, implementation)
        found[implementation] = step(model, case)
    (loss, gradients, kernels), (same_loss, same_gradients, other_kernels) = found["eager"], found["sdpa"]
    assert (kernels, other_kernels) == (("eager",), FUSED[name])
    assert loss == pytest.approx(same_loss, rel=1e-6)
    for gradient, same in zip(gradients, same_gradients, strict=True):
        torch.testing.assert_close(gradient, same, rtol=1e-4, atol=1e-6)


def test_where_scores_are_dropped_sdpa_is_the_mathematical_form() -> None:
    case = CASES["gpt2_with_dropout"]
    assert step(case.build().load().train(), case)[2] == ("math",)


@pytest.mark.parametrize("name", CHOOSABLE)
def test_undone_it_is_as_it_was_to_the_bit(name: str) -> None:
    case, model = CASES[name], toy(CASES[name])
    assert isinstance(model, PreTrainedModel)
    config, loss, gradients = model.config, *step(model, case)[:2]
    undo = set_attention_(model, "eager")
    assert step(model, case)[2] == ("eager",)
    undo()
    assert model.config is config
    after = step(model, case)
    assert after[0] == loss
    assert all(map(torch.equal, after[1], gradients))
    assert after[2] == FUSED[name]


def test_the_configuration_that_a_model_was_built_from_stays_as_it_is() -> None:
    """Planning builds its copies from the configuration that the model is built from."""
    config = LlamaConfig(**TINY)
    first, second = (FromConfig(config).build() for _ in range(2))
    set_attention_(first, "eager")
    assert isinstance(first, LlamaForCausalLM)
    assert isinstance(second, LlamaForCausalLM)
    assert [one._attn_implementation for one in (first.config, second.config, config)] == ["eager", "sdpa", "sdpa"]
    assert first.model.layers[0].self_attn.config is first.config


def composite(**implementations: str) -> EncoderDecoderModel:
    bert = {**TINY, "is_decoder": False}
    parts = BertConfig(**bert), BertConfig(**{**bert, "is_decoder": True, "add_cross_attention": True})
    config = EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config._attn_implementation = {"": "sdpa", **implementations}
    return EncoderDecoderModel(config)


def chosen(model: Any) -> list[str]:
    return [part.config._attn_implementation for part in (model, model.encoder, model.decoder)]


def test_every_model_in_a_model_is_set_and_gets_back_its_own() -> None:
    model = composite(encoder="eager", decoder="sdpa")
    assert chosen(model) == ["sdpa", "eager", "sdpa"]
    for implementation in ("eager", "sdpa"):
        undo = set_attention_(model, implementation)
        assert chosen(model) == [implementation] * 3
        # The parts go on sharing what they shared.
        assert model.config.encoder is model.encoder.config
        undo()
        assert chosen(model) == ["sdpa", "eager", "sdpa"]


def test_a_model_inside_a_module_is_set() -> None:
    model = tiny("llama")
    undo = set_attention_(nn.Sequential(nn.Linear(2, 2), model), "eager")
    assert model.config._attn_implementation == "eager"
    undo()
    assert model.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------------------------------------- refusals


def refusal(model: nn.Module, implementation: Implementation) -> str:
    """The refusal, which changes nothing."""
    before = getattr(model, "config", None)
    implemented = getattr(before, "_attn_implementation", None)
    with pytest.raises(ValueError, match=r"\.$") as caught:
        set_attention_(model, implementation)
    assert getattr(model, "config", None) is before
    assert getattr(before, "_attn_implementation", None) == implemented
    return str(caught.value)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flash_attention"])
def test_a_plain_module_has_no_choice(implementation: Implementation) -> None:
    assert refusal(nn.Linear(2, 2), implementation) == (
        "Linear does not let its attention be chosen, as models of transformers do: set attention to model_default."
    )


def test_scores_that_are_capped_are_not_for_sdpa() -> None:
    gemma = tiny("gemma2", head_dim=8, attn_logit_softcapping=50.0)
    assert refusal(gemma, "sdpa") == (
        "Gemma2ForCausalLM caps its attention scores at 50.0 (attn_logit_softcapping), which SDPA does not: "
        "set attention to eager or model_default."
    )
    set_attention_(gemma, "eager")


def test_attention_sinks_are_not_for_sdpa() -> None:
    gpt = tiny("gpt_oss", head_dim=8, num_local_experts=2, num_experts_per_tok=1, rope_parameters={"rope_type": "default"})
    assert refusal(gpt, "sdpa") == (
        "GptOssForCausalLM has attention sinks (model.layers.0.self_attn.sinks), which SDPA leaves out: "
        "set attention to eager or model_default."
    )
    set_attention_(gpt, "eager")


class WithoutSdpa(LlamaForCausalLM):
    _supports_sdpa = False


def test_a_model_without_sdpa_is_refused_in_transformers_words() -> None:
    with torch.device("meta"):
        model = WithoutSdpa(LlamaConfig(**TINY))
    assert refusal(model, "sdpa") == (
        "WithoutSdpa does not run with attention sdpa (WithoutSdpa does not support an attention implementation through "
        "torch.nn.functional.scaled_dot_product_attention yet): set attention to eager or model_default."
    )


def test_a_model_that_chooses_when_it_is_built_is_refused() -> None:
    model = tiny("gpt_neo", num_layers=1, num_heads=2, attention_types=[[["global"], 1]])
    assert refusal(model, "sdpa") == (
        "the attention of GPTNeoForCausalLM cannot be chosen after it is built, and it is eager: set attention to model_default."
    )
    set_attention_(model, "eager")


def test_a_model_that_returns_its_scores_needs_them() -> None:
    model = tiny("llama", attn_implementation="eager", output_attentions=True)
    assert refusal(model, "sdpa") == (
        "LlamaForCausalLM returns its attention scores (output_attentions), and with SDPA there are none: "
        "set output_attentions to False in its configuration, or attention to eager."
    )
    assert "and with flash-attn there are none" in refusal(model, "flash_attention")


# ---------------------------------------------------------------------------------------------- the flash-attn package


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> tuple[Tensor, None]:
    """What versions 3 and 4 are like: heads behind tokens, no dropout."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal), None


def attend_and_drop(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, causal: bool = False) -> Tensor:
    """What version 2 is like."""
    return attend(query, key, value, causal)[0]


def looks_for_a_card(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    raise RuntimeError("expected a CUDA tensor. More advice")


Installed = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Put packages of these versions where imports look, and let transformers find those of ``found``."""

    def install(found: tuple[int, ...] = (), **functions: Callable[..., Any]) -> None:
        for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
            monkeypatch.setitem(sys.modules, name, None)
        for name, function in functions.items():
            package = ModuleType(name)
            vars(package)["flash_attn_func"] = function
            monkeypatch.setitem(sys.modules, name, package)
        for version in (2, 3, 4):
            monkeypatch.setattr(
                import_utils, f"is_flash_attn_{version}_available", lambda version=version: version in found, raising=False
            )

    return install


def test_without_the_package_each_version_says_why(installed: Installed) -> None:
    installed()
    assert refusal(tiny("llama"), "flash_attention") == (
        "flash-attn cannot be used (version 4: import of flash_attn.cute halted; None in sys.modules; "
        "version 3: import of flash_attn_interface halted; None in sys.modules; "
        "version 2: import of flash_attn halted; None in sys.modules): "
        "install it on a machine with a card, plan there too, or set attention to sdpa."
    )


def test_what_a_version_leaves_out_is_a_reason(installed: Installed) -> None:
    installed(found=(3,), flash_attn_interface=attend)
    found = "version 3: it drops no scores, and attention_dropout is on;"
    assert found in refusal(tiny("llama", attention_dropout=0.1), "flash_attention")
    assert "version 3: it does not cap scores at 50.0;" in refusal(tiny("gemma2", head_dim=8), "flash_attention")
    gpt = tiny("gpt_oss", head_dim=8, num_local_experts=2, num_experts_per_tok=1, rope_parameters={"rope_type": "default"})
    assert "version 3: it leaves out the attention sinks (model.layers.0.self_attn.sinks);" in refusal(gpt, "flash_attention")


def test_a_version_that_does_not_run_without_data_is_not_planned_with(installed: Installed) -> None:
    installed(found=(2,), flash_attn=looks_for_a_card)
    assert "version 2: it does not run without data, expected a CUDA tensor)" in refusal(tiny("llama"), "flash_attention")


def test_a_version_that_transformers_does_not_find_is_not_taken(installed: Installed) -> None:
    installed(flash_attn=attend_and_drop)
    assert "version 2: transformers does not find it, or finds no card)" in refusal(tiny("llama"), "flash_attention")


def test_the_newest_version_that_suits_is_set(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for a card when it sets one of them, which is answered here."""
    models = [(3, tiny("llama")), (2, tiny("llama", attention_dropout=0.1))]
    for name in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation"):
        monkeypatch.setattr(PreTrainedModel, name, lambda self, implementation, *_, **__: implementation)
    installed(found=(2, 3), flash_attn=attend_and_drop, flash_attn_interface=attend)
    for version, model in models:
        config: PretrainedConfig = model.config
        undo = set_attention_(model, "flash_attention")
        assert model.config._attn_implementation == f"flash_attention_{version}"
        undo()
        assert model.config is config
        assert config._attn_implementation == "sdpa"


def test_a_model_without_flash_attention_is_refused_in_transformers_words(installed: Installed) -> None:
    installed(found=(2,), flash_attn=attend_and_drop)
    t5 = CASES["t5"].build().load()
    assert refusal(t5, "flash_attention") == (
        "T5ForConditionalGeneration does not run with attention flash_attention_2 (T5ForConditionalGeneration does not support "
        "Flash Attention 2 yet): set attention to eager or model_default."
    )
