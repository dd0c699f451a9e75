"""Row sets: of rows that were stored, of tensors that people bring, and of rows that a collator of theirs joins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch

from memtrain import generators
from memtrain.data.padding import Padded
from memtrain.data.rows import IGNORED, Batch, Row, Rows, check_rows, checked, fingerprint
from memtrain.data.rowset import Lengths, RowSet, alike, shape_of

Vary = Callable[[Row, int, int], Row]

PADDED_WITH: Final = {"labels": IGNORED, "attention_mask": 0, "token_type_ids": 0, "position_ids": 0, "decoder_input_ids": 0}
"""What rows of unequal length are filled up with, by the name of the tensor; ``input_ids`` with the padding token."""


class Stored(Rows, Protocol):
    """Rows that know how long they are, as :class:`memtrain.data.store.RaggedRows` does."""

    @property
    def lengths(self) -> Lengths: ...

    @property
    def longest(self) -> Mapping[str, int | None]: ...

    @property
    def digest(self) -> str: ...

    def length_of(self, column: str) -> Lengths: ...


def padded(rows: Stored, what: str, *, pad_token_id: int, mask: bool, vary: Vary | None = None) -> RowSet:
    """Stored rows, padded at the right to the longest of their micro-batch.

    Args:
        mask: whether batches tell which tokens are padding, as every model needs that looks to the right.
        vary: see :class:`memtrain.data.rowset.RowSet`.
    """
    lengths = {name: rows.length_of(name) for name, longest in rows.longest.items() if longest is not None}
    print_of = f"{len(rows)} rows ({rows.digest[:8]})"
    return _padded(rows, what, lengths, rows.lengths, pad_token_id, mask, vary, print_of)


def tensors(rows: Any, what: str, *, pad_token_id: int | None, mask: bool) -> RowSet:
    """Rows of tensors as given, padded where their lengths differ.

    Raises:
        ValueError: they are none, or differ in more than the length of what can be padded.
    """
    ragged = _ragged(rows, what)
    check_rows(rows, what=what, ragged=ragged)
    if not ragged:
        return alike(rows, what)
    if pad_token_id is None and "input_ids" in ragged:
        raise ValueError(
            f"{what} has rows of unequal length, and nothing says with which token they are filled up: give tokenizer."
        )
    put_back = generators.remember()
    found = np.array([[len(row[name]) for name in ragged] for row in (rows[number] for number in range(len(rows)))])
    put_back()
    lengths = {name: found[:, column].astype(np.int64) for column, name in enumerate(ragged)}
    # What is not ragged among them stands beside those that are: a mask as long as the tokens.
    of_row = lengths.get("input_ids", found.max(axis=1))
    has_mask = "attention_mask" in rows[0]
    return _padded(rows, what, lengths, of_row, pad_token_id or 0, mask and not has_mask, None, fingerprint(rows))


def collated(rows: Any, what: str, collator: Callable[[list[Any]], Any]) -> RowSet:
    """Rows of any form that a function joins into batches, as those of transformers' ``data_collator``.

    Each row is joined by itself once, to know the largest batch; random numbers that are drawn for it are put back.

    Raises:
        ValueError: they are no rows by number, or the function makes no batch of tensors of them.
    """
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise ValueError(
            f"{what} came as {type(rows).__name__}, and a data_collator needs rows by number: give a list or a map-style Dataset."
        )
    if not len(rows):
        raise ValueError(f"there is no row in {what}, and training needs 1 or more: give rows.")
    join = partial(_collate, collator, what)
    put_back = generators.remember()
    sizes: list[dict[str, torch.Size]] = []
    digest = hashlib.sha256()
    for number in range(len(rows)):
        one = join([rows[number]])
        sizes.append({name: tensor.shape[1:] for name, tensor in one.items()})
        digest.update(repr(sorted(sizes[-1].items())).encode())
    names = [(name, place) for name, size in sizes[0].items() for place in range(len(size))]
    longest = tuple(dict.fromkeys(max(range(len(rows)), key=lambda n: sizes[n][name][place]) for name, place in names))
    largest = join([rows[number] for number in longest or (0,)])
    put_back()
    ids = [size.get("input_ids") for size in sizes]
    uneven = any(size != sizes[0] for size in sizes)
    return RowSet(
        rows=rows,
        what=what,
        shapes={name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in largest.items()},
        join=join,
        join_largest=join,
        first=None,
        ragged=frozenset(sizes[0]) if uneven else frozenset(),
        lengths=None if ids[0] is None else np.array([size[0] if size else 0 for size in ids], dtype=np.int64),
        longest=longest if uneven else (),
        fingerprint=f"{len(rows)} rows ({digest.hexdigest()[:8]})",
    )


def _padded(
    rows: Rows,
    what: str,
    lengths: Mapping[str, Lengths],
    of_row: Lengths,
    pad_token_id: int,
    mask: bool,
    vary: Vary | None,
    print_of: str,
) -> RowSet:
    limits = {name: int(found.max()) for name, found in lengths.items()}
    pad = Padded(values={**PADDED_WITH, "input_ids": pad_token_id}, limits=limits, mask=mask)
    first = shape_of(rows)
    return RowSet(
        rows=rows,
        what=what,
        shapes=pad.shapes(first),
        join=pad,
        join_largest=partial(pad, longest=limits),
        first=first,
        ragged=frozenset(lengths),
        lengths=of_row,
        longest=tuple(dict.fromkeys(int(found.argmax()) for found in lengths.values())),
        vary=vary,
        fingerprint=print_of,
    )


def _ragged(rows: Any, what: str) -> list[str]:
    """The tensors of one dimension whose length is not the same in all rows that are looked at before training."""
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__") or not len(rows):
        return []
    put_back = generators.remember()
    try:
        first = rows[0]
        known = [name for name in first if name in PADDED_WITH or name == "input_ids"] if isinstance(first, Mapping) else []
        lengths: dict[str, set[int]] = {name: set() for name in known}
        for number in checked(len(rows)) if known else ():
            row = rows[number]
            for name in known:
                tensor = row.get(name) if isinstance(row, Mapping) else None
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 1:
                    lengths[name].add(len(tensor))
        return [name for name in known if len(lengths[name]) > 1]
    finally:
        put_back()


def _collate(collator: Callable[[list[Any]], Any], what: str, rows: Sequence[Any]) -> Batch:
    # Collators may take out of the rows what they read.
    made = collator([dict(row) if isinstance(row, Mapping) else row for row in rows])
    if not isinstance(made, Mapping):
        raise ValueError(
            f"the data_collator made a {type(made).__name__} of {len(rows)} rows of {what}, and it must make a mapping of names "
            f"to tensors: return a dict."
        )
    batch = {name: value for name, value in made.items() if value is not None}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or not value.dim() or len(value) != len(rows):
            is_a = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"the data_collator made {is_a} for {name!r} of {len(rows)} rows of {what}, and each must be a tensor whose first "
                f"dimension is the rows: return such tensors, and pack rows with packing."
            )
    return batch
