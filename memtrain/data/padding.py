"""Rows of unequal length as one batch: filled up at the right to the longest of them.

At the right whatever a tokenizer does when it generates, because positions are counted from the left: a row that is padded there
has the positions that it has alone, and no token of a causal model sees the padding. Lengths go up to a multiple of 8, as matrix
units like them (NVIDIA, "Matrix Multiplication Background"), and so that there are fewer of them for an allocator to keep blocks
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from memtrain.data.rows import Batch, Row
from memtrain.data.rowset import Shapes


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Makes a batch of rows of unequal length.

    Attributes:
        values: with what each tensor is filled up, by name: the padding token, the label that is ignored, 0 in a mask.
        limits: the longest that each tensor of unequal lengths is in any row, by name; no batch is longer.
        multiple: batches are as long as a multiple of it, where that is not beyond the longest.
        mask: whether batches get an ``attention_mask``, int64, 1 on tokens of ``input_ids`` and 0 on padding.
    """

    values: Mapping[str, float]
    limits: Mapping[str, int]
    multiple: int = 8
    mask: bool = False

    def __post_init__(self) -> None:
        assert self.multiple >= 1
        for name in self.limits:
            if name not in self.values:
                raise ValueError(
                    f"{name!r} has rows of unequal length, and nothing says with what it is filled up: make all as long, or give "
                    f"a data_collator."
                )

    def __call__(self, rows: Sequence[Row], longest: Mapping[str, int] | None = None) -> Batch:
        """The batch of rows, one or more.

        Args:
            longest: the length that each tensor is to have, where it is not that of the rows.
        """
        batch: Batch = {}
        for name in rows[0]:
            tensors = [row[name] for row in rows]
            if name in self.limits:
                length = self._length(name, tensors) if longest is None else longest[name]
                tensors = [pad(tensor, (0, length - len(tensor)), value=self.values[name]) for tensor in tensors]
            batch[name] = torch.stack(tensors)
        if self.mask:
            real = torch.tensor([len(row["input_ids"]) for row in rows])
            batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < real.unsqueeze(1)).long()
        return batch

    def _length(self, name: str, tensors: Sequence[torch.Tensor]) -> int:
        longest = max(map(len, tensors))
        assert longest <= self.limits[name]
        return min(-(-longest // self.multiple) * self.multiple, self.limits[name])

    def shapes(self, row: Row) -> Shapes:
        """Shape and type of each tensor of one row in the largest batch, by the types of ``row``, which needs no data."""
        found = {
            name: ((self.limits[name],) if name in self.limits else tuple(tensor.shape), tensor.dtype)
            for name, tensor in row.items()
        }
        return {**found, "attention_mask": (found["input_ids"][0], torch.int64)} if self.mask else found
