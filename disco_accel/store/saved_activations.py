"""Activations that autograd saves for the backward, in a store: ``with saved_activations(store): loss = model(x)``."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from disco_accel.errors import ConfigError, StoreError, StoreFull
from disco_accel.store.object_store import ObjectStore
from disco_accel.store.recent_objects import RecentObjects
from disco_accel.store.stored_object import Freer, Layout, Span, StoredObject, extent, freer_of, span_of, store_bytes
from disco_accel.store.use_order import UseOrder

MIN_BYTES = 1 << 20
"""Smaller tensors stay where they are. Bringing one to the store and back takes half a millisecond beside its bytes."""


@contextmanager
def saved_activations(store: ObjectStore, min_bytes: int = MIN_BYTES) -> Iterator[None]:
    """While it is entered, what autograd saves for the backward is copied to ``store``, of which it may be evicted,
    and comes back when the backward needs it. Backwards may run outside.

    From the second step on each tensor is announced with the time after which it was used in the step before: the same
    number among those saved since nothing was. Bits are those of plain PyTorch: its strides, alignment and errors too.
    Tensors smaller than ``min_bytes``, parameters and their views, tensors of other layouts and of subclasses stay.
    Checkpointing inside has hooks of its own and saves what it saves without.

    Raises:
        ConfigError: ``min_bytes`` is not positive.
        StoreError, in a forward: a tensor is not in host memory.
        StoreFull, StoreGone, in a forward or a backward: as ``Store.create`` and ``Store.get``.
    """
    if min_bytes < 1:
        raise ConfigError(f"min_bytes: {min_bytes} is not a number of bytes from 1 on")
    step = _step_of(store)

    def pack(tensor: torch.Tensor) -> _Kept | _Stored:
        return _pack(store, step, tensor, min_bytes)

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, _unpack)
    with hooks:
        try:
            yield
        finally:
            step.recent.clear()


class _Step:
    """What is known of the steps that save to one store, from all threads. Holds no reference to the store."""

    def __init__(self, freer: Freer) -> None:
        self.freer = freer
        self.lock = threading.Lock()
        self.order = UseOrder()
        self.recent = RecentObjects()
        self.live: set[int] = set()
        """Numbers of saved tensors whose graph is alive."""
        self.objects: dict[int, weakref.ref[StoredObject]] = {}
        """Saved tensors that may be asked back ahead, by their numbers."""
        self._number = 0

    def next_number(self) -> int:
        """Of the next tensor to be saved; 0 for the first since no graph is alive. Under ``lock``."""
        if not self.live and self._number:
            self._number = 0
            self.objects.clear()
            self.order.begin_step()
        number = self._number
        self._number += 1
        self.live.add(number)
        return number


_steps: weakref.WeakKeyDictionary[ObjectStore, _Step] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _step_of(store: ObjectStore) -> _Step:
    freer = freer_of(store)
    with _making:
        if store not in _steps:
            _steps[store] = _Step(freer)
        return _steps[store]


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
        self, step: _Step, version: _Version, item: StoredObject, layout: Layout, compact: Layout | None, nbytes: int
    ) -> None:
        self._step, self._version, self._object = step, version, item
        self._layout, self._compact, self._nbytes = layout, compact, nbytes
        self._begun, self._used = time.monotonic(), False
        with step.lock:
            self._number = step.next_number()
            step.objects[self._number] = weakref.ref(item)
            seconds = step.order.seconds(self._number, nbytes)
            first = None
            if seconds is not None:
                first = min(item.expected.values(), default=None)
                item.expected[self._number] = self._begun + seconds
        if seconds is not None and (first is None or self._begun + seconds < first):
            item.store.put(item.id, next_use=seconds)

    def __del__(self) -> None:
        # Not there where __init__ was interrupted.
        number = getattr(self, "_number", None)
        if number is not None:
            self._step.live.discard(number)

    def get(self) -> torch.Tensor:
        """The tensor, brought back if it was evicted; its memory is this process's as long as it lives.

        Raises:
            RuntimeError: it was written to since.
            StoreFull, StoreGone: as ``Store.get``.
        """
        self._version.check(self._layout.size)
        item, step = self._object, self._step
        step.recent.clear()
        with step.lock:
            now = time.monotonic()
            if not self._used:
                self._used = True
                step.order.note(self._number, self._nbytes, now - self._begun)
            item.expected.pop(self._number, None)
            again = min(item.expected.values(), default=None)
            ahead = self._ahead()
        memory = item.store.get(item.id)
        if again is not None:
            item.store.put(item.id, next_use=max(0.0, again - now))
        for other in ahead:
            other.store.prefetch(other.id)
        if self._compact is None:
            return self._layout.lay_on(memory)
        with torch.no_grad():
            return self._layout.spread(self._compact.lay_on(memory))

    def _ahead(self) -> list[StoredObject]:
        """Objects of the next uses that were not asked back yet. Under the lock."""
        found: list[StoredObject] = []
        step = self._step
        step.objects.pop(self._number, None)
        for number in step.order.following(self._number):
            reference = step.objects.pop(number, None)
            item = None if reference is None else reference()
            if item is not None and item is not self._object and item not in found:
                found.append(item)
        return found


def _pack(store: ObjectStore, step: _Step, tensor: torch.Tensor, min_bytes: int) -> _Kept | _Stored:
    if not _moves(tensor, min_bytes):
        return _Kept(tensor)
    if tensor.device.type != "cpu":
        raise StoreError(
            f"saved_activations: a saved tensor {list(tensor.size())} is on {tensor.device}; a store takes tensors of "
            "host memory alone so far. Train there with a plan (prepare), or under torch's save_on_cpu"
        )
    version = _Version(tensor, keep=False)
    with torch.no_grad():
        span = span_of(tensor)
        layout, compact = span.layout_of(tensor), None
        if extent(tensor) > tensor.numel():
            # With gaps: a part of a larger tensor, whose other parts are saved by themselves or not at all.
            source = tensor.contiguous()
            span = span_of(source)
            compact = span.layout_of(source)
            item, _memory = _new_object(store, step, span.bytes_of(source))
        else:
            item, stored = _object_of(store, step, tensor, span)
            shift = (span.begin - stored.begin) // tensor.itemsize
            layout = dataclasses.replace(layout, offset=layout.offset + shift)
    return _Stored(step, version, item, layout, compact, tensor.nbytes)


def _object_of(store: ObjectStore, step: _Step, tensor: torch.Tensor, span: Span) -> tuple[StoredObject, Span]:
    """An object that has the bytes ``span`` of ``tensor``'s storage, and the bytes that it has."""
    found = step.recent.find(tensor, span)
    if found is not None:
        return found
    item, memory = _new_object(store, step, span.bytes_of(tensor))
    step.recent.add(tensor, span, item, memory)
    return item, span


def _new_object(store: ObjectStore, step: _Step, content: torch.Tensor) -> tuple[StoredObject, torch.Tensor]:
    try:
        return store_bytes(store, content, step.freer)
    except StoreFull:
        # What is kept to be compared, and what nobody has a reference to, takes room that this needs.
        step.recent.clear()
        step.freer.wait()
        return store_bytes(store, content, step.freer)


def _moves(tensor: torch.Tensor, min_bytes: int) -> bool:
    """Whether a saved tensor goes to the store."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.nbytes < min_bytes:
        return False
    if tensor.is_leaf and tensor.requires_grad:
        # Its user holds it, as they do parameters.
        return False
    if isinstance(tensor._base, torch.nn.Parameter) or tensor.device.type == "meta":
        return False
    lazy = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    other = tensor.is_quantized or tensor.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not lazy and not other


def _unpack(packed: _Kept | _Stored) -> torch.Tensor:
    return packed.get()
