"""The objects of a store: requests for them, the requests that wait, and their memory on the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from disco_accel.errors import ExecutionError, StoreError, StoreFull
from disco_accel.eviction import Policy
from disco_accel.store.capacity_ledger import CapacityLedger
from disco_accel.store.messages import Opcode, Tier
from disco_accel.store.objects import Client, Move, Object, Waiter
from disco_accel.store.tiers import CopyLanes, new_file
from disco_accel.store.transfer_manager import TransferManager

SHRINK_SECONDS = 30.0
"""A request waits so long for clients that hold more than their budget, whose steps have to end."""
_LONGEST_WAIT = 3600.0
"""A use may be announced for decades ahead, for which no selector waits."""
_RETRY = 0.02
"""Seconds until a prefetch that found no room looks again."""


class ObjectManager:
    """All objects of a store. ``answer(waiter, object, refusal)`` is called when a request's object is there, or
    can't be.

    Not thread safe: one loop calls it. Only the copies of ``lanes`` run beside.
    """

    def __init__(
        self,
        ledger: CapacityLedger,
        policy: Policy,
        lanes: CopyLanes,
        answer: Callable[[Waiter, Object, StoreError | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = ledger
        self.objects: dict[int, Object] = {}
        self.clients: dict[Client, None] = {}
        self._answer, self._clock = answer, clock
        self._transfers = TransferManager(self.ledger, self.objects, policy, lanes, clock)
        self.counts, self.alive, self._tier = self._transfers.counts, self._transfers.alive, lanes.tier
        self._queue: deque[Object] = deque()
        self._settling = self._again = False

    # Requests of clients.

    def add(self, item: Object, waiter: Waiter) -> None:
        """A new object; ``waiter`` is answered once it has memory. Raises StoreFull: no room in host memory, or the
        owner's quota."""
        quota, owner = self.ledger.quota_of(item.owner), item.owner
        if quota is not None and owner.nbytes + item.footprint > quota:
            owned = f"{owner.words} owns {owner.nbytes} of {quota}"
            raise StoreFull(f"quota: {item.footprint} bytes wanted, {owned}: free some")
        if item.tier is Tier.HOST:
            if not self._transfers.make_host_room(item.footprint):
                raise StoreFull(self.ledger.full("host", item.footprint, self.clients))
            item.host_file = new_file(f"store-{item.id:x}", item.nbytes)
            self.ledger.host_used += item.footprint
        self.objects[item.id] = self.alive[item.id] = item
        item.owner.owned[item.id] = item
        item.owner.nbytes += item.footprint
        if item.tier is Tier.HOST:
            self._answer(waiter, item, None)
        else:
            item.waiters.append(waiter)
            if not self._queue and item.footprint <= self.ledger.device_free:
                self._admit(item)
            else:
                self._enqueue(item)

    def get(self, item: Object, waiter: Waiter) -> None:
        """A lease on ``item`` for ``waiter``, at once if it is there."""
        now = self._clock()
        item.uses.used(now)
        self.counts["gets"] += 1
        loading = item.move is not None and item.move.load
        if item.file is not None and not loading:
            self.counts["hits"] += 1
            self.lease(item, waiter.client)
            self._answer(waiter, item, None)
            return
        self.counts["fetched"] += 1
        item.waiters.append(waiter)
        if not loading:
            self._enqueue(item)

    def lease(self, item: Object, client: Client) -> None:
        """One lease more."""
        item.leases += 1
        client.leases[item] = client.leases.get(item, 0) + 1
        self.ledger.classify(item)

    def release(self, item: Object, client: Client, count: int = 1) -> None:
        """``count`` leases of ``client`` less."""
        left = client.leases[item] - count
        if left:
            client.leases[item] = left
        else:
            del client.leases[item]
        item.leases -= count
        item.uses.last_use = self._clock()
        self.ledger.classify(item)
        if item.gone:
            self._transfers.dispose(item)
        self.settle()

    def put(self, item: Object, seconds: float | None) -> bool:
        """Make ``item`` final, if it is not, and note when it is used next. False where a process can still write to
        it."""
        now = self._clock()
        if not item.final:
            assert item.file is not None
            if not self._tier.seal(item.file):
                return False
            item.final, item.uses.last_use = True, now
        item.uses.next_use = None if seconds is None else now + seconds
        self.ledger.classify(item)
        self._transfers.schedule(item)
        self.settle()
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
        self.ledger.classify(item)
        self._transfers.dispose(item)
        self.settle()

    def prefetch(self, item: Object) -> None:
        """``item`` is wanted on the device now, if others that are used later can leave for it."""
        if item.tier is Tier.DEVICE and item.device_file is None and item.move is None:
            self._prefetch(item, self._clock())
            self.settle()

    def end(self, client: Client) -> None:
        """``client`` is gone: so are its objects, its leases, its requests and its budget."""
        self.clients.pop(client, None)
        self.ledger.end(client)
        for item in list(self._queue) + list(self._transfers.moving.values()):
            item.waiters[:] = [waiter for waiter in item.waiters if waiter.client is not client]
        for item, count in list(client.leases.items()):
            self.release(item, client, count)
        for item in list(client.owned.values()):
            if not item.gone:
                self.free(item)
        self.settle()

    # Time, and copies that end.

    def tick(self) -> float | None:
        """Start the prefetches that are due, and end waits that took too long. Returns the seconds until the next."""
        now = self._clock()
        while (id := self._transfers.due.take(now)) is not None:
            item = self.objects.get(id)
            if item is not None and item.device_file is None and item.move is None and item.uses.next_use is not None:
                self._prefetch(item, now)
        if self._queue:
            self.settle()
        times = [] if self._transfers.due.next is None else [self._transfers.due.next]
        if self._queue:
            times.append(now + 0.1)
        return min(max(0.0, min(times) - now), _LONGEST_WAIT) if times else None

    def transfers_ended(self) -> None:
        """Take up the moves that workers have ended."""
        while (move := self._transfers.ended()) is not None:
            item = move.object
            (self._loaded if move.load else self._saved)(item, move)
            self.ledger.classify(item)
            if item.gone:
                self._transfers.dispose(item)
        self.settle()

    def settle(self) -> None:
        """Give room to the objects that wait for it, and evict for budgets and first-class memory: after any change."""
        self._again = True
        if self._settling:
            return
        if not self._queue and self.ledger.uncontended:
            self._transfers.save_ahead()
            return
        self._settling = True
        while self._again:
            self._again = False
            self._serve_queue()
            self.ledger.regrant()
            excess = self.ledger.excess
            if excess > 0 and self._transfers.evict(excess - self._transfers.leaving(), None):
                self.ledger.regrant()
        self._settling = False
        self._transfers.save_ahead()

    def close(self) -> None:
        """Free all memory."""
        for item in self.alive.values():
            saved = item.move.target if item.move is not None and not item.move.load else None
            for file in (item.device_file, item.host_file, saved):
                if file is not None:
                    self._tier.close(file)
        self.alive.clear()

    # Room on the device.

    def _enqueue(self, item: Object) -> None:
        if item not in self._queue:
            self._queue.append(item)
            self.ledger.demand += item.footprint
        self.settle()

    def _dequeue(self) -> Object:
        item = self._queue.popleft()
        self.ledger.demand -= item.footprint
        return item

    def _serve_queue(self) -> None:
        """Give room to the objects that wait for it, in their order, as far as there is room."""
        while self._queue:
            item = self._queue[0]
            if item.gone or not (item.waiters or item.prefetching) or item.device_file is not None:
                self._dequeue()
                continue
            self.ledger.regrant()
            missing = item.footprint - self.ledger.device_free
            if missing <= 0:
                self._admit(self._dequeue())
                continue
            missing -= self._transfers.leaving()
            # Nothing leaves for an object that would be refused all the same.
            evictable = self.ledger.idle_bytes + self._transfers.arriving()
            hopeless = missing > evictable and not self._budgets_shrink_for(item)
            if hopeless or (not self._transfers.evict(missing, self._later_than(item)) and not self._may_come(item)):
                self._refuse(self._dequeue())
            elif item.footprint > self.ledger.device_free:
                break

    def _later_than(self, item: Object) -> float | None:
        """Of a prefetch nobody waits for yet: only objects that are used later may leave for it."""
        return None if item.waiters else item.uses.wait(self._clock())

    def _may_come(self, item: Object) -> bool:
        """Whether room for ``item`` is on its way."""
        return self._transfers.leaving() > 0 or self._transfers.arriving() > 0 or self._budgets_shrink_for(item)

    def _budgets_shrink_for(self, item: Object) -> bool:
        """Whether a client is about to give back memory that ``item`` waits for."""
        if not item.waiters or not self.ledger.must_shrink:
            return False
        return self._clock() - item.waiters[0].since < SHRINK_SECONDS

    def _admit(self, item: Object) -> None:
        """``item`` gets memory on the device: new, or filled from the host."""
        try:
            file = self._tier.allocate(f"store-{item.id:x}", item.nbytes)
        except ExecutionError as error:
            self._refuse(item, StoreFull(str(error)))
            return
        item.device_file, item.uses.arrived = file, self._clock()
        self.ledger.device_used += item.footprint
        if item.host_file is None:
            self._answer_all(item)
        else:
            self._transfers.start(Move(item, True, item.host_file, file))
        self.ledger.classify(item)

    def _loaded(self, item: Object, move: Move) -> None:
        if move.error is not None or item.gone:
            self._transfers.drop(item)
            why = move.error or "it was freed"
            self._refuse(item, StoreError(f"object {item.id} cannot be brought back: {why}"))
            return
        if not self._tier.seal(move.target):
            raise RuntimeError(f"a file that nobody else has cannot be sealed: object {item.id}")
        self._transfers.copies[item.id] = item
        self.counts["loaded_bytes"] += item.nbytes
        self.counts["prefetched"] += item.prefetching and not item.waiters
        self._answer_all(item)

    def _saved(self, item: Object, move: Move) -> None:
        if move.error is not None or move.cancelled.is_set():
            self._transfers.lanes.discard(move.target, item.nbytes)
            self.ledger.host_used -= item.footprint
            return
        item.host_file = move.target
        self._transfers.copies[item.id] = item
        self.counts["saved_bytes"] += item.nbytes
        if not item.gone and item.idle and (self._queue or self.ledger.excess > 0):
            self._transfers.drop(item)
            self.counts["evicted"] += 1

    def _answer_all(self, item: Object) -> None:
        now = self._clock()
        item.prefetching = False
        waiters, item.waiters = item.waiters, []
        for waiter in waiters:
            self.counts["stalled_microseconds"] += int((now - waiter.since) * 1e6)
            if waiter.opcode is Opcode.GET:
                self.lease(item, waiter.client)
            self._answer(waiter, item, None)

    def _refuse(self, item: Object, reason: StoreError | None = None) -> None:
        """Refuse the requests that wait for ``item``. One that never had memory is gone."""
        item.prefetching = False
        if reason is None:
            reason = StoreFull(self.ledger.full("device", item.footprint, self.clients))
        waiters, item.waiters = item.waiters, []
        for waiter in waiters:
            self._answer(waiter, item, reason)
        if item.file is None and item.host_file is None and not item.gone:
            self.free(item)

    # Ahead of time.

    def _prefetch(self, item: Object, now: float) -> None:
        self.ledger.regrant()
        missing = item.footprint - self.ledger.device_free
        if missing <= 0 or self._transfers.evict(missing, item.uses.wait(now)) or self._transfers.leaving() >= missing:
            item.prefetching = True
            self._enqueue(item)
        elif item.uses.next_use is not None and now < item.uses.next_use:
            self._transfers.due.add(now + _RETRY, item.id, self.objects, len(self.objects))
