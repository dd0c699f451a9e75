"""What a model's loss is a mean over, so that micro-batches add up to exactly the mean of the whole batch.

A model with a loss takes a batch as keyword arguments and returns the mean loss over the batch's counted items; one without takes
the arguments that it knows, and a function of the user's makes the loss of what it returns and of the batch. The loss of an
effective batch of N counted items is then the sum over micro-batches of loss × n / N, token for token, whatever the micro-batch
size; averaging the micro-batches' means instead would weigh tokens of short rows more.

What is counted: of a causal language model the labels but for the first of a row, since it predicts label i+1 at position i; of
another model its integer labels, one for a token or for a row, that are not ignored; rows where labels are numbers to come close
to, where several of them hold at once, or where there are none.
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
from memtrain.data.task import Task
from memtrain.job import Loss
from memtrain.models.tasks import own_code, task_of_class, unwrapped

# How configurations call the weight of the loss by which a router spreads the tokens over its experts.
_BALANCE = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")

See = Callable[[Batch, Any], None]


@dataclass(frozen=True)
class Objective:
    """The loss of a model.

    Attributes:
        count: the number of items a batch's mean loss is over, a scalar int64 tensor on the batch's device.
        settings: keyword arguments that every forward gets besides the batch.
        own: makes the loss of what forward returns and of the batch; None where the model does.
        takes: names of the batch that forward gets; None for all.
    """

    count: Callable[[Batch], Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    own: Loss | None = None
    takes: frozenset[str] | None = None

    def loss(self, model: nn.Module, batch: Batch, see: See | None = None) -> Tensor:
        """The mean loss over the batch's counted items, a scalar.

        Args:
            see: is shown the batch and what the model returned for it, which it must not keep on the device.

        Raises:
            ValueError: there is no scalar loss.
        """
        given = batch if self.takes is None else {name: batch[name] for name in batch if name in self.takes}
        # Nothing but the loss may outlive this frame: an output kept during backward keeps the logits.
        return self._loss_of(model(**given, **self.settings), model, batch, see)

    def _loss_of(self, output: Any, model: nn.Module, batch: Batch, see: See | None) -> Tensor:
        if see is not None:
            see(batch, output)
        if self.own is None:
            return _loss_in(output, model, batch)
        loss: Any = self.own(output, batch)
        if isinstance(loss, Tensor) and loss.dim() == 0:
            return loss
        remedy = "take its mean" if isinstance(loss, Tensor) else "return a tensor without dimensions"
        raise ValueError(
            f"the loss that was given returned {_described(loss)} for {_listed(batch)}, and it must return the mean over the counted "
            f"items, a scalar tensor: {remedy}."
        )


def objective(model: nn.Module, loss: Loss | None = None) -> Objective:
    """The objective of a model: what is counted is said at the top of this module.

    Args:
        loss: makes the loss of what forward returns and of the batch, in place of the model. Its count is that of the labels where
            they are integers, and else that of the rows.
    """
    accepted = inspect.signature(unwrapped(model).forward).parameters
    settings: dict[str, Any] = {}
    if "use_cache" in accepted:
        # A cache serves generation; in training it keeps the keys and values of all layers alive.
        settings["use_cache"] = False
    if loss is None and _compares_rows(model):
        settings["return_loss"] = True
    if loss is None:
        return Objective(_count_of(model), settings)
    count = _shifted_labels_or_rows if predicts_next_token(model) else _labels_or_rows
    # What a model of transformers takes without naming it goes to its layers.
    names_all = hasattr(model, "loss_function") or all(one.kind is not one.VAR_KEYWORD for one in accepted.values())
    return Objective(count, settings, loss, frozenset(accepted) if names_all else None)


def ties_rows(model: nn.Module) -> str | None:
    """How the loss of a model depends on which rows are computed together, None where it does not: it does something over them."""
    if _compares_rows(model):
        return "compares each row with the others of"
    config: Any = getattr(model, "config", None)
    for one in (config, config.get_text_config() if hasattr(config, "get_text_config") else None):
        weights = [getattr(one, name) for name in _BALANCE if isinstance(getattr(one, name, None), int | float)]
        if getattr(one, "output_router_logits", False) and (not weights or any(weights)):
            return "balances its experts (output_router_logits) over"
    return None


def _compares_rows(model: nn.Module) -> bool:
    """Whether a model of transformers learns which text belongs to which image, as CLIP does."""
    asked = inspect.signature(unwrapped(model).forward).parameters.get("return_loss")
    # Where it is on by itself, the loss is another.
    return asked is not None and hasattr(model, "config") and asked.default in (None, False)


def predicts_next_token(model: nn.Module) -> bool:
    """Whether a transformers model's loss is that of a causal language model, which shifts the labels by one itself."""
    # transformers gives this loss function to every model of its own whose loss it does not know, so the class has to be
    # that of a language model too. Encoder-decoder models carry it and use it nowhere: their labels arrive shifted.
    if "transformers" not in sys.modules or not hasattr(model, "loss_function"):
        return False
    model = unwrapped(model)
    if own_code(getattr(model, "config", None)).get("AutoModelForCausalLM", "").endswith(f".{type(model).__name__}"):
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    is_language_model = any(base.__name__ in names for base in type(model).__mro__)
    shifts = is_language_model or getattr(model, "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration")
    return shifts and not getattr(model.config, "is_encoder_decoder", False)


def check_suits(model: nn.Module, rows: Rows, what: str, loss: Loss | None = None) -> None:
    """Refuse rows that the model cannot be trained on, before it is.

    Args:
        loss: as :func:`objective` takes it; it may read what forward does not take.

    Raises:
        ValueError: forward takes other names, a row counts nothing in the loss, or a token is not in the vocabulary.
    """
    _check_names(model, rows[0], what, loss)
    count = objective(model, loss).count
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


def _check_names(model: nn.Module, row: Row, what: str, loss: Loss | None) -> None:
    accepted = inspect.signature(model.forward).parameters
    name_of = type(model).__name__
    any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    for name in () if any_name or loss is not None else row:
        if name not in accepted:
            raise ValueError(
                f"{what} has {name!r} in its rows, and {name_of}.forward takes {', '.join(accepted) or 'nothing'}: "
                f"name the rows' tensors like its arguments."
            )
    positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [name for name, one in accepted.items() if one.default is one.empty and one.kind in positional]
    if predicts_next_token(model) and loss is None:
        needed.append("labels")
    for name in needed:
        if name not in row:
            raise ValueError(f"{what} has no {name!r} in its rows, and {name_of} needs it for its loss: add it to every row.")


# ---------------------------------------------------------------------------------------------- counts


def _count_of(model: nn.Module) -> Callable[[Batch], Tensor]:
    if predicts_next_token(model):
        return _shifted_labels
    config = getattr(model, "config", None)
    if task_of_class(type(unwrapped(model)), config) in (Task.SEQUENCE_CLASSIFICATION, Task.IMAGE_CLASSIFICATION):
        kind = getattr(config, "problem_type", None)
        # Not the label that is ignored, but a number like any other.
        if kind in ("regression", "multi_label_classification") or (kind is None and getattr(config, "num_labels", 0) == 1):
            return _rows
    return _labels_or_rows


def _shifted_labels(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()


def _shifted_labels_or_rows(batch: Batch) -> Tensor:
    return _shifted_labels(batch) if _has_classes(batch) and batch["labels"].dim() > 1 else _labels_or_rows(batch)


def _labels_or_rows(batch: Batch) -> Tensor:
    return (batch["labels"] != IGNORED).sum() if _has_classes(batch) else _rows(batch)


def _rows(batch: Batch) -> Tensor:
    first = next(iter(batch.values()))
    return torch.tensor(first.shape[0], device=first.device)


def _has_classes(batch: Batch) -> bool:
    labels = batch.get("labels")
    return labels is not None and not labels.is_floating_point()


# ---------------------------------------------------------------------------------------------- the loss


def _loss_in(output: Any, model: nn.Module, batch: Batch) -> Tensor:
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, tuple) and output:
        loss = output[0]
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    # An output object may be a tuple too, as named tuples are.
    is_named = isinstance(output, Mapping) or hasattr(output, "loss")
    found = _listed_output(output, is_named=is_named) or _described(output)
    if isinstance(loss, Tensor) and is_named:
        raise ValueError(f"{type(model).__name__} returned {found} where its loss was expected: take the mean of its loss.")
    raise ValueError(
        f"{type(model).__name__} returned {found} where its loss was expected: return a scalar loss (of several the mean), alone, as "
        f"'loss' of a mapping or an output object, or first in a tuple, put what it needs (labels) into the rows, which have "
        f"{_listed(batch)}, or give loss, a function of what it returns and of the batch."
    )


def _listed_output(output: Any, *, is_named: bool) -> str:
    """What came back, by name or by position; empty where it is one thing."""
    if is_named:
        fields = output if isinstance(output, Mapping) else _fields_of(output)
        return ", ".join(f"{name} ({_described(value)})" for name, value in fields.items())
    if isinstance(output, tuple | list):
        items = ", ".join(_described(value) for value in output)
        return f"a {type(output).__name__} of {items or 'nothing'}"
    return ""


def _fields_of(output: Any) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = output._asdict() if hasattr(output, "_asdict") else getattr(output, "__dict__", {})
    return fields or {"loss": output.loss}


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _listed(batch: Batch) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
