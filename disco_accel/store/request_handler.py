"""From a checked message to the objects of the store, and back to a reply."""

from __future__ import annotations

import mmap
import secrets
import struct

from disco_accel.errors import ExecutionError, StoreError, StoreFull
from disco_accel.store.messages import (
    FIGURES,
    NO_NEXT_USE,
    SILENT,
    STATS_PAGES,
    Opcode,
    Reply,
    ReplyStatus,
    Request,
    Tier,
    devices_in,
    label_of,
    nbytes_of,
)
from disco_accel.store.object_manager import ObjectManager
from disco_accel.store.objects import Client, Object, UseHistory, Waiter, footprint_of
from disco_accel.store.tiers import DeviceTier

_MAX_FIGURE = (1 << 63) - 1
# Of Python 3.11, each member of an enumeration that is looked up by its class takes a call.
_GET, _RELEASE, _PUT, _CREATE, _FREE = Opcode.GET, Opcode.RELEASE, Opcode.PUT, Opcode.CREATE, Opcode.FREE
_OK, _WANT = ReplyStatus.OK, Opcode.WANT


class RequestHandler:
    """Does the requests of clients, one after another. Ids are never used twice, nor by the next store: those of a
    store that has ended name nothing here."""

    def __init__(self, manager: ObjectManager, tier: DeviceTier) -> None:
        self.manager, self._tier = manager, tier
        self._next = (secrets.randbits(31) | 1) << 32

    def handle(self, client: Client, request: Request, now: float) -> Reply | None:
        """Do ``request``. Returns its reply, None where it has none or gets it later through the manager's
        ``answer``."""
        try:
            return self._do(client, request, now)
        except StoreFull as error:
            return Reply(ReplyStatus.FULL, request.number, text=str(error))
        except (StoreError, ExecutionError) as error:
            # Nobody reads a reply to those; that is counted.
            self.manager.counts["malformed"] += request.opcode in SILENT
            return None if request.opcode in SILENT else Reply(ReplyStatus.REFUSED, request.number, text=str(error))

    def _do(self, client: Client, request: Request, now: float) -> Reply | None:
        manager, opcode = self.manager, request.opcode
        if opcode is _RELEASE:
            self._release(client, request.object)
            return None
        if opcode is _CREATE:
            self._create(client, request, now)
            return None
        if not request.object or opcode is _WANT:
            return self._do_without_object(client, request)
        item = manager.objects.get(request.object)
        # Ids can be guessed: one whose memory is still waited for has not been told to anybody.
        if item is None or not (item.final or item.file is not None):
            raise StoreError(f"no object {request.object}: it was freed, or its owner or its store has ended")
        if not item.final and item.owner is not client:
            raise StoreError(f"object {item.id} is not put yet: {item.owner.words} is writing it")
        if opcode is _GET:
            manager.get(item, Waiter(client, request.number, opcode, now))
            return None
        if opcode is _PUT:
            seconds = None if request.amount == NO_NEXT_USE else request.amount / 1e6
            if not manager.put(item, seconds):
                raise StoreError(
                    f"object {item.id} can't be put: a process forked since, or another mapping, can still write to it"
                )
        elif opcode is _FREE:
            if item.owner is not client:
                raise StoreError(f"object {item.id} is {item.owner.words}'s to free; drop its tensors instead")
            manager.free(item)
        elif opcode is Opcode.PREFETCH:
            manager.prefetch(item)
        return Reply(_OK, request.number)

    def _do_without_object(self, client: Client, request: Request) -> Reply | None:
        """Requests about the store, or about their sender."""
        manager, opcode = self.manager, request.opcode
        if opcode is Opcode.STATS:
            # Claims of clients may add up to more than a message has room for.
            page, pages = request.amount, STATS_PAGES + len(manager.clients)
            figures = tuple(min(max(f, -_MAX_FIGURE), _MAX_FIGURE) for f in self._figures(page, client))
            label = "" if page < STATS_PAGES else list(manager.clients)[page - STATS_PAGES].label
            return Reply(_OK, request.number, pages, figures=figures, text=label)
        if opcode is _WANT:
            devices, run = devices_in(request.object), request.shape[0] if request.shape else 0
            manager.ledger.want(client, request.amount, request.max_useful, devices, run)
            manager.settle()
        elif opcode is Opcode.HELD:
            manager.ledger.hold(client, request.amount)
            manager.settle()
        elif opcode is Opcode.FIRST_CLASS:
            manager.ledger.report(client, request.device, request.amount)
            manager.settle()
        elif opcode is Opcode.LABEL:
            if client.label or client.owned or client.has_job:
                raise StoreError("a label is given once, before anything is created or wanted: connect anew")
            client.label = label_of(request.shape)
        return None if opcode in SILENT else Reply(_OK, request.number)

    def _create(self, client: Client, request: Request, now: float) -> None:
        nbytes = nbytes_of(request.shape, request.dtype)
        self._next += 1
        grain = self._tier.grain if request.device == Tier.DEVICE else mmap.PAGESIZE
        item = Object(
            id=self._next,
            owner=client,
            tier=Tier(request.device),
            shape=request.shape,
            dtype=request.dtype,
            nbytes=nbytes,
            # An empty one takes a descriptor of the store all the same.
            footprint=footprint_of(max(1, nbytes), grain),
            uses=UseHistory(arrived=now, last_use=now),
        )
        self.manager.add(item, Waiter(client, request.number, request.opcode, now))

    def _release(self, client: Client, name: int) -> None:
        item = self.manager.alive.get(name)
        if item is None or item not in client.leases:
            raise StoreError(f"no lease on object {name}")
        self.manager.release(item, client)

    def _figures(self, page: int, asking: Client) -> tuple[int, ...]:
        manager, ledger, clients = self.manager, self.manager.ledger, list(self.manager.clients)
        if page - STATS_PAGES >= len(clients):
            raise StoreError(f"no page {page} of figures")
        if page >= STATS_PAGES:
            one = clients[page - STATS_PAGES]
            leases, first_class = sum(one.leases.values()), sum(one.first_class.values())
            return one.pid, len(one.owned), one.nbytes, leases, one.grant, one.held, first_class, one.minimum
        low, high = struct.unpack("<qq", self._tier.identity)
        named = {
            **{"host_bytes": ledger.host, "host_used": ledger.host_used, "device_bytes": ledger.device},
            **{"device_used": ledger.device_used, "device_idle": ledger.idle_bytes, "first_class": ledger.first_class},
            **{"budgets": ledger.reserved, "waited_for": ledger.demand, "clients": len(clients)},
            **{"objects": len(manager.objects), "link_bandwidth": int(self._tier.bandwidth or 0)},
            **{"jobs": sum(client.has_job for client in clients), "quota": ledger.quota_of(asking) or 0},
            **{"device_kind": self._tier.kind, "device_grain": self._tier.grain},
            **{"device_id_low": low, "device_id_high": high},
        }
        return tuple(named.get(name, manager.counts[name]) for name in FIGURES[page])
