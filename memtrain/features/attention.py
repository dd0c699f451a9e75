"""Which implementation of attention a transformers model calls: written out, torch's SDPA, or the flash-attn package.

SDPA and flash-attn free the scores (heads × tokens × tokens per row and layer, in forward and again in backward) and cost
nothing; written out they exist whole. Equal up to rounding. With dropout the masks are other ones of the same distribution.

What a model asks of its attention and an implementation leaves out would train something else, so it is refused: a cap on
the scores and attention sinks, which transformers' SDPA does not take (integrations/sdpa_attention.py), and dropout, which
flash-attn 3 and 4 have not. The flash-attn package has been run on no card here.

Sources: transformers' AttentionInterface; Dao et al. 2022, arXiv 2205.14135.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import nn

from memtrain.features.replace import replace_

Implementation = Literal["eager", "sdpa", "flash_attention"]

# Where each version of the package lies, the newest first.
_PACKAGES = {4: "flash_attn.cute", 3: "flash_attn_interface", 2: "flash_attn"}
# The names that versions give to attention sinks.
_SINKS = ("s_aux", "learnable_sink")


def set_attention_(model: nn.Module, implementation: Implementation) -> Callable[[], None]:
    """Let a transformers model, and every model in it, call this implementation of attention. In place; returns the undoing.

    ``flash_attention`` is the newest version of the flash-attn package that can be imported, takes what the model asks of
    its attention, and runs without data, as planning does.

    Raises:
        ValueError: the model has no such choice, does not run with the implementation, or would train something else with
            it; or the package is not there. Nothing is changed.
    """
    parts = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    if not parts:
        raise ValueError(
            f"{type(model).__name__} does not let its attention be chosen, as models of transformers do: "
            f"set attention to model_default."
        )
    undo = ExitStack()
    configs = _with_own_configs_(model, undo)
    try:
        if implementation == "flash_attention":
            name = _newest_flash_attention(model, configs)
        else:
            name = implementation
            if implementation == "sdpa" and _others(parts, name):
                _check_sdpa(model, configs)
        _choose_(parts, name)
    except BaseException:
        undo.close()
        raise
    return undo.close


def _with_own_configs_(model: nn.Module, undo: ExitStack) -> list[Any]:
    """Give the model copies of its configurations: another model, or a copy without data, may have been built from them.

    The copies are equal where the originals were, so parts that share a configuration go on sharing one.
    """
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, value in tuple(vars(module).items()):
            if _is_config(value):
                undo.callback(replace_(module, name, copy.deepcopy(value, known)))
    return [value for value in tuple(known.values()) if _is_config(value)]


def _is_config(value: object) -> bool:
    return hasattr(value, "_attn_implementation")


def _others(parts: Sequence[Any], name: str) -> list[Any]:
    """The models that have another implementation."""
    return [part for part in parts if part.config._attn_implementation != name]


def _choose_(parts: Sequence[Any], name: str) -> None:
    try:
        for part in parts:
            part.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise ValueError(
            f"{type(part).__name__} does not run with attention {name} ({_first_sentence(error)}): "
            f"set attention to eager or model_default."
        ) from error
    # Where transformers cannot choose, it says so in its log and passes on.
    if others := _others(parts, name):
        raise ValueError(
            f"the attention of {type(others[0]).__name__} cannot be chosen after it is built, and it is "
            f"{others[0].config._attn_implementation}: set attention to model_default."
        )


def _first_sentence(error: Exception) -> str:
    return str(error).partition(". ")[0].partition("\n")[0].rstrip(".")


# ---------------------------------------------------------------------- what a model asks of its attention


def _check_sdpa(model: nn.Module, configs: Sequence[Any]) -> None:
    """Refuse what transformers' SDPA leaves out."""
    name = type(model).__name__
    if cap := _setting(configs, "attn_logit_softcapping"):
        raise ValueError(
            f"{name} caps its attention scores at {cap} (attn_logit_softcapping), which SDPA does not: "
            f"set attention to eager or model_default."
        )
    if sinks := _sinks(model):
        raise ValueError(
            f"{name} has attention sinks ({sinks}), which SDPA leaves out: set attention to eager or model_default."
        )
    _check_gives_no_scores(model, configs, "SDPA")


def _check_gives_no_scores(model: nn.Module, configs: Sequence[Any], name: str) -> None:
    if _setting(configs, "output_attentions"):
        raise ValueError(
            f"{type(model).__name__} returns its attention scores (output_attentions), and with {name} there are none: "
            f"set output_attentions to False in its configuration, or attention to eager."
        )


def _setting(configs: Sequence[Any], name: str) -> Any:
    """The first configuration's value of a setting that is on, None where it is on in none."""
    return next((value for config in configs if (value := getattr(config, name, None))), None)


def _sinks(model: nn.Module) -> str | None:
    """Path of the first parameter that is an attention sink, by the name that transformers gives to all of them."""
    return next((path for path, _ in model.named_parameters() if path.rpartition(".")[2] == "sinks"), None)


def _drops(configs: Sequence[Any]) -> str | None:
    """The first dropout that is on, of attention or of something else: the names of configurations do not tell."""
    for config in configs:
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return str(name)
    return None


# ---------------------------------------------------------------------- the flash-attn package


def _newest_flash_attention(model: nn.Module, configs: Sequence[Any]) -> str:
    """The name of the newest version that suits."""
    _check_gives_no_scores(model, configs, "flash-attn")
    reasons = []
    for version, package in _PACKAGES.items():
        reason = _why_not(version, package, model, configs)
        if reason is None:
            return f"flash_attention_{version}"
        reasons.append(f"version {version}: {reason}")
    raise ValueError(
        f"flash-attn cannot be used ({'; '.join(reasons)}): install it on a machine with a card, plan there too, "
        f"or set attention to sdpa."
    )


def _why_not(version: int, package: str, model: nn.Module, configs: Sequence[Any]) -> str | None:
    """Why a version is not used, None where it can be. It is imported: an installation can be there and hold no kernels."""
    from transformers.utils import import_utils

    try:
        function = importlib.import_module(package).flash_attn_func
    except Exception as error:  # whatever a broken installation raises
        return _first_sentence(error)
    taken = inspect.signature(function).parameters
    if (dropout := _drops(configs)) and "dropout_p" not in taken:
        return f"it drops no scores, and {dropout} is on"
    if (sinks := _sinks(model)) and not any(name in taken for name in _SINKS):
        return f"it leaves out the attention sinks ({sinks})"
    if (cap := _setting(configs, "attn_logit_softcapping")) and "softcap" not in taken:
        return f"it does not cap scores at {cap}"
    try:
        _run_without_data(function)
    except Exception as error:  # whatever looks for data or for a card
        return f"it does not run without data, {_first_sentence(error)}"
    available = getattr(import_utils, f"is_flash_attn_{version}_available", None)
    if available is None or not available():
        return "transformers does not find it, or finds no card"
    return None


def _run_without_data(function: Callable[..., Any]) -> None:
    """Forward and backward of 8 tokens in a head of 64."""
    one = torch.empty(1, 8, 1, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = function(one, one, one, causal=True)
    attended = found[0] if isinstance(found, tuple) else found
    torch.autograd.grad(attended.sum(), one)
