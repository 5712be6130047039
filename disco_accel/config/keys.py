"""The keys of ``disco_config`` and a parser for each, which answers a wrong value with ValueError and one that
works."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from disco_accel.errors import ConfigError
from disco_accel.native.device_types import DEVICE_TYPES

MOST_CHUNKS = 64
"""Of one kernel: each is a launch of its own, and a copy of a slice where the next kernel is cut otherwise."""

Parser = Callable[[Any], Any]
"""Turns a value as a user writes it into the stored one; raises ValueError with a value that works."""


def _one_of(*names: str) -> Parser:
    def parse(value: Any) -> str:
        if value not in names or not isinstance(value, str):
            raise ValueError(f"use {' or '.join(names)}")
        return value

    return parse


def _registered(registry: str, *others: str) -> Parser:
    """A choice among ``others`` and the names in a table of ``disco_accel.plan``, so that a new planner needs no edit
    here."""

    def parse(value: Any) -> str:
        import disco_accel.plan

        names = (*others, *getattr(disco_accel.plan, registry))
        parsed: str = _one_of(*names)(value)
        return parsed

    return parse


def _bytes(value: Any, works: str) -> int:
    from disco_accel.sizes import parse_size

    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(works)
    try:
        size = parse_size(value)
    except (ConfigError, ValueError) as error:
        raise ValueError(works) from error
    if size <= 0:
        raise ValueError(works)
    return size


def _size_or_share(value: Any) -> int | str:
    works = "use a size such as 12GiB, a share such as 80%, or auto"
    if value == "auto":
        return "auto"
    if isinstance(value, str) and value.strip().endswith("%"):
        text = value.strip().removesuffix("%").strip()
        if not re.fullmatch(r"\d+(\.\d+)?", text) or not 0 < float(text) <= 100:
            raise ValueError("use a share above 0% and up to 100%")
        return f"{text}%"
    return _bytes(value, works)


def _shared_or_size(value: Any) -> int | str:
    if value == "shared":
        return "shared"
    try:
        return _size_or_share(value)
    except ValueError as error:
        raise ValueError(str(error).replace("or auto", "auto, or shared")) from error


def _bandwidth(value: Any) -> float | None:
    works = "use bytes per second such as 0.5GB/s or 500000000, or leave it out for an unthrottled link"
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(works)
        return float(value)
    if not isinstance(value, str):
        raise ValueError(works)
    return float(_bytes(value.strip().removesuffix("/s").strip(), works))


def _count(minimum: int, optional: bool = False) -> Parser:
    def parse(value: Any) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"use a whole number of at least {minimum}")
        return value

    return parse


def seconds_or_auto(value: Any) -> str | float:
    """``auto``, or seconds as a number."""
    works = "use auto, or seconds as a number of at least 0, such as 10"
    if value == "auto":
        return "auto"
    try:
        # YAML 1.1 reads 1e-5 as text.
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(works) from error
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(works)
    return seconds


def _devices(value: Any) -> str | int | tuple[int, ...]:
    works = "use a number such as 4, a list of GPUs such as [0, 2], or auto"
    if value == "auto" or (type(value) is int and value > 0):
        return "auto" if isinstance(value, str) else int(value)
    if not isinstance(value, list | tuple) or not value or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(works)
    if len(set(value)) < len(value):
        raise ValueError("name each device once")
    return tuple(value)


def _buckets(value: Any) -> str | tuple[int, ...]:
    if value == "auto":
        return "auto"
    # YAML 1.1 reads off as false.
    if value is False or value == "off":
        return "off"
    if isinstance(value, list | tuple) and value and all(type(n) is int and n > 0 for n in value):
        return tuple(sorted(set(value)))
    raise ValueError("use auto, off, or a list of sequence lengths such as [256, 512, 1024]")


def _folder(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError("use the path of a folder, or leave it out")
    try:
        return str(Path(value).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{error} Set HOME, or give a path without ~, or null for none") from error


def _chunks(value: Any) -> str | int:
    if value == "auto" or (type(value) is int and 1 <= value <= MOST_CHUNKS):
        return "auto" if isinstance(value, str) else int(value)
    raise ValueError(f"use auto, or a number from 1, which is whole, to {MOST_CHUNKS}")


def _auto_or_off(value: Any) -> str:
    # YAML 1.1 reads off as false.
    if value is False or value == "off":
        return "off"
    if value != "auto" or not isinstance(value, str):
        raise ValueError("use auto or off")
    return "auto"


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("use true or false")
    return value


def contradiction(optimizer: str, update: str) -> str:
    """The contradiction between the two keys, in words; "" if there is none."""
    if optimizer != "planned" or update != "step":
        return ""
    return (
        "optimizer: planned does not go with update: step, which updates in optimizer.step(): planned means host "
        "memory, with updates in the plan of the next step; leave update out, or set optimizer: host"
    )


def unused_policy(planner: str, policy: str) -> str:
    """Return one line for a user who has set ``policy``, a key of the planner ``build`` alone, beside another planner;
    "" otherwise."""
    if planner != "timed" or policy == "auto":
        return ""
    return (
        f"policy: {policy} has no effect with planner: timed, which evicts the furthest next use; "
        "set planner: build to evict by policy, or leave policy out"
    )


PARSERS: dict[str, Parser] = {
    "memory_budget": _shared_or_size,
    "host_memory": _shared_or_size,
    "planner": _registered("PLANNERS"),
    "policy": _registered("POLICIES", "auto"),
    "plan_seconds": seconds_or_auto,
    "lookahead": _count(0),
    "launch_graphs": _auto_or_off,
    "buckets": _buckets,
    "plan_cache": _folder,
    "on_unsupported": _one_of("error", "eager"),
    "optimizer": _one_of("auto", "device", "host", "planned"),
    "update": _one_of("auto", "step", "deferred"),
    "update_on": _one_of("host", "auto", "device"),
    "master_weights": _one_of("auto", "script", "fp32"),
    "share_weights": _flag,
    "device": _one_of("auto", *DEVICE_TYPES),
    "devices": _devices,
    "parallel": _one_of("auto", "layers", "batch", "tensor"),
    "micro_batches": _count(1),
    "chunks": _chunks,
    "recompute": _one_of("auto", "as-written"),
    "fuse": _auto_or_off,
    "link_bandwidth": _bandwidth,
    "compute_threads": _count(1, optional=True),
    "self_check": _auto_or_off,
    "verify_steps": _count(0),
    "report_dir": _folder,
    "quiet": _flag,
    "enabled": _flag,
}
"""In the order in which they are documented."""

FORMER_KEYS: Mapping[str, str] = dict.fromkeys(
    ("dispatch", "link_latency"), "leave it out: only tests and benchmarks set it, as an option of the engine in code"
)
"""Keys of earlier versions, with the place where each went."""
