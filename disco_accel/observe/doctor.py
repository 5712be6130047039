"""``disco-accel doctor``: facts about this machine as one object, from which ``doctor_words`` makes its checks.

Nothing raises: in the place of a fact that cannot be had is an object with its ``fault`` alone.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from disco_accel.config import settings
from disco_accel.config.machine_devices import visible_devices
from disco_accel.errors import ExtensionError
from disco_accel.host_limits import HostLimit, host_limits, own_bytes
from disco_accel.native import extension, numa
from disco_accel.native.backend import backend_of_kind, first_accelerator
from disco_accel.native.cuda_backend import unseen_gpus
from disco_accel.native.host_memory import writes_are_watched
from disco_accel.native.plain_library import cache_root, compiler
from disco_accel.observe.folder_facts import folder_facts
from disco_accel.observe.locked_memory import largest_lock, lock_limit
from disco_accel.observe.package_versions import versions

_ROOT = Path("/")
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
_COPY_BYTES = 64 << 20
_REPEATS = 7
_PLANS = ("plans", "answers", "checks")
_LIBRARIES = ("disco_*",)


def report(
    more: Mapping[str, Callable[[], Any]] | None = None,
    libraries: Sequence[str] = (),
    kernels: Sequence[str] = (),
    root: Path = _ROOT,
) -> dict[str, Any]:
    """Versions, devices, limits of host memory, the measured link, extension, caches and entry points.

    Bandwidths are bytes/s, latencies and times seconds, memory bytes. Nothing is built. ``more``: further parts, by
    name. ``libraries``: distributions to tell the versions of, beside those that are needed. ``kernels``: patterns of
    names of fused kernels in the folder of the extension. ``root``: above ``proc`` and ``sys``.
    """
    parts: dict[str, Callable[[], Any]] = {
        "host": lambda: _host(root),
        "device": lambda: (first_accelerator(0) or backend_of_kind("cpu")).facts(),
        "gpus": lambda: _gpus(root),
        "link": _link,
        "extension": _extension,
        "caches": lambda: _caches(kernels),
        "entry_points": _entry_points,
        **(more or {}),
    }
    answer = versions(libraries) | {name: told(part) for name, part in parts.items()}
    # They need the engine, and are asked when it is known to be there.
    built = answer["extension"].get("built") is True
    answer["host"]["write_watch"] = told(writes_are_watched) if built else None
    answer["host"]["largest_lock"] = told(lambda: largest_lock(root, built=built))
    return answer


def told(part: Callable[[], Any]) -> Any:
    """The answer of ``part``, or an object with its ``fault``."""
    try:
        return part()
    except Exception as error:  # A report goes on, whatever a machine has in store.
        return {"fault": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"}


def _host(root: Path) -> dict[str, Any]:
    """Each limit with its bytes, and facts that bear on the speed of copies. They are the limit of locked memory (a
    process's own, which some drivers go by; None: there is none), huge pages, and the NUMA node of the first GPU."""
    limits: list[HostLimit] = host_limits(root)
    return {
        "cores": told(lambda: len(os.sched_getaffinity(0))),
        "threads": torch.get_num_threads(),
        "memory": min(limit.total for limit in limits),
        "memory_left": min(limit.share(1, own_bytes(root)) for limit in limits),
        "limits": [{"what": limit.name, "bytes": limit.total, "left": limit.left} for limit in limits],
        **lock_limit(root),
        "huge_pages": _first_line(root / _HUGE_PAGES),
        "numa_nodes": numa.node_count(root),
        "gpu_numa_node": told(
            lambda: None if (gpu := first_accelerator(0)) is None else numa.node_of(gpu.device, root)
        ),
        "load_average": told(lambda: round(os.getloadavg()[0], 2)),
        "system": platform.release(),
    }


def _first_line(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def _gpus(root: Path) -> dict[str, Any]:
    """Facts of each GPU that PyTorch sees, and the folders of the headers for the allocator decorator. Where it sees
    none, how many the driver has and why."""
    first = first_accelerator(0)
    if first is not None:
        kind = first.device.type
        seen = [told(partial(_gpu, kind, index, root)) for index in range(first.count())]
        return {"seen": seen, "headers": told(lambda: [str(folder) for folder in extension.cuda_include()])}
    count, why = unseen_gpus(root)
    return {"seen": [], "driver_has": count, "why": why, "visible_devices": visible_devices()}


def _gpu(kind: str, index: int, root: Path) -> dict[str, Any]:
    backend = backend_of_kind(kind, index)
    node = numa.node_of(backend.device, root)
    runs, takes = (None, None) if node is None else numa.within_reach(node, root)
    return {**backend.facts(), "index": index, "numa_node": node, "runs_on_node": runs, "takes_from_node": takes}


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
    """``built``: it is on disk and can be loaded. Where it is not, the first use compiles it, or ``why`` says why that
    cannot be."""
    start = time.perf_counter()
    name, version = compiler()
    answer = {"built": False, "compiler": name, "compiler_version": version}
    try:
        library = extension.engine_library()
        missing = library.fault()
        if missing is None:
            loaded = str(extension.load_extension())
            return answer | {"built": True, "library": loaded, "seconds": round(time.perf_counter() - start, 3)}
        answer["folder"] = str(library.directory)
        extension.require_tools(f"{library.path} {missing}")
    except ExtensionError as error:
        return answer | {"why": str(error)}
    return answer


def _caches(kernels: Sequence[str]) -> dict[str, Any]:
    """Folders with files that are kept: which, how large, whether this user can write there. None: there is none."""

    def plans() -> dict[str, Any] | None:
        folder = settings.DiscoConfig.from_env(settings.DiscoConfig()).plan_cache
        return None if folder is None else folder_facts(Path(folder), _PLANS)

    return {
        "plans": told(plans),
        "extension": told(lambda: folder_facts(cache_root(), _LIBRARIES)),
        "fused_kernels": told(lambda: folder_facts(cache_root(), kernels)),
    }


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
