"""How PyTorch's CUDA caching allocator is set up: its environment variable, read as PyTorch reads it.

Sources, in PyTorch: the keys, their ranges and defaults from ``parseArgs`` and the ``parse...`` functions beside it in
c10/core/AllocatorConfig.cpp; the sizes of blocks and segments from ``round_size`` and ``get_allocation_size`` in
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

MIB: Final = 1 << 20
MIN_BLOCK_BYTES: Final = 512  # every block is a multiple
SMALL_BYTES: Final = MIB  # the largest block of the small pool
SMALL_SEGMENT_BYTES: Final = 2 * MIB
LARGE_SEGMENT_BYTES: Final = 20 * MIB
MIN_LARGE_BYTES: Final = 10 * MIB  # from here on a block gets a segment of its own size
ROUND_SEGMENT_BYTES: Final = 2 * MIB
INTERVALS: Final = 16  # of request sizes, [1 MiB, 2 MiB) to [32 GiB, ...)


class TieBreak(StrEnum):
    """Which of several free blocks of one size is taken: the comparators of free blocks in CUDACachingAllocator.cpp."""

    ADDRESS = "address"
    """The lowest address: torch up to 2.11."""
    BLOCK = "block"
    """The block whose record was made first: torch 2.12, by its release notes (pull request 178362)."""
    SEGMENT = "segment"
    """The segment obtained first, in it the lowest address: torch from 2.13 (pull request 183591)."""


@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """The settings of the allocator that decide where a block goes and when memory is asked for.

    Attributes:
        expandable_segments: whether one segment per pool and stream grows page by page.
        max_split_bytes: blocks of at least this size are never split, nor used for smaller requests; None: no limit.
        max_non_split_rounding_bytes: such a block is used if it exceeds the request by less than this; None: the size of
            a large segment.
        garbage_collection_threshold: share of the allowed memory above which old blocks are released; 0: never.
        roundup_power2_divisions: for each of 16 intervals between powers of two from 1 MiB on, in how many steps requests
            are rounded up; 0 and 1: to 512 bytes.
        large_segment_bytes: size of the segment that requests between 1 and 10 MiB share, and of a large expandable page.
        memory_fraction: share of the device's memory that may be reserved.
        tie_break: which of several free blocks of one size is taken.

    Raises:
        ValueError: a value is outside the range that PyTorch takes.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    memory_fraction: float = 1.0
    tie_break: TieBreak = TieBreak.SEGMENT

    def __post_init__(self) -> None:
        if self.large_segment_bytes <= MIN_LARGE_BYTES:
            raise ValueError(
                f"large_segment_bytes is {self.large_segment_bytes}, and requests of up to {MIN_LARGE_BYTES} (10 MiB) share "
                "such a segment: make it larger."
            )
        for name in ("max_split_bytes", "max_non_split_rounding_bytes"):
            size = getattr(self, name)
            if size is not None and size < self.large_segment_bytes:
                raise ValueError(
                    f"{name} is {size}, and it is at least the size of a large segment, {self.large_segment_bytes}: raise it."
                )
        if not 0 <= self.garbage_collection_threshold < 1:
            raise ValueError(
                f"garbage_collection_threshold is {self.garbage_collection_threshold}, and it is a share of the allowed "
                "memory: give a number above 0 and below 1, or leave it out."
            )
        divisions = self.roundup_power2_divisions
        if len(divisions) != INTERVALS or any(value < 0 or value & (value - 1) for value in divisions):
            raise ValueError(
                f"roundup_power2_divisions is {divisions}, and each of the {INTERVALS} intervals takes 0 or a power of two: "
                "correct it."
            )
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(
                f"memory_fraction is {self.memory_fraction}, and it is a share of the device's memory: give a number above 0 "
                "and at most 1."
            )

    @staticmethod
    def of(text: str, torch_version: str) -> AllocatorConfig:
        """The settings that a ``PYTORCH_CUDA_ALLOC_CONF`` makes in a release of torch.

        Args:
            text: the variable's value; empty where it is not set.
            torch_version: such as ``2.13.0+cu130``.

        Raises:
            ValueError: an option is unknown, has a value that PyTorch refuses, or selects another allocator; or the
                version is none.

        >>> AllocatorConfig.of("expandable_segments:True,max_split_size_mb:128", "2.13.0").max_split_bytes
        134217728
        """
        return AllocatorConfig(tie_break=_tie_break(torch_version), **_options(text))

    def block_bytes(self, requested: int) -> int:
        """Bytes that a request for ``requested`` bytes is rounded up to (``round_size``).

        Raises:
            ValueError: the request is for less than one byte, which PyTorch answers without the allocator.
        """
        if requested <= 0:
            raise ValueError(f"{requested} bytes are no allocation: leave requests for nothing out.")
        if requested < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        power = requested.bit_length() - 1
        divisions = self.roundup_power2_divisions[min(max(power - 20, 0), INTERVALS - 1)]
        step = MIN_BLOCK_BYTES
        if divisions > 1 and requested > MIN_BLOCK_BYTES * divisions:
            step = (1 << power) // divisions
        return round_up(requested, step)

    def segment_bytes(self, block_bytes: int) -> int:
        """Bytes of the segment that is obtained for a block when none is free (``get_allocation_size``)."""
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return round_up(block_bytes, ROUND_SEGMENT_BYTES)


def round_up(size: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``size``."""
    return -(-size // step) * step


def _tie_break(torch_version: str) -> TieBreak:
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    if match is None:
        raise ValueError(f"{torch_version!r} is not a version of torch: give one such as 2.13.0.")
    release = int(match[1]), int(match[2])
    if release < (2, 12):
        return TieBreak.ADDRESS
    return TieBreak.BLOCK if release == (2, 12) else TieBreak.SEGMENT


_OPTION: Final = re.compile(r"(?P<key>\w+):(?P<value>\[[^\]]*\]|[^,:\[\]]+)(?:,|$)")
# They move time or the host's memory, not blocks.
_WITHOUT_EFFECT: Final = (
    "graph_capture_record_stream_reuse",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
)


def _options(text: str) -> dict[str, Any]:
    """The fields of AllocatorConfig that the text sets."""
    options: dict[str, Any] = {}
    text = text.replace(" ", "")
    position = 0
    while position < len(text):
        match = _OPTION.match(text, position)
        if match is None:
            raise ValueError(f"{text[position:]!r} is not an allocator option: write KEY:VALUE, with commas between them.")
        position = match.end()
        key, value = match["key"], match["value"]
        if key == "backend" and value != "native":
            raise ValueError(f"backend is {value!r}, and only the native allocator is simulated: set backend:native.")
        if key == "backend" or key in _WITHOUT_EFFECT:
            continue
        if key not in _PARSERS:
            known = ", ".join(sorted((*_PARSERS, *_WITHOUT_EFFECT, "backend")))
            raise ValueError(f"{key!r} is not an allocator option that is simulated: leave it out or take one of {known}.")
        field, parse, form = _PARSERS[key]
        try:
            options[field] = parse(value)
        except ValueError as error:
            raise ValueError(f"{key} is {value!r}, and it takes {form}: correct it or leave it out.") from error
    return options


def _mebibytes(text: str) -> int:
    return int(text) * MIB


def _truth(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(text)
    return text == "True"


def _divisions(text: str) -> tuple[int, ...]:
    """One value for all intervals, or [MIB:VALUE,...]: the interval that starts at that many MiB; ``>`` is all later ones.

    The first value also holds for all intervals before its own, and an interval that is not named keeps 0
    (``parseRoundUpPower2Divisions``).
    """
    if not text.startswith("["):
        return (_power_of_two(text),) * INTERVALS
    values = [0] * INTERVALS
    last: int | None = None
    for entry in text.strip("[]").split(","):
        start, _, number = entry.partition(":")
        value = 0 if number == "0" else _power_of_two(number)
        if start == ">":
            following = (last or 0) + 1
            values[following:] = [value] * (INTERVALS - following)
            continue
        index = min(_power_of_two(start).bit_length() - 1, INTERVALS - 1)
        if last is None:
            values[:index] = [value] * index
        values[index] = value
        last = index
    return tuple(values)


def _power_of_two(text: str) -> int:
    number = int(text)
    if number < 1 or number & (number - 1):
        raise ValueError(text)
    return number


_PARSERS: Final[dict[str, tuple[str, Callable[[str], Any], str]]] = {
    "expandable_segments": ("expandable_segments", _truth, "True or False"),
    "garbage_collection_threshold": ("garbage_collection_threshold", float, "a number above 0 and below 1"),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes, "a whole number of MiB above 10"),
    "max_non_split_rounding_mb": (
        "max_non_split_rounding_bytes",
        _mebibytes,
        "a whole number of MiB, at least a large segment (20)",
    ),
    "max_split_size_mb": ("max_split_bytes", _mebibytes, "a whole number of MiB, at least a large segment (20)"),
    "per_process_memory_fraction": ("memory_fraction", float, "a number above 0 and at most 1"),
    "roundup_power2_divisions": (
        "roundup_power2_divisions",
        _divisions,
        "a power of two, or powers of two by MiB such as [256:1,512:2,>:4]",
    ),
}
