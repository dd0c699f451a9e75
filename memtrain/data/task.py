"""What a model learns from its rows, which decides what their columns mean and how rows of unequal length are filled up."""

from __future__ import annotations

from enum import StrEnum


class Task(StrEnum):
    """The tasks that rows are made for; ``other`` takes rows as they are given."""

    CAUSAL_LM = "causal_lm"
    MASKED_LM = "masked_lm"
    SEQ2SEQ_LM = "seq2seq_lm"
    SEQUENCE_CLASSIFICATION = "sequence_classification"
    TOKEN_CLASSIFICATION = "token_classification"
    IMAGE_CLASSIFICATION = "image_classification"
    OTHER = "other"

    @property
    def learns_tokens(self) -> bool:
        """Whether what is learnt are tokens, as by language models."""
        return self in (Task.CAUSAL_LM, Task.MASKED_LM, Task.SEQ2SEQ_LM)
