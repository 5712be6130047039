"""The devices of this machine that a config names."""

from __future__ import annotations

from collections.abc import Sequence

from disco_accel.errors import ConfigError
from disco_accel.native.device_types import DEVICE_TYPES, HOST

Devices = int | str | tuple[int, ...]
"""The key ``devices``: a number, ``auto``, or indices of GPUs."""


def resolve_device(device: str, on_cpu: bool) -> str:
    """``device``, or the kind that ``auto`` is here. ``on_cpu``: a launcher's user asked for the CPU, which ``auto``
    follows.

    Raises ConfigError for a GPU that is not there.
    """
    if device == HOST.name:
        return device
    from disco_accel.native.backend import backend_of_kind, first_accelerator

    if device == "auto":
        found = first_accelerator()
        return HOST.name if found is None or on_cpu else found.device.type
    if not backend_of_kind(device).is_there():
        label = DEVICE_TYPES[device].label
        raise ConfigError(f"device: {device!r} does not work here, torch sees no {label} device; use cpu or auto")
    return device


def count_of(devices: Devices) -> int:
    """How many there are."""
    return len(devices) if isinstance(devices, tuple) else 1 if isinstance(devices, str) else devices


def gpus_of(kind: str, devices: Devices, processes: int) -> tuple[int, ...]:
    """Indices of the GPUs of this ``kind`` that ``devices`` names, in a run of so many ``processes`` on this machine. A
    number of them begins with the current one, and none are named for one.

    Raises ConfigError for a GPU that is not there, and for several GPUs in several processes.
    """
    from disco_accel.native.backend import backend_of_kind

    count = count_of(devices)
    if count == 1 and not isinstance(devices, tuple):
        return ()
    backend = backend_of_kind(kind)
    there = backend.count()
    if count > there or (isinstance(devices, tuple) and max(devices) >= there):
        given = list(devices) if isinstance(devices, tuple) else devices
        raise ConfigError(f"devices: {given} are not there, torch sees {there} GPUs, from 0 on; name some of these")
    if count > 1 and processes > 1:
        raise ConfigError(
            f"devices: a step shares {count} GPUs in one process, and this run has {processes} on this machine; start "
            "one process, or use devices: 1"
        )
    if isinstance(devices, tuple):
        return devices
    current = backend.current_index()
    return (current, *(index for index in range(there) if index != current))[:count]


def smallest_gpu_bytes(kind: str, gpus: Sequence[int]) -> int:
    """Memory of the smallest of these GPUs of this ``kind``; without any, of the current one."""
    from disco_accel.native.backend import backend_of_kind

    return min(backend_of_kind(kind, index).memory_bytes() for index in gpus or (None,))
