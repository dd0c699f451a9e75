"""Where the generators of random numbers stand: Python's, NumPy's, and torch's on the host and on each card.

As tensors and plain data, so that nothing has to be unpickled to put them back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def positions() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Where the generators stand: Python's, NumPy's, and torch's on the host and on every card that is in use."""
    import numpy

    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    generators = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        generators |= {f"cuda {index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    facts = {"python": random.getstate(), "numpy": [name, [int(key) for key in keys], position, has_gauss, gauss]}
    return generators, facts


def set_positions(generators: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Let all generators go on from where :func:`positions` found them."""
    import numpy

    version, numbers, gauss = facts["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = facts["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(generators["torch"])
    for name, state in generators.items():
        index = int(name.removeprefix("cuda ")) if name.startswith("cuda ") else -1
        # There may be fewer cards now.
        if 0 <= index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, index)


def begin_at(seed: int) -> None:
    """Let the generators of Python, NumPy and torch on the host begin at a place of their own; ``seed`` has up to 128 bits."""
    import numpy

    random.seed(seed)
    numpy.random.seed([(seed >> shift) % 2**32 for shift in (0, 32, 64, 96)])
    torch.default_generator.manual_seed(seed % 2**64)


def remember() -> Callable[[], None]:
    """What puts all generators back to where they stand now, in this process; it holds no tensor."""
    found, facts = positions()
    held = as_bytes(found)
    return lambda: set_positions(as_tensors(held), facts)


def as_bytes(generators: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The tensors of :func:`positions` as plain data."""
    return {name: bytes(state.numpy()) for name, state in generators.items()}


def as_tensors(held: Mapping[str, bytes]) -> dict[str, Tensor]:
    """What :func:`as_bytes` was given."""
    return {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in held.items()}
