"""Rows and collators as transformers' Trainer takes them.

Without a ``data_collator`` transformers makes tensors of what a row has, and pads it where there is a tokenizer. Rows of token ids
are read and padded by memtrain itself, which knows their lengths before the run; other rows are joined by the collator that
transformers would take, with the columns that it would leave.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from memtrain import generators
from memtrain.data.files import names_files

# What memtrain reads of rows of token ids.
_TOKENS: Final = frozenset(("input_ids", "attention_mask", "labels"))
_LABELS: Final = frozenset(("label", "label_ids", "labels"))
# Settings with which there are not as many rows as are given.
_CHANGES_NUMBER: Final[Mapping[str, tuple[Any, ...]]] = {
    "packing": (False,),
    "long_rows": ("truncate",),
    "on_bad_row": ("stop",),
}


@dataclass(frozen=True)
class Keeping:
    """Joins rows with a collator that sees some of their columns alone.

    Attributes:
        collator: makes a batch of a list of rows.
        columns: what it sees.
    """

    collator: Callable[[list[Any]], Any]
    columns: frozenset[str]

    def __call__(self, rows: list[Any]) -> Any:
        """The batch of these rows."""
        return self.collator([_kept(row, self.columns) if isinstance(row, Mapping) else row for row in rows])


def rows_in(data: Any, settings: Mapping[str, Any]) -> int | None:
    """How many rows will be trained on; None where that is not known before they are read."""
    if names_files(data) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        return None
    alike = all(settings.get(name, known[0]) in known for name, known in _CHANGES_NUMBER.items())
    return len(data) if alike else None


def rows_from_hf(
    found: Mapping[str, Any], args: Any, collator: Any, said: list[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """How rows are joined: ``data_collator``, or what memtrain needs to read them itself.

    Args:
        found: ``model``, ``data``, ``eval_data`` and ``tokenizer``.
        args: ``transformers.TrainingArguments``.
        collator: as given; None for the one that transformers takes.
        said: gets a sentence about columns that are not used.
        settings: of memtrain, that were given beside.

    Raises:
        ValueError: the model takes none of the columns.
    """
    model, data, tokenizer = (found[name] for name in ("model", "data", "tokenizer"))
    row = _first(data)
    if row is None:
        return {"data_collator": collator}
    takes = _taken(model, args)
    used = frozenset(row) if takes is None else frozenset(row) & takes
    if collator is None:
        if _reads(row, used, has_tokenizer=tokenizer is not None or not isinstance(model, nn.Module)):
            return _own(found, row, settings)
        collator = _default(tokenizer)
    if not used:
        raise ValueError(
            f"train_dataset has columns {', '.join(map(str, row))}, of which {type(model).__name__} takes none: rename them, or set "
            f"remove_unused_columns to False for a data_collator that reads them."
        )
    unused = [str(name) for name in row if name not in used]
    if not unused or takes is None:
        return {"data_collator": collator}
    said.append(
        f"{type(model).__name__} does not take {', '.join(unused)}, which the data_collator does not see; "
        f"remove_unused_columns=False shows it all."
    )
    return {"data_collator": Keeping(collator, takes)}


def align_tokens_(model: Any, processing_class: Any) -> None:
    """Give the model's configuration the tokenizer's special tokens, as transformers does before it trains. In place.

    A classifier of rows needs the padding token there. Versions that do not do it are left as they are.
    """
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, trainer_utils

    align = getattr(trainer_utils, "align_special_tokens", None)
    if (
        align is not None
        and isinstance(model, PreTrainedModel)
        and isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin)
    ):
        align(model, processing_class)


def _reads(row: Mapping[str, Any], used: frozenset[str], *, has_tokenizer: bool) -> bool:
    """Whether memtrain reads such rows itself."""
    if any(isinstance(value, Tensor) for value in row.values()):
        return False
    # Text that transformers would have nothing to do with.
    return has_tokenizer and (not used - _LABELS or ("input_ids" in used and used <= _TOKENS))


def _own(found: Mapping[str, Any], row: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with which no row is cut that transformers would not cut."""
    if "input_ids" not in row or settings.get("packing") or "sequence_length" in settings:
        return {}
    positions = getattr(getattr(found["model"], "config", None), "max_position_embeddings", None)
    sets = [one for one in (found["data"], found["eval_data"]) if hasattr(one, "__len__")]
    longest = positions or max(len(one["input_ids"]) for rows in sets for one in rows)
    return {"sequence_length": max(2, longest)}


def _default(tokenizer: Any) -> Any:
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator

    return DataCollatorWithPadding(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerBase) else default_data_collator


def _taken(model: Any, args: Any) -> frozenset[str] | None:
    """The columns that transformers leaves in a row; None for all."""
    if not args.remove_unused_columns or not isinstance(model, nn.Module):
        return None
    base: Any = model
    if hasattr(base, "peft_config") and hasattr(base, "get_base_model"):
        base = base.get_base_model()
    return frozenset(inspect.signature(base.forward).parameters) | _LABELS | frozenset(args.label_names or ())


def _first(data: Any) -> Mapping[str, Any] | None:
    """The first row, where rows go by number and are mappings."""
    if names_files(data) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
        return None
    put_back = generators.remember()
    row = data[0]
    put_back()
    return row if isinstance(row, Mapping) else None


def _kept(row: Mapping[str, Any], columns: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name in columns}
