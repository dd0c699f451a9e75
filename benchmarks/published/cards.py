"""The card that a record names, as memtrain describes it."""

from __future__ import annotations

import re
from dataclasses import replace

from memtrain.device import Cuda
from memtrain.machine import named
from memtrain.units import parse_bytes

# What decides how much memory a card's kernels take, of cards that no file describes: a described card of the same compute
# capability, and multiprocessors and memory as NVIDIA's data sheets have them.
_LIKE = {
    "l40": ("rtx_4090", 142, "48GB"),
    "a6000": ("rtx_3090", 84, "48GB"),
    "a5000": ("rtx_3090", 64, "24GB"),
    "a40": ("rtx_3090", 84, "48GB"),
    "a2000": ("rtx_3090", 26, "12GB"),
}
_DESCRIBED = (
    ("h200", "h200"),
    ("h100", "h100"),
    ("a100.*40", "a100_40gb"),
    ("a100", "a100_80gb"),
    ("a10g|a10", "a10g"),
    ("a4000", "rtx_a4000"),
    ("4090", "rtx_4090"),
    ("3090", "rtx_3090"),
    ("3070", "rtx_3070"),
    (r"\bt4\b", "t4"),
    (r"\bl4\b", "l4"),
)


def card(text: str) -> tuple[Cuda, tuple[str, ...]]:
    """The card that ``gpus.type`` names; one that is described nowhere is taken for the nearest, which is said."""
    words = text.lower()
    for part, (like, multiprocessors, memory) in _LIKE.items():
        if re.search(rf"{part}(?!\d)", words):
            near = _described(like)
            # Of the stated bytes about as much is usable as of the described card's.
            usable = int(parse_bytes(memory) * near.usable_bytes / parse_bytes("24GB"))
            made = replace(near, name=part, multiprocessors=multiprocessors, usable_bytes=usable)
            return made, (f"the card {text!r} has the kernels and the context of {like}",)
    for pattern, name in _DESCRIBED:
        if re.search(pattern, words):
            found = _described(name)
            stated = re.search(r"(\d+) ?gb", words)
            if name == "h100" and stated and int(stated[1]) > 80:
                larger = int(found.usable_bytes * int(stated[1]) / 80)
                return replace(found, usable_bytes=larger), (f"the card {text!r} is an H100 with more memory",)
            return found, ()
    stated = re.search(r"(\d+) ?gb", words)
    if "6000" in words and stated:
        near = _described("h200")
        usable = int(near.usable_bytes * int(stated[1]) / 141)
        return replace(near, name="rtx_pro_6000", usable_bytes=usable), (f"the card {text!r} has the kernels of H200",)
    return _described("a100_80gb"), (f"the card {text!r} is an A100 with 80 GB",)


def _described(name: str) -> Cuda:
    found = named(name)
    assert isinstance(found, Cuda)
    return found
