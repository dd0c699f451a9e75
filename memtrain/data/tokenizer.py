"""A tokenizer for text that comes without one: byte-level byte-pair encoding, trained in seconds.

Byte-level (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners", section 2.2): the alphabet is the
256 byte values and merges are learnt on top (Sennrich et al., arXiv 1508.07909), so any text is representable, no token
means "unknown", and decoding gives back exactly the text that was encoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Text that holds one of these names is read as that token, so they are names that text does not hold by accident: "<s>" is
# also HTML for struck-out text.
BOS: Final = "<|bos|>"
EOS: Final = "<|eos|>"
PAD: Final = "<|pad|>"

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message['role'] + '\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
"""Conversations with no token of their own: each turn is a line with who speaks, what is said, and the end token."""

SMALLEST_VOCABULARY: Final = 256 + len((BOS, EOS, PAD))


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of at most ``vocab_size`` tokens.

    The tokenizer is smaller where the text offers fewer merges; ``len(tokenizer)`` tells. It adds no special token by
    itself, never cuts a text short, writes conversations by :data:`CHAT_TEMPLATE`, and reloads from ``save_pretrained`` through
    ``AutoTokenizer``.

    Args:
        documents: the text to learn merges from.
        vocab_size: tokens, counting the 256 bytes and the three special tokens (begin, end, padding).

    Raises:
        ValueError: ``vocab_size`` has no room for the bytes and the special tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size is {vocab_size}, and it must be {SMALLEST_VOCABULARY} or more: 256 bytes and three special tokens."
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    made.chat_template = CHAT_TEMPLATE
    return made
