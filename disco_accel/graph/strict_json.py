"""Strict JSON from outside: bounded parsing, typed access that names the wrong place."""

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


MAX_KEYS = 16_000_000
"""The same for colons: a million vertices have nine keys each, and some have two more colons in their op's name."""

MAX_KEYS_OF_ONE = 1000
"""Keys of one object; those that these files know have at most twenty."""

MAX_TOKEN = 1 << 16
"""Bytes of one text or number. The longest that anybody needs is the dotted path of a module."""

MAX_UNICODE = 1 << 26
"""Bytes of a file with characters beyond ASCII, of which one makes all text four times as large in memory."""

_DELIMITERS = b',:[]{}" \t\r\n'


def parse_json(data: bytes) -> object:
    """Parse JSON without repeated keys, endless texts or bottomless nesting. Raises GraphFileError. The memory and time
    of a file are bounded before it is parsed. NaN and infinities, which are no JSON, come through as floats, so that
    their reader can name their place."""
    _check_size(data)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise GraphFileError(f"not a JSON file: {reason}") from None


def _check_size(data: bytes) -> None:
    for count, most, what in (
        (data.count(b","), MAX_VALUES, "values"),
        (data.count(b"[") + data.count(b"{"), MAX_CONTAINERS, "lists and objects"),
        (data.count(b":"), MAX_KEYS, "keys"),
    ):
        if count > most:
            raise GraphFileError(f"about {count} {what} are more than the {most} that a file may have")
    if data.count(b":") > MAX_KEYS_OF_ONE * (1 + data.count(b"{")):
        raise GraphFileError(f"an object has more than the {MAX_KEYS_OF_ONE} keys that one may have")
    if len(data) > MAX_UNICODE and not data.isascii():
        raise GraphFileError(f"a file of more than {MAX_UNICODE} bytes must be plain ASCII (\\u for other characters)")
    place = _long_token(data)
    if place is not None:
        raise GraphFileError(f"the text or number about byte {place} is longer than the {MAX_TOKEN} bytes it may have")


def _long_token(data: bytes) -> int | None:
    """A place within a token of more than MAX_TOKEN bytes; None if there is none. In time linear in ``data``."""
    at = 0
    while at + MAX_TOKEN < len(data):
        end = at + MAX_TOKEN + 1
        last = max(data.rfind(delimiter, at, end) for delimiter in _DELIMITERS)
        if last < 0:
            return at
        at = last + 1
    # A text may contain delimiters: there only its quotes count, and of these not the escaped ones.
    bare = data.replace(b"\\\\", b"xx").replace(b'\\"', b"xx") if b"\\" in data else data
    at, inside = 0, False
    while at + MAX_TOKEN < len(bare):
        last = bare.rfind(b'"', at, at + MAX_TOKEN + 1)
        if last >= 0:
            inside ^= bool(bare.count(b'"', at, last + 1) % 2)
            at = last + 1
        elif inside:
            return at
        else:
            at = bare.find(b'"', at)
            if at < 0:
                break
    return None


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > MAX_KEYS_OF_ONE:
        raise GraphFileError(f"an object has {len(pairs)} keys, more than the {MAX_KEYS_OF_ONE} that one may have")
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
