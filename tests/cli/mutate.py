"""Seeded damage to JSON files: to their bytes, and to what they say."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

TOKENS = (b"{", b"}", b"[", b"]", b",", b":", b'"', b"-", b"0", b"1e999", b"NaN", b"null", b"true", b"\\u0000", b"\xff")
"""What byte-level damage puts in."""

SCALARS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    255,
    257,
    1 << 31,
    1 << 62,
    (1 << 62) + 1,
    1 << 63,
    -(1 << 62),
    10**400,
    0.5,
    -0.0,
    1e-320,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "0",
    "x",
    "\ud800",
    "input",
    "transfer",
    "reload",
    "offload",
    "compute",
    "kernel",
    "copy",
    "device",
    "host",
    "storage",
    "steps",
    "foreign",
    "gate",
)
"""What structure-level damage puts in place of a value."""


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return ``data``, valid JSON, damaged in one to four places: half the time its bytes, half the time its values."""
    times = rng.choice((1, 1, 1, 2, 2, 3, 4))
    if rng.random() < 0.5:
        for _ in range(times):
            data = _damaged(data, rng)
        return data
    value = json.loads(data)
    for _ in range(times):
        value = _changed(value, rng)
    return json.dumps(value).encode()


def _damaged(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 1, 2, 8, 64)))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at] + data[end:]
    if kind == 1:
        return data[:at] + rng.choice(TOKENS) + data[at:]
    if kind == 2:
        return data[:at] + bytes([rng.randrange(256)]) + data[end:]
    if kind == 3:
        return data[:end] + data[at:end] + data[end:]
    if kind == 4:
        other = rng.randrange(len(data) + 1)
        return data[:at] + data[other : other + 32] + data[end:]
    return data[:at] if rng.random() < 0.3 else data[:at] + rng.choice(b"0123456789,").to_bytes() + data[end:]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything inside ``value``."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        top = stack.pop()
        keys: list[Any] = []
        if isinstance(top, dict):
            keys = list(top)
        elif isinstance(top, list):
            keys = list(range(len(top)))
        for key in keys:
            found.append((top, key))
            stack.append(top[key])
    return found


def _changed(value: Any, rng: random.Random) -> Any:
    places = _places(value)
    if not places:
        return rng.choice(SCALARS)
    container, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del container[key]
    elif kind <= 2:
        container[key] = rng.choice(SCALARS)
    elif kind == 3:
        other, where = rng.choice(places)
        container[key] = copy.deepcopy(other[where])
    elif kind == 4:
        other, where = rng.choice(places)
        if not _inside(other[where], container) and not _inside(container[key], other):
            container[key], other[where] = other[where], container[key]
    elif kind == 5 and isinstance(container, list):
        container.insert(rng.randrange(len(container) + 1), copy.deepcopy(container[key]))
    elif kind == 6:
        number = container[key]
        if isinstance(number, int | float):
            container[key] = rng.choice((number + 1, number - 1, number * 2, -number, number * 256, number // 2))
        else:
            container[key] = rng.choice(([], {}, [container[key]], {"id": container[key]}))
    elif isinstance(container, dict):
        name = rng.choice(("inplace", "may_inplace", "after", "late", "keep", "out", "clean", "external", "outputs"))
        word = rng.choice(("source", "home", "begin", "lifetime", "access", "arrival", "stays", "host_updated"))
        filled = ([0], [1], [[0, 0]], [{"size": 256}, {"size": 0}], True, 0, 1, -1, "steps", "read", "start")
        key = rng.choice((name, name, word, "addr", "offset", "duration", "cyclic"))
        container[key] = copy.deepcopy(rng.choice(filled))
    return value


def _inside(value: Any, container: Any) -> bool:
    """Whether ``container`` is ``value`` or lies inside it: then a swap would make a ring."""
    if value is container:
        return True
    return any(each is container for holder, key in _places(value) for each in (holder, holder[key]))
