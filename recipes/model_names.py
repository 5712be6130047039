"""A model's name → the values of its config: a folder, a preset of ``data/presets.json``, or a name on the hub.

Neither PyTorch nor transformers is imported, so that a wrong name is refused at once.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from disco_accel.errors import ConfigError

_PRESETS = Path(__file__).with_name("data") / "presets.json"
_CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_REACHED_WITHIN = 1.0
"""Seconds: a network that has not answered by then is none. The hub's own client tries for half a minute."""
_ANSWERED_WITHIN = 5.0
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3]))"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """``name`` as it was given. ``config``: the values of config.json. ``folder`` that has the file; None: a preset's.
    ``source``: where the values are from, in words. ``attention``: the implementation that it needs; None: any."""

    name: str
    config: Mapping[str, Any]
    folder: Path | None
    source: str
    attention: str | None = None


def find_model(name: str, key: str = "model_name_or_path") -> FoundModel:
    """The model that ``name`` means: a folder with a config.json, else a preset by its own name or one of its names on
    the hub, else a name on the hub, from its cache or over the network.

    Raises:
        ConfigError: there is none, within two seconds where there is no network. ``key`` leads the message.
    """
    where = Path(name).expanduser()
    if where.exists():
        return _in_folder(name, where, key)
    preset = _preset_of(name)
    if preset is not None:
        row = _presets()[preset]
        return FoundModel(name, row["config"], None, f"preset {preset}", row.get("attention"))
    if name.startswith(("/", ".", "~")) or not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"{key}: {name}: {_no_such(name, 'there is no such folder and no such preset')}")
    return _on_hub(name, key)


def preset_names() -> tuple[str, ...]:
    """Those of ``data/presets.json``."""
    return tuple(_presets())


def name_on_hub(name: str) -> str:
    """The first name on the hub of the preset ``name``; other names, and folders, as they are."""
    row = None if Path(name).exists() else _presets().get(name.lower())
    return name if row is None else str(row["hub"][0])


@functools.cache
def _presets() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_PRESETS.read_text(encoding="utf-8"))["presets"]
    return found


def _preset_of(name: str) -> str | None:
    lower = name.lower()
    return next((p for p, row in _presets().items() if lower == p or lower in map(str.lower, row["hub"])), None)


def _no_such(name: str, why: str) -> str:
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], _presets(), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"has no config that can be read: {why}{hint} Presets: {', '.join(_presets())}"


def _in_folder(name: str, folder: Path, key: str, source: str = "") -> FoundModel:
    file = folder / _CONFIG
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{key}: {name}: has no config that can be read: it has no {_CONFIG}; give the folder of a checkpoint in "
            f"Hugging Face's layout, or a preset: {', '.join(_presets())}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {name}: has no config that can be read: {_CONFIG}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{key}: {name}: has no config that can be read: {_CONFIG} holds no object")
    kind = values.get("model_type")
    attention = next((r.get("attention") for r in _presets().values() if r["config"]["model_type"] == kind), None)
    return FoundModel(name, values, folder, source or f"{_CONFIG} of {name}", attention)


def _on_hub(name: str, key: str) -> FoundModel:
    """A model of the hub's cache, or one that is asked for over the network."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        cached = try_to_load_from_cache(name, _CONFIG)
        if isinstance(cached, str):
            return _in_folder(name, Path(cached).parent, key, f"{_CONFIG} of {name} in the hub's cache")
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(f"{key}: {name}: {_no_such(name, 'HF_HUB_OFFLINE is set and the cache has none')}")
        if not _reached(constants.ENDPOINT):
            raise ConfigError(f"{key}: {name}: {_no_such(name, 'the hub does not answer and its cache has none')}")
        got = hf_hub_download(name, _CONFIG, etag_timeout=_ANSWERED_WITHIN)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{key}: {name}: {_no_such(name, f'the hub says: {reason}')}") from error
    return _in_folder(name, Path(got).parent, key, f"{_CONFIG} of {name} from the hub")


def _reached(endpoint: str) -> bool:
    """Whether the hub's machine, or the proxy in front of it, takes a connection. A process of its own asks, since a
    look-up of a name cannot be ended."""
    url = urlsplit(endpoint)
    proxy = getproxies().get(url.scheme)
    if proxy:
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = url.port or (80 if url.scheme == "http" else 443)
    if not url.hostname:
        return False
    command = [sys.executable, "-I", "-c", _CONNECT, url.hostname, str(port), str(_REACHED_WITHIN)]
    try:
        return subprocess.run(command, capture_output=True, timeout=_REACHED_WITHIN).returncode == 0
    except subprocess.TimeoutExpired:
        return False
