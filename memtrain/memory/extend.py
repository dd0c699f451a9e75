"""A trace for any micro-batch size from the traces of two.

For one plan and one sequence length, a step does the same operations at every micro-batch size, and each storage's size
is an affine function of it: bytes = fixed + per_row × rows. Two traces give both. (Not so where the number of operations
follows the size: logits in chunks.) The planner simulates the plan it chooses whole.
"""

from __future__ import annotations

from dataclasses import replace

from memtrain.trace.event import Event, Trace


class NotAlike(ValueError):
    """Two traces are not of the same operations, so nothing between them can be inferred."""


def extend(first: Trace, first_size: int, second: Trace, second_size: int, size: int) -> Trace:
    """The trace at micro-batch size ``size``, from those at two other sizes.

    Raises:
        NotAlike: the two traces differ in more than sizes, or a size is not affine in whole bytes.
    """
    if len(first.events) != len(second.events):
        raise NotAlike(f"{len(first.events)} events at micro-batch {first_size}, {len(second.events)} at {second_size}.")
    numbers: dict[int, int] = {}
    events = []
    for one, other in zip(first.events, second.events, strict=True):
        if _apart_from_size(one) != _apart_from_size(other) or numbers.setdefault(other.storage, one.storage) != one.storage:
            raise NotAlike(
                f"{one.operator} of {one.module} at micro-batch {first_size} meets {other.operator} of {other.module}."
            )
        events.append(_between(one, first_size, other, second_size, size))
    kept = tuple(event for event in events if event.bytes)
    # The work of another size is not this one's.
    return replace(first, events=kept, marks=_marks(first, events), work={})


def _apart_from_size(event: Event) -> tuple[object, ...]:
    return event.operator, event.module, event.phase, event.kind, event.place, event.stream, event.bytes > 0


def _between(one: Event, first_size: int, other: Event, second_size: int, size: int) -> Event:
    if one.bytes == other.bytes:
        return one
    per_row, rest = divmod(other.bytes - one.bytes, second_size - first_size)
    extended = one.bytes + per_row * (size - first_size)
    if rest or (extended and (extended > 0) != (one.bytes > 0)):
        raise NotAlike(f"{one.operator} takes {one.bytes} and {other.bytes} bytes, which is not affine in the micro-batch.")
    return one._replace(bytes=extended)


def _marks(trace: Trace, events: list[Event]) -> tuple[tuple[str, int], ...]:
    """The marks, counted without the events that vanished."""
    return tuple((name, sum(event.bytes != 0 for event in events[:position])) for name, position in trace.marks)
