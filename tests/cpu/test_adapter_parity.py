"""G1 for adapters and packed weights: the simulated step does to memory exactly what the real step does."""

from __future__ import annotations

from typing import Any

import pytest
from test_parity import both, load_peak
from toys import CASES, batch

from memtrain.job import Job
from memtrain.method import Int8, Lora, Nf4, Quantization, Unquantized
from memtrain.models.load import load_model
from memtrain.plan import ChunkedLogits, Plan, Recompute
from memtrain.precision import AutocastBf16, Bf16, Fp32, Precision
from memtrain.run import prepare
from memtrain.trace.kernels_bitsandbytes import NO_OUTLIERS

UNQUANTIZED, FP32 = Unquantized(), Fp32()
PLAIN = Plan(micro_batch_size=2)
SAVERS = Plan(micro_batch_size=2, activations=Recompute(1), loss=ChunkedLogits(16))
RECOMPUTED = Plan(micro_batch_size=2, activations=Recompute(1))


def job(method: Lora, quantization: Quantization = UNQUANTIZED, precision: Precision = FP32) -> Job:
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
