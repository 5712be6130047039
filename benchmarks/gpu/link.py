"""Stage ``link``: pinning, copies one way and both ways, and what it costs to submit a copy and to ask for an event."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.stage import NOT_HERE, Run
from disco_accel.native.host_memory import HostMemory

_REPEATS = 7
_CALLS = 500


def measure(run: Run) -> dict[str, Any]:
    """Rates in GB/s, latencies in microseconds. On the host device: the rate of memcpy, with and without huge pages."""
    nbytes = (64 if run.small else 1024) << 20
    figures: dict[str, Any] = {"bytes": nbytes}
    if run.device != "cuda":
        figures[NOT_HERE] = "pinning, copies both ways, events"
        for huge in (False, True):
            source, target = (_drawn(HostMemory(nbytes, huge_pages=huge)) for _ in range(2))
            figures[f"memcpy_{'huge' if huge else 'plain'}"] = rate(lambda s=source, t=target: t.copy_(s), nbytes)
        return figures
    for huge in (False, True):
        memory = HostMemory(nbytes, huge_pages=huge)
        host = _drawn(memory)
        name = "huge" if huge else "plain"
        there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        figures[f"h2d_pageable_{name}"] = rate(lambda t=there, h=host: t.copy_(h), nbytes)
        began = time.perf_counter()
        memory.pin()
        figures[f"register_{name}"] = nbytes / (time.perf_counter() - began) * 1e-9
        figures[f"h2d_{name}"] = rate(lambda t=there, h=host: t.copy_(h, non_blocking=True), nbytes)
        figures[f"d2h_{name}"] = rate(lambda t=there, h=host: h.copy_(t, non_blocking=True), nbytes)
        if not host.is_pinned():
            figures["wrong"] = "PyTorch does not see the registered arena as pinned"
    figures |= _duplex(host, there)
    figures |= _latencies(host, there)
    return figures


def _drawn(memory: HostMemory) -> torch.Tensor:
    # Random bytes: pages of zeros may be shared by the kernel and would copy faster than any weights.
    return memory.allocate((memory.nbytes,), torch.uint8).random_(0, 256)


def _seconds(copy: Callable[[], object]) -> float:
    samples = []
    for _ in range(_REPEATS + 1):
        _synchronize()
        began = time.perf_counter()
        copy()
        _synchronize()
        samples.append(time.perf_counter() - began)
    # The first copy pays for page faults.
    return statistics.median(samples[1:])


def rate(copy: Callable[[], object], nbytes: int) -> float:
    """GB/s of ``copy``, which moves ``nbytes``."""
    return nbytes / _seconds(copy) * 1e-9


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _duplex(host: torch.Tensor, there: torch.Tensor) -> dict[str, float]:
    """Both directions at once over halves of the same memory: GB/s of each, as long as both run."""
    half = host.numel() // 2
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            there[:half].copy_(host[:half], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[half:].copy_(there[half:], non_blocking=True)

    return {"duplex_each_way": rate(both, half)}


def _latencies(host: torch.Tensor, there: torch.Tensor) -> dict[str, float]:
    """Microseconds per call, Python's own microsecond or so included."""
    event = torch.cuda.Event()

    def timed(call: Callable[[], object]) -> float:
        _synchronize()
        began = time.perf_counter()
        for _ in range(_CALLS):
            call()
        spent = time.perf_counter() - began
        _synchronize()
        return spent / _CALLS * 1e6

    small, small_host = there[:4096], host[:4096]
    event.record()
    return {
        "submit_h2d_us": timed(lambda: small.copy_(small_host, non_blocking=True)),
        "launch_kernel_us": timed(lambda: small.fill_(1)),
        "record_event_us": timed(lambda: event.record()),
        "query_event_us": timed(lambda: event.query()),
    }
