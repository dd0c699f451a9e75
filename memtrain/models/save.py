"""Writing a model in HuggingFace format: whole, its adapters alone, or whole with its adapters added in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memtrain.models.adapters import adapter_tensors, config_of, has_own_adapters
from memtrain.models.build import FromPretrained, ModelSource
from memtrain.models.merge import bare, merged
from memtrain.models.quantize import is_quantized
from memtrain.models.quietly import quietly

# The weights of one file are copied to the host together, so a file is kept small beside a large model.
SHARD_BYTES = 5 * 10**9


def save_model(model: nn.Module, tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """Write the model (safetensors), and the tokenizer if there is one, for ``from_pretrained``.

    Of a model with adapters, these alone, for peft's ``PeftModel.from_pretrained(base, folder)``. Another nn.Module is written
    as ``model.safetensors``.
    """
    # transformers says in a log, and no more, that a file stands in the folder's place.
    Path(folder).mkdir(parents=True, exist_ok=True)
    if has_own_adapters(model):
        _save_adapters(model, Path(folder))
    elif hasattr(model, "save_pretrained"):
        with no_progress_bars():
            model.save_pretrained(folder, max_shard_size=SHARD_BYTES)  # type: ignore[operator]
    else:
        from safetensors.torch import save_model as save

        save(model, str(Path(folder) / "model.safetensors"))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def save_merged(
    model: nn.Module, source: ModelSource, dtype: torch.dtype, tokenizer: Any, folder: str | os.PathLike[str]
) -> None:
    """Write the model with its adapters added to the weights, for ``from_pretrained`` without peft. The model stays as it is.

    Of a model in 4 or 8 bits the weights are loaded again from where it came from, so that adapters are added to the weights
    before they were rounded. Elsewhere the weights that adapters are added to are copied, and the others shared.

    Args:
        source: where the model came from.
        dtype: of the weights that are written.

    Raises:
        ValueError: the model has no adapters, or has been quantised and there are no weights to load again.
    """
    if not has_own_adapters(model):
        raise ValueError(f"{type(model).__name__} has no adapters to add to its weights: save it with save_model.")
    if isinstance(source, FromPretrained) and (is_quantized(model) or _frozen_types(model) != {dtype}):
        with no_progress_bars():
            base = merged(model, source.load(dtype))
    elif is_quantized(model):
        raise ValueError(
            f"the weights of {source.name} were there only until they were quantised, so nothing is left to add adapters to: save "
            f"the adapters with save_model, or train a model that has been saved."
        )
    else:
        base = merged(model, bare(model))
    save_model(base, tokenizer, folder)


def _frozen_types(model: nn.Module) -> set[torch.dtype]:
    """The types of the weights that adapters are added to and stand beside."""
    return {one.dtype for one in model.parameters() if one.is_floating_point() and not one.requires_grad}


def _save_adapters(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with quietly():
        tensors: dict[str, torch.Tensor] = {}
        written: set[int] = set()
        for path, tensor in adapter_tensors(model).items():
            # Weights that are tied in a module that trained whole; a file takes each once.
            tensors[path] = tensor.clone() if tensor.data_ptr() in written else tensor.contiguous()
            written.add(tensor.data_ptr())
        save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
        config_of(model).save_pretrained(folder)


def largest_shard(model: nn.Module) -> list[int]:
    """Bytes of each tensor of the file that holds most, which saving from a card holds on the host."""
    if has_own_adapters(model):
        return [tensor.nbytes for tensor in adapter_tensors(model).values()]
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
