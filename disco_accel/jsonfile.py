"""Strict JSON from outside: parsing that cannot be led astray, typed access that names what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from disco_accel.errors import GraphFileError
from disco_accel.sizes import MAX_SIZE

_SHOWN = 40

MAX_VALUES = 64_000_000
"""A file with more commas is refused: a short value can take twenty times its bytes in memory."""

MAX_CONTAINERS = 32_000_000
"""The same for lists and objects, of which a million vertices with ten edges each have twelve million."""


def parse_json(data: bytes) -> object:
    """Parse JSON without repeated keys or bottomless nesting. Raises GraphFileError.

    NaN and infinities, which are no JSON, come through as floats, so that who reads them can name their place.
    """
    for found, most, what in (
        (data.count(b","), MAX_VALUES, "values"),
        (data.count(b"[") + data.count(b"{"), MAX_CONTAINERS, "lists and objects"),
    ):
        if found > most:
            raise GraphFileError(f"about {found} {what} are more than the {most} that a file may have")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise GraphFileError(f"not a JSON file: {reason}") from None


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise GraphFileError(f"key {shown(repeated)} appears twice in one object")
    return result


def shown(value: object) -> str:
    """Return ``value``, as a file gave it, short enough for a message, however large or deep it is."""
    if isinstance(value, dict | list):
        return f"a {'list' if isinstance(value, list) else 'JSON object'} of {len(value)}"
    if isinstance(value, str) and len(value) > _SHOWN:
        return repr(value[:_SHOWN]) + "..."
    return repr(value)[:_SHOWN]


def plain(value: object) -> str:
    """Return an id or another name for a message: a text without its quotes, on one line, and not for long."""
    if not isinstance(value, str):
        return shown(value)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value[:_SHOWN])


def number(raw: object, where: str, least: int = 0) -> int:
    """Return ``raw`` if it is an integer from ``least`` to MAX_SIZE. Raises GraphFileError."""
    if isinstance(raw, bool) or not isinstance(raw, int) or not least <= raw <= MAX_SIZE:
        raise GraphFileError(f"{where}: expected an integer from {least} to {MAX_SIZE}, got {shown(raw)}")
    return raw


def integer(entry: Mapping[str, Any], key: str, where: str, default: int | None = None, least: int = 0) -> int:
    """Return the integer at ``key``, or ``default`` if there is none. Raises GraphFileError."""
    if key not in entry:
        if default is None:
            raise GraphFileError(f"{where}: {key}: missing")
        return default
    return number(entry[key], f"{where}: {key}", least)


def flag(entry: Mapping[str, Any], key: str, where: str) -> bool:
    """Return the bool at ``key``, false if there is none. Raises GraphFileError."""
    value = entry.get(key, False)
    if not isinstance(value, bool):
        raise GraphFileError(f"{where}: {key}: expected true or false, got {shown(value)}")
    return value


def text(entry: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text at ``key``, empty if there is none. Raises GraphFileError."""
    value = entry.get(key, "")
    if not isinstance(value, str):
        raise GraphFileError(f"{where}: {key}: expected a text, got {shown(value)}")
    return value


def an_object(raw: object, where: str) -> dict[str, Any]:
    """Return ``raw`` if it is an object. Raises GraphFileError."""
    if not isinstance(raw, dict):
        raise GraphFileError(f"{where}: expected an object, got {shown(raw)}")
    return raw


def a_list(raw: object, where: str) -> list[Any]:
    """Return ``raw`` if it is a list. Raises GraphFileError."""
    if not isinstance(raw, list):
        raise GraphFileError(f"{where}: expected a list, got {shown(raw)}")
    return raw
