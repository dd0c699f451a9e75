"""The free text of a record, read by rule: number formats, optimizer, checkpointing, loss.

Each function takes the words of one field and gives memtrain's class for them, with a sentence for each guess. Words that tell
of what memtrain has not are refused with what stands in the way; words that tell nothing are refused where the bytes depend
on them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from memtrain.job import Adafactor, Adam, AdamW, Lion, Optimizer, Sgd
from memtrain.method import Int8, Nf4, Quantization, Unquantized
from memtrain.plan import (
    Activations,
    EightBit,
    Foreach,
    Fused,
    Keep,
    OnDevice,
    OptimizerKernel,
    OptimizerState,
    Paged,
    PagedEightBit,
    Recompute,
    RecomputeSelective,
)
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Bf16Master, Fp32, Precision
from published.run import NotExpressible

Sentences = tuple[str, ...]
UNQUANTIZED = Unquantized()


def _has(text: str, *words: str) -> bool:
    return any(word in text for word in words)


def _said(text: str) -> str:
    """The words in lower case, without what they deny.

    >>> _said("AdamW (torch, not fused)"), _said("SGD, no momentum"), _said("foreach=False")
    ('adamw (torch, )', 'sgd, ', '')
    """
    return re.sub(
        r"\b(?:not|no|without)\s+[\w-]+|\bunfused\b|[\w-]+\s*=\s*(?:false|0)\b|[\w-]+ (?:off|disabled)\b", "", text.lower()
    )


# ---------------------------------------------------------------------- number formats


@dataclass(frozen=True)
class Numbers:
    """What a run holds and computes in.

    Attributes:
        precision: memtrain's, for what it does by itself.
        weights: the torch data type of the weights that are not packed, by name.
        autocast: the data type of a torch.autocast that the precision does not bring, by name; "" for none.
        is_gptq: whether frozen weights are in GPTQ's 4 bits, which are none of memtrain's.
        adapters: data type of adapters, by name; "" where the words leave it open.
    """

    precision: Precision
    weights: str
    autocast: str = ""
    adapters: str = ""
    quantization: Quantization = UNQUANTIZED
    is_gptq: bool = False
    assumed: Sentences = ()


def numbers(text: str, adapted: bool, unpacked: str = "float32", *, mixes: bool = True) -> Numbers:
    """What the words of ``precision`` say.

    Args:
        adapted: whether adapters are trained beside frozen weights.
        unpacked: data type of what is not packed beside packed weights, by name, where the words do not say it.
        mixes: whether the trainer runs under autocast where weights are packed and the words leave it open.

    Raises:
        NotExpressible: the words name no number format, or one that memtrain has not.
    """
    words = text.lower()
    if "gptq" in words and "bf16" not in words:
        # What is not packed stays in float16, and the products are under autocast to it.
        return Numbers(AutocastFp16(), "float16", "", _adapters(words) or "float32", is_gptq=True)
    if _has(words, "gptq", "awq", "int4", "fp8", "float8", "mxfp4", "hqq", "nf3", "int8 weights"):
        raise NotExpressible(f"the precision {text!r} holds weights in a form that memtrain has not")
    assumed: list[str] = []
    packing = _packing(words, assumed)
    adapters = _adapters(words)
    wide = re.search(r"(?<!adapters )(fp32|float32)", words) is not None
    if _has(words, "fp16", "float16") and not _has(words, "bf16", "bfloat16"):
        mixed = _has(words, "autocast", "amp", "mixed")
        if not (adapted or wide or mixed):
            raise NotExpressible(f"the precision {text!r} trains weights in float16, which memtrain does not")
        if not mixed:
            assumed.append(f"the precision {text!r} is torch.autocast to float16 with a scaled loss")
        halved = adapted and not wide and packing == UNQUANTIZED and (not mixed or "fp16 weights" in words)
        weights = "float16" if halved else "float32"
        return Numbers(AutocastFp16(), weights, "", adapters, packing, assumed=tuple(assumed))
    if _has(words, "bf16", "bfloat16"):
        precision, weights, autocast = (
            _bf16(words, wide, assumed) if packing == UNQUANTIZED else _beside_packed(words, unpacked, mixes, assumed)
        )
        return Numbers(precision, weights, autocast, adapters, packing, assumed=tuple(assumed))
    if wide or _has(words, "tf32", "single"):
        return Numbers(Fp32(tf32="tf32" in words), "float32", "", adapters, packing, assumed=tuple(assumed))
    raise NotExpressible(f"the precision {text!r} names no number format")


def _bf16(words: str, wide: bool, assumed: list[str]) -> tuple[Precision, str, str]:
    """Precision, data type of the weights, and of an autocast beside the precision's own."""
    if _has(words, "master", "fp32 optimizer"):
        return Bf16Master(), "bfloat16", ""
    if not _has(words, "autocast", "amp", "mixed", " mp"):
        return Bf16(), "bfloat16", ""
    if _has(words, "bf16 weights", "bfloat16 weights", "pure"):
        return Bf16(), "bfloat16", "bfloat16"
    if not wide:
        assumed.append("autocast is beside weights in fp32, which the precision does not say")
    return AutocastBf16(), "float32", ""


def _beside_packed(words: str, unpacked: str, mixes: bool, assumed: list[str]) -> tuple[Precision, str, str]:
    """The same beside packed weights: what peft's prepare_model_for_kbit_training leaves in fp32, or what a trainer casts back."""
    if _has(words, "bf16-true", "pure"):
        return Bf16(), "bfloat16", ""
    autocast = _has(words, "autocast", "amp", "mixed")
    assumed.append(f"what is not packed is in {unpacked}")
    if not autocast:
        assumed.append("products are under autocast" if mixes else "nothing is under autocast")
    if unpacked == "bfloat16":
        return Bf16(), "bfloat16", "bfloat16" if autocast or mixes else ""
    # Without autocast what flows between layers has the type of norms and embeddings.
    return (AutocastBf16() if autocast or mixes else Fp32()), "float32", ""


def _packing(words: str, assumed: list[str]) -> Quantization:
    if _has(words, "nf4", "4-bit", "4bit", "fp4"):
        once = _has(words, "no double", "without double")
        twice = not once and re.search(r"double|\bdq\b|nf4-dq", words) is not None
        if not (once or twice):
            assumed.append("the 4-bit scales are not quantised a second time")
        return Nf4(double_quantization=twice)
    return Int8() if _has(words, "8-bit", "8bit", "int8") else UNQUANTIZED


def _adapters(words: str) -> str:
    found = re.search(r"adapters? (?:in )?(fp32|float32|bf16|bfloat16)", words)
    return "" if found is None else "float32" if "32" in found[1] else "bfloat16"


# ---------------------------------------------------------------------- the update


@dataclass(frozen=True)
class Rule:
    """An optimizer and the form of its update."""

    optimizer: Optimizer
    kernel: OptimizerKernel
    state: OptimizerState
    assumed: Sentences = ()


_UNKNOWN_RULES = (
    "rmsprop",
    "lamb",
    "adagrad",
    "prodigy",
    "ademamix",
    "nadam",
    "schedule-free",
    "schedulefree",
    "galore",
    "apollo",
    "lomo",
    "badam",
    "shampoo",
    "soap",
    "sophia",
    "4bit",
    "4-bit",
    "came",
    "muon",
    "lisa",
)


def update_rule(text: str) -> Rule:
    """What the words of ``optimizer`` say.

    Raises:
        NotExpressible: it is none of memtrain's.
    """
    words = _said(text)
    if _has(words, *_UNKNOWN_RULES):
        raise NotExpressible(f"the optimizer {text!r} is not in memtrain")
    if _has(words, "cpu", "offload", "host"):
        raise NotExpressible(f"the optimizer {text!r} runs on the host in a way that the record does not describe")
    assumed: list[str] = []
    if "sgd" in words:
        optimizer: Optimizer = Sgd(momentum=0.9 if "momentum" in words else 0.0)
    elif "adafactor" in words:
        return Rule(Adafactor(), Fused(), OnDevice(), ("Adafactor is torch's, whose state is a row and a column per matrix",))
    elif "lion" in words:
        optimizer = Lion()
    elif re.search(r"\badam\b", words) and "adamw" not in words:
        optimizer = Adam()
    else:
        optimizer = AdamW()
        if "adamw" not in words:
            assumed.append(f"the optimizer {text!r} is AdamW")
    eight, paged = _has(words, "8bit", "8-bit", "int8"), "paged" in words and "or paged" not in words
    if eight or paged or isinstance(optimizer, Lion):
        state: OptimizerState = OnDevice()
        if eight or paged:
            state = PagedEightBit() if eight and paged else EightBit() if eight else Paged()
        if "torch_8bit" in words or "torchao" in words:
            assumed.append("8-bit state is that of bitsandbytes, with as many bytes a parameter as torchao's")
        return Rule(optimizer, Fused(), state, tuple(assumed))
    if "fused" in words:
        return Rule(optimizer, Fused(), OnDevice(), tuple(assumed))
    if not _has(words, "foreach", "torch"):
        assumed.append("the update is torch's default, over all weights at once (foreach)")
    return Rule(optimizer, Foreach(), OnDevice(), tuple(assumed))


# ---------------------------------------------------------------------- activations


def activations(text: str, method: str) -> tuple[Activations, Sentences]:
    """What the words of ``checkpointing`` say for a method.

    Raises:
        NotExpressible: they name a form that memtrain has not, or several.
    """
    words = _for_method(text.lower(), method)
    guess: Sentences = (f"checkpointing is {words!r}",) if _has(words, "assumed", "default") else ()
    if _has(words, "offload", "cpu", "unsloth"):
        raise NotExpressible(f"the checkpointing {text!r} keeps activations on the host, which memtrain does not")
    if _has(words, "none or full", "unspecified", "unknown"):
        raise NotExpressible(f"the checkpointing {text!r} leaves open what is kept")
    if every := re.search(r"every (\d+)", words):
        return Recompute(every=int(every[1])), guess
    if _has(words, "selective", "per-op"):
        return RecomputeSelective(), (*guess, "selective checkpointing keeps products and attention, and no other operator")
    if not words:
        return Keep(), ("nothing is recomputed, since the record says nothing of it",)
    if re.search(r"\b(none|no|not|off|false|disabled|without)\b", words):
        return Keep(), guess
    if re.search(r"full|\bon\b|true|yes|enabled|(gradient|activation) checkpointing|per-layer", words.replace("_", " ")):
        return Recompute(), guess
    raise NotExpressible(f"the checkpointing {text!r} is of no kind that is known")


def _for_method(words: str, method: str) -> str:
    """The clause that is for the method, where the words say one thing for LoRA and another for QLoRA."""
    clauses = [clause.strip() for clause in words.split(",")]
    mine = [clause for clause in clauses if re.search(rf"\bfor {re.escape(method)}\b", clause)]
    return (mine[0] + (" (assumed)" if "assumed" in words else "")) if mine else words


# ---------------------------------------------------------------------- loss


@dataclass(frozen=True)
class Loss:
    """How the loss treats the logits.

    Attributes:
        chunk_tokens: tokens whose logits exist at once; None where all do.
        in_place: whole logits whose gradient is written over them.
        upcast_tokens: whole logits in 16 bits, and so many tokens at a time in fp32; None where all are at once.
    """

    chunk_tokens: int | None = None
    in_place: bool = False
    upcast_tokens: int | None = None
    assumed: Sentences = ()

    @property
    def is_standard(self) -> bool:
        """Whether it is a cross-entropy of whole logits without anything fused."""
        return self.chunk_tokens is None and self.upcast_tokens is None and not self.in_place


def loss(text: str, tokens: int, fused_tokens: int = 1024) -> Loss:
    """What the words of ``loss`` say.

    Args:
        tokens: of a micro-batch.
        fused_tokens: tokens that a fused head and loss takes at once, where the words do not say it.

    Raises:
        NotExpressible: they tell of no loss that is known.
    """
    words = _said(text)
    if _has(words, "linear ce", "linear cross", "cut cross", "cce", "liger"):
        return Loss(chunk_tokens=fused_tokens, assumed=(f"the fused head and loss takes {fused_tokens} tokens at once",))
    if "chunk" in words:
        return _chunked(words, tokens)
    if _has(words, "triton", "unsloth"):
        return Loss(in_place=True)
    if not words or re.search(r"standard|default|cross|\bce\b|unspecified|unknown", words):
        said = words and not _has(words, "unspecified", "unknown")
        guess = () if said else (f"the loss {text!r} is the model's own on all logits",)
        return Loss(assumed=guess)
    raise NotExpressible(f"the loss {text!r} is of no kind that is known")


def _chunked(words: str, tokens: int) -> Loss:
    count = re.search(r"(\d+) chunks", words)
    size = re.search(r"chunk\w*(?: ce| cross-entropy)?[ ,(]*(?:of |chunk )*(\d+)", words)
    chunk = math.ceil(tokens / int(count[1])) if count else int(size[1]) if size else math.ceil(tokens / 8)
    guess = () if count or size else ("the loss is taken in 8 chunks",)
    if _has(words, "chunked lm_head", "chunked head", "linear"):
        return Loss(chunk_tokens=chunk, assumed=guess)
    return Loss(upcast_tokens=chunk, assumed=(*guess, "the logits exist whole, and the loss takes a chunk of them at a time"))
