"""The ten jobs of gpu_truth: models of a few GB that differ in what decides memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from memtrain.data.rows import Batch
from memtrain.job import AdamW, Job, Sgd
from memtrain.method import Lora
from memtrain.plan import (
    AfterBackward,
    ChunkedLogits,
    DuringBackward,
    Foreach,
    Fused,
    Keep,
    OnDevice,
    Plan,
    Recompute,
    Sdpa,
    WholeLogits,
)
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Fp32, Precision
from memtrain.trace.simulate import RowShapes

GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_labels": 1000,
}
T5 = {
    "model_type": "t5",
    "decoder_start_token_id": 0,
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 3072,
    "num_layers": 12,
    "num_heads": 12,
    "vocab_size": 32128,
}


@dataclass(frozen=True)
class GpuJob:
    """A model, what is trained and how.

    Attributes:
        name: what it is called in tables.
        model: settings of a transformers configuration.
        rows: shape and torch type, by name, of each tensor of one row.
        classes: values of an integer tensor lie below this.
    """

    name: str
    model: Mapping[str, Any]
    rows: Mapping[str, tuple[tuple[int, ...], str]]
    classes: int
    job: Job
    plan: Plan


def _job(batch: int, precision: Precision, **settings: Any) -> Job:
    return Job(
        model="toy", **{"global_batch_size": batch, "steps": 8, "precision": precision, "optimizer": AdamW(), **settings}
    )


def _plan(size: int, **policies: Any) -> Plan:
    plain = {
        "activations": Keep(),
        "loss": WholeLogits(),
        "update": AfterBackward(),
        "optimizer_kernel": Foreach(),
        "optimizer_state": OnDevice(),
        "attention": Sdpa(),
    }
    return Plan(micro_batch_size=size, **{**plain, **policies})


def _text(length: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
    return {"input_ids": ((length,), "int64"), "labels": ((length,), "int64")}


_IMAGE: Mapping[str, tuple[tuple[int, ...], str]] = {"pixel_values": ((3, 224, 224), "float32"), "labels": ((), "int64")}
_PAIR: Mapping[str, tuple[tuple[int, ...], str]] = {
    "input_ids": ((512,), "int64"),
    "attention_mask": ((512,), "int64"),
    "labels": ((128,), "int64"),
}
_ADAPTERS = Lora(rank=16, dropout=0.1)

JOBS = (
    GpuJob("gpt2 fp32 foreach", GPT2, _text(1024), 50257, _job(8, Fp32()), _plan(8)),
    GpuJob("gpt2 autocast bf16 fused", GPT2, _text(1024), 50257, _job(8, AutocastBf16()), _plan(8, optimizer_kernel=Fused())),
    GpuJob("gpt2 autocast fp16, 2 x 4", GPT2, _text(1024), 50257, _job(8, AutocastFp16()), _plan(4)),
    GpuJob("llama bf16 recompute", LLAMA, _text(2048), 32000, _job(4, Bf16()), _plan(4, activations=Recompute())),
    GpuJob(
        "llama bf16 chunked loss",
        LLAMA,
        _text(2048),
        32000,
        _job(4, Bf16()),
        _plan(4, activations=Recompute(), loss=ChunkedLogits(), optimizer_kernel=Fused()),
    ),
    GpuJob("llama bf16 LoRA", LLAMA, _text(2048), 32000, _job(2, Bf16(), method=_ADAPTERS), _plan(2)),
    GpuJob("llama fp32 SGD", LLAMA, _text(512), 32000, _job(2, Fp32(), optimizer=Sgd(momentum=0.9)), _plan(2)),
    GpuJob(
        "llama bf16 during backward",
        LLAMA,
        _text(2048),
        32000,
        _job(2, Bf16(), max_grad_norm=None),
        _plan(2, update=DuringBackward(), optimizer_kernel=Fused()),
    ),
    GpuJob("vit autocast bf16", VIT, _IMAGE, 1000, _job(32, AutocastBf16()), _plan(32)),
    GpuJob("t5 fp32", T5, _PAIR, 32128, _job(8, Fp32()), _plan(8)),
)
RECORDED = "gpt2 autocast bf16 fused"
"""The job whose second step is compared event by event."""


def row_shapes(job: GpuJob) -> RowShapes:
    """The rows of a job as the simulation takes them."""
    import torch

    return {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in job.rows.items()}


def batches(job: GpuJob, device: str) -> list[Batch]:
    """The micro-batches of one step with random content, on a torch device."""
    import torch

    def tensor(name: str) -> torch.Tensor:
        shape, dtype = job.rows[name]
        size = (job.plan.micro_batch_size, *shape)
        if name == "attention_mask":
            return torch.ones(size, dtype=torch.int64, device=device)
        if dtype == "int64":
            return torch.randint(job.classes, size, device=device)
        return torch.randn(size, device=device)

    count = job.plan.accumulation(job.job.global_batch_size)
    return [{name: tensor(name) for name in job.rows} for _ in range(count)]


def constraints_of(plan: Plan) -> dict[str, Any]:
    """Every field of a plan, as constraints that leave nothing open."""
    return {one.name: getattr(plan, one.name) for one in fields(plan)}
