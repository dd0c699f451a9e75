"""A watch on memory that grows from step to step: by how much, since when, and which tensors there are more of.

A step frees all that it made once optimizer state and caches are there, so that memory after step n is that after step 3. One
number is read after each step; the live tensors are looked up among Python's objects at the baseline and when there is something
to tell, and nothing of them is kept but their sizes.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from memtrain.units import format_bytes

SETTLING_STEPS: Final = 3
"""Steps after which memory is expected to stay as it is: the first makes the optimizer state, the next meets it."""

# Growth counts once it is in so many readings in a row: a copy that is being written, or an evaluation, falls back.
_STEADY: Final = 5
_NAMED: Final = 3


@dataclass(frozen=True)
class Group:
    """Live tensors that are alike.

    Attributes:
        shape, dtype, device: of each of them.
        has_graph: they were computed from what needs gradients, and hold the graph, with all that backward would need.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    has_graph: bool

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} on {self.device}"


@dataclass(frozen=True)
class Held:
    """What the groups of live tensors come to, each storage counted once, for the largest tensor over it."""

    counts: Counter[Group]
    bytes: Counter[Group]


class LeakWatch:
    """Compares memory after each step with that after the third."""

    def __init__(self, used_bytes: Callable[[], int | None], tolerance_bytes: int) -> None:
        """
        Args:
            used_bytes: bytes in use now; None where it is not known, and then the step is passed over.
            tolerance_bytes: growth that is no leak.
        """
        self._used_bytes = used_bytes
        self._tolerance_bytes = tolerance_bytes
        self.rebase()

    def rebase(self) -> None:
        """Forget what was, as the plan changes or a state is loaded: the third step from here is the new baseline."""
        self._to_settle = SETTLING_STEPS
        self._limit_bytes = self._tolerance_bytes
        self._latest: deque[int] = deque(maxlen=_STEADY)

    def after(self, step: int) -> str | None:
        """Look at memory after a step.

        Args:
            step: its number, for the sentence.

        Returns:
            A sentence when memory has grown by more than the tolerance and stayed so for five readings, and then each time the
            growth has doubled. Otherwise None.
        """
        used = self._used_bytes()
        if used is None:
            return None
        if self._to_settle:
            self._to_settle -= 1
            if not self._to_settle:
                self._baseline = self._flat = (step, used)
                self._held = live_tensors()
            return None
        first_step, first_bytes = self._baseline
        grown = used - first_bytes
        # From the last step before the growth, so that what begins late has its own rate.
        if grown <= self._tolerance_bytes // 8:
            self._flat = (step, used)
        self._latest.append(grown)
        if len(self._latest) < _STEADY or min(self._latest) <= self._limit_bytes:
            return None
        self._limit_bytes = 2 * grown
        since, bytes_then = self._flat
        return (
            f"memory after step {step} is {format_bytes(grown)} more than after step {first_step}, and has grown by "
            f"{format_bytes((used - bytes_then) // (step - since))} per step since step {since}: {_growth(self._held, live_tensors())}."
        )


def live_tensors() -> Held:
    """The tensors that Python's collector knows, by group. Those that only a graph or a library holds are not among them."""
    largest: dict[int, tuple[int, Group, int]] = {}
    # Properties of a subclass are read past its own code, and of anything else nothing but its type: isinstance would ask
    # proxies for their class, which loads modules.
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            # A wrapper holds no memory; the tensors in it are counted themselves.
            if not issubclass(type(thing), Tensor) or hasattr(type(thing), "__tensor_flatten__"):
                continue
            try:
                storage = thing.untyped_storage()
            except (NotImplementedError, RuntimeError):
                # Sparse tensors have none of their own.
                continue
            # Data-less tensors hold no memory, whatever device they say they are on.
            if storage.device.type == "meta":
                continue
            known = largest.get(storage._cdata)
            if known is None or known[0] < thing.numel():
                has_graph = thing.requires_grad and not thing.is_leaf
                group = Group(tuple(thing.shape), str(thing.dtype).removeprefix("torch."), str(thing.device), has_graph)
                largest[storage._cdata] = thing.numel(), group, storage.nbytes()
    counts: Counter[Group] = Counter()
    sizes: Counter[Group] = Counter()
    for _, group, size in largest.values():
        counts[group] += 1
        sizes[group] += size
    return Held(counts, sizes)


def _growth(before: Held, now: Held) -> str:
    """The groups that grew most, in words; graphs first, whose bytes are not in the tensors that hold them."""
    grown = [group for group in now.counts if now.counts[group] > before.counts[group]]
    if not grown:
        return "there are no more tensors than then that Python knows of, so look at what libraries, lists and arrays keep"
    grown.sort(key=lambda group: (group.has_graph, now.bytes[group] - before.bytes[group]), reverse=True)
    return "something keeps " + ", ".join(_more(group, before, now) for group in grown[:_NAMED])


def _more(group: Group, before: Held, now: Held) -> str:
    count = now.counts[group] - before.counts[group]
    size = format_bytes(now.bytes[group] - before.bytes[group])
    graph = (
        " and the graph that it was computed by"
        if group.has_graph and count == 1
        else " and the graphs"
        if group.has_graph
        else ""
    )
    return f"{count} more tensor{'s' if count > 1 else ''} of {group} ({size}){graph}"
