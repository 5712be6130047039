"""Activations that autograd saves for the backward, in a store: ``with saved_activations(store): loss = model(x)``."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from disco_accel.errors import ConfigError, StoreError, StoreFull
from disco_accel.native.backend import is_host
from disco_accel.store.recent_objects import RecentObjects
from disco_accel.store.stored_object import (
    Freer,
    Layout,
    ObjectStore,
    StoredObject,
    extent,
    freer_of,
    span_of,
    store_bytes,
)
from disco_accel.store.use_order import UseOrder

_T = TypeVar("_T")

MIN_BYTES = 1 << 20
"""Smaller tensors stay where they are. Bringing one to the store and back takes half a millisecond beside its bytes."""


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

    def pack(tensor: torch.Tensor) -> _Kept | _Stored:
        return _pack(store, step, tensor, min_bytes)

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


class _SavedStep:
    """The steps that save to one store, from all threads. Holds no reference to the store."""

    def __init__(self, freer: Freer, device_bytes: int) -> None:
        self.freer, self.device_bytes = freer, device_bytes
        self.lock = threading.Lock()
        self.order = UseOrder()
        self.recent = RecentObjects(device_bytes)
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
    return known or _steps.setdefault(store, _SavedStep(freer_of(store), store.stats()["device_bytes"]))


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

    @property
    def tensor(self) -> torch.Tensor:
        """With its memory, if that was kept."""
        return self._counter


class _Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("version",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.version = _Version(tensor, keep=True)

    def get(self) -> torch.Tensor:
        """The tensor; raises RuntimeError if it was written to."""
        self.version.check(tuple(self.version.tensor.size()))
        return self.version.tensor


class _Stored:
    """A saved tensor in the store. Autograd holds it for as long as a backward may need it.

    ``layout``: of the tensor in the object's bytes; with ``compact`` those are its elements alone, laid out so, and it
    lies in more bytes with gaps.
    """

    __slots__ = ("_begun", "_compact", "_layout", "_nbytes", "_number", "_object", "_step", "_used", "_version")

    def __init__(
        self,
        step: _SavedStep,
        number: int,
        version: _Version,
        item: StoredObject,
        layout: Layout,
        compact: Layout | None,
        nbytes: int,
    ) -> None:
        self._step, self._number, self._version, self._object = step, number, version, item
        self._layout, self._compact, self._nbytes = layout, compact, nbytes
        self._begun, self._used = time.monotonic(), False

    def __del__(self) -> None:
        # Ctrl-C may have come before anything was set.
        step: _SavedStep | None = getattr(self, "_step", None)
        if step is not None:
            step.live.discard(self._number)

    def get(self) -> torch.Tensor:
        """The tensor, brought back if it was evicted; its memory is this process's as long as it lives.

        Raises:
            RuntimeError: it was written to since.
            StoreFull, StoreGone: as ``Store.get``.
        """
        self._version.check(self._layout.size)
        item, step = self._object, self._step
        with step.lock:
            ahead = step.ahead(self._number)
            if not self._used:
                self._used = True
                step.order.note(self._number, self._nbytes, time.monotonic() - self._begun)
                item.expected.pop(self._number, None)
                item.uses -= 1
        memory = item.memory
        if memory is None:
            memory = _with_room(step, lambda: item.store.get(item.id))
            if item.uses > 0:
                step.recent.fetched(item, memory)
        elif item.uses <= 0:
            item.memory = None
        for other in ahead:
            other.store.prefetch(other.id)
        with torch.no_grad():
            if self._compact is None:
                # A backward may write to its saved tensors (cuDNN's recurrent layers, fused losses). In host memory it
                # then writes to pages of its own; a GPU has no such pages.
                return self._layout.lay_on(memory if memory.is_cpu else memory.clone())
            return self._layout.empty(memory.device).copy_(self._compact.lay_on(memory))


def _with_room(step: _SavedStep, ask: Callable[[], _T]) -> _T:
    """``ask()`` of the store, once more where objects without a use now took the room: those that are kept for later
    uses, and those without a reference. Raises StoreFull."""
    try:
        return ask()
    except StoreFull:
        step.recent.clear()
        step.freer.wait()
        return ask()


def _pack(store: ObjectStore, step: _SavedStep, tensor: torch.Tensor, min_bytes: int) -> _Kept | _Stored:
    if not _moves(tensor, min_bytes, store.device):
        return _Kept(tensor)
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
            layout, compact = span_of(tensor).layout_of(tensor), None
            if extent(tensor) > tensor.numel():
                # With gaps: a part of a larger tensor, whose other parts are saved by themselves or not at all.
                source = tensor.contiguous()
                compact = span_of(source).layout_of(source)
                item, _memory = _new_object(store, step, span_of(source).bytes_of(source), seconds)
            else:
                item, begin = _object_of(store, step, tensor, seconds)
                shift = (span_of(tensor).begin - begin) // tensor.itemsize
                layout = dataclasses.replace(layout, offset=layout.offset + shift)
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
        item, memory = _new_object(store, step, span.bytes_of(tensor), seconds)
        step.recent.stored(tensor, span, item, memory)
        return item, span.begin
    item, stored = found
    if seconds is not None and time.monotonic() + seconds < min(item.expected.values(), default=float("inf")):
        item.store.put(item.id, next_use=seconds)
    return item, stored.begin


def _new_object(
    store: ObjectStore, step: _SavedStep, content: torch.Tensor, seconds: float | None
) -> tuple[StoredObject, torch.Tensor]:
    step.stored += content.numel()
    return _with_room(step, lambda: store_bytes(store, content, step.freer, seconds))


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


def _unpack(packed: _Kept | _Stored) -> torch.Tensor:
    return packed.get()
