"""Objects and their ways between the tiers: what is brought, what leaves, and who waits for it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from disco_accel.errors import ExecutionError, StoreError, StoreFull
from disco_accel.store.copy_lanes import Lanes
from disco_accel.store.due_times import DueTimes
from disco_accel.store.messages import Opcode, Tier
from disco_accel.store.objects import Holder, Move, Object, Waiter
from disco_accel.store.policies import Policy, victims, wait
from disco_accel.store.room import Limits, Room
from disco_accel.store.tiers import new_file

COMING_DOWN_SECONDS = 30.0
"""A request waits so long for clients that hold more than their budget, whose steps have to end."""
_SPARE = 0.25
"""Part of the device that is kept free or clean where the host has room, so that an object that is brought back need
not wait for another to be saved."""
_RETRY = 0.02
"""Seconds until a prefetch that found no room looks again."""


@dataclass(slots=True)
class Counts:
    """Since the store began. ``hits``: gets of an object that was there; ``stalled``: seconds that gets and creations
    waited."""

    gets: int = 0
    hits: int = 0
    fetched: int = 0
    prefetched: int = 0
    evicted: int = 0
    dropped: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    stalled: float = 0.0


class Keeper:
    """All objects of a store. ``answer(waiter, object, refusal)`` is called when a request's object is there, or
    can't be.

    Not thread safe: one loop calls it. Only the copies of ``lanes`` run beside.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        lanes: Lanes,
        answer: Callable[[Waiter, Object, StoreError | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.room = Room(limits)
        self.counts = Counts()
        self.objects: dict[int, Object] = {}
        self.holders: dict[Holder, None] = {}
        self._policy, self._lanes, self._answer, self._clock = policy, lanes, answer, clock
        self._queue: deque[Object] = deque()
        self._moving: dict[int, Object] = {}
        self._copies: dict[int, Object] = {}
        """Objects in both tiers, whose host memory can be dropped, the oldest copies first."""
        self._due = DueTimes()
        self.alive: dict[int, Object] = {}
        """All that have memory or wait for it, also those whose name is gone."""
        self._settling = self._again = False

    # What clients ask for.

    def add(self, item: Object, waiter: Waiter) -> None:
        """A new object; ``waiter`` is answered once it has memory.

        Raises:
            StoreFull: no room in host memory, or the owner's quota.
        """
        quota = self.room.limits.quota
        if quota is not None and item.owner.nbytes + item.room > quota:
            raise StoreFull(
                f"quota: {item.room} bytes wanted, this process owns {item.owner.nbytes} of {quota}: free some"
            )
        if item.tier is Tier.HOST:
            if not self._make_host_room(item.room):
                raise StoreFull(self.room.full("host", item.room, self.holders))
            item.host_file = new_file(f"store-{item.id:x}", item.nbytes)
            self.room.host_used += item.room
        self.objects[item.id] = self.alive[item.id] = item
        item.owner.owned[item.id] = item
        item.owner.nbytes += item.room
        if item.tier is Tier.HOST:
            self._answer(waiter, item, None)
        else:
            item.waiters.append(waiter)
            if not self._queue and item.room <= self.room.device_free:
                self._admit(item)
            else:
                self._enqueue(item)

    def get(self, item: Object, waiter: Waiter) -> None:
        """A lease on ``item`` for ``waiter``, at once if it is there."""
        now = self._clock()
        item.used(now)
        self.counts.gets += 1
        loading = item.move is not None and item.move.load
        if item.file is not None and not loading:
            self.counts.hits += 1
            self.lease(item, waiter.holder)
            self._answer(waiter, item, None)
            return
        self.counts.fetched += 1
        item.waiters.append(waiter)
        if not loading:
            self._enqueue(item)

    def lease(self, item: Object, holder: Holder) -> None:
        """One lease more."""
        item.leases += 1
        holder.leases[item] = holder.leases.get(item, 0) + 1
        self.room.classify(item)

    def release(self, item: Object, holder: Holder, count: int = 1) -> None:
        """``count`` leases of ``holder`` less."""
        left = holder.leases[item] - count
        if left:
            holder.leases[item] = left
        else:
            del holder.leases[item]
        item.leases -= count
        item.last_use = self._clock()
        self.room.classify(item)
        if item.gone:
            self._dispose(item)
        self._settle()

    def put(self, item: Object, seconds: float | None) -> bool:
        """Make ``item`` final, if it is not, and note when it is used next. False where a process can still write to
        it."""
        now = self._clock()
        if not item.final:
            assert item.file is not None
            if not self._lanes.tier.seal(item.file):
                return False
            item.final, item.last_use = True, now
        item.next_use = None if seconds is None else now + seconds
        self.room.classify(item)
        self._schedule(item)
        self._settle()
        return True

    def free(self, item: Object) -> None:
        """The name ``item`` is no more, and its memory once nobody has a lease."""
        item.gone = True
        del self.objects[item.id]
        if item.move is not None and not item.leases:
            item.move.cancelled.set()
        for waiter in item.waiters:
            self._answer(waiter, item, StoreError(f"object {item.id} was freed"))
        item.waiters.clear()
        self.room.classify(item)
        self._dispose(item)
        self._settle()

    def prefetch(self, item: Object) -> None:
        """``item`` is wanted on the device now, if others that are used later can leave for it."""
        if item.tier is Tier.DEVICE and item.device_file is None and item.move is None:
            self._prefetch(item, self._clock())
            self._settle()

    def end(self, holder: Holder) -> None:
        """``holder`` is gone: so are its objects, its leases, its requests and its budget."""
        self.holders.pop(holder, None)
        self.room.end(holder)
        for item in list(self._queue) + list(self._moving.values()):
            item.waiters[:] = [waiter for waiter in item.waiters if waiter.holder is not holder]
        for item, count in list(holder.leases.items()):
            self.release(item, holder, count)
        for item in list(holder.owned.values()):
            if not item.gone:
                self.free(item)
        self._settle()

    # What time and workers bring.

    def tick(self) -> float | None:
        """Start the prefetches that are due, and end waits that took too long. Returns the seconds until the next."""
        now = self._clock()
        while (id := self._due.take(now)) is not None:
            item = self.objects.get(id)
            if item is not None and item.device_file is None and item.move is None and item.next_use is not None:
                self._prefetch(item, now)
        if self._queue:
            self._settle()
        times = [] if self._due.next is None else [self._due.next]
        if self._queue:
            times.append(now + 0.1)
        return max(0.0, min(times) - now) if times else None

    def moves_ended(self) -> None:
        """Take up the moves that workers have ended."""
        while (move := self._lanes.ended()) is not None:
            item = move.object
            item.move = None
            self._moving.pop(item.id, None)
            (self._loaded if move.load else self._saved)(item, move)
            self.room.classify(item)
            if item.gone:
                self._dispose(item)
        self._settle()

    def changed(self) -> None:
        """Budgets or first-class memory have changed."""
        self._settle()

    def close(self) -> None:
        """Let go of all memory."""
        for item in self.alive.values():
            saved = item.move.target if item.move is not None and not item.move.load else None
            for file in (item.device_file, item.host_file, saved):
                if file is not None:
                    os.close(file)
        self.alive.clear()

    # Ways between the tiers.

    def _enqueue(self, item: Object) -> None:
        if item not in self._queue:
            self._queue.append(item)
            self.room.demand += item.room
        self._settle()

    def _dequeue(self) -> Object:
        item = self._queue.popleft()
        self.room.demand -= item.room
        return item

    def _settle(self) -> None:
        """Do all that can be done now: give room to those that wait for it, and make it for those that come."""
        self._again = True
        if self._settling:
            return
        self._settling = True
        while self._again:
            self._again = False
            self._serve_queue()
            self.room.regrant()
            excess = self.room.excess
            if excess > 0 and self._evict(excess - self._leaving(), None):
                self.room.regrant()
        self._settling = False
        self._save_ahead()

    def _serve_queue(self) -> None:
        """Give room to the objects that wait for it, in their order, as far as there is room."""
        while self._queue:
            item = self._queue[0]
            if item.gone or not (item.waiters or item.prefetching) or item.device_file is not None:
                self._dequeue()
                continue
            self.room.regrant()
            missing = item.room - self.room.device_free
            if missing <= 0:
                self._admit(self._dequeue())
                continue
            missing -= self._leaving()
            # Nothing leaves for an object that would be refused all the same.
            hopeless = missing > self.room.idle_bytes + self._unclaimed(True) and not self._comes_down(item)
            if hopeless or (not self._evict(missing, self._later_than(item)) and not self._may_come(item)):
                self._refuse(self._dequeue())
            elif item.room > self.room.device_free:
                break

    def _later_than(self, item: Object) -> float | None:
        """Of a prefetch nobody waits for yet: only objects that are used later may leave for it."""
        return None if item.waiters else wait(item.candidate(0.0), self._clock())

    def _may_come(self, item: Object) -> bool:
        """Whether room for ``item`` is on its way."""
        return self._leaving() > 0 or self._unclaimed(True) > 0 or self._comes_down(item)

    def _comes_down(self, item: Object) -> bool:
        """Whether a client is about to give back memory that ``item`` waits for."""
        if not item.waiters or not self.room.coming_down:
            return False
        return self._clock() - item.waiters[0].since < COMING_DOWN_SECONDS

    def _leaving(self) -> int:
        """Bytes of objects that can leave the device once they are saved."""
        return self._unclaimed(False)

    def _unclaimed(self, load: bool) -> int:
        """Bytes of objects that nobody uses or waits for, on their way to the device or, not ``load``, from it."""
        free = [item for item in self._moving.values() if not item.leases and not item.waiters]
        return sum(item.room for item in free if item.move is not None and item.move.load is load)

    def _admit(self, item: Object) -> None:
        """``item`` gets memory on the device: new, or filled from the host."""
        try:
            file = self._lanes.tier.allocate(f"store-{item.id:x}", item.nbytes)
        except ExecutionError as error:
            self._refuse(item, StoreFull(str(error)))
            return
        item.device_file, item.arrived = file, self._clock()
        self.room.device_used += item.room
        if item.host_file is None:
            self._answer_all(item)
        else:
            self._move(Move(item, True, item.host_file, file))
        self.room.classify(item)

    def _move(self, move: Move) -> None:
        move.object.move = move
        self._moving[move.object.id] = move.object
        self._lanes.submit(move)

    def _loaded(self, item: Object, move: Move) -> None:
        if move.error is not None or item.gone:
            self._drop(item)
            why = move.error or "it was freed"
            self._refuse(item, StoreError(f"object {item.id} cannot be brought back: {why}"))
            return
        if not self._lanes.tier.seal(move.target):
            raise RuntimeError(f"a file that nobody else has cannot be sealed: object {item.id}")
        self._copies[item.id] = item
        self.counts.loaded_bytes += item.nbytes
        self.counts.prefetched += item.prefetching and not item.waiters
        self._answer_all(item)

    def _saved(self, item: Object, move: Move) -> None:
        if move.error is not None or move.cancelled.is_set():
            self._lanes.discard(move.target, item.nbytes)
            self.room.host_used -= item.room
            return
        item.host_file = move.target
        self._copies[item.id] = item
        self.counts.saved_bytes += item.nbytes
        if not item.gone and item.idle and (self._queue or self.room.excess > 0):
            self._drop(item)
            self.counts.evicted += 1

    def _answer_all(self, item: Object) -> None:
        now = self._clock()
        item.prefetching = False
        waiters, item.waiters = item.waiters, []
        for waiter in waiters:
            self.counts.stalled += now - waiter.since
            if waiter.opcode is Opcode.GET:
                self.lease(item, waiter.holder)
            self._answer(waiter, item, None)

    def _refuse(self, item: Object, reason: StoreError | None = None) -> None:
        """Tell those that wait for ``item``. One that never had memory is gone."""
        item.prefetching = False
        if reason is None:
            reason = StoreFull(self.room.full("device", item.room, self.holders))
        waiters, item.waiters = item.waiters, []
        for waiter in waiters:
            self._answer(waiter, item, reason)
        if item.file is None and item.host_file is None and not item.gone:
            self.free(item)

    def _evict(self, nbytes: int, later_than: float | None) -> bool:
        """Begin to take ``nbytes`` from the device by the policy. Whether any are free now that were not before.

        ``later_than``: only objects whose next use is so many seconds away or more, and none if these do not suffice.
        """
        now = self._clock()
        if nbytes <= 0:
            return False
        pool: Iterable[Object] = self.room.idle.values()
        if later_than is not None:
            pool = [item for item in pool if wait(item.candidate(0.0), now) > later_than]
            if sum(item.room for item in pool) < nbytes:
                return False
        candidates = [item.candidate(self._lanes.tier.seconds(item.nbytes)) for item in pool]
        dropped = False
        for victim in victims(self._policy, candidates, nbytes, now):
            item = self.objects[victim.id]
            if item.host_file is not None:
                self._drop(item)
                self.counts.evicted += 1
                dropped = True
            elif not self._save(item):
                continue
            # Of one that is saved first, it counts once it has left.
            nbytes -= item.room
        if nbytes <= 0:
            return dropped
        # Host memory is full: those that have a copy there already can leave nevertheless.
        clean = [c for c in candidates if c.id in self.room.idle and self.objects[c.id].host_file is not None]
        for victim in victims(self._policy, clean, nbytes, now):
            self._drop(self.objects[victim.id])
            self.counts.evicted += 1
            dropped = True
        return dropped

    def _save(self, item: Object) -> bool:
        """Begin to copy ``item`` to host memory, if there is room."""
        assert item.device_file is not None
        if not self._make_host_room(item.room):
            return False
        try:
            target = new_file(f"store-{item.id:x}", item.nbytes)
        except ExecutionError:
            return False
        self.room.host_used += item.room
        self._move(Move(item, False, item.device_file, target))
        self.room.classify(item)
        return True

    def _make_host_room(self, nbytes: int) -> bool:
        """Drop host copies of objects that are on the device until ``nbytes`` are free."""
        if self.room.host_free >= nbytes:
            return True
        if self.room.host_free + sum(c.room for c in self._copies.values() if c.idle or c.leases) < nbytes:
            return False
        for copy in list(self._copies.values()):
            if self.room.host_free >= nbytes:
                break
            if copy.move is None and copy.host_file is not None:
                self._lanes.discard(copy.host_file, copy.nbytes)
                copy.host_file = None
                self.room.host_used -= copy.room
                del self._copies[copy.id]
                self.room.classify(copy)
        return self.room.host_free >= nbytes

    def _drop(self, item: Object) -> None:
        """Let go of device memory whose content the host has too."""
        assert item.device_file is not None
        self._lanes.discard(item.device_file, item.nbytes)
        item.device_file = None
        self.room.device_used -= item.room
        self._copies.pop(item.id, None)
        self.counts.dropped += 1
        self.room.classify(item)
        self._schedule(item)

    def _dispose(self, item: Object) -> None:
        """Let go of the memory of an object that is gone, unless somebody has a lease or a worker copies it."""
        if item.leases or item.move is not None:
            return
        self._copies.pop(item.id, None)
        if item.device_file is not None:
            self._lanes.discard(item.device_file, item.nbytes)
            self.room.device_used -= item.room
        if item.host_file is not None:
            self._lanes.discard(item.host_file, item.nbytes)
            self.room.host_used -= item.room
        item.device_file = item.host_file = None
        self.alive.pop(item.id, None)
        self.room.classify(item)
        if item.owner.owned.pop(item.id, None) is not None:
            item.owner.nbytes -= item.room

    # Ahead of time.

    def _schedule(self, item: Object) -> None:
        """Note when an evicted object whose next use was announced has to start on its way back."""
        if item.next_use is not None and item.tier is Tier.DEVICE and item.device_file is None:
            queued = self._lanes.tier.seconds(self._lanes.queued[True])
            # Half as long again, for others that come in between.
            start = item.next_use - 1.5 * (self._lanes.tier.seconds(item.nbytes) + queued)
            self._due.add(max(start, self._clock()), item.id, self.objects, len(self.objects))

    def _prefetch(self, item: Object, now: float) -> None:
        self.room.regrant()
        missing = item.room - self.room.device_free
        if missing <= 0 or self._evict(missing, wait(item.candidate(0.0), now)) or self._leaving() >= missing:
            item.prefetching = True
            self._enqueue(item)
        elif item.next_use is not None and now < item.next_use:
            self._due.add(now + _RETRY, item.id, self.objects, len(self.objects))

    def _save_ahead(self) -> None:
        """Copy idle objects to host memory while that has room of its own, one at a time."""
        room = self.room
        if self._lanes.queued[False] or room.idle_bytes == room.clean_bytes:
            return
        if room.device_free + room.clean_bytes >= _SPARE * room.limits.device:
            return
        now = self._clock()
        dirty = [o for o in room.idle.values() if o.host_file is None and o.room <= room.host_free]
        if dirty:
            best = max(dirty, key=lambda o: self._policy(o.candidate(self._lanes.tier.seconds(o.nbytes)), now))
            self._save(best)
