"""AdamW and Lion with state in 8 bits, in managed memory, or both: bitsandbytes' implementations over our parameter groups.

8-bit state (Dettmers et al. 2022, arXiv 2110.02861) takes a quarter of the bytes of 32-bit state and rounds both moments
at every step. Paged state lies in managed memory: in the host's, and on the card while a kernel touches it and there is
room. That is exact but for rounding, and costs the transfer.

Source: the bitsandbytes library, which is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memtrain.features.optimizers import decay_groups
from memtrain.models.quietly import quietly


def bitsandbytes_adamw(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bits: Literal[8, 32],
    memory: Literal["device", "managed"],
    in_32_bits: Iterable[Tensor] = (),
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; weight decay acts on those of two or more dimensions.

    Args:
        bits: 32 keeps both moments in fp32, 8 bytes per parameter, whatever the parameter's type. 8 keeps them in uint8
            with an fp32 scale per 256 values, 2 + 1/32 bytes per parameter; parameters of fewer than 4096 elements keep
            32 bits.
        memory: where the moments lie. Only those of parameters of 100,000 elements or more go to managed memory; scales
            stay on the device.
        in_32_bits: parameters that keep 32 bits all the same, such as :func:`embedding_weights`.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    groups = decay_groups(parameters, weight_decay)
    made = _bitsandbytes().optim.AdamW(
        groups, lr=learning_rate, betas=betas, eps=eps, optim_bits=bits, is_paged=memory == "managed"
    )
    return _prepared(made, in_32_bits)


def bitsandbytes_lion(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    bits: Literal[8, 32],
    memory: Literal["device", "managed"],
    in_32_bits: Iterable[Tensor] = (),
) -> torch.optim.Optimizer:
    """Lion over the trainable parameters; the arguments are those of :func:`bitsandbytes_adamw`.

    Its one momentum takes half of what the two moments of AdamW take: 4 bytes per parameter, or 1 + 1/64 in 8 bits.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    groups = decay_groups(parameters, weight_decay)
    made = _bitsandbytes().optim.Lion(groups, lr=learning_rate, betas=betas, optim_bits=bits, is_paged=memory == "managed")
    return _prepared(made, in_32_bits)


def _prepared(optimizer: Any, in_32_bits: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The library's optimizer with exceptions and tables of its own."""
    # Exceptions of its own, not those of the process: these are looked up by a parameter's address or its place in
    # param_groups, and would be met by other parameters once a model is gone or a group is split.
    exceptions = _bitsandbytes().optim.GlobalOptimManager
    optimizer.mng = exceptions.__new__(exceptions)
    optimizer.mng.initialize()
    optimizer.mng.override_config(list(in_32_bits), "optim_bits", 32)
    # The two tables of 256 values are put in place here rather than in the first step.
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.name2qmap = {name: table.to(device) for name, table in optimizer.name2qmap.items()}
    made: torch.optim.Optimizer = optimizer
    return made


def embedding_weights(model: nn.Module) -> list[Tensor]:
    """The weights of the embeddings, a tied head among them.

    Their gradients are large in the few rows that a batch holds and zero in the others. The library's own embedding layer
    keeps their state in 32 bits, and so does transformers' Trainer.
    """
    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]


def _bitsandbytes() -> Any:
    """The library.

    Raises:
        ValueError: it is not installed.
    """
    try:
        with quietly():
            return importlib.import_module("bitsandbytes")
    except ImportError as missing:
        raise ValueError(
            f"8-bit and paged optimizer state need bitsandbytes, which cannot be imported here ({missing}): "
            f"pip install bitsandbytes, or keep the state on the device."
        ) from missing
