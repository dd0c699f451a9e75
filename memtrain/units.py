"""Bytes and seconds as people write them: parsed once, at the edge, and printed in one way everywhere.

Decimal and binary prefixes are different numbers and both are in use (a "24 GB" card has 24 GiB), so a size always
carries its unit: ``24GB`` is 24·10⁹ bytes, ``24GiB`` is 24·2³⁰ (IEC 80000-13).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

ACCEPTED_FORMS: Final = "a positive number of bytes with its unit, such as 24GB (10^9), 24GiB (2^30), 512MiB or 1.5TiB"

_PREFIXES: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE: Final = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<prefix>[kmgtp]?)(?P<binary>i?)(?P<unit>b)", re.IGNORECASE)
_BITS: Final = re.compile(r"bits?$|bps$|(?<=[KMGTP])b$|(?<=[KMGTP]i)b$")


def parse_bytes(text: str) -> int:
    """Return the number of bytes that ``text`` names, rounded down to a whole byte.

    Lower case reads as bytes too (``24gb``); a capital prefix with a small b (``24Gb``) means bits and is refused.

    Raises:
        ValueError: the text has no unit, names bits, or is not a positive finite number.

    >>> parse_bytes("24gb"), parse_bytes("24GiB"), parse_bytes("0.5 MiB")
    (24000000000, 25769803776, 524288)
    """
    stripped = str(text).strip()
    if _BITS.search(stripped):
        raise ValueError(f"{text!r} names bits, and memory is counted in bytes: give {ACCEPTED_FORMS}.")
    match = _SIZE.fullmatch(stripped)
    if match is None or (match["binary"] and not match["prefix"]):
        raise ValueError(f"{text!r} is not an amount of memory: give {ACCEPTED_FORMS}.")
    base = 1024 if match["binary"] else 1000
    # Exactly: as floats, 2.01 GB would be a byte short.
    number = int(Fraction(match["number"]) * base ** _PREFIXES[match["prefix"].lower()])
    if number <= 0:
        raise ValueError(f"{text!r} is less than one byte: give {ACCEPTED_FORMS}.")
    return number


def format_bytes(number: int) -> str:
    """Print bytes with a binary prefix and three or four significant digits.

    >>> format_bytes(345_000_000), format_bytes(-2048), format_bytes(17)
    ('329 MiB', '-2.00 KiB', '17 B')
    """
    size, unit = float(abs(number)), "B"
    for following in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        # 1023.5 would print as 1024 of the smaller unit.
        if size < 1023.5:
            break
        size, unit = size / 1024, following
    sign = "-" if number < 0 else ""
    if unit == "B":
        return f"{sign}{int(size)} B"
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{sign}{size:.{digits}f} {unit}"


def format_count(number: int) -> str:
    """Print a count of parameters or tokens as people say it.

    >>> format_count(5_004_032), format_count(6_738_415_616), format_count(512)
    ('5.0 M', '6.7 B', '512')
    """
    for size, suffix in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        # 999.95 would print as 1000.0 of the smaller unit.
        if number >= 0.99995 * size:
            return f"{number / size:.1f} {suffix}"
    return str(number)


def format_seconds(seconds: float) -> str:
    """Print a duration.

    >>> format_seconds(0.1234), format_seconds(75), format_seconds(7500)
    ('123 ms', '1 min 15 s', '2 h 05 min')
    """
    # The bounds are where rounding would print the next unit's first value in this one.
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
