"""Byte sizes: whole numbers, or strings with a binary unit."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {
    "k": "KiB",
    "kb": "KiB",
    "m": "MiB",
    "mb": "MiB",
    "g": "GiB",
    "gb": "GiB",
    "t": "TiB",
    "tb": "TiB",
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(text: str) -> int:
    """``"64MiB"`` to 67108864. Units B, KiB, MiB, GiB, TiB, in any case, also after a space.

    Raises:
        ValueError: with what is wrong: no unit, a decimal unit, or no whole number of bytes.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError("a number with a unit is wanted, such as 64MiB")
    number, unit = match.group(1), match.group(2).lower()
    if unit in _DECIMAL:
        raise ValueError(f"units are binary: write {number}{_DECIMAL[unit]}")
    if unit not in _UNITS:
        raise ValueError(f"no such unit {match.group(2)!r}: B, KiB, MiB, GiB or TiB")
    size = Fraction(number) * _UNITS[unit]
    if size.denominator != 1:
        raise ValueError(f"{text.strip()} is not a whole number of bytes")
    return int(size)


def format_bytes(size: int) -> str:
    """The shortest exact text: 67108864 to ``"64MiB"``, 1000 to ``"1000"``."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)
