"""What people give a Trainer, as rows that suit the model; whatever does not is refused before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from memtrain.data.rows import Row, Rows, TokenRows, check_rows
from memtrain.data.rowset import RowSet, alike
from memtrain.data.text import read_documents
from memtrain.device import Device
from memtrain.models import gguf
from memtrain.models.build import FromModule, FromPretrained, ModelSource, weight_dtype
from memtrain.plan import policy_name
from memtrain.precision import Precision

# Text is cut into rows of at most this many tokens unless told otherwise; the default of TRL's SFTTrainer.
_DEFAULT_SEQUENCE_LENGTH = 1024


def rows_of(data: Any, what: str, model: ModelSource, tokenizer: Any, sequence_length: int | None) -> RowSet:
    """Rows as given, or cut from the text file or folder that ``data`` names.

    Args:
        what: name of the argument, for errors.
        sequence_length: tokens per row of text; None for what the model has positions for, at most 1024.

    Raises:
        ValueError: they cannot be read, or the model cannot be trained on them.
    """
    if isinstance(data, str | os.PathLike):
        documents = read_documents(Path(data))
        if tokenizer is None:
            raise ValueError(f"{what} is text, and {model.name} brings no tokenizer to read it with: give tokenizer.")
        positions = _config(model, "max_position_embeddings") or _DEFAULT_SEQUENCE_LENGTH
        length = min(positions, _DEFAULT_SEQUENCE_LENGTH) if sequence_length is None else sequence_length
        data = TokenRows.of(documents, tokenizer, length)
    check_rows(data, what=what)
    rows: Rows = data
    _check_tokens(rows[0], model, tokenizer)
    return alike(rows, what)


def load_tokenizer(tokenizer: Any, model: ModelSource) -> Any:
    """A tokenizer as given or at a path; by default the one beside the model's weights, or None where there is none.

    Raises:
        ValueError: there is none at the path.
    """
    if tokenizer is None and isinstance(model, FromPretrained):
        try:
            return _at(model.path)
        except (OSError, ValueError):
            return None
    if not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    path = os.path.expanduser(tokenizer)
    try:
        return _at(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"there is no tokenizer at {path!r} ({reason}): give one that save_pretrained wrote.") from error


def check_module(model: ModelSource, precision: Precision, device: Device) -> None:
    """Refuse a module that is not what the precision trains on the device.

    Raises:
        ValueError: it has nothing to train, or a parameter of another type or place.
    """
    if not isinstance(model, FromModule):
        return
    if not any(parameter.requires_grad for parameter in model.module.parameters()):
        raise ValueError(f"{model.name} has no parameter that requires a gradient, so there is nothing to train.")
    dtype = weight_dtype(precision)
    for path, parameter in model.module.named_parameters():
        if parameter.device.type not in ("cpu", device.kind):
            raise ValueError(
                f"parameter {path} is on {parameter.device}, and memtrain trains on device {device.name}: call model.cpu()."
            )
        # What is frozen may have any type: a base in 16 bits under adapters in 32.
        if parameter.requires_grad and parameter.dtype != dtype:
            raise ValueError(
                f"parameter {path} is {parameter.dtype}, and precision {policy_name(type(precision))} trains {dtype}: "
                f"call model.to({dtype})."
            )


def _at(path: str) -> Any:
    from transformers import AutoTokenizer

    folder, file = gguf.pretrained(path)
    return AutoTokenizer.from_pretrained(folder, **file)


def _config(model: ModelSource, name: str) -> Any:
    holder = model.module if isinstance(model, FromModule) else model
    return getattr(getattr(holder, "config", None), name, None)


def check_length(length: int, model: ModelSource) -> None:
    """Refuse rows of more tokens than the model has positions for.

    Raises:
        ValueError: they are longer.
    """
    positions = _config(model, "max_position_embeddings")
    if positions is not None and length > positions:
        raise ValueError(
            f"the rows have {length} tokens and {model.name} has {positions} positions: "
            f"shorten sequence_length to {positions} or less."
        )


def _check_tokens(row: Row, model: ModelSource, tokenizer: Any) -> None:
    """Refuse rows that run past the model's positions, and a tokenizer with more tokens than the model."""
    if "input_ids" not in row:
        return
    check_length(len(row["input_ids"]), model)
    vocabulary = _config(model, "vocab_size")
    if tokenizer is not None and vocabulary is not None and len(tokenizer) > vocabulary:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and {model.name} has embeddings for {vocabulary}: "
            f"take the tokenizer that belongs to the model, or a larger vocab_size."
        )
