"""The rows that a recipe names: what is trained on, what is held out, and the tokenizer that reads both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain.data.files import read_records
from memtrain.data.instructions import Pair, hold_out_groups, library_docstrings
from memtrain.data.records import BadRow, Origin, Record
from memtrain.data.rowset import RowSet
from memtrain.data.text import hold_out, python_documentation
from memtrain.data.tokenizer import train_tokenizer
from memtrain.inputs import Reader, as_documents, load_tokenizer
from memtrain.models.build import ModelSource, with_vocabulary
from memtrain.settings import DataSettings, Settings

Records = Callable[[], Iterable[Record | BadRow]]
"""Gives the records from the beginning, each time it is called."""


@dataclass(frozen=True)
class RecipeRows:
    """What a recipe trains on.

    Attributes:
        model: what is trained, with embeddings for every token.
        reader: made the rows, and says what it found.
        training, held_out: the rows; None where nothing is evaluated on.
        tokenizer: read them.
    """

    model: ModelSource
    reader: Reader
    training: RowSet
    held_out: RowSet | None
    tokenizer: Any


def rows_of_recipe(settings: Settings, model: ModelSource) -> RecipeRows:
    """Read what the settings name, which is something.

    Raises:
        ValueError: it cannot be read, or the model cannot be trained on it.
    """
    data = settings.data
    training, held_out = _parts(data)
    tokenizer = _tokenizer(settings, model, training)
    model, grown = with_vocabulary(model, tokenizer)
    reader = Reader(model, tokenizer, data.options, seed=settings.seed)
    if grown:
        reader.said.append(grown)
    rows = reader.of_records(training(), "data")
    evaluated = None if held_out is None else reader.of_records(held_out(), "eval_data")
    return RecipeRows(model, reader, rows, evaluated, tokenizer)


def _parts(data: DataSettings) -> tuple[Records, Records | None]:
    """Records to train on and to evaluate on."""
    if data.source == "python_docs":
        return _divided(python_documentation(), data, "python_docs")
    if data.source == "stdlib_docstrings":
        pairs = library_docstrings()
        if not data.held_out:
            return _conversations(pairs), None
        training, held_out = hold_out_groups(pairs, data.held_out)
        return _conversations(training), _conversations(held_out)

    def everything() -> Iterable[Record | BadRow]:
        return read_records(data.path, "data")

    if data.eval_path:
        return everything, lambda: read_records(data.eval_path, "eval_data")
    if not data.held_out:
        return everything, None
    documents, _ = as_documents(everything())
    if documents is not None:
        return _divided(documents, data, ", ".join(data.path))
    return _hashed(everything, data.held_out)


def _divided(documents: list[str], data: DataSettings, name: str) -> tuple[Records, Records | None]:
    """Documents, of each of which a part is held out."""

    def records(texts: list[str]) -> Records:
        # Named as text files are, so that they are read as such.
        return lambda: (Record({"text": text}, Origin(f"{name}.txt", n, "row")) for n, text in enumerate(texts))

    if not data.held_out:
        return records(documents), None
    training, held_out = hold_out(documents, data.held_out)
    return records(training), records(held_out)


def _conversations(pairs: list[Pair]) -> Records:
    def records() -> Iterator[Record]:
        for number, pair in enumerate(pairs):
            question = {"role": "user", "content": pair.prompt}
            answer = {"role": "assistant", "content": pair.completion}
            yield Record({"messages": [question, answer]}, Origin("stdlib_docstrings", number, "row"))

    return records


def _hashed(everything: Records, fraction: float) -> tuple[Records, Records]:
    """Hold out the rows whose digests are smallest: as many as the fraction says, chosen by content and not by place.

    Rows of one content are on one side, all of them. What cannot be read is told with the rows that are trained on.
    """
    digests = np.array([_digest(record) for record in everything() if isinstance(record, Record)], dtype=np.uint64)
    count = round(len(digests) * fraction)
    if not count:
        raise ValueError(
            f"holding out {fraction} of {len(digests)} rows leaves none to evaluate on: raise data.held_out, set data.eval_path, or "
            f"set data.held_out to 0."
        )
    last = np.partition(digests, count - 1)[count - 1]

    def training() -> Iterator[Record | BadRow]:
        return (record for record in everything() if isinstance(record, BadRow) or _digest(record) > last)

    def held_out() -> Iterator[Record | BadRow]:
        return (record for record in everything() if isinstance(record, Record) and _digest(record) <= last)

    return training, held_out


def _digest(record: Record) -> np.uint64:
    content = json.dumps(record.values, sort_keys=True, default=str).encode(errors="surrogatepass")
    return np.uint64(int.from_bytes(hashlib.sha256(content).digest()[:8]))


def _tokenizer(settings: Settings, model: ModelSource, training: Records) -> Any:
    data = settings.data
    if data.tokenizer.train_vocab_size is not None:
        records = (record for record in training() if isinstance(record, Record))
        return train_tokenizer(
            (text for record in records for text in _strings(record.values)), data.tokenizer.train_vocab_size
        )
    # Asked for by path even where it is the model's, because without one there are no rows.
    path = data.tokenizer.path or settings.model.path
    return load_tokenizer(path, model, trust_remote_code=settings.model.trust_remote_code)


def _strings(value: Any) -> Iterator[str]:
    """All text in a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)
