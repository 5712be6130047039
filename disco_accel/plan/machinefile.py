"""The machine file of docs/schema.md: compute streams and links, as far as the simulation models them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from disco_accel.errors import ConfigError
from disco_accel.graphfile import parse_json
from disco_accel.plan.simulate import Link, Machine

_KINDS = ("h2d", "d2h", "p2p")
_MAX_BYTES = 1 << 20


def read_machine(path: str | os.PathLike[str], devices: int) -> Machine:
    """Return the machine of ``path`` for a graph on ``devices`` devices; links that it does not name keep the default.

    Raises ConfigError naming the key, also for what is not modelled: one link for several kinds of copies, and a link
    that several devices share.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{os.fspath(path)}: larger than the {_MAX_BYTES} bytes that a machine file may have")
    try:
        return _machine(parse_json(data), devices)
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from None


def _machine(data: object, devices: int) -> Machine:
    if not isinstance(data, dict):
        raise ConfigError("expected an object with compute_streams and links")
    streams = data.get("compute_streams", 1)
    if isinstance(streams, bool) or not isinstance(streams, int) or not 1 <= streams <= 1024:
        raise ConfigError(f"compute_streams: expected a number from 1 to 1024, got {streams!r}")
    links = data.get("links", [])
    if not isinstance(links, list):
        raise ConfigError(f"links: expected a list, got {str(links)[:40]!r}")
    found: dict[str, Link] = {}
    for index, entry in enumerate(links):
        kind, link = _link(entry, f"links[{index}]", devices)
        if kind in found:
            raise ConfigError(f"links[{index}]: kinds: {kind} has a link already")
        found[kind] = link
    default = Machine()
    return Machine(streams, found.get("h2d", default.h2d), found.get("d2h", default.d2h), found.get("p2p", default.p2p))


def _link(entry: Any, where: str, devices: int) -> tuple[str, Link]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object, got {str(entry)[:40]!r}")
    kinds = entry.get("kinds")
    if not isinstance(kinds, list) or len(kinds) != 1 or kinds[0] not in _KINDS:
        raise ConfigError(f"{where}: kinds: expected one of {', '.join(_KINDS)} (half duplex is not modelled)")
    scope = entry.get("scope", "device")
    if devices > 1 and (scope != "device" or "groups" in entry):
        raise ConfigError(f"{where}: scope: with {devices} devices only 'device' is modelled, not {str(scope)[:40]!r}")
    bandwidth = _number(entry, "bandwidth", where, least=1.0)
    return str(kinds[0]), Link(bandwidth, _number(entry, "latency", where, least=0.0, default=0.0))


def _number(entry: dict[str, Any], key: str, where: str, least: float, default: float | None = None) -> float:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ConfigError(f"{where}: {key}: expected a number of at least {least:g}, got {str(value)[:40]!r}")
    return float(value)
