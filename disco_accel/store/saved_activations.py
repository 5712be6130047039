"""Activations that autograd saves for the backward, in a store: ``with saved_activations(store): loss = model(x)``."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from disco_accel.errors import ConfigError, StoreError, StoreFull
from disco_accel.native.backend import is_host
from disco_accel.store.stored_object import (
    AHEAD,
    Layout,
    ObjectStore,
    StoredObject,
    bytes_in,
    extent,
    layout_in,
    span_of,
    store_bytes,
    wait_for_frees,
)

_T = TypeVar("_T")

MIN_BYTES = 1 << 20
"""Smaller tensors stay where they are. Bringing one to the store and back takes half a millisecond beside its bytes."""
_KEPT = 4
"""Objects. A LoRA step of a tiny Llama (``benchmarks.store.offload``) stores 103 objects with 1, 85 with 2 to 8, 79
with 16, which would take 16 from the device."""
_SHARE = 0.25
"""Of the store's device, that they may take, or one alone."""


@contextmanager
def saved_activations(store: ObjectStore, min_bytes: int = MIN_BYTES) -> Iterator[None]:
    """While it is entered, tensors that autograd saves for the backward are copied to ``store``, of which they may be
    evicted, and come back when the backward needs them. Backwards may run outside.

    From the second step on each tensor is announced with the time after which it was used in the step before: the same
    number among those saved since nothing was. Bits are those of plain PyTorch: its strides, alignment and errors too.
    Tensors smaller than ``min_bytes``, parameters and their views, tensors of other layouts and of subclasses stay.
    Checkpointing inside has hooks of its own and saves the same as without.

    Raises:
        ConfigError: ``min_bytes`` is not positive.
        StoreError, in a forward: a tensor is on another device than the store's.
        StoreFull, StoreGone, in a forward or a backward: as ``Store.create`` and ``Store.get``.
    """
    if min_bytes < 1:
        raise ConfigError(f"min_bytes: {min_bytes} is not a number of bytes from 1 on")
    step = _step_of(store)

    def pack(tensor: torch.Tensor) -> _Version | _Stored:
        return _pack(store, step, tensor, min_bytes)

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


class _UseOrder:
    """The uses of one step, numbered by the caller, and those of the step before. Not thread safe."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[int, float]] = {}
        self._order: list[int] = []
        self._last_seconds: dict[int, tuple[int, float]] = {}
        self._last_order: list[int] = []
        self._places: dict[int, int] = {}

    def begin_step(self) -> None:
        """The next step goes by the uses of this one. A step without uses teaches nothing."""
        if self._order:
            self._last_seconds, self._last_order = self._seconds, self._order
            self._places = {number: place for place, number in enumerate(self._order)}
        self._seconds, self._order = {}, []

    def seconds(self, number: int, nbytes: int) -> float | None:
        """From now to use ``number``, as it was in the last step from the same event on. None in the first step, and
        where that use was of another size."""
        size, seconds = self._last_seconds.get(number, (nbytes, None))
        return seconds if size == nbytes else None

    def note(self, number: int, nbytes: int, seconds: float) -> None:
        """Use ``number`` comes now, ``seconds`` after the event from which it is announced."""
        self._seconds[number] = (nbytes, seconds)
        self._order.append(number)

    def following(self, number: int) -> list[int]:
        """The uses that come next after ``number``: in the order of the last step; in the first, backwards as autograd
        goes."""
        if self._last_order:
            place = self._places.get(number)
            return [] if place is None else self._last_order[place + 1 : place + 1 + AHEAD]
        return list(range(number - 1, max(-1, number - 1 - AHEAD), -1))


@dataclass(frozen=True, slots=True)
class _Recent:
    """``storage``: whose bytes ``span`` the object has, if they may be stored again; does not keep it."""

    object: weakref.ref[StoredObject]
    storage: StorageWeakRef | None = None
    span: range | None = None


class _RecentObjects:
    """The last few. An object that is freed is not held up. Thread safe."""

    def __init__(self, device_bytes: int) -> None:
        self._recent: deque[_Recent] = deque()
        self._lock = threading.Lock()
        self._most = int(_SHARE * device_bytes)

    def stored(self, tensor: torch.Tensor, span: range, item: StoredObject, memory: torch.Tensor) -> None:
        """``item`` has the bytes ``span`` of ``tensor``'s storage, in ``memory``."""
        self._add(_Recent(weakref.ref(item), StorageWeakRef(tensor.untyped_storage()), span), item, memory)

    def fetched(self, item: StoredObject, memory: torch.Tensor) -> None:
        """``item`` came back, in ``memory``, and is used again."""
        self._add(_Recent(weakref.ref(item)), item, memory)

    def find(self, tensor: torch.Tensor, span: range) -> tuple[StoredObject, range] | None:
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
            if item is None or memory is None or one.span is None:
                continue
            begin = span.start - one.span.start
            if begin < 0 or span.stop > one.span.stop:
                continue
            if _same(bytes_in(tensor, span), memory[begin : begin + len(span)]):
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


class _SavedStep:
    """The steps that save to one store, from all threads. Holds no reference to the store."""

    def __init__(self, device_bytes: int) -> None:
        self.device_bytes = device_bytes
        self.lock = threading.Lock()
        self.order = _UseOrder()
        self.recent = _RecentObjects(device_bytes)
        self.stored = 0
        """Bytes of this step's objects."""
        self.live: set[int] = set()
        """Numbers of saved tensors whose graph is alive."""
        self.objects: dict[int, weakref.ref[StoredObject]] = {}
        """Saved tensors that may be asked back ahead, by their numbers."""
        self._number = 0

    def begin_use(self, nbytes: int) -> tuple[int, float | None]:
        """The number of a tensor that is saved now, 0 for the first since no graph is alive, and the seconds until it
        is used, None if that is not known."""
        with self.lock:
            if not self.live and self._number:
                self._number = self.stored = 0
                self.objects.clear()
                self.order.begin_step()
            number = self._number
            self._number += 1
            self.live.add(number)
            return number, self.order.seconds(number, nbytes)

    def ahead(self, number: int) -> list[StoredObject]:
        """Objects of the uses that come after ``number`` and were not asked back yet. Under ``lock``."""
        self.objects.pop(number, None)
        if self.stored <= self.device_bytes / 2:
            # They are there, unless others have taken the device; then announced times bring them back.
            return []
        found = [self.objects.pop(n, None) for n in self.order.following(number)]
        alive = [item for one in found if one is not None and (item := one()) is not None and item.memory is None]
        return list(dict.fromkeys(alive))


_steps: weakref.WeakKeyDictionary[ObjectStore, _SavedStep] = weakref.WeakKeyDictionary()


def _step_of(store: ObjectStore) -> _SavedStep:
    known = _steps.get(store)
    # Of several threads that make one at the same time, all get the first one's.
    return known or _steps.setdefault(store, _SavedStep(store.stats()["device_bytes"]))


class _Version:
    """The version counter of a tensor, without its memory: that a tensor was written to since it was saved is an error
    of PyTorch's, which leaves the check to hooks where there are any."""

    __slots__ = ("_counter", "_saved")

    def __init__(self, tensor: torch.Tensor, keep: bool) -> None:
        counter = tensor.detach()
        if not keep:
            # Assigning data leaves the counter in place.
            counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._counter, self._saved = counter, tensor._version

    def check(self, size: tuple[int, ...]) -> None:
        """Raises RuntimeError as PyTorch does."""
        if self._counter._version != self._saved:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._counter.dtype} {list(size)}] is at version {self._counter._version}; "
                f"expected version {self._saved} instead"
            )

    def get(self) -> torch.Tensor:
        """The tensor, where its memory was kept; raises RuntimeError if it was written to."""
        self.check(tuple(self._counter.size()))
        return self._counter


@dataclass(eq=False, slots=True)
class _Stored:
    """A saved tensor in the store. Autograd holds it for as long as a backward may need it.

    ``layout``: of the tensor in the object's bytes; with ``compact`` those are its elements alone, laid out so, and it
    lies in more bytes with gaps. ``begun``: when it was saved.
    """

    step: _SavedStep
    number: int
    version: _Version
    item: StoredObject
    layout: Layout
    compact: Layout | None
    nbytes: int
    begun: float = field(default_factory=time.monotonic)
    used: bool = False

    def __del__(self) -> None:
        # Ctrl-C may have come before anything was set.
        step: _SavedStep | None = getattr(self, "step", None)
        if step is not None:
            step.live.discard(self.number)

    def get(self) -> torch.Tensor:
        """The tensor, brought back if it was evicted; its memory is this process's as long as it lives. Raises
        RuntimeError where it was written to since, StoreFull and StoreGone as ``Store.get``."""
        self.version.check(self.layout.size)
        item, step = self.item, self.step
        with step.lock:
            ahead = step.ahead(self.number)
            if not self.used:
                self.used = True
                step.order.note(self.number, self.nbytes, time.monotonic() - self.begun)
                item.expected.pop(self.number, None)
                item.uses -= 1
        memory = item.memory
        if memory is None:
            memory = _with_room(item.store, step, lambda: item.store.get(item.id))
            if item.uses > 0:
                step.recent.fetched(item, memory)
        elif item.uses <= 0:
            item.memory = None
        for other in ahead:
            other.store.prefetch(other.id)
        with torch.no_grad():
            if self.compact is None:
                # A backward may write to its saved tensors (cuDNN's recurrent layers, fused losses). In host memory it
                # then writes to pages of its own; a GPU has no such pages.
                return self.layout.lay_on(memory if memory.is_cpu else memory.clone())
            return self.layout.empty(memory.device).copy_(self.compact.lay_on(memory))


def _with_room(store: ObjectStore, step: _SavedStep, ask: Callable[[], _T]) -> _T:
    """``ask()`` of the store, once more where objects without a use now took the room: those that are kept for later
    uses, and those without a reference. Raises StoreFull."""
    try:
        return ask()
    except StoreFull:
        step.recent.clear()
        wait_for_frees(store)
        return ask()


def _pack(store: ObjectStore, step: _SavedStep, tensor: torch.Tensor, min_bytes: int) -> _Version | _Stored:
    if not _moves(tensor, min_bytes, store.device):
        return _Version(tensor, keep=True)
    if tensor.device != store.device:
        raise StoreError(
            f"saved_activations: a saved tensor {list(tensor.size())} is on {tensor.device}, and this store's device "
            f"is {_named(store.device)}: train on that one, serve a store there (--device-kind), train with a plan "
            "(prepare), or under torch's save_on_cpu"
        )
    number, seconds = step.begin_use(tensor.nbytes)
    try:
        version = _Version(tensor, keep=False)
        with torch.no_grad():
            layout, compact = layout_in(tensor, span_of(tensor)), None
            if extent(tensor) > tensor.numel():
                # With gaps: a part of a larger tensor, whose other parts are saved by themselves or not at all.
                source = tensor.contiguous()
                compact = layout_in(source, span_of(source))
                item, _memory = _new_object(store, step, bytes_in(source, span_of(source)), seconds)
            else:
                item, begin = _object_of(store, step, tensor, seconds)
                shift = (span_of(tensor).start - begin) // tensor.itemsize
                layout = replace(layout, offset=layout.offset + shift)
        record = _Stored(step, number, version, item, layout, compact, tensor.nbytes)
    except BaseException:
        step.live.discard(number)
        raise
    with step.lock:
        item.uses += 1
        step.objects[number] = weakref.ref(item)
        if seconds is not None:
            item.expected[number] = time.monotonic() + seconds
    return record


def _object_of(
    store: ObjectStore, step: _SavedStep, tensor: torch.Tensor, seconds: float | None
) -> tuple[StoredObject, int]:
    """An object that has the bytes in which ``tensor`` lies, and the first byte of the storage that it has."""
    span = span_of(tensor)
    found = step.recent.find(tensor, span)
    if found is None:
        item, memory = _new_object(store, step, bytes_in(tensor, span), seconds)
        step.recent.stored(tensor, span, item, memory)
        return item, span.start
    item, stored = found
    if seconds is not None and time.monotonic() + seconds < min(item.expected.values(), default=float("inf")):
        item.store.put(item.id, next_use=seconds)
    return item, stored.start


def _new_object(
    store: ObjectStore, step: _SavedStep, content: torch.Tensor, seconds: float | None
) -> tuple[StoredObject, torch.Tensor]:
    step.stored += content.numel()
    return _with_room(store, step, lambda: store_bytes(store, content, seconds))


def _named(device: torch.device) -> str:
    return "a slice of host memory" if is_host(device) else str(device)


def _moves(tensor: torch.Tensor, min_bytes: int, there: torch.device) -> bool:
    """Whether a saved tensor goes to the store, whose device is ``there``."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.nbytes < min_bytes:
        return False
    if tensor.is_leaf and tensor.requires_grad:
        # Its user holds it, as they do parameters.
        return False
    if isinstance(tensor._base, torch.nn.Parameter) or tensor.is_meta:
        return False
    if tensor.is_cpu and not is_host(there):
        # Host memory is where it would be evicted to.
        return False
    lazy = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    other = tensor.is_quantized or tensor.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not lazy and not other


def _unpack(packed: _Version | _Stored) -> torch.Tensor:
    return packed.get()
