"""Another attribute for one module instance, until it is given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def replace_(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Give this instance its own ``name`` (its ``forward``, say) and return what undoes it.

    A replaced forward runs below ``__call__``: hooks, parameter names, the module tree and the class stay as they are.
    """
    own = module.__dict__
    had_its_own, before = name in own, own.get(name)
    own[name] = value

    def undo() -> None:
        if had_its_own:
            own[name] = before
        else:
            own.pop(name, None)

    return undo
