"""Families of models: simulated as they run on a processor, and trained by the Trainer as they are predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import architectures as benchmark
import pytest
import torch
from torch import Tensor, nn

from memtrain import Trainer
from memtrain.data.rows import IGNORED
from memtrain.device import Cpu
from memtrain.job import AdamW, Job
from memtrain.models.build import FromConfig, FromModule, source
from memtrain.plan import Plan
from memtrain.trace.event import Kind, Trace
from memtrain.trace.simulate import simulate

PROCESSOR = Cpu(name="cpu", threads=1, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-6)


# ---------------------------------------------------------------------- the benchmark


# Each part of the kernel tables and each kind of model once; the benchmark holds all of them.
@pytest.mark.parametrize(
    ("architecture", "feature"),
    [
        ("gemma2", "autocast_bf16"),
        ("gpt_bigcode", "recompute"),
        ("opt", "lora"),
        ("deepseek_v3", "fp32"),
        ("gpt_oss", "bf16"),
        ("qwen3_moe", "uneven_recompute_bf16"),
        ("modernbert", "eager"),
        ("bert_classes", "autocast_bf16"),
        ("whisper", "fp32"),
        ("vit", "autocast_fp16"),
        ("swin", "fp32"),
        ("residual_network", "autocast_bf16"),
    ],
)
def test_an_architecture_is_simulated_as_it_runs(architecture: str, feature: str) -> None:
    if torch.__version__.startswith("2.11.") and architecture in ("qwen3_moe", "vit", "swin"):
        pytest.skip("torch 2.11 encodes choices in other steps, and gives a data-less convolution's gradient other strides")
    found = benchmark.compare(architecture, feature)
    assert (found.outcome, found.shown) == ("equal", ())
    assert found.events > 500


def test_a_difference_in_evaluation_alone_may_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = benchmark.compare("torch_encoder", "fp32")
    assert (found.outcome, found.reason) == ("differs", benchmark.KNOWN["torch_encoder"])
    assert any("_transformer_encoder_layer_fwd" in line for line in found.shown)
    monkeypatch.setattr(benchmark, "KNOWN", {})
    assert benchmark.compare("torch_encoder", "fp32").reason == ""


def test_what_a_model_does_not_do_is_refused_with_the_reason() -> None:
    found = benchmark.compare("residual_network", "recompute")
    assert found.outcome == "refused"
    assert "counts each forward in its running statistics" in found.reason


def test_every_architecture_goes_through_the_main_features_and_some_through_all() -> None:
    listed = list(benchmark.pairs())
    assert len({name for name, _ in listed}) == len(benchmark.ARCHITECTURES) >= 20
    for name in benchmark.ARCHITECTURES:
        assert set(benchmark.MAIN) <= {feature for other, feature in listed if other == name}
    assert {feature for _, feature in listed} == set(benchmark.FEATURES)
    assert set(benchmark.THOROUGH) | set(benchmark.KNOWN) <= set(benchmark.ARCHITECTURES)


def test_only_a_difference_that_is_not_known_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = benchmark.Result
    equal, refused = made("a", "fp32", "equal", events=10), made("gemma2", "chunked", "refused", reason="why not.")
    known, other = made("b", "fp32", "differs", 7, 2, reason="so."), made("b", "bf16", "differs", 7, 3)
    assert benchmark.report([equal, refused, known]) == 0
    assert "2 events differ (so.)" in capsys.readouterr().out
    assert benchmark.report([equal, made("llama", "chunked", "refused", reason="why not.")]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("1 refused, 1 of them not known; 0 s")
    assert benchmark.report([equal, refused, known, other], tmp_path / "out.json") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "architectures: 1 of 3 traces of 3 architectures equal, 24 events; 1 known to differ, 1 not known, "
        "1 refused, 0 of them not known; 0 s"
    )
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert written["summary"]["unknown_differences"] == 1
    assert [record["outcome"] for record in written["records"]] == ["equal", "refused", "differs", "differs"]


# ---------------------------------------------------------------------- the Trainer


@pytest.mark.parametrize("name", ["t5", "bert_classes", "vit", "residual_network", "torch_encoder", "plain_module", "mixtral"])
def test_a_model_of_any_family_trains_as_it_is_predicted(name: str) -> None:
    architecture = benchmark.ARCHITECTURES[name]
    made = architecture.build()
    run = Trainer(
        model=made.config if isinstance(made, FromConfig) else made.module,
        data=[architecture.row(number) for number in range(8)],
        eval_data=[architecture.row(number) for number in range(3)],
        budget="64MiB",
        global_batch_size=4,
        steps=2,
        optimizer=AdamW(learning_rate=1e-2),
        progress=False,
    )
    result = run.train()
    assert len(result.evaluations) == 2
    assert result.evaluations[0][1] != result.evaluations[1][1]
    # The convolutions of a toy are so small that oneDNN's own buffers, which depend on the processor, count.
    assert abs(result.comparison.peak_error) < (0.3 if name == "residual_network" else 1e-3)


# ---------------------------------------------------------------------- what is held


class Head(nn.Module):
    """A frozen first layer, a buffer, and an embedding that the output may share."""

    def __init__(self, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.embedding, self.first, self.out = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=False)
        self.register_buffer("scale", torch.ones(8))
        if tied:
            self.out.weight = self.embedding.weight
        self.first.requires_grad_(not frozen)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.first(self.embedding(input_ids) * self.scale)
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


TABLE, LAYER, SCALE = 4 * 50 * 8, 4 * (8 * 8 + 8), 4 * 8


def held(module: nn.Module, kind: Kind) -> int:
    """Bytes of the storages of a kind, each step's anew."""
    trace = one_step(module)
    return sum(event.bytes for event in trace.events if event.kind is kind and event.bytes > 0)


def one_step(module: nn.Module) -> Trace:
    job = Job(model="toy", global_batch_size=2, steps=1, max_grad_norm=None)
    rows = dict.fromkeys(("input_ids", "labels"), ((6,), torch.int64))
    return simulate(job, Plan(micro_batch_size=2), FromModule(module), rows, PROCESSOR)


@pytest.mark.parametrize(("tied", "tables"), [(True, 1), (False, 2)])
def test_weights_that_are_tied_count_once_and_so_do_their_gradient_and_state(tied: bool, tables: int) -> None:
    module = Head(tied, frozen=False)
    assert held(module, Kind.WEIGHT) == tables * TABLE + LAYER + SCALE
    # Two moments, and a count of steps for each weight.
    assert held(module, Kind.OPTIMIZER_STATE) == 2 * (tables * TABLE + LAYER) + 4 * (tables + 2)
    assert held(module, Kind.GRADIENT) == tables * TABLE + LAYER


def test_a_frozen_part_has_neither_gradient_nor_state_and_a_buffer_neither() -> None:
    module = Head(tied=True, frozen=True)
    assert held(module, Kind.WEIGHT) == TABLE + LAYER + SCALE
    assert held(module, Kind.OPTIMIZER_STATE) == 2 * TABLE + 4
    assert held(module, Kind.GRADIENT) == TABLE
    assert one_step(module).updated == {"embedding.weight"}


def test_tied_weights_of_a_model_of_transformers_count_once() -> None:
    def weights(tied: bool) -> int:
        settings: dict[str, Any] = {"vocab_size": 50, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
        made = source({"model_type": "gpt2", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied, **settings})
        job = Job(model="toy", global_batch_size=2, steps=1)
        rows = dict.fromkeys(("input_ids", "labels"), ((6,), torch.int64))
        events = simulate(job, Plan(micro_batch_size=2), made, rows, PROCESSOR).events
        return sum(event.bytes for event in events if event.kind is Kind.WEIGHT and event.bytes > 0)

    assert weights(tied=False) - weights(tied=True) == TABLE
