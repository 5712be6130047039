"""Memory of objects in both tiers: copies, evictions, and the start of evicted objects on their way back."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping

from disco_accel.errors import ExecutionError
from disco_accel.eviction import Candidate, Policy
from disco_accel.store.capacity_ledger import CapacityLedger
from disco_accel.store.messages import Tier
from disco_accel.store.objects import LEAD, BusyShare, Move, Object, victims
from disco_accel.store.tiers import CopyLanes, new_file

_SPARE = 0.25
"""Part of the device that is kept free or clean where the host has room, so that an object that is brought back need
not wait for another to be saved."""
_SLACK = 64
"""Entries beyond two for each object, before those of objects that were freed or announced anew are thrown away."""


class _DueTimes:
    """Start times of evicted objects on their way back, by their ids, the earliest first. One id may have several; the
    caller looks whether there is anything left to do for an id."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, start: float, id: int, known: Container[int], count: int) -> None:
        """Object ``id`` starts at ``start``. ``known``: the ``count`` ids that exist; entries of others may be dropped,
        as their time may never come."""
        heapq.heappush(self._heap, (start, id))
        if len(self._heap) > _SLACK + 2 * count:
            first = {id: start for start, id in sorted(self._heap, reverse=True) if id in known}
            self._heap = sorted((start, id) for id, start in first.items())

    def take(self, now: float) -> int | None:
        """The next id that is due; None if none is."""
        return heapq.heappop(self._heap)[1] if self._heap and self._heap[0][0] <= now else None

    @property
    def next(self) -> float | None:
        """When the next is due."""
        return self._heap[0][0] if self._heap else None


class TransferManager:
    """Copies, evicts and drops objects. ``objects``: those that have a name, by id, as the object manager adds and
    removes them. Not thread safe: only the copies of ``lanes`` run beside."""

    def __init__(
        self,
        ledger: CapacityLedger,
        objects: Mapping[int, Object],
        policy: Policy,
        lanes: CopyLanes,
        clock: Callable[[], float],
    ) -> None:
        self.ledger = ledger
        self.lanes = lanes
        self.counts: Counter[str] = Counter()
        """Figures since the store began. A hit is a get of an object that was there; other gets and creations may wait,
        and their waits are the stall."""
        self.moving: dict[int, Object] = {}
        self.alive: dict[int, Object] = {}
        """All that have memory or wait for it, also those whose name is gone."""
        self.due = _DueTimes()
        self._objects, self._policy, self._clock = objects, policy, clock
        self.copies: dict[int, Object] = {}
        """Objects in both tiers, whose host memory can be dropped, the oldest copies first."""
        self._link_busy = BusyShare()

    def leaving(self) -> int:
        """Bytes of objects that nobody uses or waits for, and that leave the device once they are saved."""
        return self._unclaimed(load=False)

    def arriving(self) -> int:
        """Bytes of objects that nobody uses or waits for, on their way to the device."""
        return self._unclaimed(load=True)

    def _unclaimed(self, load: bool) -> int:
        free = [item for item in self.moving.values() if not item.leases and not item.waiters]
        return sum(item.footprint for item in free if item.move is not None and item.move.load is load)

    def _candidates(self, pool: Iterable[Object], now: float) -> dict[int, Candidate]:
        """``pool`` for the policy, by their ids."""
        seconds, queued = self.lanes.tier.seconds, self.lanes.queued[True]
        busy, queue = self._link_busy.at(now), seconds(queued) if queued else 0.0
        made = {}
        for item in pool:
            fetch = seconds(item.nbytes)
            save = 0.0 if item.host_file is not None else fetch
            made[item.id] = item.uses.candidate(item.footprint, now, fetch, save, busy, queue)
        return made

    def start(self, move: Move) -> None:
        """Hand ``move`` to its lane; its object waits for it to end."""
        move.object.move = move
        self.moving[move.object.id] = move.object
        if move.load:
            self._link_busy.add(self.lanes.tier.seconds(move.object.nbytes), self._clock())
        self.lanes.submit(move)

    def ended(self) -> Move | None:
        """A move that has ended, each once, its object free to move again; None where there is no other."""
        move = self.lanes.ended()
        if move is not None:
            move.object.move = None
            self.moving.pop(move.object.id, None)
        return move

    def evict(self, nbytes: int, later_than: float | None) -> bool:
        """Begin to take ``nbytes`` from the device by the policy. Whether any are free now that were not before.

        ``later_than``: only objects whose next use is so many seconds away or more, and none if these do not suffice.
        """
        now = self._clock()
        if nbytes <= 0:
            return False
        pool: Iterable[Object] = self.ledger.idle.values()
        if later_than is not None:
            pool = [item for item in pool if item.uses.wait(now) > later_than]
            if sum(item.footprint for item in pool) < nbytes:
                return False
        candidates = self._candidates(pool, now)
        dropped = False
        for id in victims(self._policy, candidates, nbytes):
            item = self._objects[id]
            if item.host_file is not None:
                self.drop(item)
                self.counts["evicted"] += 1
                dropped = True
            elif not self.save(item):
                continue
            # Of one that is saved first, it counts once it has left.
            nbytes -= item.footprint
        if nbytes <= 0:
            return dropped
        # Host memory is full: those that have a copy there already can leave nevertheless.
        idle = self.ledger.idle
        clean = {id: c for id, c in candidates.items() if id in idle and idle[id].host_file is not None}
        for id in victims(self._policy, clean, nbytes):
            self.drop(self._objects[id])
            self.counts["evicted"] += 1
            dropped = True
        return dropped

    def save(self, item: Object) -> bool:
        """Begin to copy ``item`` to host memory, if there is room."""
        assert item.device_file is not None
        if not self.make_host_room(item.footprint):
            return False
        try:
            target = new_file(f"store-{item.id:x}", item.nbytes)
        except ExecutionError:
            return False
        self.ledger.host_used += item.footprint
        self.start(Move(item, False, item.device_file, target))
        self.ledger.classify(item)
        return True

    def make_host_room(self, nbytes: int) -> bool:
        """Drop host copies of objects that are on the device until ``nbytes`` are free."""
        if self.ledger.host_free >= nbytes:
            return True
        if self.ledger.host_free + sum(c.footprint for c in self.copies.values() if c.idle or c.leases) < nbytes:
            return False
        for copy in list(self.copies.values()):
            if self.ledger.host_free >= nbytes:
                break
            if copy.move is None and copy.host_file is not None:
                self.lanes.discard(copy.host_file, copy.nbytes)
                copy.host_file = None
                self.ledger.host_used -= copy.footprint
                del self.copies[copy.id]
                self.ledger.classify(copy)
        return self.ledger.host_free >= nbytes

    def drop(self, item: Object) -> None:
        """Free device memory whose content the host has too."""
        assert item.device_file is not None
        self.lanes.discard(item.device_file, item.nbytes)
        item.device_file = None
        self.ledger.device_used -= item.footprint
        self.copies.pop(item.id, None)
        self.counts["dropped"] += 1
        self.ledger.classify(item)
        self.schedule(item)

    def dispose(self, item: Object) -> None:
        """Free the memory of an object that is gone, unless somebody has a lease or a worker copies it."""
        if item.leases or item.move is not None:
            return
        self.copies.pop(item.id, None)
        if item.device_file is not None:
            self.lanes.discard(item.device_file, item.nbytes)
            self.ledger.device_used -= item.footprint
        if item.host_file is not None:
            self.lanes.discard(item.host_file, item.nbytes)
            self.ledger.host_used -= item.footprint
        item.device_file = item.host_file = None
        self.alive.pop(item.id, None)
        self.ledger.classify(item)
        if item.owner.owned.pop(item.id, None) is not None:
            item.owner.nbytes -= item.footprint

    def schedule(self, item: Object) -> None:
        """Note when an evicted object whose next use was announced has to start on its way back."""
        if item.uses.next_use is not None and item.tier is Tier.DEVICE and item.device_file is None:
            queued = self.lanes.tier.seconds(self.lanes.queued[True])
            start = item.uses.next_use - LEAD * (self.lanes.tier.seconds(item.nbytes) + queued)
            self.due.add(max(start, self._clock()), item.id, self._objects, len(self._objects))

    def save_ahead(self) -> None:
        """Copy idle objects to host memory while that has room of its own, one at a time."""
        ledger = self.ledger
        if self.lanes.queued[False] or ledger.idle_bytes == ledger.clean_bytes:
            return
        if ledger.device_free + ledger.clean_bytes >= _SPARE * ledger.device:
            return
        dirty = [o for o in ledger.idle.values() if o.host_file is None and o.footprint <= ledger.host_free]
        if dirty:
            candidates = self._candidates(dirty, self._clock())
            self.save(self._objects[max(candidates, key=lambda id: self._policy(candidates[id]))])
