"""The machine file of docs/schema.md: compute streams and links."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disco_accel.errors import ConfigError
from disco_accel.graph.spaces import ROUTE_OF
from disco_accel.graph.strict_json import parse_json, shown
from disco_accel.simulate.machine import SCOPES, Link, Machine

logger = logging.getLogger("disco_accel")

IGNORED = "ignored in the machine file"
"""The begin of the warning of keys that mean nothing."""

_MAX_BYTES = 1 << 20
_LARGEST = 1e30
_KEYS = ("compute_streams", "links")
_LINK_KEYS = ("kinds", "bandwidth", "latency", "scope", "groups", "bandwidths")
_DEVICE = re.compile(r"0|[1-9][0-9]{0,8}")


def read_machine(path: str | os.PathLike[str]) -> Machine:
    """Return the machine of ``path``; links that it does not name keep the default. Raises ConfigError naming the key.

    ``scope`` may be ``device`` (the default), ``pair`` or ``shared``; ``groups`` lists devices that share a link;
    ``bandwidths`` maps ids of devices with another bandwidth to theirs.
    """
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{os.fspath(path)}: larger than the {_MAX_BYTES} bytes that a machine file may have")
    try:
        return machine_from_json(parse_json(data))
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from None


def machine_from_json(data: object) -> Machine:
    """Build the machine that ``data`` (parsed JSON) describes; keys that mean nothing are named in a warning. Raises
    ConfigError naming the key."""
    if not isinstance(data, dict):
        raise ConfigError("expected an object with compute_streams and links")
    streams = data.get("compute_streams", 1)
    if isinstance(streams, bool) or not isinstance(streams, int) or not 1 <= streams <= 1024:
        raise ConfigError(f"compute_streams: expected a number from 1 to 1024, got {shown(streams)}")
    links = data.get("links", [])
    if not isinstance(links, list):
        raise ConfigError(f"links: expected a list, got {shown(links)}")
    link_of: dict[str, Link] = {}
    joint: list[tuple[str, ...]] = []
    for index, entry in enumerate(links):
        where = f"links[{index}]"
        kinds, link = _link(entry, where)
        for kind in kinds:
            if kind in link_of:
                raise ConfigError(f"{where}: kinds: {kind} has a link already")
            link_of[kind] = link
        if len(kinds) > 1:
            joint.append(kinds)
    _warn_of_unknown(data, links)
    return Machine(streams, {ROUTE_OF[kind]: link for kind, link in link_of.items()}, tuple(joint))


def _warn_of_unknown(data: Mapping[str, Any], links: Sequence[Mapping[str, Any]]) -> None:
    """Name the keys that mean nothing, in one line: a link that is described otherwise is the default one."""
    unknown = [shown(key) for key in data if key not in _KEYS]
    for index, entry in enumerate(links):
        unknown += [f"{shown(key)} in links[{index}]" for key in entry if key not in _LINK_KEYS]
    if unknown:
        known = f"{', '.join(_KEYS)}, and in a link {', '.join(_LINK_KEYS)}"
        logger.warning("%s: %s; the keys are %s", IGNORED, ", ".join(unknown[:3]), known)


def _link(entry: Any, where: str) -> tuple[tuple[str, ...], Link]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object, got {shown(entry)}")
    kinds = entry.get("kinds")
    if not isinstance(kinds, list) or not kinds or any(kinds.count(k) > 1 or k not in list(ROUTE_OF) for k in kinds):
        raise ConfigError(f"{where}: kinds: expected some of {', '.join(ROUTE_OF)}, each once, got {shown(kinds)}")
    scope = entry.get("scope", "device")
    if scope not in SCOPES:
        raise ConfigError(f"{where}: scope: expected one of {', '.join(SCOPES)}, got {shown(scope)}")
    bandwidth = _number(entry, "bandwidth", where, least=1.0)
    latency = _number(entry, "latency", where, least=0.0, default=0.0)
    own = _bandwidths(entry.get("bandwidths"), f"{where}: bandwidths")
    link = Link(bandwidth, latency, scope, _groups(entry.get("groups"), f"{where}: groups"), own)
    return tuple(kind for kind in ROUTE_OF if kind in kinds), link


def _groups(raw: Any, where: str) -> tuple[tuple[int, ...], ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list) or not all(isinstance(group, list) and group for group in raw):
        raise ConfigError(f"{where}: expected lists of device ids such as [[0, 1], [2, 3]], got {shown(raw)}")
    members = [device for group in raw for device in group]
    for device in members:
        if isinstance(device, bool) or not isinstance(device, int) or device < 0:
            raise ConfigError(f"{where}: expected device ids, got {shown(device)}")
    if len(set(members)) != len(members):
        raise ConfigError(f"{where}: a device is in two groups")
    return tuple(tuple(sorted(group)) for group in raw)


def _bandwidths(raw: Any, where: str) -> tuple[tuple[int, float], ...]:
    if raw is None:
        return ()
    if not isinstance(raw, dict):
        raise ConfigError(f'{where}: expected device ids with bytes/s such as {{"1": 5e9}}, got {shown(raw)}')
    for device in raw:
        if not _DEVICE.fullmatch(device):
            raise ConfigError(f"{where}: expected device ids, got {shown(device)}")
    return tuple(sorted((int(device), _number(raw, device, where, least=1.0)) for device in raw))


def _number(entry: dict[str, Any], key: str, where: str, least: float, default: float | None = None) -> float:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _LARGEST:
        raise ConfigError(f"{where}: {key}: expected a number of at least {least:g}, got {shown(value)}")
    if not math.isfinite(value):
        raise ConfigError(f"{where}: {key}: {value} is not a number")
    return float(value)
