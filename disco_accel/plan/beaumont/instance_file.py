"""INSTANCE.json: ``{"memory": bytes, "bandwidth": bytes/s, "a0": bytes, "layers": [{"u_f": s, "u_b": s, "w": bytes,
"a": bytes, "repeat": n}]}``; ``repeat`` (1) makes several equal layers, ``"frozen": true`` says that no step changes
the weights."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disco_accel.errors import ConfigError, GraphFileError
from disco_accel.graph.strict_json import parse_json
from disco_accel.plan.beaumont.selection import Instance, Layer

MAX_FILE_BYTES = 1 << 24
MAX_LAYERS = 1000
_TOP = ("memory", "bandwidth", "a0", "layers", "frozen")
_LAYER = ("u_f", "u_b", "w", "a", "repeat")
_LARGEST = 1e30
_LEAST = 1e-30
"""Of numbers that something is divided by: quotients stay finite."""


def read_instance(path: str | os.PathLike[str]) -> Instance:
    """Read a file. Raises ConfigError naming the file, the layer and the key."""
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than the {MAX_FILE_BYTES} bytes that an instance may have")
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return instance_from_json(parse_json(data))
    except GraphFileError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def instance_from_json(data: object) -> Instance:
    """Build the instance that ``data`` (parsed JSON) describes. Raises ConfigError naming the layer and the key."""
    top = _object(data, "the file", _TOP)
    raw = top.get("layers")
    if not isinstance(raw, list) or not raw:
        raise ConfigError("layers: expected a list of one or more layers")
    layers: list[Layer] = []
    for index, entry in enumerate(raw):
        where = f"layers[{index}]: "
        fields = _object(entry, where.rstrip(": "), _LAYER)
        layer = Layer(*(_number(fields, key, where) for key in ("u_f", "u_b", "w", "a")))
        repeat = fields.get("repeat", 1)
        if isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1:
            raise ConfigError(f"{where}repeat: expected a whole number of at least 1, got {str(repeat)[:40]!r}")
        if len(layers) + repeat > MAX_LAYERS:
            raise ConfigError(f"{where}repeat: more than the {MAX_LAYERS} layers that an instance may have")
        layers += [layer] * repeat
    frozen = top.get("frozen", False)
    if not isinstance(frozen, bool):
        raise ConfigError(f"frozen: expected true or false, got {str(frozen)[:40]!r}")
    return Instance(
        memory=_number(top, "memory", positive=True),
        bandwidth=_number(top, "bandwidth", positive=True),
        a0=_number(top, "a0"),
        layers=tuple(layers),
        frozen=frozen,
    )


def _object(raw: object, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected an object with {', '.join(keys)}, got {str(raw)[:40]!r}")
    for key in raw:
        near = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
        if key not in keys and near:
            raise ConfigError(f"{where}: unknown key {key!r}; did you mean {near[0]!r}?")
    return raw


def _number(fields: Mapping[str, Any], key: str, where: str = "", positive: bool = False) -> float:
    if key not in fields:
        raise ConfigError(f"{where}{key}: missing")
    value = fields[key]
    least = "more than 0" if positive else "0 or more"
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
    if not number or not math.isfinite(value) or value < 0 or (positive and value < _LEAST):
        raise ConfigError(f"{where}{key}: expected a number, {least}, got {str(value)[:40]!r}")
    return float(value)
