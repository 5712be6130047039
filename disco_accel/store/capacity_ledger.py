"""The bytes of each tier of a store: taken by objects, budgets and first-class memory, and free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from disco_accel.sizes import format_size
from disco_accel.store.grants import Job, Rule, divide, on_devices, runs_that_fit, shares
from disco_accel.store.messages import MAX_AMOUNT
from disco_accel.store.objects import Client, Object

OUR_DEVICE = 0
"""The number of the device tier where programs report memory of their own."""


class CapacityLedger:
    """Bytes by their users. First-class memory comes first, then objects in use, then budgets; idle objects make way
    for all of these.

    ``host``, ``device``: bytes of each tier; all devices have as many. ``device_used``, ``host_used``: bytes of files
    of each tier, those that moves fill included. ``demand``: bytes that objects wait for on the device.
    """

    def __init__(
        self, host: int, device: int, quota: int | None = None, quotas: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """``quota``: the most that one client may own as objects, and as a budget; None: all. ``quotas``: the same for
        each client of a label, in its place."""
        self.host, self.device, self._quota, self._quotas = host, device, quota, quotas
        self.device_used = 0
        self.host_used = 0
        self.idle: dict[int, Object] = {}
        """On the device and free to leave, by id."""
        self.idle_bytes = 0
        self.clean_bytes = 0
        """Of those that the host has a copy of."""
        self.demand = 0
        self._counted: dict[int, bool] = {}
        self._jobs: dict[Client, None] = {}
        self._first_class: dict[int, int] = {}
        self.reserved = 0
        """Bytes that budgets take: of each those granted or held, the larger number."""

    def quota_of(self, client: Client) -> int | None:
        """The most that ``client`` may own, and get; None: all."""
        return self._quotas.get(client.label, self._quota)

    def classify(self, item: Object) -> None:
        """Note that ``item`` may have become idle or clean, or not so any more."""
        was = self._counted.pop(item.id, None)
        if was is not None:
            del self.idle[item.id]
            self.idle_bytes -= item.footprint
            self.clean_bytes -= item.footprint if was else 0
        if item.idle:
            clean = item.host_file is not None
            self.idle[item.id], self._counted[item.id] = item, clean
            self.idle_bytes += item.footprint
            self.clean_bytes += item.footprint if clean else 0

    @property
    def first_class(self) -> int:
        """Bytes of our device that programs hold apart from the store."""
        return max(0, self._first_class.get(OUR_DEVICE, 0))

    @property
    def device_free(self) -> int:
        """Bytes of the device that nothing has a claim on; negative while too much is held."""
        return self.device - self.first_class - self.reserved - self.device_used

    @property
    def host_free(self) -> int:
        """Bytes of host memory that no object takes."""
        return self.host - self.host_used

    @property
    def must_shrink(self) -> bool:
        """Whether a client holds more than its budget, which it gives back at the end of its step."""
        return any(client.held > client.grant for client in self._here())

    @property
    def uncontended(self) -> bool:
        """Whether nobody wants a budget and nothing has to leave for first-class memory."""
        return not self._jobs and self.device_used + self.first_class <= self.device

    @property
    def excess(self) -> int:
        """Bytes of idle objects that have to leave for first-class memory and budgets; at most 0 where none do."""
        return self.device_used - (self.device - self.first_class - self._ideal())

    def report(self, client: Client, device: int, nbytes: int) -> None:
        """``client``'s process has ``nbytes`` more of ``device``, or less. Its sum is never negative."""
        before = client.first_class.get(device, 0)
        client.first_class[device] = after = min(max(0, before + nbytes), MAX_AMOUNT)
        self._first_class[device] = self._first_class.get(device, 0) + after - before

    def end(self, client: Client) -> None:
        """All that ``client`` reported and wanted is no more."""
        for device, nbytes in client.first_class.items():
            self._first_class[device] -= nbytes
        client.first_class.clear()
        client.minimum = client.max_useful = client.held = client.grant = 0
        self._jobs.pop(client, None)
        self._reserve()

    def want(self, client: Client, minimum: int, max_useful: int, devices: frozenset[int], run: int) -> None:
        """``client`` wants a budget, as much on each of ``devices``, as one of ``run``; its place in the order of
        arrival is that of its first one."""
        client.minimum, client.max_useful, client.devices, client.run = minimum, max_useful, devices, run
        self._note(client)

    def hold(self, client: Client, nbytes: int) -> None:
        """``client`` has so many bytes of its budget in use."""
        client.held = nbytes
        self._note(client)

    def regrant(self) -> None:
        """Divide anew."""
        if not self._jobs:
            return
        free = self.device - self.first_class - max(self.device_used, self._needed())
        jobs = list(self._jobs)
        for client, grant in zip(jobs, self._divided(divide, free, jobs), strict=True):
            client.grant = grant
        self._reserve()

    def full(self, tier: str, wanted: int, clients: Iterable[Client]) -> str:
        """Why there is no room: sizes, and the clients that hold most."""
        if tier == "host":
            taken = {client: client.nbytes for client in clients}
            free, size = self.host_free, self.host
        else:
            taken = {client: sum(o.footprint for o in _in_use(client)) for client in clients}
            free, size = self.device_free, self.device
        head = f"{tier}: {format_size(wanted)} wanted, {format_size(free)} of {format_size(size)} free"
        if tier == "device" and self.first_class:
            head += f", programs hold {format_size(self.first_class)}"
        if tier == "device" and self.reserved:
            head += f", budgets {format_size(self.reserved)}"
        largest = sorted(taken, key=lambda client: -taken[client])[:3]
        held = ", ".join(f"{h.words} {format_size(taken[h])}" for h in largest if taken[h])
        return head + (f"; in use: {held}" if held else "")

    def _note(self, client: Client) -> None:
        if client.has_job:
            self._jobs[client] = None
        else:
            self._jobs.pop(client, None)
            client.grant = 0
        self._reserve()

    def _job(self, client: Client) -> Job:
        return Job(client.minimum, client.max_useful, self.quota_of(client), client.held)

    def _divided(self, rule: Rule, free: int, jobs: list[Client]) -> list[int]:
        """The bytes of each of ``jobs`` by ``rule`` if ``free`` bytes of our device are for budgets. Other devices have
        budgets and first-class memory alone."""
        totals = {device: self._rest_of(device) for client in jobs for device in client.devices}
        totals[OUR_DEVICE] = max(0, free)
        devices = [client.devices for client in jobs]
        wanted = runs_that_fit(totals, [self._job(client) for client in jobs], devices, [client.run for client in jobs])
        return on_devices(rule, totals, wanted, devices)

    def _rest_of(self, device: int) -> int:
        return max(0, self.device - self._first_class.get(device, 0))

    def _here(self) -> list[Client]:
        """Those with a budget of our device."""
        return [client for client in self._jobs if OUR_DEVICE in client.devices]

    def _reserve(self) -> None:
        self.reserved = sum(max(client.grant, client.held) for client in self._here())

    def _needed(self) -> int:
        """Bytes that objects in use take, and those that are waited for, which take no running job's minimum."""
        used = self.device_used - self.idle_bytes
        running = sum(client.minimum for client in self._here() if client.grant or client.held)
        return used + max(0, min(self.demand, self.device - self.first_class - used - running))

    def _ideal(self) -> int:
        """Bytes of all budgets once idle objects have left and no client holds more than its budget."""
        if not self._jobs:
            return 0
        free = max(0, self.device - self.first_class - self._needed())
        jobs = list(self._jobs)
        ends = zip(self._divided(shares, free, jobs), jobs, strict=True)
        return sum(max(end, client.held) for end, client in ends if OUR_DEVICE in client.devices)


def _in_use(client: Client) -> list[Object]:
    """Objects on the device that ``client`` has a lease on, or has not put yet."""
    writing = [o for o in client.owned.values() if not o.final and o.device_file is not None]
    return writing + [o for o in client.leases if o.final and o.device_file is not None]
