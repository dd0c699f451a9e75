"""Runs of sources that have no module of their own here, told from the fields of the record alone.

What the words of a field mean is in words.py, targets.py and cards.py, what trainers of others do around a model in
trainers.py. Where a record says nothing, the trainer's habit is taken, and each guess is a sentence of the run.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from published.liger import chunk_tokens, fuse_
from published.models import model_config
from published.record import Record
from published.run import NotExpressible, PublishedRun
from published.trainers import (
    Trainer,
    adapted,
    keeping_outputs,
    loss_by_chunks,
    loss_in_place,
    loss_outside,
    mixed_precision,
    trainer,
)

if TYPE_CHECKING:
    from torch import nn

    from memtrain.method import Method
    from memtrain.plan import Plan, Sharding
    from memtrain.trace.simulate import RowShapes
    from published.words import Loss, Numbers

_FULL = ("full", "fft", "full-parameter")
_LORA = ("lora", "qlora", "rslora", "dora", "qdora")
# Other first values of the same two matrices, another rate for one of them, or a part of them held at zero.
_LIKE_LORA = ("pissa", "olora", "eva", "corda", "loftq", "loraplus", "lora+", "lora-ga", "mica", "bdlora")


def environment(record: Record) -> str:
    """The libraries that are installed."""
    return "current"


def express(record: Record) -> PublishedRun:
    """The run of a record.

    Raises:
        NotExpressible: it is sharded, offloaded, compiled, or told too sparsely.
    """
    from memtrain.job import Approximation, Job
    from memtrain.models.build import FromModule
    from memtrain.plan import EightBit, Paged, PagedEightBit
    from memtrain.precision import weight_type
    from published import cards, words

    sharding = _sharding(record)
    _check(record)
    who = trainer(record)
    device, near = cards.card(str(record.gpus.get("type", "unspecified")))
    if layer := re.search(r"SwiGLU FeedForward\((\d+), ?(\d+)\)", record.model):
        return _layer(record, int(layer[1]), int(layer[2]))
    rows = _rows(record, who)
    tokens = (record.batch_size_per_gpu or 1) * (record.seq_len or 1)
    adapters = record.method.lower() not in _FULL
    told = words.numbers(record.precision, adapters, who.unpacked, mixes=who.is_transformers)
    rule = words.update_rule(record.optimizer)
    if isinstance(rule.state, Paged) and weight_type(told.precision) == "bfloat16":
        # memtrain pages 32-bit state for 32-bit weights alone. On the card neither takes anything.
        rule = replace(rule, state=PagedEightBit(), assumed=(*rule.assumed, "paged state is in 8 bits, none of it on the card"))
    how = words.loss(record.loss, tokens, _fused_tokens(record, tokens))
    module, method, chosen = _module(record, who, told, how)
    ranks = int(record.gpus.get("count", 1)) if record.sharding != "none" else 1
    compressed = isinstance(rule.state, EightBit | PagedEightBit)
    plan, kept = _plan(record, how, rule, sharding)
    job = Job(
        model=record.model,
        global_batch_size=plan.micro_batch_size * (record.grad_accum or 1) * ranks,
        steps=20,
        optimizer=rule.optimizer,
        precision=told.precision,
        method=method,
        quantization=told.quantization,
        max_grad_norm=None if record.optimizer_in_backward else who.max_grad_norm,
        allow=frozenset({Approximation.EIGHT_BIT_STATE} if compressed else ()),
    )
    assumed = (*record.assume, f"the trainer is {who.name}", *near, *told.assumed, *rule.assumed, *how.assumed, *chosen, *kept)
    return PublishedRun(job, plan, FromModule(module), rows, device, record.scope != "fwd_bwd", assumed)


# ---------------------------------------------------------------------- what cannot be told


def _check(record: Record) -> None:
    if record.scope not in ("train_step", "fwd_bwd"):
        raise NotExpressible(f"the scope {record.scope!r} is not a training step")
    if record.offload.lower() not in ("none", "no", "false", ""):
        raise NotExpressible(f"the offload {record.offload!r} is not in memtrain")
    if record.compile:
        raise NotExpressible("the model is compiled, and what torch.compile fuses is not predicted")
    if record.batch_size_per_gpu is None or record.seq_len is None:
        raise NotExpressible("the record has no batch size or no length")
    if re.search(r"lisa|galore|badam|llamapro|reft", record.method.lower()):
        raise NotExpressible(f"the method {record.method!r} is not in memtrain")


def _sharding(record: Record) -> Sharding:
    from memtrain.plan import DataParallel, Single

    count, words = int(record.gpus.get("count", 1)), record.sharding.lower()
    if words in ("none", "no", "single", "no sharding", "") and count == 1:
        return Single()
    if words in ("ddp", "data parallel", "distributeddataparallel") and count > 1:
        return DataParallel(count)
    raise NotExpressible(f"{count} cards with sharding {record.sharding!r} are not in memtrain")


# ---------------------------------------------------------------------- the plan


def _plan(record: Record, how: Loss, rule: Any, sharding: Sharding) -> tuple[Plan, tuple[str, ...]]:
    from memtrain.plan import AfterBackward, ChunkedLogits, DuringBackward, Fused, Plan, WholeLogits
    from published import words

    activations, kept = words.activations(record.checkpointing, record.method)
    assert record.batch_size_per_gpu is not None
    during = record.optimizer_in_backward
    plan = Plan(
        micro_batch_size=record.batch_size_per_gpu,
        activations=activations,
        loss=WholeLogits() if how.chunk_tokens is None else ChunkedLogits(how.chunk_tokens),
        update=DuringBackward() if during else AfterBackward(),
        # One weight at a time has one weight's temporaries, as a fused update has none.
        optimizer_kernel=Fused() if during else rule.kernel,
        optimizer_state=rule.state,
        sharding=sharding,
    )
    return plan, kept


# ---------------------------------------------------------------------- the rows


def _rows(record: Record, who: Trainer) -> RowShapes:
    import torch

    kind, _ = model_config(record)
    if kind == "vit":
        return {"pixel_values": ((3, 224, 224), torch.float32), "labels": ((), torch.int64)}
    names = ["input_ids", "attention_mask", "labels"] if who.is_transformers or kind == "bert" else ["input_ids", "labels"]
    rows: dict[str, Any] = dict.fromkeys(names, ((record.seq_len,), torch.int64))
    if "classification" in str(record.arch.get("extra", "")):
        rows["labels"] = ((), torch.int64)
    return rows


# ---------------------------------------------------------------------- the model


def _module(record: Record, who: Trainer, told: Numbers, how: Loss) -> tuple[nn.Module, Method, tuple[str, ...]]:
    """The model on data-less tensors, what of it is trained, and what was taken to be so."""
    import torch

    from memtrain.features.chunked_loss import refusal
    from memtrain.method import Full, Lora, Unquantized
    from memtrain.precision import AutocastBf16, AutocastFp16, product_type
    from published.auto_gptq import pack_
    from published.targets import targets

    kind, settings = model_config(record)
    assumed: list[str] = []
    with torch.device("meta"):
        model = _base(record, kind, settings, getattr(torch, told.weights), assumed)
        _set_loss_(model, how)
        if told.is_gptq:
            pack_(model)
            assumed.append("packed weights are unpacked by torch's operators, as auto-gptq does without its kernels")
        if "liger" in record.loss.lower():
            fuse_(model, record.loss)
        method: Method = Full()
        if record.method.lower() not in _FULL:
            wanted = targets(record.lora_targets, kind)
            adapters = told.adapters or who.adapters or told.weights
            assumed += wanted.assumed
            if record.method.lower() in _LIKE_LORA:
                assumed.append(f"{record.method} takes the memory of LoRA")
            if not told.adapters:
                assumed.append(f"adapters are in {adapters}")
            if who.is_transformers and "none" not in record.checkpointing.lower():
                model.enable_input_require_grads()
            dropout = record.lora_dropout if record.lora_dropout is not None else who.dropout
            if isinstance(told.quantization, Unquantized):
                modules: Any = wanted.modules if isinstance(wanted.modules, str) else list(wanted.modules)
                model = adapted(model, _peft_name(record.method), _peft(record, modules, wanted.whole, dropout), adapters)
            else:
                method = Lora(
                    rank=record.lora_rank or 8,
                    dropout=dropout,
                    target_modules=wanted.modules,
                    modules_to_save=wanted.whole,
                    use_dora="dora" in record.method.lower(),
                    dtype=adapters,
                )
    if how.chunk_tokens is not None and (reason := refusal(model)) is not None:
        raise NotExpressible(f"the loss cannot be chunked, {reason}")
    if told.autocast:
        model = mixed_precision(model, getattr(torch, told.autocast), converts=who.is_transformers)
    elif who.is_transformers and isinstance(told.precision, AutocastBf16 | AutocastFp16):
        # The precision brings the autocast; what is left is the cast of what comes out of it.
        model = mixed_precision(model, getattr(torch, product_type(told.precision)), converts=True)
    if how.is_standard and who.loss != "model" and kind not in ("vit", "bert", "t5"):
        model = loss_outside(model, in_fp32=who.loss == "in fp32")
    if who.keeps_outputs:
        model = keeping_outputs(model)
    return model, method, tuple(assumed)


def _base(record: Record, kind: str, settings: Mapping[str, Any], dtype: Any, assumed: list[str]) -> Any:
    from memtrain.models.tasks import model_class

    transformers: Any = importlib.import_module("transformers")
    config = transformers.CONFIG_MAPPING[kind](**{**_family(record, kind), **settings})
    wanted = _attention(record.attention, assumed)
    if wanted is not None:
        config._attn_implementation = wanted
    try:
        model = model_class(config)(config)
    except ValueError as error:
        if wanted == "eager" or "attention implementation" not in str(error):
            raise
        assumed.append(f"attention is eager, since a {kind} model has no {wanted}")
        config._attn_implementation = "eager"
        model = model_class(config)(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _fused_tokens(record: Record, tokens: int) -> int:
    _, settings = model_config(record)
    hidden, vocabulary = settings.get("hidden_size"), settings.get("vocab_size")
    return chunk_tokens(tokens, hidden, vocabulary) if hidden and vocabulary else 1024


def _family(record: Record, kind: str) -> dict[str, Any]:
    """What of a configuration the record decides."""
    found: dict[str, Any] = {}
    if kind == "t5":
        found["decoder_start_token_id"] = 0
    elif kind != "vit":
        found["use_cache"] = False
    if "classification" in str(record.arch.get("extra", "")) and kind == "bert":
        found["architectures"] = ["BertForSequenceClassification"]
    return found


def _attention(text: str, assumed: list[str]) -> str | None:
    """The implementation's name in transformers, None for the default of the model."""
    words = text.lower()
    if "flash" in words or "fa2" in words:
        assumed.append("attention is torch's build of the flash-attn kernels")
        return "sdpa"
    if "sdpa" in words or "flex" in words:
        return None if "default" in words else "sdpa"
    if "eager" in words:
        return "eager"
    assumed.append(f"the attention {text!r} is the model's default in transformers")
    return None


def _set_loss_(model: Any, how: Loss) -> None:
    if how.in_place:
        loss_in_place(model)
    elif how.upcast_tokens is not None:
        loss_by_chunks(model, how.upcast_tokens)


def _peft_name(method: str) -> str:
    return "lora" if method.lower() in (*_LORA, *_LIKE_LORA) else method


def _peft(record: Record, modules: str | list[str], whole: tuple[str, ...], dropout: float) -> dict[str, Any]:
    """Settings of peft's configurations; each class takes those that it knows."""
    name = record.method.lower()
    settings: dict[str, Any] = {
        "r": record.lora_rank or 8,
        "rank": record.lora_rank,
        "lora_dropout": dropout,
        "modules_to_save": list(whole) or None,
        "use_rslora": name == "rslora",
        "use_dora": "dora" in name,
    }
    if name == "oft":
        # A block's size and the number of blocks exclude each other, and the names of runs give the size.
        settings |= {"r": 0, "oft_block_size": record.lora_rank}
    if name == "adalora":
        settings |= {"total_step": 1000}
    if record.lora_targets or name in (*_LORA, *_LIKE_LORA):
        settings["target_modules"] = modules
        if name == "ia3":
            settings["feedforward_modules"] = [one for one in modules if one in ("down_proj", "fc2", "wo")]
    return {key: value for key, value in settings.items() if value is not None}


# ---------------------------------------------------------------------- a layer alone


def _layer(record: Record, hidden: int, inner: int) -> PublishedRun:
    """The feed-forward layer that Lightning's tensor-parallel example trains, its loss the sum of what comes out."""
    import torch
    from torch import nn

    from memtrain.job import Job
    from memtrain.models.build import FromModule
    from memtrain.plan import Plan, Single
    from published import cards, words

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Linear(hidden, inner, bias=False)
            self.w2 = nn.Linear(inner, hidden, bias=False)
            self.w3 = nn.Linear(hidden, inner, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
            return out.sum()

    device, near = cards.card(str(record.gpus.get("type", "unspecified")))
    rule = words.update_rule(record.optimizer)
    batch = record.batch_size_per_gpu or 1
    job = Job(
        model=record.model,
        global_batch_size=batch,
        steps=20,
        optimizer=rule.optimizer,
        precision=words.numbers(record.precision, False).precision,
        max_grad_norm=None,
    )
    plan = Plan(micro_batch_size=batch, optimizer_kernel=rule.kernel, optimizer_state=rule.state, sharding=Single())
    with torch.device("meta"):
        module = FeedForward()
    return PublishedRun(job, plan, FromModule(module), {"x": ((hidden,), torch.float32)}, device, assumed=near)
