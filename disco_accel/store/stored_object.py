"""A tensor's bytes as an object of a store, freed when the last reference in this process goes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from disco_accel.errors import StoreError
from disco_accel.native.backend import backend_of
from disco_accel.threads import start_thread

AHEAD = 4
"""Uses for which a tensor is asked back ahead of its own. Announced times alone bring back one after another, each for
its own use: where the link is behind, later ones begin too late."""


class ObjectStore(Protocol):
    """The part of ``Store`` that offloaded weights and saved activations use; its docstrings hold."""

    @property
    def device(self) -> torch.device: ...
    def create(self, shape: Sequence[int], dtype: torch.dtype, device: str = "host") -> int: ...
    def get(self, id: int) -> torch.Tensor: ...
    def put(self, id: int, next_use: float | None = None) -> None: ...
    def free(self, id: int) -> None: ...
    def prefetch(self, id: int) -> None: ...
    def stats(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in an object's bytes. ``offset``: in elements from their begin, as ``size`` and ``stride``."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def lay_on(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in ``memory``, 1-d bytes that begin their storage; no copy."""
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        made.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
        return made

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """A tensor in new memory of ``device`` where it lies so."""
        elements = 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        whole = torch.empty(self.offset + max(0, elements), dtype=self.dtype, device=device)
        return whole.as_strided(self.size, self.stride, self.offset)


def extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of ``tensor``, which has some, in its storage."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))


def span_of(tensor: torch.Tensor) -> range:
    """The bytes of its storage in which ``tensor`` lies, from an aligned one on: fewer than its own where it is
    expanded, more where it has gaps."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    # It keeps its place in PyTorch's allocation: kernels may sum in another order where operands are aligned otherwise.
    aligned = backend_of(tensor.device).alignment
    return range(begin // aligned * aligned, begin + extent(tensor) * tensor.itemsize)


def bytes_in(tensor: torch.Tensor, span: range) -> torch.Tensor:
    """The bytes ``span`` of ``tensor``'s storage, as a 1-d uint8 tensor; no copy."""
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    made.set_(tensor.untyped_storage(), span.start, (len(span),))  # type: ignore[call-overload]
    return made


def layout_in(tensor: torch.Tensor, span: range) -> Layout:
    """How ``tensor`` lies in the bytes ``span`` of its storage."""
    offset = int(tensor.storage_offset()) - span.start // tensor.itemsize
    return Layout(tensor.dtype, tuple(tensor.size()), tensor.stride(), offset)


_FreeQueue = SimpleQueue[int | threading.Event | None]
_queues: weakref.WeakKeyDictionary[ObjectStore, _FreeQueue] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _free_queue(store: ObjectStore) -> _FreeQueue:
    """Ids of objects of ``store`` whose last reference has gone. A thread frees them: a finalizer may run in the middle
    of a call of the store, and must not wait for another."""
    with _making:
        if store not in _queues:
            queue = _queues[store] = _FreeQueue()
            start_thread(_free, weakref.ref(store), queue, name="store-free", stop=partial(queue.put, None))
            # At exit the end of the connection frees all.
            weakref.finalize(store, queue.put, None).atexit = False
        return _queues[store]


def _free(store: weakref.ref[ObjectStore], queue: _FreeQueue) -> None:
    while (item := queue.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        there = store()
        if there is None:
            return
        # A store that is gone has freed it.
        with contextlib.suppress(StoreError):
            there.free(item)
        del there


def wait_for_frees(store: ObjectStore, seconds: float = 10.0) -> None:
    """Return once objects without a reference are freed, or after ``seconds``: the thread may be a dead parent's."""
    done = threading.Event()
    _free_queue(store).put(done)
    done.wait(seconds)


class StoredObject:
    """One object of a store in this process's name.

    ``memory``: its bytes while they are kept on the device between uses. ``uses``: how many are to come. ``expected``:
    for each of them, by its number, when it comes if this step is as the last (seconds of ``time.monotonic``).
    """

    _freed: _FreeQueue | None = None
    """None where Ctrl-C came before anything was set, which ``__del__`` sees too."""

    def __init__(self, store: ObjectStore, id: int, nbytes: int) -> None:
        self.store, self.id, self.nbytes = store, id, nbytes
        self.memory: torch.Tensor | None = None
        self.uses = 0
        self.expected: dict[int, float] = {}
        self._freed = _free_queue(store)

    def __del__(self) -> None:
        # In any thread, and in the middle of any call of the store: it only notes.
        if self._freed is not None:
            self._freed.put(self.id)


def store_bytes(
    store: ObjectStore, content: torch.Tensor, next_use: float | None = None
) -> tuple[StoredObject, torch.Tensor]:
    """A new object of the device tier with ``content`` (1-d bytes), final; and its memory, which keeps it on the
    device. Raises StoreFull, StoreGone: as ``Store.create``."""
    nbytes = content.numel()
    made = StoredObject(store, store.create((nbytes,), torch.uint8, device="device"), nbytes)
    memory = store.get(made.id)
    memory.copy_(content)
    store.put(made.id, next_use)
    return made, memory
