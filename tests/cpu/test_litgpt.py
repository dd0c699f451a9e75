"""Records of LitGPT: what its scripts keep alive, its layers of four bits, and how records are told as runs."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from published import litgpt
from published.litgpt_modules import Finetuning, PackedLinear, RmsNormOf2023, pack_, use_norms_of_2023_
from published.record import Record
from published.run import NotExpressible
from torch import Tensor, nn
from torch.nn import functional

from memtrain.memory.timeline import MemoryTimeline
from memtrain.plan import Foreach, Fused, OnDevice, Paged
from memtrain.precision import Bf16, Fp32
from memtrain.trace.event import Kind
from memtrain.trace.simulate import simulate

HUB = Record(
    id="hub",
    source="Lightning-AI/litgpt:config_hub/finetune/README.md (tiny/lora.yaml)",
    model="someone/Tiny-1B",
    method="lora",
    lora_rank=2,
    lora_targets=("q", "mlp"),
    precision="bf16-true",
    batch_size_per_gpu=2,
    seq_len=6,
    grad_accum=1,
    gpus={"count": 1, "type": "A10G-24GB"},
)
TABLE = replace(HUB, id="table", source="Lightning-AI/litgpt:tutorials/resource-tables.md (commit 8641822, Oct-2023)")
EXAMPLE = Record(
    id="example",
    source="Lightning-AI/pytorch-lightning:docs/source-fabric/advanced/model_parallel/tp.rst",
    model="SwiGLU FeedForward(64,128)",
    precision="fp32",
    batch_size_per_gpu=8,
    seq_len=1,
    gpus={"count": 1, "type": "A100"},
)


class TinyGpt(nn.Module):
    """Tokens to logits as LitGPT's models do it, with a note of each call."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(16, 8)
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.max_seq_length = 64
        self.calls: list[tuple[bool, bool]] = []
        self.before: weakref.ref[Tensor] | None = None
        self.lived: list[bool] = []

    def forward(self, idx: Tensor, lm_head_chunk_size: int = 0) -> Any:
        self.calls.append((self.training, torch.is_grad_enabled()))
        if self.before is not None:
            self.lived.append(self.before() is not None)
        x = self.wte(idx)
        if lm_head_chunk_size:
            return [self.lm_head(part) for part in x.split(lm_head_chunk_size, dim=1)]
        return self.lm_head(x)


def chunked_cross_entropy(logits: Any, targets: Tensor, chunk_size: int = 128) -> Tensor:
    whole = torch.cat(logits, dim=1) if isinstance(logits, list) else logits
    return functional.cross_entropy(whole.reshape(-1, whole.shape[-1]), targets.reshape(-1))


def _finetuning(keeps_loss: bool = False, head_chunk: int = 4) -> tuple[Finetuning, TinyGpt, Tensor]:
    model = TinyGpt()
    return Finetuning(model, chunked_cross_entropy, head_chunk, keeps_loss), model, torch.arange(12).reshape(2, 6)


# ---------------------------------------------------------------------- what a script keeps alive


def test_the_script_validates_twice_before_its_first_micro_batch_and_never_again() -> None:
    script, model, tokens = _finetuning()
    script(tokens, tokens)
    script(tokens, tokens)
    assert model.calls == [(False, False), (False, False), (True, True), (True, True)]


def test_logits_live_until_the_next_forward_has_returned() -> None:
    script, model, tokens = _finetuning()
    script(tokens, tokens)
    model.before = weakref.ref(script._logits[0])
    script(tokens, tokens)
    assert model.lived == [True]
    assert model.before() is None


@pytest.mark.parametrize("keeps_loss", [True, False])
def test_the_loss_lives_into_the_next_forward_only_where_the_script_prints_it(keeps_loss: bool) -> None:
    script, model, tokens = _finetuning(keeps_loss)
    model.before = weakref.ref(script(tokens, tokens))
    script(tokens, tokens)
    assert model.lived == [keeps_loss]


@pytest.mark.parametrize("head_chunk", [0, 4])
def test_each_token_predicts_the_next_whether_or_not_the_head_is_in_chunks(head_chunk: int) -> None:
    script, model, tokens = _finetuning(head_chunk=head_chunk)
    expected = functional.cross_entropy(model(tokens)[:, :-1].reshape(-1, 16), tokens[:, 1:].reshape(-1))
    torch.testing.assert_close(script(tokens, tokens), expected)


def test_fabric_hands_logits_on_in_the_default_type() -> None:
    script, model, tokens = _finetuning()
    model.to(torch.bfloat16)
    script(tokens, tokens)
    assert [chunk.dtype for chunk in script._logits] == [torch.float32, torch.float32]


# ---------------------------------------------------------------------- layers


def _packed(double_quantization: bool) -> PackedLinear:
    with torch.device("meta"):
        return PackedLinear(nn.Linear(64, 128, bias=False), double_quantization)


def test_a_packed_layer_has_half_a_byte_per_weight_and_a_scale_for_64() -> None:
    plain, double = (_packed(double_quantization) for double_quantization in (False, True))
    assert plain.weight.nbytes == double.weight.nbytes == 64 * 128 // 2
    # Scales, and the 16 values of the code.
    assert sum(buffer.nbytes for buffer in plain.buffers()) == 4 * 128 + 4 * 16
    # Scales in a byte, the code, the scales' mean and one scale of scales.
    assert sum(buffer.nbytes for buffer in double.buffers()) == 128 + 4 * 16 + 4 + 4


def test_the_input_of_a_packed_product_lives_as_long_as_the_graph_after_backward() -> None:
    layer = _packed(False)
    first = torch.zeros(3, 64, device="meta", requires_grad=True)
    between = first * 2
    given = weakref.ref(between)
    product = layer(between)
    del between
    product.sum().backward()
    assert given() is not None
    del product
    assert given() is None
    assert first.grad is not None
    assert first.grad.shape == (3, 64)


def test_every_linear_layer_is_packed_and_the_embedding_is_not() -> None:
    with torch.device("meta"):
        model = TinyGpt()
    pack_(model, double_quantization=False)
    assert isinstance(model.lm_head, PackedLinear)
    assert type(model.wte) is nn.Embedding


def test_the_norm_of_2023_multiplies_and_keeps_its_input_in_fp32() -> None:
    norm = RmsNormOf2023(nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)), eps=0.0)
    kept: list[tuple[torch.dtype, tuple[int, ...]]] = []
    given = torch.tensor([[7.0, 1.0]], dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append((tensor.dtype, tuple(tensor.shape))), lambda _: None
    ):
        # The mean of 49 and 1 is 25.
        normed = norm(given)
    assert normed.tolist() == [[torch.tensor(1.4).bfloat16().item(), torch.tensor(0.4).bfloat16().item()]]
    assert (torch.float32, (1, 2)) in kept
    assert (torch.bfloat16, (1, 2)) not in kept


def test_later_norms_give_way_to_that_of_2023_with_their_weight() -> None:
    class RMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.eps = 1e-5

    model = nn.Sequential(RMSNorm(), nn.Linear(4, 4))
    weight = model[0].weight
    use_norms_of_2023_(model)
    assert isinstance(model[0], RmsNormOf2023)
    assert model[0].weight is weight


# ---------------------------------------------------------------------- telling a record


@dataclass
class TinyConfig:
    """LitGPT's configuration, as far as it is asked for."""

    name: str
    settings: dict[str, Any]

    @classmethod
    def from_name(cls, name: str, **settings: Any) -> TinyConfig:
        return cls(name, settings)


def _mark_only_lora_as_trainable(model: nn.Module) -> None:
    model.wte.requires_grad_(False)  # type: ignore[union-attr, operator]


@pytest.fixture(params=["litgpt", "lit_gpt"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """LitGPT, under the name of either time, with one model."""
    name = str(request.param)
    modules = {part: ModuleType(f"{name}.{part}") for part in ("config", "utils", "model", "lora")}
    modules["config"].configs = [  # type: ignore[attr-defined]
        {"name": "tiny-1b-chat", "hf_config": {"org": "someone", "name": "Tiny-1B-Chat"}},
        {"name": "tiny-1b", "hf_config": {"org": "someone", "name": "Tiny-1B-of-3T-tokens"}},
    ]
    modules["utils"].chunked_cross_entropy = chunked_cross_entropy  # type: ignore[attr-defined]
    for part in ("model", "lora"):
        modules[part].Config, modules[part].GPT = TinyConfig, TinyGpt  # type: ignore[attr-defined]
    modules["lora"].mark_only_lora_as_trainable = _mark_only_lora_as_trainable  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for part, module in modules.items():
        monkeypatch.setitem(sys.modules, f"{name}.{part}", module)
    return name


def _record(package: str) -> Record:
    return HUB if package == "litgpt" else TABLE


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (TABLE, "litgpt-0.1.0.dev1"),
        (HUB, "litgpt-0.4.5"),
        (replace(HUB, model="google/gemma-2-2b"), "litgpt-0.4.13"),
        (replace(HUB, model="google/gemma-2b"), "litgpt-0.4.5"),
        (replace(HUB, model="meta-llama/Llama-3.1-8B"), "litgpt-0.4.13"),
        (EXAMPLE, "current"),
    ],
)
def test_the_libraries_follow_from_source_and_model(record: Record, name: str) -> None:
    assert litgpt.environment(record) == name


def test_adapters_are_set_under_the_names_of_the_release(package: str) -> None:
    model: Any = litgpt.express(_record(package)).source
    config = model.module.model.config
    number, layer = ("lora_", "lora_") if package == "litgpt" else ("", "to_")
    assert config.name == "tiny-1b"
    assert config.settings == {
        f"{number}r": 2,
        f"{number}alpha": 16,
        f"{number}dropout": 0.05,
        **{f"{layer}{part}": part in ("query", "mlp") for part in ("query", "key", "value", "projection", "mlp", "head")},
    }


def test_the_hub_accumulates_rows_and_the_table_is_decided_by_its_first_micro_batch(package: str) -> None:
    run = litgpt.express(_record(package))
    assert (run.job.global_batch_size, run.job.steps) == ((8, 2) if package == "litgpt" else (2, 1))
    assert run.rows == {"input_ids": ((6,), torch.int64), "labels": ((6,), torch.int64)}


def test_packed_weights_go_with_paged_state(package: str) -> None:
    plain = litgpt.express(_record(package))
    packed = litgpt.express(replace(_record(package), method="qlora", precision="nf4 base, bf16-true"))
    assert (plain.job.precision, plain.plan.optimizer_kernel, plain.plan.optimizer_state) == (Bf16(), Foreach(), OnDevice())
    assert (packed.job.precision, packed.plan.optimizer_kernel, packed.plan.optimizer_state) == (Fp32(), Fused(), Paged())


def test_a_record_is_simulated_with_its_weights_in_bf16_and_no_gradient_before_the_longest_row(package: str) -> None:
    run = litgpt.express(_record(package))
    trace = simulate(run.job, run.plan, run.source, run.rows, run.device)
    kinds = MemoryTimeline(trace).by_kind()
    assert kinds[Kind.WEIGHT] == 2 * (16 * 8 + 8 * 16)
    steps = [name for name, _ in trace.marks if name.startswith("step")]
    assert steps == (["step 1", "step 2"] if package == "litgpt" else ["step 1"])


def test_all_weights_train_with_logits_of_all_tokens_at_once(package: str) -> None:
    run = litgpt.express(replace(_record(package), method="full", lora_targets=None))
    script: Any = run.source
    assert all(parameter.requires_grad for parameter in script.module.parameters())
    assert script.module._head_chunk == 0


def test_the_feed_forward_peaks_in_its_update_at_five_times_its_weights() -> None:
    run = litgpt.express(EXAMPLE)
    trace = simulate(run.job, run.plan, run.source, run.rows, run.device)
    kinds = MemoryTimeline(trace).by_kind()
    weights = 4 * 3 * 64 * 128
    assert kinds[Kind.WEIGHT] == kinds[Kind.GRADIENT] == weights
    assert kinds[Kind.OPTIMIZER_STATE] == 2 * weights
    assert kinds[Kind.TEMPORARY] == weights
    # The output and the loss, which the loop keeps, and the losses of the step.
    assert kinds[Kind.SAVED_ACTIVATION] == 4 * 8 * 64 + 4 + 4


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (replace(HUB, gpus={"count": 4, "type": "A10G"}, sharding="fsdp1"), r"split over 4 cards \(fsdp1\)"),
        (replace(HUB, seq_len=None), "names no batch size or no length"),
        (replace(HUB, assume=("inconsistent as published: too small",)), "says that the published peak is inconsistent"),
        (replace(HUB, precision="16-true"), "precision '16-true' is not told here"),
        (replace(EXAMPLE, model="Transformer"), r"tells Lightning's FeedForward\(width, hidden\)"),
    ],
)
def test_what_cannot_be_told_is_refused_with_its_reason(record: Record, reason: str) -> None:
    with pytest.raises(NotExpressible, match=reason):
        litgpt.express(record)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"method": "galore"}, "method 'galore' is not among LitGPT's scripts"),
        ({"model": "someone/Other"}, "has no model named 'someone/Other'"),
        ({"lora_targets": ("q", "gate")}, "LoRA on gate is not told here"),
    ],
)
def test_what_litgpt_does_not_have_is_refused_with_its_reason(package: str, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotExpressible, match=reason):
        litgpt.express(replace(_record(package), **changed))
