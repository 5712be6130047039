"""The devices of this machine that a config names."""

from __future__ import annotations

from collections.abc import Sequence

from disco_accel.errors import ConfigError

Devices = int | str | tuple[int, ...]
"""The key ``devices``: a number, ``auto``, or indices of GPUs."""


def resolve_device(device: str, on_cpu: bool) -> str:
    """``cpu`` or ``cuda``. ``on_cpu``: a launcher's user asked for the CPU, which ``auto`` follows.

    Raises ConfigError for a GPU that is not there.
    """
    if device == "cpu":
        return device
    import torch

    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ConfigError("device: 'cuda' does not work here, torch sees no CUDA device; use cpu or auto")
    return "cuda" if there and not (device == "auto" and on_cpu) else "cpu"


def count_of(devices: Devices) -> int:
    """How many there are."""
    return len(devices) if isinstance(devices, tuple) else 1 if isinstance(devices, str) else devices


def gpus_of(devices: Devices, processes: int) -> tuple[int, ...]:
    """Indices of the GPUs that ``devices`` names, in a run of so many ``processes`` on this machine. A number of them
    begins with the current one, and none are named for one.

    Raises ConfigError for a GPU that is not there, and for several GPUs in several processes.
    """
    import torch

    count = count_of(devices)
    if count == 1 and not isinstance(devices, tuple):
        return ()
    there = torch.cuda.device_count()
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
    current = torch.cuda.current_device()
    return (current, *(index for index in range(there) if index != current))[:count]


def smallest_gpu_bytes(gpus: Sequence[int]) -> int:
    """Memory of the smallest of these GPUs; without any, of the current one."""
    import torch

    return min(int(torch.cuda.mem_get_info(index)[1]) for index in gpus or (None,))
