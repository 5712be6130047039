"""GPUs that seconds are estimated for: rates from the peaks of ``gpus.json``, which names a source for each."""

from __future__ import annotations

import difflib
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disco_accel.errors import ConfigError
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.simulate.machine import Link, Machine
from disco_accel.simulate.roofline import Speed
from disco_accel.sizes import parse_size

_FILE = Path(__file__).with_name("gpus.json")
_WORD = re.compile(r"\w+")
_SAME_MEMORY = 0.1
"""Drivers show less memory than is on the box, and its maker may mean powers of ten."""
_DIGITS = 2
"""Of a rate: no share of a peak is known better."""


@dataclass(frozen=True, slots=True)
class _Gpu:
    """``memory`` in bytes, as on its box. ``source`` of its peaks; ``unverified``: those of which none was read."""

    name: str
    speed: Speed
    memory: int
    source: str
    unverified: tuple[str, ...]


def gpu_named(name: str) -> _Gpu:
    """The GPU that ``gpus.json`` calls ``name``. Raises ConfigError with those that it has."""
    gpus = _data()["gpus"]
    if name not in gpus:
        near = difflib.get_close_matches(name.lower(), gpus, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--gpu: {name!r} is not known; {hint}give one of {', '.join(gpus)}, or this")
    return _gpu(name)


def gpu_names() -> tuple[str, ...]:
    """All that ``gpus.json`` has."""
    return tuple(_data()["gpus"])


def gpu_like(hardware: str, memory: int) -> _Gpu | None:
    """The GPU of ``gpus.json`` that a driver calls ``hardware``, such as "NVIDIA H100 80GB HBM3", with about ``memory``
    bytes; None if there is none."""
    words = set(_WORD.findall(hardware))
    for name, row in _data()["gpus"].items():
        label = _WORD.findall(row["label"].partition("(")[0])[1:]
        here = memory / parse_size(row["memory"])
        if words.issuperset(label) and "Laptop" not in words and abs(here - 1) < _SAME_MEMORY:
            return _gpu(name)
    return None


@functools.cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


def _gpu(name: str) -> _Gpu:
    data = _data()
    row, share, link = data["gpus"][name], data["share_of_peak"], data["links"][data["gpus"][name]["link"]]
    both = Link(link["bandwidth"], link["latency"])
    speed = Speed(
        name=f"{row['label']} behind {row['link']}",
        half=_rounded(share["half"] * row["half"]),
        single=_rounded(share["single"] * row["single"]),
        memory=_rounded(share["memory"] * row["bandwidth"]),
        kernel=data["kernel_seconds"],
        machine=Machine(links={TO_DEVICE: both, TO_HOST: both}),
    )
    return _Gpu(name, speed, parse_size(row["memory"]), row["source"], tuple(row.get("unverified", ())))


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS - 1}e}")
