"""Another forward for one module, until it is given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def replace_forward_(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let this instance run ``forward`` below its ``__call__``, and return what undoes it.

    Hooks, parameter names, the module tree and the class stay as they are.
    """
    own = module.__dict__
    had_its_own, before = "forward" in own, own.get("forward")
    own["forward"] = forward

    def undo() -> None:
        if had_its_own:
            own["forward"] = before
        else:
            own.pop("forward", None)

    return undo
