"""The repeated blocks of a model (its transformer layers), found without knowing the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn

Part = Literal["attention", "mlp"]

# What transformers calls the parts of a block; T5 names them by their classes.
_NAMES: dict[Part, tuple[str, ...]] = {
    "attention": (
        "attention",
        "attn",
        "self_attn",
        "self_attention",
        "cross_attn",
        "crossattention",
        "encoder_attn",
        "SelfAttention",
        "EncDecAttention",
    ),
    "mlp": ("mlp", "feed_forward", "ffn", "DenseReluDense"),
}


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's blocks by path, in the order of the model.

    They are the modules of the classes that a transformers model names in ``_no_split_modules``; for other models, the
    members of the longest list (``nn.ModuleList`` or ``nn.Sequential``) of two or more modules of one class with
    parameters. Empty where there is neither.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    found = {path: module for path, module in model.named_modules() if type(module).__name__ in named}
    if found:
        # A block inside a block (an embedding named beside the layer that holds it) is part of the outer one.
        return _outermost(found)
    longest: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        members = {f"{path}.{name}".lstrip("."): member for name, member in module.named_children()}
        alike = len({type(member) for member in members.values()}) == 1
        if alike and len(members) > max(1, len(longest)) and any(True for _ in next(iter(members.values())).parameters()):
            longest = members
    return longest


def _outermost(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {path: module for path, module in modules.items() if not any(path.startswith(f"{outer}.") for outer in modules)}


def parts(blocks: Mapping[str, nn.Module], part: Part) -> dict[str, nn.Module]:
    """The attentions, or the MLPs, inside of ``blocks`` by path, found by the names that transformers gives them.

    Blocks without one are passed over: some models alternate attention with something else.

    Raises:
        ValueError: no block has one.
    """
    found: dict[str, nn.Module] = {}
    for prefix, block in blocks.items():
        inside = {
            path: module
            for path, module in block.named_modules(prefix=prefix)
            if path != prefix and path.rpartition(".")[2] in _NAMES[part]
        }
        # An attention that holds another one, as in BERT, is the part.
        found |= _outermost(inside)
    if not found:
        raise ValueError(
            f"no block of the model has a part called {', '.join(_NAMES[part][:-1])} or {_NAMES[part][-1]}: "
            f"recompute whole blocks."
        )
    return found
