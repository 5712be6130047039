"""Storages that were stored just now, so that one which autograd saves several times is stored once."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from disco_accel.store.stored_object import Span, StoredObject

_KEPT = 4
"""Objects that are kept on the device so that they can be compared. Projections of one input save it within so many of
each other; on a tiny Llama with LoRA 8 found no more."""


@dataclass(frozen=True, slots=True)
class _Recent:
    """``memory``: of the object, whose lease it is. ``storage``: whose bytes ``span`` they were; does not keep it."""

    storage: StorageWeakRef
    span: Span
    object: weakref.ref[StoredObject]
    memory: torch.Tensor


class RecentObjects:
    """The last few objects, those whose storage is gone dropped. Thread safe."""

    def __init__(self) -> None:
        self._recent: deque[_Recent] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def add(self, tensor: torch.Tensor, span: Span, item: StoredObject, memory: torch.Tensor) -> None:
        """``item`` has the bytes ``span`` of ``tensor``'s storage, in ``memory``."""
        recent = _Recent(StorageWeakRef(tensor.untyped_storage()), span, weakref.ref(item), memory)
        with self._lock:
            alive = [r for r in self._recent if not r.storage.expired() and r.object() is not None]
            self._recent.clear()
            self._recent.extend([*alive, recent])

    def find(self, tensor: torch.Tensor, span: Span) -> tuple[StoredObject, Span] | None:
        """An object with the bytes ``span`` of ``tensor``'s storage as they are now, and the bytes that it has.

        They are compared: ``.data`` and NumPy write to a storage and leave its version as it was.
        """
        storage = tensor.untyped_storage()
        with self._lock:
            recent = list(self._recent)
        for one in reversed(recent):
            if one.storage.cdata != storage._cdata or one.storage.expired() or not one.span.holds(span):
                continue
            item = one.object()
            begin = span.begin - one.span.begin
            if item is not None and _same(span.bytes_of(tensor), one.memory[begin : begin + span.end - span.begin]):
                return item, one.span
        return None

    def clear(self) -> None:
        """Let go of all: what is stored next needs their room, or is not of their storages."""
        with self._lock:
            self._recent.clear()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two 1-d byte tensors have the same bits."""
    words = one.numel() // 8 * 8
    return torch.equal(one[:words].view(torch.int64), other[:words].view(torch.int64)) and torch.equal(
        one[words:], other[words:]
    )
