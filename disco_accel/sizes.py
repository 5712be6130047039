"""Byte counts as people write them: ``12GiB``, ``512 MB``, ``1048576``."""

from __future__ import annotations

import re

from disco_accel.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]{1,20})(\.[0-9]{1,9})?\s*([A-Za-z]*)\s*", re.ASCII)
MAX_SIZE = 1 << 62
"""Largest size accepted, in bytes: addresses stay inside a signed 64-bit integer."""


def parse_size(text: str | int) -> int:
    """Return the bytes that ``text`` means: a count, or a number with B, KiB, MiB, GiB, TiB (powers of 1024; K, M, G, T
    for short) or KB, MB, GB, TB (powers of 1000). Raises ConfigError for anything else, zero and negative included."""
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ConfigError(f"{text!r} is not a size: write bytes, or a number with a unit such as 12GiB")
    match = _SIZE.fullmatch(str(text))
    unit = _UNITS.get(match[3].upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size: write bytes, or a number with a unit such as 12GiB")
    fraction = match[2]
    size = int(match[1]) * unit
    if fraction is not None:
        size += int(fraction[1:]) * unit // 10 ** len(fraction[1:])
    if not 0 < size <= MAX_SIZE:
        raise ConfigError(f"{text!r} is not a usable size: it must be more than 0 and at most {MAX_SIZE} bytes")
    return size


def format_size(size: int) -> str:
    """Return ``size`` bytes for people: exact where it is a whole number of units, else as in ``1.50GiB``."""
    sign, magnitude = ("-", -size) if size < 0 else ("", size)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _UNITS[unit.upper()]
        if magnitude >= scale:
            whole, rest = divmod(magnitude, scale)
            return f"{sign}{whole}{unit}" if rest == 0 else f"{sign}{magnitude / scale:.2f}{unit}"
    return f"{sign}{magnitude}B"


def size_for_people(size: int) -> str:
    """``size`` as ``format_size`` writes it, but rounded up: a budget that is copied from it is large enough."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale and size % scale:
            hundredths = -(-size * 100 // scale)
            return f"{hundredths // 100}.{hundredths % 100:02}{unit}"
    return format_size(size)
