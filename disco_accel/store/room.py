"""The books of a store: how many bytes each tier has, who takes them, and how budgets are divided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from disco_accel.sizes import format_size
from disco_accel.store.grants import Job, Rule, divide, on_devices, runs_that_fit, shares
from disco_accel.store.messages import MAX_AMOUNT
from disco_accel.store.objects import Holder, Object

OUR_DEVICE = 0
"""The number of the device tier where programs report memory of their own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of each tier; every device has ``device``. ``quota``: the most that one client may own as objects, and as a
    budget; None: all. ``quotas``: the same for each client of a label, in its place."""

    host: int
    device: int
    quota: int | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)

    def quota_of(self, holder: Holder) -> int | None:
        """The most that ``holder`` may own, and get; None: all."""
        return self.quotas.get(holder.label, self.quota)


class Room:
    """Who takes how much. First-class memory comes first, then what objects in use take, then budgets; idle objects
    make way for all of these.

    ``device_used``, ``host_used``: bytes of files of each tier, those that moves fill included. ``demand``: bytes that
    objects wait for on the device.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.device_used = 0
        self.host_used = 0
        self.idle: dict[int, Object] = {}
        """On the device and free to leave, by id."""
        self.idle_bytes = 0
        self.clean_bytes = 0
        """Of those that the host has a copy of."""
        self.demand = 0
        self._counted: dict[int, bool] = {}
        self._jobs: dict[Holder, None] = {}
        self._first_class: dict[int, int] = {}
        self._reserved = 0

    def classify(self, item: Object) -> None:
        """Note that ``item`` may have become idle or clean, or not so any more."""
        was = self._counted.pop(item.id, None)
        if was is not None:
            del self.idle[item.id]
            self.idle_bytes -= item.room
            self.clean_bytes -= item.room if was else 0
        if item.idle:
            clean = item.host_file is not None
            self.idle[item.id], self._counted[item.id] = item, clean
            self.idle_bytes += item.room
            self.clean_bytes += item.room if clean else 0

    @property
    def first_class(self) -> int:
        """Bytes of our device that programs hold apart from the store."""
        return max(0, self._first_class.get(OUR_DEVICE, 0))

    @property
    def reserved(self) -> int:
        """Bytes that budgets take: of each what is granted or held, whichever is more."""
        return self._reserved

    @property
    def device_free(self) -> int:
        """Bytes of the device that nothing has a claim on; negative while too much is held."""
        return self.limits.device - self.first_class - self._reserved - self.device_used

    @property
    def host_free(self) -> int:
        """Bytes of host memory that no object takes."""
        return self.limits.host - self.host_used

    @property
    def coming_down(self) -> bool:
        """Whether a client holds more than its budget, which it gives back at the end of its step."""
        return any(holder.held > holder.grant for holder in self._here())

    @property
    def uncontended(self) -> bool:
        """Whether nobody wants a budget and nothing has to leave for first-class memory."""
        return not self._jobs and self.device_used + self.first_class <= self.limits.device

    @property
    def excess(self) -> int:
        """Bytes of idle objects that have to leave for first-class memory and budgets; at most 0 where none do."""
        return self.device_used - (self.limits.device - self.first_class - self._ideal())

    def report(self, holder: Holder, device: int, nbytes: int) -> None:
        """``holder``'s process has ``nbytes`` more of ``device``, or less. Its sum is never negative."""
        before = holder.first_class.get(device, 0)
        holder.first_class[device] = after = min(max(0, before + nbytes), MAX_AMOUNT)
        self._first_class[device] = self._first_class.get(device, 0) + after - before

    def end(self, holder: Holder) -> None:
        """All that ``holder`` reported and wanted is no more."""
        for device, nbytes in holder.first_class.items():
            self._first_class[device] -= nbytes
        holder.first_class.clear()
        holder.least = holder.wish = holder.held = holder.grant = 0
        self._jobs.pop(holder, None)
        self._reserve()

    def want(
        self,
        holder: Holder,
        least: int,
        wish: int,
        devices: frozenset[int] = frozenset({OUR_DEVICE}),
        run: int = 0,
    ) -> None:
        """``holder`` wants a budget, as much on each of ``devices``, as one of ``run``; its place in the order of
        arrival is that of its first one."""
        holder.least, holder.wish, holder.devices, holder.run = least, wish, devices, run
        self._note(holder)

    def hold(self, holder: Holder, nbytes: int) -> None:
        """``holder`` has so many bytes of its budget in use."""
        holder.held = nbytes
        self._note(holder)

    def regrant(self) -> list[Holder]:
        """Divide anew. Returns the clients whose budgets have changed."""
        if not self._jobs:
            return []
        free = self.limits.device - self.first_class - max(self.device_used, self._needed())
        jobs = list(self._jobs)
        granted = self._divided(divide, free, jobs)
        changed = [holder for holder, grant in zip(jobs, granted, strict=True) if holder.grant != grant]
        for holder, grant in zip(jobs, granted, strict=True):
            holder.grant = grant
        self._reserve()
        return changed

    def full(self, tier: str, wanted: int, holders: Iterable[Holder]) -> str:
        """Why there is no room: sizes, and who holds what, the largest first."""
        if tier == "host":
            taken = {holder: holder.nbytes for holder in holders}
            free, size = self.host_free, self.limits.host
        else:
            taken = {holder: sum(o.room for o in _in_use(holder)) for holder in holders}
            free, size = self.device_free, self.limits.device
        head = f"{tier}: {format_size(wanted)} wanted, {format_size(free)} of {format_size(size)} free"
        if tier == "device" and self.first_class:
            head += f", programs hold {format_size(self.first_class)}"
        if tier == "device" and self._reserved:
            head += f", budgets {format_size(self._reserved)}"
        largest = sorted(taken, key=lambda holder: -taken[holder])[:3]
        held = ", ".join(f"{h.words} {format_size(taken[h])}" for h in largest if taken[h])
        return head + (f"; in use: {held}" if held else "")

    def _note(self, holder: Holder) -> None:
        if holder.has_job:
            self._jobs[holder] = None
        else:
            self._jobs.pop(holder, None)
            holder.grant = 0
        self._reserve()

    def _job(self, holder: Holder) -> Job:
        return Job(holder.least, holder.wish, self.limits.quota_of(holder), holder.held)

    def _divided(self, rule: Rule, free: int, jobs: list[Holder]) -> list[int]:
        """What each of ``jobs`` has by ``rule`` if ``free`` bytes of our device are for budgets. Other devices have
        budgets and first-class memory alone."""
        totals = {device: self._rest_of(device) for holder in jobs for device in holder.devices}
        totals[OUR_DEVICE] = max(0, free)
        devices = [holder.devices for holder in jobs]
        wanted = runs_that_fit(totals, [self._job(holder) for holder in jobs], devices, [holder.run for holder in jobs])
        return on_devices(rule, totals, wanted, devices)

    def _rest_of(self, device: int) -> int:
        return max(0, self.limits.device - self._first_class.get(device, 0))

    def _here(self) -> list[Holder]:
        """Those with a budget of our device."""
        return [holder for holder in self._jobs if OUR_DEVICE in holder.devices]

    def _reserve(self) -> None:
        self._reserved = sum(max(holder.grant, holder.held) for holder in self._here())

    def _needed(self) -> int:
        """Bytes that objects in use take, and those that are waited for, which take no running job's least."""
        used = self.device_used - self.idle_bytes
        running = sum(holder.least for holder in self._here() if holder.grant or holder.held)
        return used + max(0, min(self.demand, self.limits.device - self.first_class - used - running))

    def _ideal(self) -> int:
        """What budgets come to once idle objects have made way and all have come down."""
        if not self._jobs:
            return 0
        free = max(0, self.limits.device - self.first_class - self._needed())
        jobs = list(self._jobs)
        ends = zip(self._divided(shares, free, jobs), jobs, strict=True)
        return sum(max(end, holder.held) for end, holder in ends if OUR_DEVICE in holder.devices)


def _in_use(holder: Holder) -> list[Object]:
    """Objects on the device that ``holder`` has a lease on, or has not put yet."""
    writing = [o for o in holder.owned.values() if not o.final and o.device_file is not None]
    return writing + [o for o in holder.leases if o.final and o.device_file is not None]
