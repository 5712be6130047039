"""The link between pinned host memory and the device: are copies right, and how many bytes a second does each way take?

On the host device, whose copies are the processor's: the rate of one copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from disco_accel.native.backend import backend_of
from disco_accel.native.host_memory import HostMemory
from disco_accel.selfcheck.outcome import Difference

_REPEATS = 5


def link(device: torch.device, nbytes: int) -> tuple[list[Difference], dict[str, float]]:
    """Differences after a copy there and back of ``nbytes`` bytes, and rates in bytes/s: ``h2d``, ``d2h``, ``both``
    (each way, while both run); ``copy`` on the CPU."""
    memory = HostMemory(2 * nbytes, huge_pages=False)
    if backend_of(device).separate_memory:
        memory.pin()
    source, back = (memory.allocate((nbytes,), torch.uint8) for _ in range(2))
    source.view(torch.int32).random_(generator=torch.Generator().manual_seed(nbytes))
    back.zero_()
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if not backend_of(device).separate_memory:
        figures = {"copy": _rate(lambda: on_device.copy_(source), nbytes, lambda: None)}
        back.copy_(on_device)
    else:
        figures = _rates(device, source, back, on_device)
    wrong = int((source != back).sum())
    if not wrong:
        return [], figures
    what = f"a copy of {nbytes} bytes to the device and back"
    return [Difference("link", what, "every byte", f"{wrong} bytes that differ")], figures


def _rates(device: torch.device, source: torch.Tensor, back: torch.Tensor, on_device: torch.Tensor) -> dict[str, float]:
    backend = backend_of(device)
    streams = backend.streams(2)
    half = source.numel() // 2
    backend.synchronize()

    def wait() -> None:
        for stream in streams:
            stream.synchronize()

    def copy(index: int, target: torch.Tensor, origin: torch.Tensor) -> None:
        with backend.on_stream(streams[index]):
            target.copy_(origin, non_blocking=True)

    def both() -> None:
        copy(0, on_device[:half], source[:half])
        copy(1, back[half:], on_device[half:])

    nbytes = source.numel()
    return {
        "h2d": _rate(lambda: copy(0, on_device, source), nbytes, wait),
        "d2h": _rate(lambda: copy(1, back, on_device), nbytes, wait),
        "both": _rate(both, half, wait),
    }


def _rate(run: Callable[[], object], nbytes: int, wait: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - began)
    # The first copy pays for page faults.
    return nbytes / max(statistics.median(seconds[1:]), 1e-9)
