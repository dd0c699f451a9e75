"""The repeated blocks of a model (its transformer layers), found without knowing the model."""

from __future__ import annotations

from torch import nn


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
        return {path: module for path, module in found.items() if not any(path.startswith(f"{outer}.") for outer in found)}
    longest: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        members = {f"{path}.{name}".lstrip("."): member for name, member in module.named_children()}
        alike = len({type(member) for member in members.values()}) == 1
        if alike and len(members) > max(1, len(longest)) and any(True for _ in next(iter(members.values())).parameters()):
            longest = members
    return longest
