"""Published records told from their fields alone, as runs that simulate; and what other trainers do, on real tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from published import general, trainers
from published.auto_gptq import PackedLinear
from published.models import model_config
from published.record import Record, read
from published.run import NotExpressible
from torch import Tensor, nn

from memtrain.job import AdamW
from memtrain.memory.footprint import footprint
from memtrain.method import Full, Lora, Nf4
from memtrain.models.build import FromConfig, FromModule
from memtrain.plan import ChunkedLogits, DataParallel, DuringBackward, Foreach, Fused, PagedEightBit, Recompute, WholeLogits
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16
from memtrain.trace.event import Kind, Phase
from memtrain.trace.kernels import kernels_of
from memtrain.trace.simulate import simulate

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256, "tied_embeddings": False}
RECORDS = Path(__file__).parents[3] / "shared" / "ground_truth" / "dev.jsonl"


def record(**said: Any) -> Record:
    line: dict[str, Any] = {
        "id": "made by hand",
        "source": "someone's report",
        "model": "someone/tiny",
        "arch": SIZES,
        "precision": "pure-bf16",
        "optimizer": "adamw (torch foreach)",
        "batch_size_per_gpu": 2,
        "seq_len": 16,
        "checkpointing": "none",
        "attention": "sdpa",
        "loss": "standard",
        "gpus": {"count": 1, "type": "A100-80GB"},
        **said,
    }
    return Record.of(line)


def simulated(told: Record) -> Any:
    run = general.express(told)
    return footprint(simulate(run.job, run.plan, run.source, run.rows, run.device), run.device)


def module_of(told: Record) -> Any:
    source = general.express(told).source
    assert isinstance(source, FromModule)
    return source.module


# ---------------------------------------------------------------------- the run of a record


def test_the_fields_of_a_record_decide_job_plan_and_rows() -> None:
    run = general.express(record(grad_accum=4, checkpointing="full", gpus={"count": 2, "type": "A100-80GB"}, sharding="ddp"))
    assert isinstance(run.job.optimizer, AdamW)
    assert (run.job.precision, run.job.method, run.job.global_batch_size, run.job.max_grad_norm) == (Bf16(), Full(), 16, 1.0)
    plan = run.plan
    assert (plan.micro_batch_size, plan.activations, plan.loss) == (2, Recompute(), WholeLogits())
    assert (plan.optimizer_kernel, plan.sharding) == (Foreach(), DataParallel(2))
    assert run.rows == dict.fromkeys(("input_ids", "attention_mask", "labels"), ((16,), torch.int64))
    assert run.device.name == "a100_80gb"


def test_an_update_in_backward_clips_nothing() -> None:
    run = general.express(record(optimizer_in_backward=True))
    assert (run.plan.update, run.plan.optimizer_kernel, run.job.max_grad_norm) == (DuringBackward(), Fused(), None)


def test_paged_state_of_16_bit_weights_takes_next_to_nothing_on_the_card() -> None:
    told = record(optimizer="paged_adamw_32bit", arch={**SIZES, "hidden": 512, "ffn": 512, "vocab": 512})
    assert general.express(told).plan.optimizer_state == PagedEightBit()
    found = simulated(told).by_kind
    # bitsandbytes pages nothing of fewer than 100,000 elements: the norms' state stays.
    assert 0 < found[Kind.OPTIMIZER_STATE] < found[Kind.WEIGHT] / 50


def test_packed_weights_are_memtrains_own() -> None:
    told = record(method="qlora", lora_rank=4, lora_targets=["q", "v"], precision="nf4 (double-quant) base, bf16 autocast")
    run = general.express(told)
    assert run.job.quantization == Nf4(double_quantization=True)
    assert run.job.method == Lora(rank=4, target_modules=("q_proj", "v_proj"), dtype="float32")
    assert run.job.precision == AutocastBf16()


def test_frozen_float16_stays_float16_under_autocast() -> None:
    told = record(method="lora", lora_rank=4, lora_targets=["q"], precision="fp16")
    assert general.express(told).job.precision == AutocastFp16()
    types = {parameter.requires_grad: parameter.dtype for parameter in module_of(told).parameters()}
    assert types == {False: torch.float16, True: torch.float32}


def test_a_fused_head_is_a_loss_in_chunks() -> None:
    # 32 tokens, and 256 words of 64 each: the logits of 8 tokens are as large as the hidden states of all.
    assert general.express(record(loss="fused linear CE (liger)")).plan.loss == ChunkedLogits(8)


def test_each_guess_is_a_sentence() -> None:
    run = general.express(record(optimizer="unspecified", assume=["rows are full"]))
    assert "rows are full" in run.assumed
    assert "the optimizer 'unspecified' is AdamW" in run.assumed
    assert "the trainer is transformers' Trainer" in run.assumed


def test_forward_and_backward_alone_have_no_update() -> None:
    assert not general.express(record(scope="fwd_bwd")).updates
    assert general.express(record()).updates


def test_installed_libraries_tell_all_of_them() -> None:
    assert general.environment(record()) == "current"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"scope": "component"}, "the scope 'component' is not a training step"),
        ({"offload": "activations to CPU"}, "the offload 'activations to CPU' is not in memtrain"),
        ({"compile": True}, "what torch.compile fuses is not predicted"),
        ({"seq_len": None}, "the record has no batch size or no length"),
        ({"method": "full (LISA, 2 active layers)"}, r"the method 'full \(LISA, 2 active layers\)' is not in memtrain"),
        ({"gpus": {"count": 4, "type": "A100"}, "sharding": "fsdp"}, "4 cards with sharding 'fsdp' are not in memtrain"),
        ({"gpus": {"count": 2, "type": "A100"}}, "2 cards with sharding 'none' are not in memtrain"),
        ({"method": "no-such-method"}, "the method 'no-such-method' is not one of peft's"),
        ({"method": "prompt_tuning"}, "adds tokens, of which the record does not say how many"),
        ({"method": "lora", "lora_targets": ["no_such_layer"]}, "peft cannot add 'lora'"),
        (
            {"model": "google/gemma-2-2b", "loss": "cut cross-entropy"},
            "the loss cannot be chunked, its head changes the logits",
        ),
    ],
)
def test_what_cannot_be_told_is_refused_with_a_reason(said: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotExpressible, match=reason):
        general.express(record(**said))


# ---------------------------------------------------------------------- what is simulated


def test_adam_over_all_weights_of_a_layer_takes_five_times_their_bytes() -> None:
    told = record(
        model="SwiGLU FeedForward(512,512)", precision="fp32", loss="output.sum()", batch_size_per_gpu=8, seq_len=1, arch={}
    )
    weights = 3 * 512 * 512 * 4
    found = simulated(told)
    assert found.peak_phase == Phase.FIRST_UPDATE
    assert found.by_kind[Kind.WEIGHT] == weights
    assert 5 * weights <= found.peak_allocated_bytes < 5.1 * weights + 2 * 8_519_680  # and cuBLAS's two workspaces


@pytest.mark.parametrize("method", ["lora", "dora", "pissa", "ia3", "vera", "ln_tuning", "oft", "adalora"])
def test_adapters_of_peft_train_beside_frozen_weights(method: str) -> None:
    targets = ["input_layernorm"] if method == "ln_tuning" else ["q_proj", "down_proj"]
    found = simulated(record(method=method, lora_rank=4, lora_targets=targets))
    weights = found.by_kind[Kind.WEIGHT]
    assert 0 < found.by_kind.get(Kind.OPTIMIZER_STATE, 0) < weights


def test_a_fused_norm_and_a_fused_mlp_keep_less() -> None:
    plain = record(loss="fused linear CE", seq_len=2048)
    fused = record(loss="fused linear CE + RMSNorm/SwiGLU (liger)", seq_len=2048)
    kept = [simulated(told).by_phase[Phase.FORWARD] for told in (plain, fused)]
    tokens, layers = 2 * 2048, SIZES["layers"]
    # At least the activation of the gate in each layer, in bfloat16.
    assert kept[0] - kept[1] >= layers * tokens * SIZES["ffn"] * 2


def test_gptq_has_half_a_byte_a_weight() -> None:
    sizes = {**SIZES, "hidden": 256, "ffn": 512, "vocab": 64}
    told = record(
        method="lora",
        lora_rank=2,
        lora_targets=["q"],
        precision="GPTQ int4 base, fp16 autocast",
        arch=sizes,
        batch_size_per_gpu=1,
    )
    packed = {path: one for path, one in module_of(told).named_buffers() if path.endswith("qweight")}
    # Seven matrices in each of two layers, one of them inside an adapter.
    assert len(packed) == 14
    matrices = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)
    assert sum(one.nbytes for one in packed.values()) == matrices // 2
    assert simulated(told).by_kind[Kind.OPTIMIZER_STATE] > 0


@pytest.mark.parametrize(("converts", "outside"), [(True, torch.float32), (False, torch.bfloat16)])
def test_what_comes_out_of_autocast_is_cast_to_fp32_where_the_trainer_does(converts: bool, outside: torch.dtype) -> None:
    inside: list[torch.dtype] = []

    class Projection(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            projected = super().forward(given)
            inside.append(projected.dtype)
            return projected

    with torch.device("meta"):
        model = trainers.mixed_precision(Projection(4, 4), torch.bfloat16, converts=converts)
        given = torch.ones(2, 4)
    with kernels_of(general.express(record()).device):
        assert model(given).dtype is outside
    assert inside == [torch.bfloat16]


def test_encoders_and_images_get_rows_of_their_own() -> None:
    bert = record(model="bert-base-uncased", arch={"extra": "encoder, seq-classification head"}, precision="fp32")
    assert general.express(bert).rows["labels"] == ((), torch.int64)
    assert type(module_of(bert)).__name__ == "BertForSequenceClassification"
    translator = module_of(record(model="t5-small", precision="fp32", attention="eager"))
    assert translator.config.decoder_start_token_id == 0
    image = record(model="torchvision vit_b_16", precision="fp32", seq_len=197)
    assert general.express(image).rows["pixel_values"] == ((3, 224, 224), torch.float32)


# ---------------------------------------------------------------------- what others do, on real tensors


def test_a_packed_weight_is_unpacked_to_scaled_differences() -> None:
    layer = PackedLinear(nn.Linear(8, 8, bias=False))
    layer.shifts.copy_(torch.arange(0, 32, 4, dtype=torch.int32)[None])
    # Each 32-bit integer holds the numbers 0 to 7, and all zeros are 0, which stands for 1.
    layer.qweight.fill_(0x76543210)
    layer.qzeros.zero_()
    layer.scales.fill_(0.5)
    layer.g_idx.zero_()
    expected = (torch.arange(8.0)[:, None].expand(8, 8) - 1) * 0.5
    assert torch.equal(layer.unpacked().float(), expected)
    assert torch.equal(layer(torch.eye(8)), expected)


def tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


def tokens() -> Tensor:
    return torch.arange(10).reshape(2, 5)


@pytest.mark.parametrize("in_fp32", [False, True])
def test_a_loss_outside_of_the_model_is_the_models_and_keeps_the_logits(in_fp32: bool) -> None:
    model = tiny().to(torch.bfloat16 if in_fp32 else torch.float32)
    own = model(input_ids=tokens(), labels=tokens()).loss
    looped = trainers.loss_outside(model, in_fp32=in_fp32)
    assert torch.allclose(looped(input_ids=tokens(), labels=tokens())["loss"].float(), own.float(), rtol=1e-2)
    kept = looped.__dict__["_kept"]
    assert (kept.dtype, kept.shape[-1]) == (torch.float32, 64)
    assert type(looped).__name__ == "LlamaForCausalLM"


def test_a_loop_that_names_its_outputs_keeps_them_until_the_next_ones_are_there() -> None:
    model = trainers.keeping_outputs(tiny())
    first = model(input_ids=tokens(), labels=tokens())
    assert model.__dict__["_kept"] is first
    second = model(input_ids=tokens(), labels=tokens())
    assert model.__dict__["_kept"] is second
    assert trainers.trainer(record(source_family="huggingface/peft")).keeps_outputs


def test_a_loss_by_chunks_is_the_whole_loss() -> None:
    model = tiny()
    whole = model(input_ids=tokens(), labels=tokens()).loss
    trainers.loss_by_chunks(model, 3)
    assert torch.allclose(model(input_ids=tokens(), labels=tokens()).loss, whole)


def test_a_gradient_in_place_of_the_logits_takes_no_memory() -> None:
    model = tiny()
    trainers.loss_in_place(model)
    places: list[int] = []
    output = model(input_ids=tokens(), labels=tokens())
    output.logits.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    output.loss.backward()
    assert places == [output.logits.data_ptr()]


def test_what_trains_whole_keeps_its_type() -> None:
    model = tiny().to(torch.bfloat16)
    settings = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    found = trainers.adapted(model, "lora", settings, "float32")
    types = {path.split(".")[-3]: one.dtype for path, one in found.named_parameters() if one.requires_grad}
    assert types["lora_A"] == types["lora_B"] == torch.float32
    assert types["modules_to_save"] == torch.bfloat16


def test_sources_have_the_habits_of_their_trainers() -> None:
    assert trainers.trainer(record(source_family="pytorch/torchtune")).max_grad_norm is None
    assert trainers.trainer(record(source_family="axolotl-ai-cloud/axolotl")).unpacked == "bfloat16"
    assert trainers.trainer(record()).is_transformers


# ---------------------------------------------------------------------- the table of models


def billions(told: Record) -> float:
    from transformers import AutoConfig

    kind, settings = model_config(told)
    with torch.device("meta"):
        model: nn.Module = FromConfig(AutoConfig.for_model(kind, **settings)).build(torch.bfloat16)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e9


# As the hub counts them.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("openai-community/gpt2", 0.124),
        ("facebook/opt-350m", 0.331),
        ("EleutherAI/pythia-1.4b", 1.415),
        ("bigscience/bloom-560m", 0.559),
        ("EleutherAI/gpt-neo-1.3B", 1.316),
        ("tiiuae/falcon-7b", 6.92),
        ("bigcode/starcoder2-3b", 3.03),
        ("meta-llama/Llama-3.2-1B-Instruct", 1.236),
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494),
        ("Qwen/Qwen3-1.7B", 1.72),
        ("google/gemma-2-2b-it", 2.614),
        ("google/gemma-3-1b-it", 1.0),
        ("microsoft/Phi-4-mini-instruct", 3.836),
        ("HuggingFaceTB/SmolLM2-135M", 0.1345),
        ("google-t5/t5-small", 0.0605),
        ("distilbert-base-uncased", 0.067),
        ("FacebookAI/roberta-base", 0.1247),
        ("answerdotai/ModernBERT-base", 0.1497),
        ("LiquidAI/LFM2-350M", 0.354),
        ("torchvision vit_b_16", 0.0866),
    ],
)
def test_a_model_of_the_table_has_its_published_parameters(model: str, parameters: float) -> None:
    assert billions(record(model=model, arch={})) == pytest.approx(parameters, rel=0.01)


@pytest.mark.skipif(not RECORDS.is_file(), reason="the shared records are not beside this checkout")
def test_each_model_of_the_records_has_the_parameters_that_they_give() -> None:
    sizes = {one.model: one for one in read(RECORDS) if one.params_b and one.scope == "train_step"}
    wrong: dict[str, float] = {}
    for model, one in sizes.items():
        try:
            found = billions(one)
        except NotExpressible:
            continue
        # transformers 5 ties the head of each T5 to its embedding, which T0 does not.
        if one.params_b and abs(found / one.params_b - 1) > 0.01 and "T0" not in model:
            wrong[model] = found
    assert wrong == {}
