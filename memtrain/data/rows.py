"""Rows: what one line of a batch is, rows cut from text, and the check of rows that users bring.

A row maps the names of the model's arguments to tensors without a batch dimension. All rows of a run have the same names,
shapes and dtypes, so they stack into a batch without padding, and every batch takes the same memory.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol, Self, runtime_checkable

import torch
from torch.nn.functional import pad
from torch.utils.data import Dataset, IterableDataset

from memtrain import generators

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, torch.Tensor]
Batch = dict[str, torch.Tensor]

IGNORED: Final = -100
"""The label of a position that does not count in the loss (``ignore_index`` of torch's cross-entropy)."""

_CHECKED_AT_EACH_END: Final = 5_000


@runtime_checkable
class Rows(Protocol):
    """Rows by number: a list, a map-style torch ``Dataset``, a Hugging Face ``Dataset`` in torch format."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


class TokenRows(Dataset[Batch]):
    """Text as rows of ``sequence_length`` tokens: ``{"input_ids", "labels"}``, int64, each of shape (sequence_length,).

    The documents' tokens stand end to end, each document followed by the end-of-sequence token, which is learnt like any
    other, and are cut into windows without gap or overlap. Labels equal the inputs: a causal model shifts them itself, so
    the first token of a row is never a target.

    The last window may be shorter. It is filled up at the right with the padding token (or end-of-sequence, where the
    tokenizer has none) and :data:`IGNORED` labels. A causal model needs no attention mask for that: no real token sees what
    stands to its right, and positions counted from the left stay as they are. A last window of a single token is left out:
    as the first of its row it would be no target, and nothing would follow that it could help to predict.
    """

    def __init__(self, tokens: torch.Tensor, sequence_length: int, pad_token_id: int) -> None:
        """Cut ``tokens`` (1-D, two or more) into rows; :meth:`of` makes them from text."""
        lone_last_token = len(tokens) % sequence_length == 1
        self._tokens = tokens[:-1] if lone_last_token else tokens
        self._sequence_length = sequence_length
        self._pad_token_id = pad_token_id

    @classmethod
    def of(cls, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> Self:
        """Tokenise ``documents`` and cut them into rows of ``sequence_length`` tokens.

        Raises:
            ValueError: ``sequence_length`` is below 2, the tokenizer has no end-of-sequence token, or the text is shorter
                than 2 tokens.
        """
        if sequence_length < 2:
            raise ValueError(f"sequence_length is {sequence_length}, and it must be 2 or more: a token and one to predict.")
        eos = tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                "the tokenizer has no end-of-sequence token, and one must follow each document: set its eos_token."
            )
        # 32 bits: half the memory of int64 for as long as the run lasts; a row is widened when it is read.
        tokens = array("i")
        for document in documents:
            # verbose=False: no warning that a document is longer than the model's context, since it is cut into rows here.
            tokens.extend(tokenizer.encode(document, add_special_tokens=False, verbose=False))
            tokens.append(eos)
        if len(tokens) < 2:
            raise ValueError(
                f"the text has {len(tokens)} tokens with the end of each document, and it must have 2 or more: give more text."
            )
        pad_token_id = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return cls(torch.frombuffer(tokens, dtype=torch.int32), sequence_length, pad_token_id)

    def __len__(self) -> int:
        return -(-len(self._tokens) // self._sequence_length)

    def __getitem__(self, index: int) -> Batch:
        start = range(len(self))[index] * self._sequence_length
        tokens = self._tokens[start : start + self._sequence_length].to(torch.int64)
        missing = self._sequence_length - len(tokens)
        return {
            "input_ids": pad(tokens, (0, missing), value=self._pad_token_id),
            "labels": pad(tokens, (0, missing), value=IGNORED),
        }


def check_rows(rows: object, *, what: str, ragged: Collection[str] = ()) -> None:
    """Refuse rows that cannot be trained on, before training starts.

    All rows are read up to 10,000 of them, else the first and the last 5,000; a batch checks its own rows again
    (:mod:`memtrain.data.batches`).

    Args:
        rows: what the user gave.
        what: its name in messages, such as ``"the training rows"``.
        ragged: the names of tensors whose length may differ.

    Raises:
        ValueError: the rows have no length or number, there are none, or :func:`check_row` refuses one.
    """
    # torch gives every IterableDataset a __getitem__ (that raises), and its subclasses may have a length.
    if not isinstance(rows, Rows) or isinstance(rows, IterableDataset | Mapping):
        raise ValueError(
            f"{what} came as {type(rows).__name__}, and rows must have a length and be read by number: "
            "give a list or a map-style Dataset, a stream as list(stream)."
        )
    count = len(rows)
    if count == 0:
        raise ValueError(f"there is no row in {what}, and training needs 1 or more: give rows.")
    first = rows[0]
    for index in checked(count):
        check_row(rows[index], first, index=index, what=what, ragged=ragged)


def checked(count: int) -> Iterable[int]:
    """The numbers of the rows that are looked at before training: all of 10,000, else those at either end."""
    middle = max(_CHECKED_AT_EACH_END, count - _CHECKED_AT_EACH_END)
    return chain(range(min(count, _CHECKED_AT_EACH_END)), range(middle, count))


def check_row(row: object, first: Row, *, index: int, what: str, ragged: Collection[str] = ()) -> None:
    """Refuse a row that is no mapping of tensors, does not stack with ``first``, or has no label that counts.

    Args:
        row: the row.
        first: row 0, which all rows must be like; for row 0 the row itself.
        index: the row's number in messages.
        what: the name of the rows in messages.
        ragged: the names of tensors whose length may differ.

    Raises:
        ValueError: with the number, what differs and the remedy.
    """
    fault = _not_tensors(row)
    if fault:
        raise ValueError(
            f"row {index} of {what} {fault}, and every row must be a mapping of names to tensors: "
            'convert it, a Hugging Face Dataset by with_format("torch").'
        )
    assert isinstance(row, Mapping)
    if row.keys() != first.keys():
        raise ValueError(
            f"row {index} of {what} has the keys {sorted(row)} where row 0 has {sorted(first)}, and rows must be alike: "
            "give every row the same keys."
        )
    for name, tensor in row.items():
        like = tensor.dim() == first[name].dim() == 1 if name in ragged else tensor.shape == first[name].shape
        if not like or tensor.dtype != first[name].dtype:
            raise ValueError(
                f"row {index} of {what} has {name!r} as {_described(tensor)} where row 0 has {_described(first[name])}, and "
                "rows must be alike: cut or pad all rows to one shape and convert them to one dtype."
            )
    labels = row.get("labels")
    if labels is not None and labels.dtype == torch.int64 and not (labels != IGNORED).any():
        raise ValueError(
            f"row {index} of {what} has labels of which none counts (all are {IGNORED}), and a row must have something to "
            "learn: leave the row out."
        )


def _not_tensors(row: object) -> str:
    if not isinstance(row, Mapping):
        return f"is a {type(row).__name__}"
    if not row:
        return "is empty"
    for name, value in row.items():
        if not isinstance(name, str):
            return f"has the key {name!r}"
        if not isinstance(value, torch.Tensor):
            return f"has {name!r} as {type(value).__name__}"
    return ""


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def fingerprint(rows: Rows) -> str:
    """The number of rows and a digest of the first and the last, by which two processes tell whether theirs are the same.

    A row that draws random numbers draws the same ones each time; the generators are put back afterwards.
    """
    digest = hashlib.sha256()
    put_back = generators.remember()
    try:
        for index in (0, len(rows) - 1):
            generators.begin_at(index)
            row = rows[index]
            for name in sorted(row):
                digest.update(name.encode())
                digest.update(row[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    finally:
        put_back()
    return f"{len(rows)} rows ({digest.hexdigest()[:8]})"
