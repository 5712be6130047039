"""The few objects that are kept on the device for their next use: another tensor of a storage that was stored just
now, or another use of an object that was fetched just now."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from disco_accel.store.stored_object import ByteSpan, StoredObject

_KEPT = 4
"""Objects. A LoRA step of a tiny Llama (``benchmarks.store.offload``) stores 103 objects with 1, 85 with 2 to 8, 79
with 16, which would take 16 from the device."""
_SHARE = 0.25
"""Of the store's device, that they may take, or one alone."""


@dataclass(frozen=True, slots=True)
class _Recent:
    """``storage``: whose bytes ``span`` the object has, if they may be stored again; does not keep it."""

    object: weakref.ref[StoredObject]
    storage: StorageWeakRef | None = None
    span: ByteSpan | None = None


class RecentObjects:
    """The last few. An object that is freed is not held up. Thread safe."""

    def __init__(self, device_bytes: int) -> None:
        self._recent: deque[_Recent] = deque()
        self._lock = threading.Lock()
        self._most = int(_SHARE * device_bytes)

    def stored(self, tensor: torch.Tensor, span: ByteSpan, item: StoredObject, memory: torch.Tensor) -> None:
        """``item`` has the bytes ``span`` of ``tensor``'s storage, in ``memory``."""
        self._add(_Recent(weakref.ref(item), StorageWeakRef(tensor.untyped_storage()), span), item, memory)

    def fetched(self, item: StoredObject, memory: torch.Tensor) -> None:
        """``item`` came back, in ``memory``, and is used again."""
        self._add(_Recent(weakref.ref(item)), item, memory)

    def find(self, tensor: torch.Tensor, span: ByteSpan) -> tuple[StoredObject, ByteSpan] | None:
        """An object with the bytes ``span`` of ``tensor``'s storage as they are now, and the bytes that it has.

        They are compared: ``.data`` and NumPy write to a storage and leave its version as it was.
        """
        storage = tensor.untyped_storage()
        with self._lock:
            recent = list(self._recent)
        for one in reversed(recent):
            if one.storage is None or one.storage.cdata != storage._cdata or one.storage.expired():
                continue
            item = one.object()
            memory = None if item is None else item.memory
            if item is None or memory is None or one.span is None or not one.span.holds(span):
                continue
            begin = span.begin - one.span.begin
            if _same(span.bytes_of(tensor), memory[begin : begin + span.end - span.begin]):
                return item, one.span
        return None

    def clear(self) -> None:
        """Drop all: others need the room."""
        with self._lock:
            dropped, self._recent = list(self._recent), deque()
        self._drop(dropped)

    def _add(self, one: _Recent, item: StoredObject, memory: torch.Tensor) -> None:
        item.memory = memory
        with self._lock:
            # Of others that are freed, or used up, nothing is held.
            others = [(r, o) for r in self._recent if (o := r.object()) not in (None, item) and o.memory is not None]
            nbytes, kept = item.nbytes, deque([one])
            dropped = []
            for other, object in reversed(others):
                nbytes += object.nbytes
                if len(kept) < _KEPT and nbytes <= self._most:
                    kept.appendleft(other)
                else:
                    dropped.append(other)
            self._recent = kept
        self._drop(dropped)

    def _drop(self, dropped: list[_Recent]) -> None:
        now = time.monotonic()
        for one in dropped:
            item = one.object()
            if item is None or item.memory is None:
                continue
            item.memory = None
            expected = min(list(item.expected.values()), default=None)
            # A get has cleared the announcement.
            if one.storage is None and expected is not None:
                item.store.put(item.id, next_use=max(0.0, expected - now))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two 1-d byte tensors have the same bits."""
    words = one.numel() // 8 * 8
    return torch.equal(one[:words].view(torch.int64), other[:words].view(torch.int64)) and torch.equal(
        one[words:], other[words:]
    )
