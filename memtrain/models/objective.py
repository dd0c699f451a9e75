"""What a model's loss is a mean over, so that micro-batches add up to exactly the mean of the whole batch.

A model with a loss takes a batch as keyword arguments and returns the mean loss over the batch's counted items. The loss
of an effective batch of N counted items is then the sum over micro-batches of loss × n / N, token for token, whatever
the micro-batch size; averaging the micro-batches' means instead would weigh tokens of short rows more.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.data.rows import IGNORED, Batch, Row, Rows, checked


@dataclass(frozen=True)
class Objective:
    """The loss of a model.

    Attributes:
        count: the number of items a batch's mean loss is over, a scalar int64 tensor on the batch's device.
        settings: keyword arguments that every forward gets besides the batch.
    """

    count: Callable[[Batch], Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the batch's counted items, a scalar.

        Raises:
            ValueError: the model returns no scalar loss.
        """
        # Nothing but the loss may outlive this frame: an output kept during backward keeps the logits.
        return _loss_in(model(**batch, **self.settings), model)


def objective(model: nn.Module) -> Objective:
    """The objective of a model: counted tokens where there are integer labels, rows elsewhere.

    The transformers losses for causal models predict label i+1 at position i, so the first label of a row never counts.
    """
    accepted = inspect.signature(model.forward).parameters
    # A cache serves generation; in training it keeps the keys and values of all layers alive.
    settings = {"use_cache": False} if "use_cache" in accepted else {}
    return Objective(count=_shifted_labels if predicts_next_token(model) else _labels_or_rows, settings=settings)


def predicts_next_token(model: nn.Module) -> bool:
    """Whether a transformers model's loss is that of a causal language model, which shifts the labels by one itself."""
    # transformers gives this loss function to every model of its own whose loss it does not know, so the class has to be
    # that of a language model too. Encoder-decoder models carry it and use it nowhere: their labels arrive shifted.
    if "transformers" not in sys.modules or not hasattr(model, "loss_function"):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    is_language_model = any(base.__name__ in names for base in type(model).__mro__)
    shifts = is_language_model or getattr(model, "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration")
    return shifts and not getattr(model.config, "is_encoder_decoder", False)


def check_suits(model: nn.Module, rows: Rows, what: str) -> None:
    """Refuse rows that the model cannot be trained on, before it is.

    Raises:
        ValueError: forward takes other names, a row counts nothing in the loss, or a token is not in the vocabulary.
    """
    _check_names(model, rows[0], what)
    count = objective(model).count
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    for index in checked(len(rows)):
        row = rows[index]
        if not count({name: tensor.unsqueeze(0) for name, tensor in row.items()}):
            raise ValueError(
                f"row {index} of {what} has no label that counts (a causal model predicts none for the first token): "
                f"leave the row out."
            )
        ids = row.get("input_ids")
        if ids is not None and vocabulary is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(
                f"row {index} of {what} has tokens from {int(ids.min())} to {int(ids.max())}, and {type(model).__name__} knows 0 to "
                f"{vocabulary - 1}: take the tokenizer that belongs to the model."
            )


def _check_names(model: nn.Module, row: Row, what: str) -> None:
    accepted = inspect.signature(model.forward).parameters
    name_of = type(model).__name__
    any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    for name in () if any_name else row:
        if name not in accepted:
            raise ValueError(
                f"{what} has {name!r} in its rows, and {name_of}.forward takes {', '.join(accepted) or 'nothing'}: "
                f"name the rows' tensors like its arguments."
            )
    positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [name for name, one in accepted.items() if one.default is one.empty and one.kind in positional]
    if predicts_next_token(model):
        needed.append("labels")
    for name in needed:
        if name not in row:
            raise ValueError(f"{what} has no {name!r} in its rows, and {name_of} needs it for its loss: add it to every row.")


def _shifted_labels(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()


def _labels_or_rows(batch: Batch) -> Tensor:
    labels = batch.get("labels")
    if labels is not None and not labels.is_floating_point():
        return (labels != IGNORED).sum()
    first = next(iter(batch.values()))
    return torch.tensor(first.shape[0], device=first.device)


def _loss_in(output: Any, model: nn.Module) -> Tensor:
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, tuple):
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        described = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(
            f"{type(model).__name__} returned {described} where its loss was expected: return a scalar loss, alone, as "
            f"'loss' of a mapping or an output object, or first in a tuple, and put what it needs (labels) into the rows."
        )
    return loss
