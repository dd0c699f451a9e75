"""What a model's loss is a mean over, so that micro-batches add up to exactly the mean of the whole batch.

A model with a loss takes a batch as keyword arguments and returns the mean loss over the batch's counted items. The loss
of an effective batch of N counted items is then the sum over micro-batches of loss × n / N, token for token, whatever
the micro-batch size; averaging the micro-batches' means instead would weigh tokens of short rows more.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.data.rows import IGNORED, Batch


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
    # Looked up by module name, so that a model which is not of transformers does not import it.
    losses = sys.modules.get("transformers.loss.loss_utils")
    shifts = losses is not None and getattr(model, "loss_function", None) is losses.ForCausalLMLoss
    # Encoder-decoder models carry that loss function too, but use it nowhere: their labels arrive shifted.
    return shifts and not getattr(model.config, "is_encoder_decoder", False)


def check_names(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse rows that the model's forward cannot take.

    Raises:
        ValueError: a name is no argument of forward.
    """
    accepted = inspect.signature(model.forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    for name in names:
        if name not in accepted:
            raise ValueError(
                f"the rows hold {name!r}, and {type(model).__name__}.forward takes {', '.join(accepted) or 'nothing'}: "
                f"name the rows' tensors like its arguments."
            )


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
