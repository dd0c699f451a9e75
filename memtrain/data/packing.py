"""Packing: several short rows in one, where they do not see each other.

Which rows go together is best-fit decreasing (Johnson, 1973; for training Ding et al., 2024, arXiv 2404.10830): the longest first,
each to where it leaves the least room. In a packed row the positions begin anew with each row, and by these a model of transformers
keeps them apart, if it gets neither a mask nor a cache (docs/packing.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from memtrain.data.rows import IGNORED, Batch, Row
from memtrain.data.rowset import Lengths


class RowsOfLengths(Protocol):
    """Rows of ``input_ids`` and ``labels`` that know how long they are, as :class:`memtrain.data.store.RaggedRows` does."""

    @property
    def lengths(self) -> Lengths: ...

    @property
    def digest(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


def best_fit_decreasing(lengths: Sequence[int] | Lengths, capacity: int) -> list[list[int]]:
    """The numbers of the rows in each pack, the same for the same lengths.

    A row's cost is a look at ``capacity`` bits, 64 at a time: a million rows take a second where packs have 8192 tokens, and five
    where they have 131072.

    Args:
        lengths: tokens of each row, 1 to ``capacity``.
        capacity: tokens in a pack.

    >>> best_fit_decreasing([3, 4, 5], 8)
    [[2, 0], [1]]
    """
    found = np.asarray(lengths, dtype=np.int64)
    assert not len(found) or 0 < found.min() <= found.max() <= capacity
    packs: list[list[int]] = []
    # The packs by the room that they have left, and a bit for each room that there is a pack with.
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    order = np.argsort(-found, kind="stable")
    for number, length in zip(order.tolist(), found[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            # The lowest bit is the least room that is enough.
            room = length + (enough & -enough).bit_length() - 1
            pack = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            packs[pack].append(number)
        else:
            room, pack = capacity, len(packs)
            packs.append([number])
        left = room - length
        if left:
            if not with_room[left]:
                rooms |= 1 << left
            with_room[left].append(pack)
    return packs


class PackedRows(Dataset[Batch]):
    """Rows packed into some of ``sequence_length`` tokens: ``{"input_ids", "labels", "position_ids"}``, int64, of that length.

    The first token of a row is no target, as in a row alone, where nothing stands before it. What is left at the end is filled up
    with padding that counts nowhere and has positions of its own.

    Attributes:
        packs: the numbers of the rows in each pack.
        lengths: tokens of each pack that are no padding, int64 of shape (packs,).
        most_rows: the number of the pack in which the most rows stand, its padding counted as one; 0 where there is no pack.
        digest: by which two processes tell whether theirs are the same.
    """

    def __init__(self, rows: RowsOfLengths, sequence_length: int, pad_token_id: int) -> None:
        """Pack ``rows``, none longer than ``sequence_length``."""
        assert not len(rows) or rows[0].keys() == {"input_ids", "labels"}
        self._rows = rows
        self._sequence_length = sequence_length
        self._pad_token_id = pad_token_id
        self.packs = best_fit_decreasing(rows.lengths, sequence_length)
        self.lengths: Lengths = np.array([rows.lengths[pack].sum() for pack in self.packs], dtype=np.int64)
        segments = [len(pack) + (tokens < sequence_length) for pack, tokens in zip(self.packs, self.lengths, strict=True)]
        self.most_rows = int(np.argmax(segments)) if segments else 0
        self.digest = hashlib.sha256(f"{rows.digest} in {sequence_length}".encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.packs)

    def tokens(self, index: int) -> int:
        """How many tokens of a pack are no padding."""
        return int(self.lengths[index])

    @property
    def filled(self) -> float:
        """The share of all tokens that are no padding."""
        return float(self.lengths.sum() / max(1, len(self) * self._sequence_length))

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        ids = torch.full((self._sequence_length,), self._pad_token_id)
        labels = torch.full((self._sequence_length,), IGNORED)
        positions = torch.arange(self._sequence_length)
        start = 0
        for number in self.packs[index]:
            row = self._rows[number]
            stop = start + len(row["input_ids"])
            ids[start:stop] = row["input_ids"]
            labels[start + 1 : stop] = row["labels"][1:]
            positions[stop:] -= stop - start
            start = stop
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
