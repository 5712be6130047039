"""A client's objects in the memory of a GPU, as tensors without a copy.

Kernels run later than the calls that start them. So memory is given back to the store, or handed to other processes,
when all work that this process had queued on the GPU by then is done, on any stream.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from disco_accel.errors import DeviceLost, ExecutionError, StoreError
from disco_accel.native.cuda_driver import CudaMapping, device_id, import_mapping
from disco_accel.store.objects import footprint_of
from disco_accel.threads import start_thread

_DRAIN_SECONDS = 30.0
"""A request that found no room waits so long for kernels that use this process's dropped tensors."""


class _Exposed:
    """Device memory for ``torch.as_tensor``, which keeps this object as long as a tensor of it lives."""

    def __init__(self, mapping: CudaMapping) -> None:
        # PyTorch refuses memory that says it is read-only; a kernel that writes to such is CUDA's to stop.
        self.__cuda_array_interface__ = {
            **{"shape": (mapping.nbytes,), "typestr": "|u1", "data": (mapping.address, False)},
            **{"strides": None, "version": 3},
        }


_Dropped = tuple[CudaMapping, Callable[[], None]]
"""Memory whose last tensor has gone, and a function that tells the store."""

_objects: dict[int, CudaObjects] = {}
_making = threading.Lock()


class CudaObjects:
    """Those of all connections, on one device. Thread safe. ``ended``: how many mappings were given back."""

    def __init__(self, index: int, grain: int) -> None:
        """``index``: of the device in PyTorch; ``grain``: its memory comes in multiples of so many bytes."""
        self.device = torch.device("cuda", index)
        self.ended = 0
        self._grain = grain
        self._pid = os.getpid()
        self._mappings: dict[int, CudaMapping] = {}
        self._dropped: SimpleQueue[_Dropped | threading.Event | None] = SimpleQueue()
        # As long as the process: tensors may outlive the connection.
        start_thread(self._give_back, name="store-gpu-free", stop=partial(self._dropped.put, None))

    @classmethod
    def of(cls, figures: Mapping[str, int]) -> CudaObjects:
        """For the device that a store's ``figures`` name. Raises StoreError: PyTorch does not see it in this
        process."""
        wanted = struct.pack("<qq", figures["device_id_low"], figures["device_id_high"])
        if not torch.cuda.is_available():
            raise StoreError(
                f"store: its objects are in the memory of GPU {wanted.hex()}, and this PyTorch ({torch.__version__}) "
                "sees no GPU: install a CUDA build, or look at CUDA_VISIBLE_DEVICES"
            )
        for index in range(torch.cuda.device_count()):
            if device_id(index) == wanted:
                torch.cuda.init()
                with _making:
                    if index not in _objects:
                        _objects[index] = cls(index, figures["device_grain"])
                    return _objects[index]
        raise StoreError(
            f"store: its objects are in the memory of GPU {wanted.hex()}, which this process does not see: add it to "
            "CUDA_VISIBLE_DEVICES"
        )

    def map(self, file: int, nbytes: int, *, writes: bool, freed: Callable[[], None]) -> torch.Tensor:
        """The ``nbytes`` bytes of an object, in whole grains, as a 1-d uint8 tensor; the descriptor is not needed any
        more. After the last tensor of that memory ``freed`` is called, in a thread of its own, once the GPU is done.

        Raises:
            StoreError: a CUDA graph is being captured.
            ExecutionError: the driver refuses.
        """
        _refuse_capture()
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        mapping = import_mapping(self.device.index, file, footprint_of(nbytes, self._grain), writes=writes)
        exposed = _Exposed(mapping)
        try:
            made: torch.Tensor = torch.as_tensor(exposed, device=self.device)
            assert made.data_ptr() == mapping.address
        except BaseException:
            mapping.unmap()
            raise
        self._mappings[mapping.address] = mapping
        weakref.finalize(exposed, self._drop, (mapping, freed)).atexit = False
        return made

    def let_write(self, memory: torch.Tensor, writes: bool) -> None:
        """Let kernels write to ``memory``, a tensor of ``map``, or not any more: when it returns, this process's
        queued writes there are done, and others see them.

        Raises:
            StoreError: a CUDA graph is being captured.
            DeviceLost: queued work ended in an error of the GPU.
            ExecutionError: the driver refuses.
        """
        _refuse_capture()
        if memory.nbytes == 0:
            return
        if not writes:
            self._wait()
        self._mappings[memory.data_ptr()].allow(writes=writes)

    def _wait(self) -> None:
        """Until all that this process has queued on the device is done. Raises DeviceLost."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise DeviceLost(
                f"store: {self.device} ended what this process had queued with an error, and does nothing more for it "
                f"until it is started again: {str(error).partition(chr(10))[0]}"
            ) from error

    def drain(self, ended: int) -> bool:
        """Wait for the GPU to be done with dropped memory. Whether more than ``ended`` mappings are given back."""
        done = threading.Event()
        self._dropped.put(done)
        done.wait(_DRAIN_SECONDS)
        return self.ended > ended

    def _drop(self, dropped: _Dropped) -> None:
        # Called in any thread and at any point of another call: it only notes. A forked process has no part in it.
        if os.getpid() == self._pid:
            self._dropped.put(dropped)

    def _give_back(self) -> None:
        while True:
            batch: list[Any] = [self._dropped.get()]
            with suppress(Empty):
                while True:
                    batch.append(self._dropped.get_nowait())
            if None in batch:
                return
            # Where the GPU is lost, so are all that use it.
            with suppress(DeviceLost):
                self._wait()
            for one in batch:
                if isinstance(one, threading.Event):
                    one.set()
                    continue
                mapping, freed = one
                self._mappings.pop(mapping.address, None)
                with suppress(ExecutionError):
                    mapping.unmap()
                freed()
                self.ended += 1
                del freed
            # They hold the connection.
            batch.clear()
            del one


def _refuse_capture() -> None:
    """Raise StoreError inside the capture of a CUDA graph, which would use memory at times that nobody waits for."""
    if torch.cuda.is_current_stream_capturing():
        raise StoreError("store: a CUDA graph is being captured: get and put its tensors before or after")
