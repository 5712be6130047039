"""Copies of host tensors to a device, beside its own work: on a stream of a GPU, in a thread of the host device."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from disco_accel.threads import start_thread

_DATA: Any = torch._C.TensorBase.data


def _bytes_into(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    # Past the count of versions, which tells of the writes of others.
    with torch.no_grad():
        _DATA.__get__(target).copy_(source, non_blocking=non_blocking)


class _HostLoading:
    """One copy on its way. ``tensor``: its target, whose version stays 0 until somebody writes to it."""

    __slots__ = ("_arrived", "_failure", "_source", "tensor")

    def __init__(self, source: torch.Tensor) -> None:
        self.tensor = torch.empty_like(source)
        self._source: torch.Tensor | None = source
        self._arrived = threading.Event()
        self._failure: BaseException | None = None

    def copy(self) -> None:
        assert self._source is not None
        try:
            _bytes_into(self.tensor, self._source)
        except BaseException as error:
            self._failure = error
        self._source = None

    @property
    def end(self) -> Callable[[], object]:
        """Tells those that wait. It holds nothing of the device's memory."""
        return self._arrived.set

    def arrive(self) -> None:
        """What the caller's thread computes from now on, on its current stream, finds the bytes in ``tensor``. Raises
        what made the copy fail."""
        self._arrived.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def finish(self) -> Callable[[], object]:
        """Returns once the source is not read any more. It holds nothing of the device's memory."""
        return self._arrived.wait


class _CudaLoading:
    """As a ``_HostLoading``. Its memory is of the stream that is current when it begins, and is reused in that stream's
    order."""

    __slots__ = ("_arrived", "_copied", "_device", "_home", "tensor")

    def __init__(self, source: torch.Tensor, device: torch.device, copies: torch.cuda.Stream) -> None:
        self._device, self._arrived = device, False
        with torch.cuda.device(device):
            self._home = torch.cuda.current_stream(device)
            self.tensor = torch.empty_like(source, device=device)
            # The memory may be that of a tensor which kernels on this stream still read.
            copies.wait_event(self._home.record_event())
            with torch.cuda.stream(copies):
                _bytes_into(self.tensor, source, non_blocking=True)
            self._copied = copies.record_event()

    def arrive(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied)
        if stream == self._home:
            self._arrived = True
        else:
            self.tensor.record_stream(stream)

    @property
    def finish(self) -> Callable[[], object]:
        wait: Callable[[], object] = self._copied.synchronize
        return wait

    def __del__(self) -> None:
        # Nothing may be put into memory that a copy still writes to.
        if not getattr(self, "_arrived", True) and hasattr(self, "_copied"):
            self._home.wait_event(self._copied)


Loading = _HostLoading | _CudaLoading
Load = Callable[[torch.Tensor], Loading]
"""Begins to copy a host tensor to a device, after the loads before it; its target has memory of its own."""


def host_loads(bandwidth: float | None) -> Load:
    """Over a link of so many bytes a second, None for one that is not throttled. Copies wait for each other on it. One
    thread at a time may call the result."""
    waiting: queue.SimpleQueue[_HostLoading | None] = queue.SimpleQueue()
    process = os.getpid()
    thread: list[threading.Thread | None] = []

    def load(source: torch.Tensor) -> Loading:
        loading = _HostLoading(source)
        if not thread:
            stop = weakref.finalize(load, waiting.put, None)
            stop.atexit = False
            thread.append(start_thread(_work, waiting, bandwidth, name="disco-visits", stop=stop))
        if thread[0] is None or os.getpid() != process:
            # At the end of the process, or in a forked one, which has no such thread.
            loading.copy()
            loading.end()
        else:
            waiting.put(loading)
        return loading

    return load


def _work(waiting: queue.SimpleQueue[_HostLoading | None], bandwidth: float | None) -> None:
    free = 0.0
    while (loading := waiting.get()) is not None:
        begins = max(free, time.perf_counter())
        loading.copy()
        if bandwidth is not None:
            free = begins + loading.tensor.nbytes / bandwidth
            time.sleep(max(0.0, free - time.perf_counter()))
        # Whoever is told may free the target at once.
        end = loading.end
        del loading
        end()


def cuda_loads(device: torch.device) -> Load:
    """On a stream of their own."""
    copies: list[torch.cuda.Stream] = []

    def load(source: torch.Tensor) -> Loading:
        if not copies:
            copies.append(torch.cuda.Stream(device))
        return _CudaLoading(source, device, copies[0])

    return load
