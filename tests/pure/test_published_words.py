"""What the free text of published records means, word by word."""

from __future__ import annotations

import pytest
from published import cards, words
from published.models import model_config, names, spelled
from published.record import Record
from published.run import NotExpressible
from published.targets import targets

from memtrain.job import Adafactor, Adam, AdamW, Sgd
from memtrain.method import Int8, Nf4, Unquantized
from memtrain.plan import (
    EightBit,
    Foreach,
    Fused,
    Keep,
    OnDevice,
    Paged,
    PagedEightBit,
    Recompute,
    RecomputeSelective,
)
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Bf16Master, Fp32

# ---------------------------------------------------------------------- number formats


@pytest.mark.parametrize(
    ("text", "precision", "weights", "autocast", "adapters"),
    [
        ("pure-bf16", Bf16(), "bfloat16", "", ""),
        ("bf16-true", Bf16(), "bfloat16", "", ""),
        ("pure-bf16; adapters fp32", Bf16(), "bfloat16", "", "float32"),
        ("bf16 weights + bf16 autocast, adapters fp32", Bf16(), "bfloat16", "bfloat16", "float32"),
        ("fp32 weights (load-dtype bug #339) + bf16 autocast", AutocastBf16(), "float32", "", ""),
        ("bf16 autocast", AutocastBf16(), "float32", "", ""),
        ("bf16 (DeepSpeed, fp32 master)", Bf16Master(), "bfloat16", "", ""),
        ("fp16 autocast with fp32 weights", AutocastFp16(), "float32", "", ""),
        ("fp16 mixed precision (AMP)", AutocastFp16(), "float32", "", ""),
        ("fp16 weights + fp16 autocast, adapters fp32", AutocastFp16(), "float16", "", "float32"),
        ("fp32 (assumed)", Fp32(), "float32", "", ""),
        ("fp32 with tf32", Fp32(tf32=True), "float32", "", ""),
    ],
)
def test_words_of_precision_name_weights_products_and_adapters(
    text: str, precision: object, weights: str, autocast: str, adapters: str
) -> None:
    found = words.numbers(text, adapted="adapters" in text)
    assert (found.precision, found.weights, found.autocast, found.adapters) == (precision, weights, autocast, adapters)
    assert found.quantization == Unquantized()


@pytest.mark.parametrize(
    ("text", "packing"),
    [
        ("nf4 base (no double-quant), bf16 autocast", Nf4(double_quantization=False)),
        ("nf4 (double-quant) base, bf16 autocast", Nf4(double_quantization=True)),
        ("bnb.nf4-dq base, bf16-true", Nf4(double_quantization=True)),
        ("4-bit base, fp16 autocast", Nf4(double_quantization=False)),
        ("int8 base, bf16 autocast", Int8()),
    ],
)
def test_words_of_precision_name_the_packing(text: str, packing: object) -> None:
    assert words.numbers(text, adapted=True).quantization == packing


@pytest.mark.parametrize(
    ("text", "unpacked", "mixes", "precision", "autocast"),
    [
        ("nf4 base, bf16 autocast", "float32", True, AutocastBf16(), ""),
        ("nf4 base, bf16 autocast", "bfloat16", True, Bf16(), "bfloat16"),
        ("nf4 base, bf16", "float32", True, AutocastBf16(), ""),
        ("nf4 base, bf16", "float32", False, Fp32(), ""),
        ("nf4 base, bf16-true", "float32", True, Bf16(), ""),
    ],
)
def test_what_is_not_packed_follows_the_trainer(
    text: str, unpacked: str, mixes: bool, precision: object, autocast: str
) -> None:
    found = words.numbers(text, True, unpacked, mixes=mixes)
    assert (found.precision, found.autocast) == (precision, autocast)


def test_float16_is_frozen_weights_under_autocast_where_adapters_train() -> None:
    assert words.numbers("fp16", adapted=True).weights == "float16"
    with pytest.raises(NotExpressible, match="the precision 'fp16' trains weights in float16, which memtrain does not"):
        words.numbers("fp16", adapted=False)


def test_gptq_is_frozen_beside_float16_under_autocast() -> None:
    found = words.numbers("GPTQ int4 base (group 128), fp16 autocast", adapted=True)
    assert (found.is_gptq, found.precision, found.weights, found.adapters) == (True, AutocastFp16(), "float16", "float32")


@pytest.mark.parametrize("text", ["GPTQ int4 base, bf16", "AWQ base, fp16", "bf16 (dequantised MXFP4)", "fp8 mixed"])
def test_forms_that_memtrain_has_not_are_refused(text: str) -> None:
    with pytest.raises(NotExpressible, match="holds weights in a form that memtrain has not"):
        words.numbers(text, adapted=True)


def test_a_precision_that_is_not_said_is_refused() -> None:
    with pytest.raises(NotExpressible, match="the precision 'unspecified' names no number format"):
        words.numbers("unspecified", adapted=False)


# ---------------------------------------------------------------------- the update


@pytest.mark.parametrize(
    ("text", "rule", "kernel", "state"),
    [
        ("adamw (torch foreach)", AdamW(), Foreach(), OnDevice()),
        ("adamw_torch", AdamW(), Foreach(), OnDevice()),
        ("adamw fused", AdamW(), Fused(), OnDevice()),
        ("adam foreach", Adam(), Foreach(), OnDevice()),
        ("adamw8bit (bnb)", AdamW(), Fused(), EightBit()),
        ("paged_adamw_8bit", AdamW(), Fused(), PagedEightBit()),
        ("paged_adamw_32bit", AdamW(), Fused(), Paged()),
        ("adamw (or paged; assumed)", AdamW(), Foreach(), OnDevice()),
        ("sgd", Sgd(momentum=0.0), Foreach(), OnDevice()),
        ("adafactor", Adafactor(), Fused(), OnDevice()),
    ],
)
def test_words_of_the_optimizer_name_rule_kernel_and_state(text: str, rule: object, kernel: object, state: object) -> None:
    found = words.update_rule(text)
    assert (found.optimizer, found.kernel, found.state) == (rule, kernel, state)


def test_an_optimizer_that_is_guessed_is_said() -> None:
    assert "the optimizer 'unspecified' is AdamW" in words.update_rule("unspecified").assumed
    assert words.update_rule("adamw (torch foreach)").assumed == ()


@pytest.mark.parametrize("text", ["galore r128", "apollo-mini, per-layer", "adamw_torch_4bit"])
def test_optimizers_of_others_are_refused(text: str) -> None:
    with pytest.raises(NotExpressible, match="is not in memtrain"):
        words.update_rule(text)


def test_an_optimizer_on_the_host_is_refused() -> None:
    with pytest.raises(NotExpressible, match="runs on the host in a way that the record does not describe"):
        words.update_rule("adamw fused (on CPU)")


# ---------------------------------------------------------------------- activations


@pytest.mark.parametrize(
    ("text", "method", "policy"),
    [
        ("none", "full", Keep()),
        ("full", "full", Recompute()),
        ("full (HF per-layer)", "lora", Recompute()),
        ("every 2 layers", "full", Recompute(every=2)),
        ("selective per-op", "full", RecomputeSelective()),
        ("none for LoRA, k-bit default (on) for QLoRA (assumed)", "lora", Keep()),
        ("none for LoRA, k-bit default (on) for QLoRA (assumed)", "qlora", Recompute()),
    ],
)
def test_words_of_checkpointing_name_a_policy(text: str, method: str, policy: object) -> None:
    assert words.activations(text, method)[0] == policy


def test_a_default_of_checkpointing_is_said() -> None:
    assert words.activations("none (assumed: config default false)", "lora")[1] != ()
    assert words.activations("none", "lora")[1] == ()
    assert words.activations("", "lora") == (Keep(), ("nothing is recomputed, since the record says nothing of it",))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("full + CPU offload (unsloth)", "keeps activations on the host"),
        ("unspecified", "leaves open what is kept"),
        ("a riddle", "is of no kind that is known"),
    ],
)
def test_other_checkpointing_is_refused(text: str, reason: str) -> None:
    with pytest.raises(NotExpressible, match=reason):
        words.activations(text, "full")


# ---------------------------------------------------------------------- loss


def test_words_of_the_loss_say_what_becomes_of_the_logits() -> None:
    assert words.loss("standard", 4096).is_standard
    assert words.loss("HF CE, logits materialized", 4096).is_standard
    assert words.loss("standard (no CCE)", 4096).is_standard
    assert words.loss("fused triton CE (logits materialized)", 4096).in_place
    assert words.loss("fused linear CE (liger)", 4096).chunk_tokens == 1024
    assert words.loss("cut cross-entropy", 4096).chunk_tokens == 1024
    assert words.loss("chunked CE, chunk 128 with chunked lm_head", 4096).chunk_tokens == 128
    assert words.loss("chunked CE (8 chunks, fp32 upcast per chunk)", 4100).upcast_tokens == 513
    assert words.loss("chunked CE (256)", 4096).upcast_tokens == 256
    assert words.loss("chunked CE 128", 4096).upcast_tokens == 128
    assert words.loss("chunked CE", 4096).upcast_tokens == 512


def test_a_fused_head_takes_as_many_tokens_as_the_caller_says() -> None:
    assert words.loss("fused linear CE (liger)", 4096, 128).chunk_tokens == 128


def test_a_loss_of_no_known_kind_is_refused() -> None:
    with pytest.raises(NotExpressible, match=r"the loss 'output.sum\(\)' is of no kind that is known"):
        words.loss("output.sum()", 8)


# ---------------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    ("said", "kind", "modules"),
    [
        (("q_proj", "v_proj"), "llama", ("q_proj", "v_proj")),
        (("q", "v"), "llama", ("q_proj", "v_proj")),
        (("q", "k", "v", "o", "gate", "up", "down"), "phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        (("c_attn / qkv (DEFAULT)",), "mistral", ("q_proj", "k_proj", "v_proj")),
        (
            ("c_attn", "c_proj", "w1", "w2"),
            "qwen2",
            ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj", "gate_proj"),
        ),
        (("w1", "w3"), "llama", ("gate_proj", "up_proj")),
        (("q", "k", "v", "o", "mlp?"), "llama", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        (("c_attn", "c_proj"), "gpt2", ("c_attn", "c_proj")),
        (("q", "v"), "gpt_neox", ("query_key_value",)),
        (("q_proj", "v_proj"), "falcon", ("query_key_value",)),
        (("default (q,v)",), "opt", ("q_proj", "v_proj")),
        (("input_layernorm", "norm"), "llama", ("input_layernorm", "norm")),
        (("ALL linear",), "llama", "all-linear"),
        (("all-linear",), "llama", "all-linear"),
        (None, "llama", ("q_proj", "v_proj")),
    ],
)
def test_targets_have_the_names_of_the_model(said: tuple[str, ...] | None, kind: str, modules: object) -> None:
    assert targets(said, kind).modules == modules


def test_embeddings_and_heads_train_whole() -> None:
    found = targets(("q", "wte", "lm_head (trained fully)"), "llama")
    assert (found.modules, found.whole) == (("q_proj",), ("embed_tokens", "lm_head"))


def test_targets_that_name_nothing_are_refused() -> None:
    with pytest.raises(NotExpressible, match="name no module of a llama model"):
        targets(("lm_head",), "llama")


# ---------------------------------------------------------------------- the card


@pytest.mark.parametrize(
    ("text", "name", "capability"),
    [
        ("A100-80GB", "a100_80gb", (8, 0)),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb", (8, 0)),
        ("A100-40GB", "a100_40gb", (8, 0)),
        ("H100-80GB", "h100", (9, 0)),
        ("A10G-24GB", "a10g", (8, 6)),
        ("RTX4090", "rtx_4090", (8, 9)),
        ("L40S-48GB", "l40", (8, 9)),
        ("A6000", "a6000", (8, 6)),
        ("T4", "t4", (7, 5)),
        ("L4", "l4", (8, 9)),
    ],
)
def test_a_card_is_found_by_its_name(text: str, name: str, capability: tuple[int, int]) -> None:
    found, _ = cards.card(text)
    assert (found.name, found.compute_capability) == (name, capability)


def test_a_card_that_is_guessed_is_said() -> None:
    assert cards.card("A100-80GB")[1] == ()
    assert cards.card("unspecified")[1] == ("the card 'unspecified' is an A100 with 80 GB",)
    assert cards.card("H100-96GB")[0].usable_bytes > cards.card("H100-80GB")[0].usable_bytes


# ---------------------------------------------------------------------- the model


def record(model: str, **arch: object) -> Record:
    return Record(id="made by hand", source="here", model=model, arch=arch)


@pytest.mark.parametrize(
    ("model", "same"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Qwen/Qwen-1_8B-Chat", "qwen-1.8b"),
        ("microsoft/phi-1_5", "phi-1.5"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("TheBloke/Mistral-7B-v0.1-GPTQ", "mistral-7b"),
        ("torchvision vit_l_16", "vit-l-16"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
        ("openlm-research/open_llama_7b", "open-llama-7b"),
    ],
)
def test_copies_of_a_model_are_spelled_alike(model: str, same: str) -> None:
    assert spelled(model) == spelled(same)


def test_no_two_models_of_the_table_are_spelled_alike() -> None:
    # A copy under another name has the same shapes.
    shapes: dict[str, object] = {}
    for name in names():
        found = model_config(record(name))
        assert shapes.setdefault(spelled(name), found) == found


def test_an_unknown_model_is_built_from_its_architecture() -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256}
    kind, settings = model_config(record("someone/new", **sizes, kv_heads=2, head_dim=32, tied_embeddings=True))
    assert kind == "llama"
    assert (settings["num_key_value_heads"], settings["head_dim"], settings["tie_word_embeddings"]) == (2, 32, True)
    kind, settings = model_config(record("someone/new", **sizes, extra="MoE 8 experts top-2"))
    assert (kind, settings["num_local_experts"], settings["num_experts_per_tok"]) == ("mixtral", 8, 2)
    assert model_config(record("someone/new", **sizes, extra="parallel block, GELU, biases"))[0] == "gpt_neox"
    learned = "learned positions, GELU 2-mat MLP, biases"
    assert model_config(record("someone/new", **sizes, extra=learned))[0] == "gpt2"
    assert model_config(record("someone/new", **sizes, kv_heads=1, extra=f"MQA, {learned}"))[0] == "gpt_bigcode"
    assert model_config(record("someone/new", **sizes, extra="encoder"))[0] == "bert"


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        ({}, "is unknown, and the record gives no architecture of it"),
        ({"layers": 2, "hidden": 64}, "its architecture lacks heads, ffn, vocab"),
        ({"layers": 2, "hidden": 64, "heads": 4, "ffn": 1, "vocab": 1, "extra": "hybrid mamba"}, "names no kind"),
        ({"layers": 2, "hidden": 64, "heads": 4, "ffn": 1, "vocab": 1, "extra": "MoE"}, "does not say how many experts"),
    ],
)
def test_a_model_of_unknown_shape_is_refused(arch: dict[str, object], reason: str) -> None:
    with pytest.raises(NotExpressible, match=reason):
        model_config(record("someone/new", **arch))


@pytest.mark.parametrize(
    "text", ["no gradient checkpointing", "gradient checkpointing off", "none (full activations kept)", "disabled"]
)
def test_what_is_denied_is_not_recomputed(text: str) -> None:
    assert words.activations(text, "full")[0] == Keep()


@pytest.mark.parametrize("text", ["enabled", "activation checkpointing", "HF gradient_checkpointing", "on"])
def test_more_words_for_recomputing_every_block(text: str) -> None:
    assert words.activations(text, "full")[0] == Recompute()


def test_what_is_denied_of_an_update_is_left_out() -> None:
    assert words.update_rule("sgd (no momentum)").optimizer == Sgd(momentum=0.0)
    assert words.update_rule("adamw, not fused").kernel == Foreach()
    assert words.update_rule("adamw (unfused)").kernel == Foreach()
    assert words.update_rule("adamw, not paged").state == OnDevice()


@pytest.mark.parametrize("text", ["RMSprop", "LAMB", "Prodigy", "NAdam"])
def test_a_rule_of_another_kind_is_no_adamw(text: str) -> None:
    with pytest.raises(NotExpressible, match="is not in memtrain"):
        words.update_rule(text)
