"""How the choices of a router are taken to fall where they decide what a step allocates.

The experts of a mixture either run as one grouped product, whose memory does not depend on who chose whom, or one after another,
each on the tokens that chose it. The second asks for values that only data tell, so that the run is simulated under two
assumptions, and the one that takes more is the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum

import torch
from torch import Tensor

from memtrain.device import Device
from memtrain.memory.footprint import footprint
from memtrain.trace.event import Trace
from memtrain.units import format_bytes


class Routing(StrEnum):
    """An assumption about which experts the tokens choose."""

    BALANCED = "balanced"
    """Every expert is chosen equally often."""
    UNEVEN = "uneven"
    """The first experts get nearly all tokens and every other gets one: none rests, the temporaries of one are as large as they
    can be, and in backward, which takes the experts from the last to the first, they come on top of the gradients of all others."""


def choices(routing: Routing, tokens: int, per_token: int, experts: int) -> Tensor:
    """The experts that each token chooses, different ones: int64 of shape (tokens, per_token).

    >>> choices(Routing.BALANCED, 4, 2, 4).tolist()
    [[0, 1], [2, 3], [0, 1], [2, 3]]
    >>> choices(Routing.UNEVEN, 4, 2, 4).tolist()
    [[0, 2], [0, 3], [0, 1], [0, 1]]
    """
    if routing is Routing.BALANCED:
        return (torch.arange(tokens * per_token) % experts).view(tokens, per_token)
    chosen = torch.arange(per_token).repeat(tokens, 1)
    others = torch.arange(per_token, experts)[:tokens]
    chosen[: len(others), -1] = others
    return chosen


def larger(simulate: Callable[[Routing], tuple[Trace, bool]], device: Device | None = None) -> Trace:
    """The trace of the assumption that takes more memory, which says the peaks of both.

    Args:
        simulate: the trace under an assumption, and whether anything depended on it; where nothing did, one run says all.
        device: a card takes what its allocator makes of a trace; without one the trace's own bytes count.
    """
    trace, depends = simulate(Routing.BALANCED)
    if not depends:
        return trace
    try:
        uneven, _ = simulate(Routing.UNEVEN)
    except (RuntimeError, ValueError, LookupError) as error:
        # It trains where the tokens are spread, and that is what is asked.
        said = f"all experts are taken to be chosen equally often: with one token for an expert the model fails ({error})"
        return replace(trace, assumed=(*trace.assumed, said))
    traces = {Routing.BALANCED: trace, Routing.UNEVEN: uneven}
    peaks = {routing: footprint(found, device).total_device_bytes for routing, found in traces.items()}
    found = traces[max(peaks, key=peaks.__getitem__)]
    return replace(found, assumed=(*found.assumed, described(peaks)))


def described(peaks: Mapping[Routing, int]) -> str:
    """What is said with a prediction that depends on the routing."""
    balanced, uneven = (format_bytes(peaks[routing]) for routing in (Routing.BALANCED, Routing.UNEVEN))
    if peaks[Routing.BALANCED] == peaks[Routing.UNEVEN]:
        return f"which experts the tokens choose moves what is allocated, but not the peak: {balanced} under an even and an uneven choice"
    return (
        f"which experts the tokens choose decides what is allocated: {balanced} at the peak where all are chosen equally often, "
        f"{uneven} where nearly all tokens choose the same, and the larger was taken"
    )
