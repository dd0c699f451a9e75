"""What trainers of others do around a model, told on the model itself: mixed precision, adapters, losses.

``Trainer`` is what a source is known to do where its records do not say; the sources are in the comments.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from published.record import Record
from published.run import NotExpressible

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Trainer:
    """The habits of a trainer.

    Attributes:
        name: as printed.
        max_grad_norm: None where nothing is clipped.
        is_transformers: whether it is transformers' Trainer, or built on it: what it hands to the model has a mask, and accelerate
            casts what the model returns under autocast.
        dropout: of adapters.
        adapters: data type of adapters that a record does not say, "" for that of the weights.
        unpacked: data type of what is not packed beside packed weights under autocast, by name.
        loss: of whole logits where the words call it standard: the "model"'s own, or one outside of the model, which takes the
            logits "as they come" or "in fp32", and keeps them until the next forward returns.
        keeps_outputs: whether what the model returns, logits and loss, is there until the next forward returns.
    """

    name: str
    max_grad_norm: float | None
    is_transformers: bool
    dropout: float = 0.0
    adapters: str = "float32"
    unpacked: str = "float32"
    loss: Literal["model", "as they come", "in fp32"] = "model"
    keeps_outputs: bool = False


_HUGGING_FACE = "transformers' Trainer"
_TRAINERS = (
    # recipes/lora_finetune_single_device.py and modules/transformer.py until August 2024: clip_grad_norm is null, adapters have
    # the type of the model, its output is taken to fp32 and stays a name of the loop while backward runs.
    ("torchtune", Trainer("torchtune", None, False, adapters="", loss="in fp32")),
    ("torchtitan", Trainer("torchtitan", 1.0, False, adapters="")),
    ("lightning", Trainer("Lightning", None, False, adapters="")),
    ("pytorch tutorials", Trainer("a plain loop", None, False)),
    ("gpumemnet", Trainer("a plain loop", None, False)),
    ("llama-recipes", Trainer("a plain loop", None, False, dropout=0.05)),
    # src/models/llama3.py and src/trainer/trainer.py: CrossEntropyLoss on a slice of the logits, which the loop calls "_".
    ("universal-llm-trainer", Trainer("universal-llm-trainer", None, False, loss="as they come")),
    # method_comparison/MetaMathQA/run.py: "outputs" is a name of the loop.
    ("huggingface/peft", Trainer("the loop of peft's method comparison", 1.0, False, keeps_outputs=True)),
    # lora_dropout of finetune.py in QwenLM/Qwen, of the first swift's SftArguments, of the examples of axolotl.
    ("qwenlm", Trainer(_HUGGING_FACE, 1.0, True, dropout=0.05)),
    ("swift", Trainer(_HUGGING_FACE, 1.0, True, dropout=0.05)),
    # With flash attention, axolotl casts norms and embeddings back to the type of the model (loaders/model.py).
    ("axolotl", Trainer(_HUGGING_FACE, 1.0, True, dropout=0.05, unpacked="bfloat16")),
)
_TRANSFORMERS = Trainer(_HUGGING_FACE, 1.0, True)


def trainer(record: Record) -> Trainer:
    """What is known of the trainer of a record's source; transformers' where nothing is."""
    source = f"{record.source_family} {record.source}".lower()
    return next((found for name, found in _TRAINERS if name in source), _TRANSFORMERS)


# ---------------------------------------------------------------------- mixed precision


def mixed_precision(model: Any, dtype: torch.dtype, *, converts: bool) -> Any:
    """The model in its own class, whose forward runs under torch.autocast.

    Args:
        converts: casts what it returns to fp32, as accelerate does (ConvertOutputsToFp32).
    """
    import torch

    kind: Any = type(model)

    class MixedPrecision(kind):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cuda", dtype=dtype):
                found = super().forward(*args, **kwargs)
            return _in_fp32(found) if converts else found

    MixedPrecision.__name__ = kind.__name__
    # What a model takes is asked of this by its callers.
    MixedPrecision.forward.__wrapped__ = kind.forward  # type: ignore[attr-defined]
    model.__class__ = MixedPrecision
    return model


def _in_fp32(returned: Any) -> Any:
    return importlib.import_module("accelerate.utils.operations").convert_to_fp32(returned)


# ---------------------------------------------------------------------- adapters


def adapted(model: Any, method: str, settings: dict[str, Any], dtype: str) -> Any:
    """The model with adapters of one of peft's methods, in place, in this data type; what trains whole keeps its own.

    Raises:
        NotExpressible: peft has no such method, or it changes what the model is given instead of its layers.
    """
    import torch

    from memtrain.models.quietly import quietly

    with quietly():
        peft: Any = importlib.import_module("peft")
    # Where the table lies differs between versions.
    table: Any = getattr(importlib.import_module("peft.mapping"), "PEFT_TYPE_TO_CONFIG_MAPPING", None)
    found = {str(getattr(kind, "value", kind)).lower().replace("_", ""): config for kind, config in table.items()}
    name = method.lower().replace("_", "").replace("-", "")
    if name not in found:
        raise NotExpressible(f"the method {method!r} is not one of peft's")
    if issubclass(found[name], peft.PromptLearningConfig):
        raise NotExpressible(f"the method {method!r} adds tokens, of which the record does not say how many")
    known = found[name].__dataclass_fields__
    settings = {key: value for key, value in settings.items() if key in known}
    try:
        with quietly():
            # The model itself with what was put into it; peft's own class around it adds no memory.
            model = peft.get_peft_model(model, found[name](task_type="CAUSAL_LM", **settings)).base_model.model
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise NotExpressible(f"peft cannot add {method!r} ({str(error).splitlines()[0].rstrip('.')})") from error
    for path, parameter in model.named_parameters():
        # Norms and what trains whole keep the type that they have.
        if parameter.requires_grad and "modules_to_save" not in path and "ln_tuning_layers" not in path:
            # peft does this to tensors with data, and leaves those without as they are.
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return model


# ---------------------------------------------------------------------- losses on whole logits


def loss_in_place(model: Any) -> None:
    """Let the gradient of the logits be written over them, as Triton kernels of a cross-entropy do."""
    model._loss_function = _in_place


def loss_by_chunks(model: Any, chunk_tokens: int) -> None:
    """Let the loss take so many tokens of the whole logits to fp32 at a time, as torchtune's CEWithChunkedOutputLoss."""

    def by_chunks(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        from torch.nn.functional import cross_entropy

        flat, target = logits.reshape(-1, vocab_size), _shifted(labels)
        pieces = zip(flat.split(chunk_tokens), target.split(chunk_tokens), strict=True)
        losses: Sequence[Tensor] = [cross_entropy(one.float(), wanted, reduction="sum") for one, wanted in pieces]
        return sum(losses[1:], losses[0]) / (target != -100).sum()

    model._loss_function = by_chunks


def loss_outside(model: Any, *, in_fp32: bool) -> Any:
    """The model in its own class, which gives the loss that a loop computes from its logits, and keeps these as the loop does.

    Args:
        in_fp32: the logits are taken to fp32 first.
    """
    kind: Any = type(model)

    class LossOutside(kind):  # type: ignore[misc]
        def forward(self, *args: Any, labels: Tensor, **kwargs: Any) -> Any:
            from torch.nn.functional import cross_entropy

            logits = super().forward(*args, **kwargs).logits
            if in_fp32:
                logits = logits.float()
            shifted = logits[:, :-1].reshape(-1, logits.shape[-1])
            loss = cross_entropy(shifted, labels[:, 1:].reshape(-1))
            # Whatever was kept of the last forward was there until here.
            self.__dict__["_kept"] = shifted if in_fp32 else logits
            return {"loss": loss}

    LossOutside.__name__ = kind.__name__
    model.__class__ = LossOutside
    return model


def keeping_outputs(model: Any) -> Any:
    """The model in its own class, which keeps what it returned until the next forward has returned."""
    kind: Any = type(model)

    class KeepingOutputs(kind):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            self.__dict__["_kept"] = found
            return found

    KeepingOutputs.__name__ = kind.__name__
    KeepingOutputs.forward.__wrapped__ = kind.forward  # type: ignore[attr-defined]
    model.__class__ = KeepingOutputs
    return model


def _shifted(labels: Tensor) -> Tensor:
    from torch.nn.functional import pad

    return pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)


def _in_place(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    import torch

    class OverLogits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, flat: Tensor, target: Tensor) -> Tensor:
            # A kernel holds neither the maximum nor the exponentials of all tokens: two numbers a token are left.
            normaliser = flat.new_empty(len(flat), dtype=torch.float32)
            losses = torch.empty_like(normaliser)
            ctx.save_for_backward(flat, normaliser, target)
            return losses.sum()

        @staticmethod
        def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, None]:
            flat, _, _ = ctx.saved_tensors
            return flat.mul_(d_loss), None

    target = _shifted(labels)
    loss: Tensor = OverLogits.apply(logits.reshape(-1, vocab_size), target)
    return loss / (target != -100).sum()
