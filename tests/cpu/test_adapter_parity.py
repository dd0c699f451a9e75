"""G1 for adapters and packed weights: the simulated step does to memory exactly what the real step does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_parity import both, load_peak
from torch import nn
from toys import CASES, Case, batch

from memtrain.job import Job
from memtrain.method import Full, Int8, Lora, Method, Nf4, Quantization, Unquantized
from memtrain.models.build import FromModule
from memtrain.models.load import load_model
from memtrain.models.save import save_model
from memtrain.plan import ChunkedLogits, Plan, Recompute
from memtrain.precision import AutocastBf16, Bf16, Fp32, Precision
from memtrain.run import prepare
from memtrain.trace.kernels_bitsandbytes import NO_OUTLIERS
from memtrain.trace.simulate import dataless_model_of

UNQUANTIZED, FP32 = Unquantized(), Fp32()
PLAIN = Plan(micro_batch_size=2)
SAVERS = Plan(micro_batch_size=2, activations=Recompute(1), loss=ChunkedLogits(16))
RECOMPUTED = Plan(micro_batch_size=2, activations=Recompute(1))


def job(method: Method, quantization: Quantization = UNQUANTIZED, precision: Precision = FP32) -> Job:
    return Job(model="toy", global_batch_size=4, steps=2, precision=precision, method=method, quantization=quantization)


@pytest.mark.parametrize("precision", [Fp32(), Bf16()], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("method", "plan"),
    [
        (Lora(rank=4), PLAIN),
        (Lora(rank=4), SAVERS),
        (Lora(rank=4, use_rslora=True, dropout=0.1, dtype="bfloat16"), RECOMPUTED),
        (Lora(rank=4, use_dora=True, target_modules=("q_proj", "down_proj")), SAVERS),
        (Lora(rank=4, modules_to_save=("lm_head",)), RECOMPUTED),
        (Lora(rank=4, modules_to_save=("embed_tokens",)), PLAIN),
    ],
    ids=["lora", "lora, savers", "rslora in bf16 with dropout", "dora", "head trained whole", "embeddings trained whole"],
)
def test_a_step_of_adapters_allocates_what_is_simulated(method: Lora, plan: Plan, precision: Precision) -> None:
    measured, predicted = both(CASES["llama"], job(method, precision=precision), plan)
    assert predicted.assumed == ()
    if isinstance(precision, Fp32):
        assert load_peak(measured) == load_peak(predicted)
    # In 16 bits, peft makes adapters in 32 bits, and casts them one after another where they have data.
    assert load_peak(measured) <= load_peak(predicted) + 4 * 4 * 48 * 4


@pytest.mark.parametrize("precision", [Fp32(), Bf16()], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("quantization", "method", "plan"),
    [
        (Nf4(), Lora(rank=4), PLAIN),
        (Nf4(), Lora(rank=4, dropout=0.1), SAVERS),
        (Nf4(double_quantization=False), Lora(rank=4, use_dora=True), RECOMPUTED),
        (Int8(), Lora(rank=4), SAVERS),
        (Int8(threshold=0.0), Lora(rank=4, modules_to_save=("lm_head",)), RECOMPUTED),
    ],
    ids=["nf4", "nf4, savers", "nf4 with plain scales and dora", "int8", "int8 without threshold"],
)
def test_a_step_on_packed_weights_allocates_what_is_simulated(
    quantization: Quantization, method: Lora, plan: Plan, precision: Precision
) -> None:
    measured, predicted = both(CASES["llama"], job(method, quantization, precision), plan)
    assert predicted.assumed == ((NO_OUTLIERS,) if quantization == Int8() else ())
    assert load_peak(measured) <= load_peak(predicted)
    # DoRA's lengths are computed through a copy of the layer, which peft makes otherwise where it has no data.
    if not method.use_dora:
        assert load_peak(measured) == load_peak(predicted)


@pytest.mark.parametrize("quantization", [Unquantized(), Nf4(), Int8()], ids=str)
def test_a_step_under_autocast_allocates_what_is_simulated(quantization: Quantization) -> None:
    both(CASES["llama"], job(Lora(rank=4), quantization, AutocastBf16()), SAVERS)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"llama"}))
def test_every_model_shape_with_packed_weights_allocates_what_is_simulated(name: str) -> None:
    measured, predicted = both(CASES[name], job(Lora(rank=4), Nf4()), PLAIN)
    assert load_peak(measured) == load_peak(predicted)


@pytest.mark.parametrize("plan", [PLAIN, RECOMPUTED], ids=str)
def test_recomputation_leaves_no_adapter_without_a_gradient(plan: Plan) -> None:
    model = load_model(CASES["llama"].build(), job(Lora(rank=4), Nf4()))
    run = prepare(job(Lora(rank=4), Nf4()), plan, model)
    run.forward_backward([batch(CASES["llama"], 2)])
    missing: list[Any] = [path for path, one in model.named_parameters() if one.requires_grad and one.grad is None]
    assert missing == []
    run.release()


# ---------------------------------------------------------------------------------------------- packed by their users


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that has been saved."""
    path: Path = tmp_path_factory.mktemp("base")
    save_model(CASES["llama"].build().build(), None, path)
    return path


def packed_by_a_user(folder: Path, bits: int, *, adapters: bool) -> nn.Module:
    """As the pages of transformers and peft do it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = {4: {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 8: {"load_in_8bit": True}}[bits]
    read = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**settings), dtype=torch.float32)
    if not adapters:
        return read
    with warnings.catch_warnings():
        # peft asks transformers by an old name.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(read, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("method", [Full(), Lora(rank=4)], ids=["with adapters of peft's", "without"])
def test_a_model_that_its_user_packed_is_simulated_like_any_other(bits: int, method: Method, folder: Path) -> None:
    def build() -> FromModule:
        return FromModule(packed_by_a_user(folder, bits, adapters=isinstance(method, Full)))

    both(Case(build, CASES["llama"].row), job(method), PLAIN)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_data_less_copy_leaves_its_users_packed_weights_as_they_are(bits: int, folder: Path) -> None:
    given: Any = packed_by_a_user(folder, bits, adapters=False)
    layer = given.model.layers[0].mlp.up_proj
    weight, scales = layer.weight, layer.weight.SCB if bits == 8 else layer.weight.quant_state.absmax
    bytes_before = weight.clone()
    made: Any = dataless_model_of(job(Lora(rank=4)), FromModule(given))
    copied = made.model.layers[0].mlp.up_proj.base_layer
    assert type(copied.weight) is type(weight)
    assert copied.weight.is_meta
    held = copied.state.SCB if bits == 8 else copied.weight.quant_state.absmax
    assert held.is_meta
    assert (held.shape, held.dtype) == (scales.shape, scales.dtype)
    if bits == 4:
        assert copied.weight.quant_state is copied.quant_state
    else:
        assert copied.state.CB.untyped_storage()._cdata == copied.weight.untyped_storage()._cdata
    assert layer.weight is weight
    assert torch.equal(weight, bytes_before)
    assert (layer.weight.SCB if bits == 8 else layer.weight.quant_state.absmax) is scales
    assert not scales.is_meta
