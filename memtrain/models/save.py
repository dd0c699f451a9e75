"""Writing a model in HuggingFace format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

# The weights of one file are copied to the host together, so a file is kept small beside a large model.
SHARD_BYTES = 5 * 10**9


def save_model(model: nn.Module, tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """Write the model (safetensors), and the tokenizer if there is one, for ``from_pretrained``.

    Another nn.Module is written as ``model.safetensors``.
    """
    if hasattr(model, "save_pretrained"):
        with no_progress_bars():
            model.save_pretrained(folder, max_shard_size=SHARD_BYTES)  # type: ignore[operator]
    else:
        from safetensors.torch import save_model as save

        Path(folder).mkdir(parents=True, exist_ok=True)
        save(model, str(Path(folder) / "model.safetensors"))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def largest_shard(model: nn.Module) -> list[int]:
    """Bytes of each tensor of the file that holds most, which saving from a card holds on the host."""
    sizes = [tensor.nbytes for tensor in {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values()]
    if not hasattr(model, "save_pretrained"):
        return sizes
    shards: list[list[int]] = [[]]
    for size in sizes:
        if shards[-1] and sum(shards[-1]) + size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(size)
    return max(shards, key=sum)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars of its own into ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
