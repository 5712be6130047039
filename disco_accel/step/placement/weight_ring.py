"""Device memory of bounded size through which weights of the host stream while forwards without a plan run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from disco_accel.native.host_memory import WatchedTensors
from disco_accel.native.loads import Load, Loading
from disco_accel.step.placement.read_order import ReadOrder

_ALONE = 2
"""Users of a storage that one tensor alone has, while Python looks at it."""
_FAR = 48
"""Reads that are looked at for something to load."""
_MOST_READING = 128


@dataclass(slots=True, eq=False)
class _Copy:
    """A tensor of the host's on the device, of when it lay at ``address`` and had this ``version``. ``source``: its
    memory while it may still be read; an update of a weight waits for the end of all other references to it.
    ``users``: forwards that have read it and are not over."""

    home: weakref.ref[torch.Tensor]
    source: torch.Tensor | None
    address: int
    version: int
    loading: Loading
    users: int = 0
    arrived: bool = False

    @property
    def nbytes(self) -> int:
        return self.loading.tensor.nbytes

    def holds(self, home: torch.Tensor) -> bool:
        """Whether it has the bytes of ``home``, as far as PyTorch counts writes to both."""
        same = self.home() is home and self.version == home._version and self.address == home.data_ptr()
        return same and self.loading.tensor.shape == home.shape and self.loading.tensor._version == 0

    def alone(self) -> bool:
        """Whether nothing else has its memory, so that nobody can write to it any more."""
        return torch._C._storage_Use_Count(self.loading.tensor.untyped_storage()._cdata) == _ALONE


class WeightRing:
    """Copies of weights on a device, loaded ahead in the order in which the last forward read them.

    The forwards of one thread at a time have the ring; for those of others weights are copied when they are read. The
    ring holds at most ``room`` bytes, or the two largest modules, or as much as a forward reads at once. Copies make
    way for the next ones; those that fit beside the two largest modules stay for the next forward until something
    writes to their homes. Memory is freed by references: a copy that a forward has kept keeps its bytes.
    """

    def __init__(
        self,
        modules: Iterable[list[torch.Tensor]],
        load: Load,
        room: Callable[[int], int],
        say: Callable[[str], None],
    ) -> None:
        """``modules``: the tensors that each module has of its own, in the order of a first forward. ``load`` begins a
        copy to the device. ``room``: bytes that the ring may take now, of so many wanted ones. ``say``: tells the user
        something once."""
        own = list(modules)
        self._load, self._room_now, self._say = load, room, say
        self._window = sum(sorted(sum(t.nbytes for t in tensors) for tensors in own)[-2:])
        self._order = ReadOrder(tensor for tensors in own for tensor in tensors)
        self._copies: dict[int, _Copy] = {}
        """By identity of the tensor on the host."""
        self._stay: set[int] = set()
        """Those that stay for the next forward."""
        self._watch = _HomeWatch()
        self._reading: list[tuple[torch.Tensor, Callable[[], object]]] = []
        """Memory that dropped copies were loaded from, and how to wait for that."""
        self._room, self._backward = 0, -1
        self._lock, self._owner = threading.Lock(), 0
        self.held = self.most_held = 0
        """Bytes in the ring now, and at most."""

    def begin(self, owner: object, *, forward: bool) -> bool:
        """The outermost forward of this thread begins; whether it has the ring. ``forward``: of a module, not of a
        segment that a backward computes again."""
        with self._lock:
            if self._owner not in (0, threading.get_ident()):
                return False
            self._owner = threading.get_ident()
        if forward:
            self._order.begin((id(owner), torch.is_grad_enabled()))
        backward = torch._C._current_graph_task_id()
        if backward < 0 or backward != self._backward:
            self._backward = backward
            expected = self._order.expected()
            self._drop_all(self._watch.untouched(expected))
            self._room = max(self._window, self._room_now(sum(t.nbytes for t in expected)))
        return True

    def end(self, *, forward: bool, whole: bool) -> None:
        """It is over; ``whole``: no exception has ended it. After a ``forward`` nothing reads the host's memory."""
        try:
            for copy in self._copies.values():
                # The forwards of an interrupted one are over too.
                copy.users = 0
            if not whole:
                # Some may have failed.
                for key in [key for key, copy in self._copies.items() if not copy.arrived]:
                    self._drop(key)
            if forward:
                if whole:
                    self._order.end()
                    self._choose()
                if not torch.is_grad_enabled():
                    # Else a backward goes on with what is there.
                    self._drop_all(self._stay)
                self._wait()
                self._look_for_writes()
        finally:
            self._owner = 0

    def _look_for_writes(self) -> None:
        written, counted = self._watch.written()
        if written:
            self._drop_all(())
        if written and not counted:
            self._say(
                "weights were written to past PyTorch's count of versions (.data, NumPy) while a forward without a "
                "plan ran, which may have loaded them before; write to them between forwards, or in place under "
                "torch.no_grad()"
            )

    @property
    def mine(self) -> bool:
        """Whether the forward that runs in this thread has the ring."""
        return self._owner == threading.get_ident()

    def read(self, home: torch.Tensor) -> torch.Tensor | None:
        """The bytes of ``home`` on the device, for the forward that has the ring, until ``give_back``; None for a
        tensor that does not go through it."""
        source = _source(home)
        if source is None:
            return None
        copy = self._copies.get(id(home))
        # One without a reader yet may still be in the hands of the thread that copies.
        if copy is not None and not (copy.holds(home) and (copy.users or not copy.arrived or copy.alone())):
            # A backward may keep it, or somebody who may write to it.
            self._drop(id(home))
            copy = None
        self._order.read(home)
        if copy is None:
            self._make_way(source.nbytes, ())
            copy = self._begin(home, source)
        copy.users += 1
        self._load_ahead()
        try:
            copy.loading.arrive()
        except BaseException:
            # The next forward loads it anew.
            self._drop(id(home))
            raise
        copy.arrived = True
        return copy.loading.tensor.detach()

    def read_again(self, home: torch.Tensor) -> torch.Tensor | None:
        """As ``read``, for a backward, which gives nothing back; None also where another thread has the ring."""
        inside = self.mine
        if not inside and not self.begin(None, forward=False):
            return None
        try:
            found = self.read(home)
            if found is not None:
                self._copies[id(home)].users -= 1
            return found
        finally:
            if not inside:
                self._owner = 0

    def give_back(self, home: torch.Tensor) -> None:
        """The forward that has read ``home`` is over, and its reference is gone."""
        copy = self._copies.get(id(home))
        if copy is None or copy.home() is not home:
            return
        copy.users = max(0, copy.users - 1)
        if not copy.users and not copy.holds(home):
            self._drop(id(home))

    def give_way(self) -> None:
        """Something else needs the memory: drop all copies, unless a forward has them."""
        with self._lock:
            if not self._owner:
                self._drop_all(())
                self._wait()

    def _begin(self, home: torch.Tensor, source: torch.Tensor) -> _Copy:
        copy = _Copy(weakref.ref(home), source, home.data_ptr(), home._version, self._load(source))
        self._copies[id(home)] = copy
        self.held += copy.nbytes
        self.most_held = max(self.most_held, self.held)
        return copy

    def _drop(self, key: int) -> None:
        copy = self._copies.pop(key)
        self.held -= copy.nbytes
        if copy.source is not None and not copy.arrived:
            # Its memory is not free before.
            copy.loading.finish()
            copy.source = None
        if copy.source is None:
            return
        self._reading.append((copy.source, copy.loading.finish))
        if len(self._reading) > _MOST_READING:
            self._wait(_MOST_READING // 2)

    def _drop_all(self, but: Collection[int]) -> None:
        for key, copy in list(self._copies.items()):
            home = copy.home()
            if key not in but or home is None or not (copy.holds(home) and copy.alone()):
                self._drop(key)

    def _wait(self, most: int | None = None) -> None:
        """Until nothing reads the host's memory; ``most``: only the oldest of dropped copies."""
        ended, self._reading = self._reading[:most], self._reading[len(self._reading[:most]) :]
        for _, finish in ended:
            finish()
        if most is None:
            for copy in self._copies.values():
                if copy.source is not None:
                    copy.loading.finish()
                    copy.source = None

    def _make_way(self, nbytes: int, wanted: Collection[int]) -> bool:
        """Whether there is room for so many bytes more, perhaps in the place of copies that nobody uses. For those
        that are ``wanted`` soon nothing else that is wanted, or that stays, makes way."""
        if self.held + nbytes <= self._room:
            return True
        # What a graph keeps until its backward would not be freed.
        idle = [(k, c) for k, c in self._copies.items() if not c.users and k not in wanted and c.alone()]
        first = [key for key, copy in idle if copy.arrived and key not in self._stay]
        if not wanted:
            # Read out of order: what comes latest makes way first.
            first += [key for key, copy in reversed(idle) if not copy.arrived and key not in self._stay]
            first += [key for key, _ in idle if key in self._stay]
        for key in first:
            self._drop(key)
            if self.held + nbytes <= self._room:
                return True
        return False

    def _load_ahead(self) -> None:
        wanted: set[int] = set()
        for tensor in self._order.ahead(_FAR):
            if id(tensor) in wanted:
                continue
            wanted.add(id(tensor))
            if id(tensor) in self._copies:
                continue
            source = _source(tensor)
            if source is None:
                continue
            if not self._make_way(source.nbytes, wanted):
                return
            self._begin(tensor, source)

    def _choose(self) -> None:
        """Choose the tensors that stay: as many as fit beside the window. The first is one of them, during whose load
        nothing could be computed; the others lie evenly over the order, so that the link always has work."""
        read = self._order.tensors()
        tensors = [tensor for tensor in read if id(tensor) in self._watch.ids]
        total, room = sum(tensor.nbytes for tensor in read), max(0, self._room - self._window)
        if total <= self._room:
            self._stay = {id(tensor) for tensor in tensors}
            return
        self._stay = set()
        if tensors and tensors[0] is read[0] and read[0].nbytes <= room:
            self._stay.add(id(read[0]))
            tensors, total, room = tensors[1:], total - read[0].nbytes, room - read[0].nbytes
        share, credit = room / total, 0.0
        for tensor in tensors:
            credit += share * tensor.nbytes
            if credit >= tensor.nbytes:
                credit -= tensor.nbytes
                self._stay.add(id(tensor))


def _source(home: torch.Tensor) -> torch.Tensor | None:
    """The bytes of ``home``, if it is a tensor that can be copied as it is."""
    source = home.detach()
    plain = type(source) is torch.Tensor and source.layout is torch.strided and not source.is_quantized
    return source if plain and source.is_cpu and source.nbytes and not source.is_inference() else None


class _HomeWatch:
    """Tells of writes to tensors in host memory between two looks, where the kernel watches their pages. ``ids``:
    identities of the tensors that are watched now."""

    def __init__(self) -> None:
        self.ids: frozenset[int] = frozenset()
        self._watched: WatchedTensors | None = None
        self._versions: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, bool]] = {}
        """By identity: a tensor, its address, and whether the kernel watches its pages."""

    def untouched(self, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        """Identities of watched tensors, none of which was written to since the last call of this or of ``written``.
        From now on ``tensors`` are watched, as far as the kernel does that."""
        before = self.ids
        changed = self._watched is None or self._watched.changed()
        if changed or any(id(tensor) not in before and self._can_watch(tensor) for tensor in tensors):
            self._begin([tensor for tensor in tensors if self._can_watch(tensor)])
        return frozenset() if changed else before

    def written(self) -> tuple[bool, bool]:
        """Whether one was written to since then, and whether PyTorch has counted such a write."""
        if self._watched is None or not self._watched.changed():
            return False, False
        alive = [(tensor, version) for reference, version in self._versions if (tensor := reference()) is not None]
        counted = any(tensor._version != version for tensor, version in alive)
        self._begin([tensor for tensor, _ in alive])
        return True, counted

    def _begin(self, tensors: Sequence[torch.Tensor]) -> None:
        self._watched = WatchedTensors([tensor.detach() for tensor in tensors]) if tensors else None
        self._versions = [(weakref.ref(tensor), tensor._version) for tensor in tensors]
        self.ids = frozenset(map(id, tensors))

    def _can_watch(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor.data_ptr():
            plain = type(tensor.detach()) is torch.Tensor and tensor.is_cpu and not tensor.is_inference()
            watched = plain and tensor.nbytes > 0 and WatchedTensors([tensor.detach()]).hashed_bytes == 0
            known = self._known[id(tensor)] = weakref.ref(tensor), tensor.data_ptr(), watched
        # A watch holds memory, for which updates of trained weights wait; and these change anyway.
        return known[2] and not tensor.requires_grad
