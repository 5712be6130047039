"""From a timeline to stays: which bytes are taken from when to when, and by whom they are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from disco_accel.memgraph import MemGraph, Slot
from disco_accel.plan.demand import Demand
from disco_accel.plan.finish import assemble
from disco_accel.plan.sim_malloc import PlanLog
from disco_accel.plan.stay import Planned
from disco_accel.plan.timeline import Act, Timeline
from disco_accel.taskgraph import Ref, Vertex, VertexKind

FOREVER = 1 << 60


@dataclass(slots=True, eq=False)
class Occupancy:
    """``block`` bytes of ``device`` from tick ``begin`` up to before tick ``end`` for one value or a chain of them.

    ``values`` are named as in the plan, each with its readers; a tick is a place in the order of acts, and 0 the start.
    ``back``: a later stay of the same page that must have the same address, because the step ends as it began.
    """

    device: int
    block: int
    begin: int
    end: int = FOREVER
    values: list[tuple[Ref, list[int]]] = field(default_factory=list)
    back: Occupancy | None = None
    is_back: bool = False
    addr: int = -1

    @property
    def users(self) -> list[int]:
        """Who must finish before the bytes are written again; empty if nobody ever touched them."""
        ref, readers = self.values[-1]
        return readers or ([] if self.begin == 0 and len(self.values) == 1 else [ref[0]])


@dataclass(slots=True)
class Script:
    """A plan but for its addresses: ``planned`` in order of priority, ``stays`` by their first tick."""

    demand: Demand
    cyclic: bool
    planned: list[Vertex]
    stays: list[Occupancy]
    slots: dict[Ref, Occupancy]


def script_of(
    demand: Demand, timeline: Timeline, start: Sequence[int], permanent: Sequence[int], cyclic: bool
) -> Script:
    """Replay ``timeline`` and return what it plans."""
    return _Replay(demand, timeline, cyclic).run([*permanent, *start])


class _Replay:
    def __init__(self, demand: Demand, timeline: Timeline, cyclic: bool) -> None:
        self.demand = demand
        self.acts = timeline.acts
        self.cyclic = cyclic
        self.planned: list[Vertex] = []
        self.stays: list[Occupancy] = []
        self.slots: dict[Ref, Occupancy] = {}
        self.current: dict[int, Occupancy] = {}
        self.readers: dict[Ref, list[int]] = {}
        """Readers of what is not a page."""
        self.host: dict[int, Ref] = {i: page.ref for i, page in enumerate(demand.pages) if page.clean}
        self.fresh = max((v.id for v in (*demand.inputs, *demand.order)), default=-1) + 1
        self.needed = self._needed_offloads()

    def run(self, start: Sequence[int]) -> Script:
        for page in start:
            self._open(page, self.demand.pages[page].ref, 0)
        first = dict(self.current)
        run_tick: dict[int, int] = {-1: 0}
        release_tick: dict[tuple[int, int], int] = {}
        running: dict[int, int] = {}
        for tick, (act, what) in enumerate(self.acts, start=1):
            if act is Act.RUN:
                run_tick[what] = tick
                for device in self.demand.devices[what]:
                    running[device] = what
                self._run(what, tick)
            elif act is Act.RELEASE:
                release_tick[what, running[what]] = tick
            elif act is Act.LOAD:
                self._open(what, (self._copy(VertexKind.RELOAD, what, self.host[what]), 0), tick)
            elif act is Act.DROP:
                self.current.pop(what).end = tick
            elif what in self.needed:
                stay = self.current[what]
                offload = self._copy(VertexKind.OFFLOAD, what, stay.values[-1][0])
                stay.values[-1][1].append(offload)
                self.host[what] = (offload, 0)
        if self.cyclic:
            self._come_back(first)
        for storage in self.demand.storages:
            end = release_tick.get((storage.device, storage.last), FOREVER)
            values = [(ref, self.readers.get(ref, [])) for ref in storage.values]
            stay = Occupancy(storage.device, storage.block, run_tick[storage.first], end, values)
            self.stays.append(stay)
            self.slots.update(dict.fromkeys(storage.values, stay))
        self.stays.sort(key=lambda stay: stay.begin)
        return Script(self.demand, self.cyclic, self.planned, self.stays, self.slots)

    def _needed_offloads(self) -> set[int]:
        """Return the produced pages that are wanted again after they left, by a reader or by the user."""
        needed = set()
        for act, page in self.acts:
            if act in (Act.LOAD, Act.DROP) and not self.demand.pages[page].clean:
                producer = self.demand.order[self.demand.pages[page].producer]
                if act is Act.LOAD or producer.keep:
                    needed.add(page)
        return needed

    def _open(self, page: int, ref: Ref, tick: int) -> None:
        value = self.demand.pages[page]
        stay = Occupancy(value.device, value.block, tick, values=[(ref, [])])
        self.current[page] = stay
        self.stays.append(stay)
        self.slots[ref] = stay

    def _copy(self, kind: VertexKind, page: int, source: Ref) -> int:
        value = self.demand.pages[page]
        vertex = Vertex(self.fresh, kind, value.device, kind.name.lower(), (source,), (value.size,))
        self.fresh += 1
        self.planned.append(vertex)
        return vertex.id

    def _run(self, position: int, tick: int) -> None:
        vertex = self.demand.order[position]
        here: dict[Ref, Ref] = {}
        for page in self.demand.reads[position]:
            ref, readers = self.current[page].values[-1]
            here[self.demand.pages[page].ref] = ref
            readers.append(vertex.id)
        for ref in dict.fromkeys(vertex.inputs):
            if ref not in here:
                self.readers.setdefault(ref, []).append(vertex.id)
        self.planned.append(replace(vertex, inputs=tuple(here.get(ref, ref) for ref in vertex.inputs)))
        for page in self.demand.made.get(position, ()):
            self._open(page, self.demand.pages[page].ref, tick)

    def _come_back(self, first: dict[int, Occupancy]) -> None:
        for page, stay in first.items():
            last = self.current[page]
            if last is not stay:
                stay.back = last
                last.is_back = True


def finish(script: Script) -> MemGraph:
    """Return the plan once every stay has its address."""
    demand = script.demand
    log = PlanLog((*demand.inputs, *demand.order))
    log.planned = [Planned(vertex) for vertex in script.planned]
    waits: dict[int, list[int]] = {}
    memories: dict[int, _Ground] = {}
    for stay in script.stays:
        former = memories.setdefault(stay.device, _Ground()).replace(stay)
        producer = stay.values[0][0][0]
        for other in former:
            waits.setdefault(producer, []).extend(u for u in other.users if u != producer)
        for (_, readers), (ref, _) in zip(stay.values, stay.values[1:], strict=False):
            waits.setdefault(ref[0], []).extend(reader for reader in readers if reader != ref[0])
    log.memory_edges = {vertex: tuple(dict.fromkeys(of)) for vertex, of in waits.items()}
    sizes = {
        (vertex.id, k): size for vertex in (*demand.inputs, *script.planned) for k, size in enumerate(vertex.sizes)
    }
    slots = {ref: Slot(stay.device, stay.addr, sizes[ref]) for ref, stay in script.slots.items()}
    return assemble(demand.graph, log, slots, {}, cyclic=script.cyclic)


class _Ground:
    """Who had each byte of an arena last: disjoint ranges by address."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ranges: list[tuple[int, int, Occupancy]] = []

    def replace(self, stay: Occupancy) -> list[Occupancy]:
        """Give the bytes of ``stay`` to it and return who had them."""
        begin, end = stay.addr, stay.addr + stay.block
        low = bisect_right(self.starts, begin)
        if low and self.ranges[low - 1][1] > begin:
            low -= 1
        high = low
        kept: list[tuple[int, int, Occupancy]] = []
        former: list[Occupancy] = []
        while high < len(self.ranges) and self.ranges[high][0] < end:
            start, stop, other = self.ranges[high]
            former.append(other)
            if start < begin:
                kept.append((start, begin, other))
            if stop > end:
                kept.append((end, stop, other))
            high += 1
        kept.append((begin, end, stay))
        kept.sort(key=lambda piece: piece[0])
        self.ranges[low:high] = kept
        self.starts[low:high] = [piece[0] for piece in kept]
        return list(dict.fromkeys(former))
