"""``disco-accel doctor``: the devices and versions of this machine, the rate of its link, obstacles for the engine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from disco_accel.config import settings
from disco_accel.host_limits import host_limits
from disco_accel.native import extension, numa
from disco_accel.native.backend import backend_of_kind, first_accelerator
from disco_accel.native.plain_library import ExtensionError

_REQUIRED = ("torch", "transformers", "accelerate", "peft", "numpy", "pyyaml", "safetensors")
_OPTIONAL = ("deepspeed", "matplotlib", "scipy")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_COPY_BYTES = 64 << 20
_REPEATS = 7


def main(more: Mapping[str, Mapping[str, Any]] | None = None) -> int:
    """Print the report as JSON; 0 when everything that training needs is there, else 1.

    ``more``: further parts of the report, by name; the text under ``problem`` of one is a problem, unless empty.
    """
    answer = report()
    for name, part in (more or {}).items():
        answer[name] = part
        answer["problems"] += [part["problem"]] if part.get("problem") else []
    print(json.dumps(answer, indent=2))
    return 1 if answer["problems"] else 0


def report() -> dict[str, Any]:
    """Versions, device, measured link, extension and entry points; ``problems`` lists, in words, obstacles for
    training.

    Bandwidths are bytes/s, latencies and times seconds, memory bytes. Builds the extension if it is not built yet.
    """
    problems: list[str] = []
    versions = {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    problems += [f"{name} is not installed" for name in _REQUIRED if versions[name] is None]
    extension = _extension()
    if not extension["built"]:
        problems.append(f"the engine's extension is not built: {extension['why']}")
    entry_points = _entry_points()
    return {
        "disco_accel": _version("disco-accel"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "host": {
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            **_host_memory(),
            "load_average": round(os.getloadavg()[0], 2),
        },
        "device": (first_accelerator(0) or backend_of_kind("cpu")).facts(),
        "link": _link(),
        "extension": extension,
        "entry_points": entry_points,
        "problems": problems,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _host_memory() -> dict[str, Any]:
    """Each limit with its bytes, and three facts that bear on the speed of copies. They are the limit of locked memory
    (a process's own, which some drivers go by; None: there is none), huge pages, and the NUMA node of the first GPU."""
    gpu = first_accelerator(0)
    limits = host_limits()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "memory": settings.host_memory_bytes(),
        "memory_left": settings.spare_host_memory(),
        "limits": [{"what": limit.name, "bytes": limit.total, "left": limit.left} for limit in limits],
        "most_locked": None if locked == resource.RLIM_INFINITY else locked,
        "huge_pages": _first_line(_HUGE_PAGES),
        "numa_nodes": numa.node_count(),
        "gpu_numa_node": None if gpu is None else numa.node_of(gpu.device),
    }


def _first_line(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return None


def _link() -> dict[str, float]:
    """Median rates of large copies and median time of tiny ones, between host memory and the device's."""
    # Random bytes: pages of zeros may be shared by the kernel and would copy faster than any weights.
    source = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8)
    tiny = source[:4096].clone()
    gpu = first_accelerator(0)
    if gpu is None:
        target, tiny_target = torch.empty_like(source), torch.empty_like(tiny)
        return {
            "copy_bandwidth": _COPY_BYTES / _median(lambda: target.copy_(source), lambda: None),
            "copy_latency": _median(lambda: tiny_target.copy_(tiny), lambda: None),
        }
    pinned, tiny_pinned = source.pin_memory(), tiny.pin_memory()
    on_device, tiny_on_device = pinned.to(gpu.device), tiny_pinned.to(gpu.device)
    wait = gpu.synchronize
    return {
        "h2d_bandwidth": _COPY_BYTES / _median(lambda: on_device.copy_(pinned, non_blocking=True), wait),
        "d2h_bandwidth": _COPY_BYTES / _median(lambda: pinned.copy_(on_device, non_blocking=True), wait),
        "pageable_h2d_bandwidth": _COPY_BYTES / _median(lambda: on_device.copy_(source), wait),
        "h2d_latency": _median(lambda: tiny_on_device.copy_(tiny_pinned, non_blocking=True), wait),
    }


def _median(copy: Callable[[], object], wait: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        copy()
        wait()
        seconds.append(time.perf_counter() - start)
    # The first copy pays for page faults and, on a GPU, for the context.
    return statistics.median(seconds[1:])


def _extension() -> dict[str, Any]:
    start = time.perf_counter()
    try:
        library = extension.build("disco_runtime", extension.sources())
    except ExtensionError as error:
        return {"built": False, "why": str(error)}
    return {"built": True, "library": str(library), "seconds": round(time.perf_counter() - start, 3)}


def _entry_points() -> dict[str, Any]:
    """Whether the literal ``accelerate launch --config`` works; the other two entry points need nothing."""
    registered = any(point.name == "disco_accel" for point in importlib.metadata.entry_points(group="torch.backends"))
    if not registered:
        why = "disco-accel is not installed in this environment, only importable; pip install it"
    elif not torch._is_device_backend_autoload_enabled():
        why = "switched off by TORCH_DEVICE_BACKEND_AUTOLOAD"
    elif not settings.autoload_wanted():
        why = f"switched off by {settings.AUTOLOAD_VARIABLE}"
    else:
        return {"accelerate_launch_config": True}
    return {"accelerate_launch_config": False, "why": f"{why}; use disco-accel launch --config instead"}
