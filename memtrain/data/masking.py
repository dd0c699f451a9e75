"""Masked language modelling: which tokens of a row are to be told from the others, drawn anew in every step.

Devlin et al., 2019, arXiv 1810.04805, section 3.1 and appendix A.1: 15 % of the tokens are learnt; of these 80 % are replaced by
the mask, 10 % by any token, and 10 % stay. At least one token of each row is learnt, so that every row counts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from memtrain.data.rows import IGNORED, Row

_LEARNT, _MASKED, _REPLACED = 0.15, 0.8, 0.5


@dataclass(frozen=True)
class Masking:
    """Masks a row; what it draws depends on the seed, the step and the row's number alone.

    Attributes:
        mask_token_id: stands for a token that is to be told.
        vocab_size: of the tokens that another is drawn from.
        kept: special tokens, which are never masked.
        seed: of the draws.
    """

    mask_token_id: int
    vocab_size: int
    kept: frozenset[int]
    seed: int

    def __call__(self, row: Row, number: int, step: int) -> Row:
        """The row with tokens masked, and labels for these alone."""
        digest = hashlib.sha256(f"masks, seed {self.seed}, step {step}, row {number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]))
        ids = row["input_ids"].clone()
        possible = torch.tensor([int(token) not in self.kept for token in ids])
        chance = torch.rand(len(ids), generator=generator).masked_fill(~possible, 1.0)
        learnt = chance < _LEARNT
        learnt[chance.argmin()] = True
        kind = torch.rand(len(ids), generator=generator)
        others = torch.randint(self.vocab_size, (len(ids),), generator=generator)
        masked = learnt & (kind < _MASKED)
        replaced = learnt & ~masked & (kind < _MASKED + (1 - _MASKED) * _REPLACED)
        labels = ids.masked_fill(~learnt, IGNORED)
        ids[masked] = self.mask_token_id
        ids[replaced] = others[replaced]
        return {**row, "input_ids": ids, "labels": labels}
