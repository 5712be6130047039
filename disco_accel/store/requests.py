"""What each request does: from a checked message to the keeper's objects, and back to a reply."""

from __future__ import annotations

import mmap
import secrets
import struct

from disco_accel.errors import ExecutionError, StoreError, StoreFull
from disco_accel.store.figures import DEVICE_PAGE, STATS_PAGES
from disco_accel.store.keeper import Keeper
from disco_accel.store.messages import (
    NO_NEXT_USE,
    SILENT,
    Opcode,
    Reply,
    Request,
    Status,
    Tier,
    devices_in,
    label_of,
    nbytes_of,
)
from disco_accel.store.objects import Holder, Object, Waiter, room_of
from disco_accel.store.tiers import DeviceTier
from disco_accel.store.victims import UseHistory

_MAX_FIGURE = (1 << 63) - 1
# Of Python 3.11, each member of an enumeration that is looked up by its class takes a call.
_GET, _RELEASE, _PUT, _CREATE, _FREE = Opcode.GET, Opcode.RELEASE, Opcode.PUT, Opcode.CREATE, Opcode.FREE
_OK, _WANT = Status.OK, Opcode.WANT


class Desk:
    """Takes requests of clients, one after another. Ids are never used twice, nor by the next store: what is left of
    one that has ended names nothing here."""

    def __init__(self, keeper: Keeper, tier: DeviceTier, link_bandwidth: float | None) -> None:
        self.keeper, self._tier = keeper, tier
        self.malformed = 0
        self._link = int(link_bandwidth or 0)
        self._next = (secrets.randbits(31) | 1) << 32

    def take(self, holder: Holder, request: Request, now: float) -> Reply | None:
        """Do ``request``. Returns its reply, None where it has none or gets it later through the keeper's
        ``answer``."""
        try:
            return self._do(holder, request, now)
        except StoreFull as error:
            return Reply(Status.FULL, request.number, text=str(error))
        except (StoreError, ExecutionError) as error:
            # Nobody reads a reply to those; that is counted.
            self.malformed += request.opcode in SILENT
            return None if request.opcode in SILENT else Reply(Status.REFUSED, request.number, text=str(error))

    def _do(self, holder: Holder, request: Request, now: float) -> Reply | None:
        keeper, opcode = self.keeper, request.opcode
        if opcode is _RELEASE:
            self._release(holder, request.object)
            return None
        if opcode is _CREATE:
            self._create(holder, request, now)
            return None
        if not request.object or opcode is _WANT:
            return self._do_without_object(holder, request)
        item = keeper.objects.get(request.object)
        # Ids can be guessed: one whose memory is still waited for has not been told to anybody.
        if item is None or not (item.final or item.file is not None):
            raise StoreError(f"no object {request.object}: it was freed, or its owner or its store has ended")
        if not item.final and item.owner is not holder:
            raise StoreError(f"object {item.id} is not put yet: {item.owner.words} is writing it")
        if opcode is _GET:
            keeper.get(item, Waiter(holder, request.number, opcode, now))
            return None
        if opcode is _PUT:
            seconds = None if request.amount == NO_NEXT_USE else request.amount / 1e6
            if not keeper.put(item, seconds):
                raise StoreError(
                    f"object {item.id} can't be put: a process forked since, or another mapping, can still write to it"
                )
        elif opcode is _FREE:
            if item.owner is not holder:
                raise StoreError(f"object {item.id} is {item.owner.words}'s to free; drop its tensors instead")
            keeper.free(item)
        elif opcode is Opcode.PREFETCH:
            keeper.prefetch(item)
        return Reply(_OK, request.number)

    def _do_without_object(self, holder: Holder, request: Request) -> Reply | None:
        """Requests about the store, or about their sender."""
        keeper, opcode = self.keeper, request.opcode
        if opcode is Opcode.STATS:
            # What clients claim may add up to more than a message has room for.
            page, pages = request.amount, STATS_PAGES + len(keeper.holders)
            figures = tuple(min(max(f, -_MAX_FIGURE), _MAX_FIGURE) for f in self._figures(page, holder))
            label = "" if page < STATS_PAGES else list(keeper.holders)[page - STATS_PAGES].label
            return Reply(_OK, request.number, pages, figures=figures, text=label)
        if opcode is _WANT:
            devices, run = devices_in(request.object), request.shape[0] if request.shape else 0
            keeper.room.want(holder, request.amount, request.wish, devices, run)
            keeper.changed()
        elif opcode is Opcode.HELD:
            keeper.room.hold(holder, request.amount)
            keeper.changed()
        elif opcode is Opcode.FIRST_CLASS:
            keeper.room.report(holder, request.device, request.amount)
            keeper.changed()
        elif opcode is Opcode.LABEL:
            if holder.label or holder.owned or holder.has_job:
                raise StoreError("a label is given once, before anything is created or wanted: connect anew")
            holder.label = label_of(request.shape)
        return None if opcode in SILENT else Reply(_OK, request.number)

    def _create(self, holder: Holder, request: Request, now: float) -> None:
        nbytes = nbytes_of(request.shape, request.dtype)
        self._next += 1
        grain = self._tier.grain if request.device == Tier.DEVICE else mmap.PAGESIZE
        item = Object(
            id=self._next,
            owner=holder,
            tier=Tier(request.device),
            shape=request.shape,
            dtype=request.dtype,
            nbytes=nbytes,
            # An empty one takes a descriptor of the store all the same.
            room=room_of(max(1, nbytes), grain),
            uses=UseHistory(arrived=now, last_use=now),
        )
        self.keeper.add(item, Waiter(holder, request.number, request.opcode, now))

    def _release(self, holder: Holder, name: int) -> None:
        item = self.keeper.alive.get(name)
        if item is None or item not in holder.leases:
            raise StoreError(f"no lease on object {name}")
        self.keeper.release(item, holder)

    def _figures(self, page: int, asking: Holder) -> tuple[int, ...]:
        keeper, room, counts = self.keeper, self.keeper.room, self.keeper.counts
        holders = list(keeper.holders)
        if page == 0:
            return (
                *(room.limits.host, room.host_used, room.limits.device, room.device_used, room.idle_bytes),
                *(room.first_class, room.reserved, room.demand),
            )
        if page == 1:
            return (
                *(counts.gets, counts.hits, counts.fetched, counts.prefetched, counts.evicted, counts.dropped),
                *(self.malformed, len(holders)),
            )
        if page == 2:
            return (
                *(counts.saved_bytes, counts.loaded_bytes, int(counts.stalled * 1e6), len(keeper.objects), self._link),
                *(sum(h.has_job for h in holders), room.limits.quota_of(asking) or 0, 0),
            )
        if page == DEVICE_PAGE:
            return (self._tier.kind, self._tier.grain, *struct.unpack("<qq", self._tier.identity), 0, 0, 0, 0)
        if page - STATS_PAGES >= len(holders):
            raise StoreError(f"no page {page} of figures")
        return _client(holders[page - STATS_PAGES])


def _client(holder: Holder) -> tuple[int, ...]:
    return (
        *(holder.pid, len(holder.owned), holder.nbytes, sum(holder.leases.values()), holder.grant, holder.held),
        *(sum(holder.first_class.values()), holder.least),
    )
