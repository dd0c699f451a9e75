"""What people give a Trainer, as rows that suit the model; whatever does not is refused before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from memtrain import generators
from memtrain.data.encode import Encoder, Reading
from memtrain.data.files import names_files, read_records
from memtrain.data.masking import Masking
from memtrain.data.options import DataOptions
from memtrain.data.packing import PackedRows
from memtrain.data.records import BadRow, Origin, Record
from memtrain.data.rows import Row, Rows, TokenRows
from memtrain.data.rowset import RowSet, alike
from memtrain.data.sets import collated, padded, tensors
from memtrain.data.store import RaggedRows
from memtrain.data.task import Task
from memtrain.data.text import TEXT_SUFFIXES
from memtrain.device import Device
from memtrain.models import gguf
from memtrain.models.build import FromModule, FromPretrained, ModelSource, weight_dtype
from memtrain.models.tasks import task_of
from memtrain.plan import policy_name
from memtrain.precision import Precision

# Text is cut into rows of at most this many tokens unless told otherwise; the default of TRL's SFTTrainer.
_DEFAULT_SEQUENCE_LENGTH = 1024

Collator = Callable[[list[Any]], Any]


class Reader:
    """Makes rows of what people give, for one model.

    Attributes:
        task: what the model learns.
        said: sentences about what was read, for people.
        readings: what was counted, by the name of the rows; stores: the rows as they were read, where they were not cut from text
            end to end.
    """

    def __init__(
        self,
        model: ModelSource,
        tokenizer: Any,
        options: DataOptions,
        *,
        seed: int = 0,
        data_collator: Collator | None = None,
    ) -> None:
        """
        Args:
            model: what is trained.
            tokenizer: reads text; None where rows are no text.
            options: how rows are read.
            seed: of the tokens that are masked, where the task is to tell them.
            data_collator: joins rows into batches, in place of all else.
        """
        self._model, self._tokenizer, self._seed = model, tokenizer, seed
        self._collator = data_collator
        # What is in no list is taken to read from left to right, as language models do.
        task = task_of(model)
        self.task = Task.CAUSAL_LM if task is Task.OTHER else task
        self._options = options
        self.said: list[str] = []
        self.readings: dict[str, Reading] = {}
        self.stores: dict[str, RaggedRows] = {}

    def read(self, data: Any, what: str, enough: int | None = None) -> RowSet:
        """The rows of ``data``.

        Args:
            data: as :func:`memtrain.data.files.read_records` takes it, or rows of tensors.
            what: name of the argument, for messages.
            enough: how many rows a run sees; no more are read of a stream, which may have no end.

        Raises:
            ValueError: they cannot be read, or the model cannot be trained on them.
        """
        if isinstance(data, RowSet):
            return data
        if self._collator is not None:
            return collated(data, what, self._collator)
        if not names_files(data):
            first, data = _peeked(data)
            if isinstance(first, dict) and any(isinstance(value, torch.Tensor) for value in first.values()):
                return self._tensors(data, what, first, enough)
        stream = not names_files(data) and not hasattr(data, "__len__")
        return self.of_records(read_records(data, what), what, enough if stream else None)

    def of_records(self, records: Iterable[Record | BadRow], what: str, enough: int | None = None) -> RowSet:
        """The rows of records; plain text stands end to end, unless short rows are packed."""
        if self.task is Task.CAUSAL_LM and not self._options.packing:
            documents, records = as_documents(records)
            if documents is not None:
                return self.of_documents(documents, what)
        self._require_tokenizer(what)
        length = self._sequence_length()
        reading = Reading(what, length)
        known = _config(self._model, "vocab_size")
        encoder = Encoder(
            self._tokenizer,
            self.task,
            self._options,
            sequence_length=length,
            vocab_size=known,
            label2id=_config(self._model, "label2id"),
            num_labels=_config(self._model, "num_labels"),
        )
        if self._options.packing and enough is not None:
            # As many tokens as fill the packs make at least as many packs.
            store = RaggedRows.of(encoder.encode_all(records, reading, enough_tokens=enough * length))
        else:
            store = RaggedRows.of(encoder.encode_all(records, reading, enough=enough))
        _check_positions({"input_ids": torch.empty(store.longest["input_ids"] or 0)}, self._model)
        self.readings[what], self.stores[what] = reading, store
        self.said += reading.lines()
        if self._options.packing:
            return self._packed(store, what, length)
        vary = self._masking() if self.task is Task.MASKED_LM else None
        return padded(store, what, pad_token_id=self._padding(), mask=self._masks(), vary=vary)

    def of_documents(self, documents: Iterable[str], what: str) -> RowSet:
        """Plain text end to end, cut into rows of one length without gap or overlap."""
        self._require_tokenizer(what)
        rows = TokenRows.of(documents, self._tokenizer, self._sequence_length())
        _check_positions(rows[0], self._model)
        return alike(rows, what)

    def _tensors(self, data: Any, what: str, first: Row, enough: int | None) -> RowSet:
        by_number = isinstance(data, Rows) and not isinstance(data, IterableDataset)
        rows = data if by_number else list(islice(data, enough))
        found = tensors(rows, what, pad_token_id=self._padding() if self._tokenizer else None, mask=self._masks())
        _check_positions(first, self._model)
        return found

    def _packed(self, store: RaggedRows, what: str, length: int) -> RowSet:
        rows = PackedRows(store, length, self._padding())
        self.said.append(f"{what}: {len(store)} rows are packed into {len(rows)} of {length} tokens, {rows.filled:.1%} filled.")
        known = f"{len(rows)} rows ({rows.digest[:8]})"
        return replace(alike(rows, what), lengths=rows.lengths, packed=True, fingerprint=known)

    def _masking(self) -> Masking:
        tokenizer = self._tokenizer
        if tokenizer.mask_token_id is None:
            raise ValueError(
                f"the task of {self._model.name} is to tell masked tokens, and its tokenizer has no mask token: set mask_token."
            )
        kept = frozenset(tokenizer.all_special_ids)
        return Masking(tokenizer.mask_token_id, len(tokenizer), kept, self._seed)

    def _masks(self) -> bool:
        """Whether batches tell which tokens are padding: a causal model does not see it, unless it balances its experts."""
        return self.task is not Task.CAUSAL_LM or bool(_config(self._model, "output_router_logits"))

    def _padding(self) -> int:
        pad, eos = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        return int(next((token for token in (pad, eos) if token is not None), 0))

    def _sequence_length(self) -> int:
        if self._options.sequence_length is not None:
            return self._options.sequence_length
        positions = _config(self._model, "max_position_embeddings") or _DEFAULT_SEQUENCE_LENGTH
        return min(int(positions), _DEFAULT_SEQUENCE_LENGTH)

    def _require_tokenizer(self, what: str) -> None:
        if self._tokenizer is None:
            raise ValueError(f"{what} is text, and {self._model.name} brings no tokenizer to read it with: give tokenizer.")


def _peeked(data: Any) -> tuple[Any, Any]:
    """The first row, None where there is none, and all rows."""
    if isinstance(data, Rows) and not isinstance(data, IterableDataset | dict):
        put_back = generators.remember()
        first = data[0] if len(data) else None
        put_back()
        return first, data
    if not isinstance(data, Iterable) or isinstance(data, dict):
        return None, data
    rows = iter(data)
    first = next(rows, None)
    return first, rows if first is None else chain([first], rows)


def as_documents(records: Iterable[Record | BadRow]) -> tuple[list[str] | None, Iterable[Record | BadRow]]:
    """The text of records that are text files, each one document, or None where they are rows; and the records.

    Raises:
        ValueError: a file cannot be used.
    """
    first, records = _peeked(records)
    origin = first.origin if isinstance(first, Record | BadRow) else Origin("", 0)
    if Path(origin.source.removesuffix(".gz")).suffix.lower() not in TEXT_SUFFIXES:
        return None, records
    documents = []
    for record in records:
        if isinstance(record, BadRow):
            raise ValueError(f"{record}: mend the file or leave it out.")
        documents.append(str(record.values["text"]))
    return documents, ()


def load_tokenizer(tokenizer: Any, model: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """A tokenizer as given or at a path; by default the one beside the model's weights, or None where there is none.

    Args:
        trust_remote_code: whether code that comes with it is run.

    Raises:
        ValueError: there is none at the path, or it brings code that is not trusted.
    """
    if tokenizer is None and isinstance(model, FromPretrained):
        try:
            return _at(model.path, trust_remote_code)
        except (OSError, ValueError) as error:
            _refuse_code(model.path, error)
            return None
    if not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    path = os.path.expanduser(tokenizer)
    try:
        return _at(path, trust_remote_code)
    except (OSError, ValueError) as error:
        _refuse_code(path, error)
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"there is no tokenizer at {path!r} ({reason}): give one that save_pretrained wrote.") from error


def _refuse_code(path: str, error: Exception) -> None:
    if "trust_remote_code" in str(error):
        raise ValueError(
            f"the tokenizer at {path!r} brings its own code, which is not run unasked: read it, and set trust_remote_code to true if "
            f"you trust it."
        ) from error


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


def _at(path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    folder, file = gguf.pretrained(path)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **file)


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


def _check_positions(row: Row, model: ModelSource) -> None:
    """Refuse rows that run past the model's positions."""
    if "input_ids" in row:
        check_length(len(row["input_ids"]), model)
