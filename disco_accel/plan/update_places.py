"""Where an optimizer's updates run: each on its device, or on the processors, where its state has its home.

A device updates faster, but the state moves to it and back; the processors update where the state is, and the gradient
and the weights alone move. The choice starts from the balance of processor seconds against link seconds and is improved
in simulated time, update by update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from disco_accel.errors import ConfigError
from disco_accel.graph.check import called, check_taskgraph
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.passes import GraphPass
from disco_accel.graph.spaces import TO_DEVICE, Space, SpaceKind
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists, lasting_versions
from disco_accel.plan.update_estimate import estimated
from disco_accel.simulate.simulator import Machine

HostSeconds = Callable[[Vertex], float | None]
"""Seconds of a kernel on the processors; None: it cannot run there."""

_TRIES = 120
"""Steps that are simulated for one choice."""

_GAIN = 1e-4
"""Share of a step that a change must save to be made."""


@dataclass(frozen=True, slots=True)
class Places:
    """``on_host``: ids of the updates that run on the processors; ``seconds``: of a step, estimated."""

    on_host: frozenset[int]
    seconds: float


def update_places(host_seconds: HostSeconds, machine: Machine) -> GraphPass:
    """The pass that moves those updates to the processors with which a step is expected to be the fastest."""

    def run(graph: TaskGraph) -> TaskGraph:
        found = updates_of(graph, host_seconds)
        if not found:
            return graph
        balance = balanced_share(graph, found, machine)
        best, *_ = choose(list(found), lambda on_host: placed(graph, _only(found, on_host)), machine, balance)
        return placed(graph, _only(found, best.on_host))

    return GraphPass("update places", "updates to the processors where a step is faster with it", run)


def updates_of(graph: TaskGraph, host_seconds: HostSeconds) -> dict[int, float]:
    """Kernels that write only over values that live over steps and can run on the processors → seconds there."""
    states = {version for each in lasting_versions(graph.vertices).values() for version in each}
    found = {}
    for vertex in graph.vertices:
        over = [vertex.inputs[position] for _, position in vertex.inplace]
        if vertex.kind is not VertexKind.KERNEL or not over or len(over) < len(vertex.sizes):
            continue
        if states.issuperset(over) and (seconds := host_seconds(vertex)) is not None:
            found[vertex.id] = seconds
    return found


def _only(found: Mapping[int, float], on_host: Collection[int]) -> dict[int, float]:
    return {vertex: seconds for vertex, seconds in found.items() if vertex in on_host}


def placed(graph: TaskGraph, on_host: Mapping[int, float]) -> TaskGraph:
    """Return ``graph`` with these kernels on the processors: id → seconds there.

    Values that the step makes on a device for them are transferred; values that live over steps, and that they alone
    use, stay at home. Raises ConfigError for a kernel that writes values of the step itself.
    """
    if not on_host:
        return graph
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    host = next((d.id for d in graph.devices if d.is_host_device), 1 + max(d.id for d in graph.devices))
    at_home = {version for each in lasting_versions(graph.vertices).values() for version in each}
    at_home |= {(vertex.id, 0) for vertex in graph.vertices if host_copy_exists(vertex)}
    copies: dict[Ref, Vertex] = {}
    next_id = 1 + max(by_id)
    for moved in (vertex for vertex in graph.vertices if vertex.id in on_host):
        over = [moved.inputs[position] for _, position in moved.inplace]
        if not over or not at_home.issuperset(over):
            raise ConfigError(f"{called(moved)}: writes over no value that lives over steps; let it run on its device")
        for ref in moved.inputs:
            if ref not in at_home and ref not in copies and by_id[ref[0]].space != host:
                size = by_id[ref[0]].sizes[ref[1]]
                copies[ref] = _copied(next_id + len(copies), ref, size, by_id[ref[0]].space, host)
    vertices: list[Vertex] = []
    for vertex in graph.vertices:
        if vertex.id in on_host:
            inputs = tuple((copies[ref].id, 0) if ref in copies else ref for ref in vertex.inputs)
            vertex = replace(vertex, space=host, inputs=inputs, duration=on_host[vertex.id])
        vertices.append(vertex)
        vertices += [copies[vertex.id, k] for k in range(len(vertex.sizes)) if (vertex.id, k) in copies]
    spaces = graph.spaces
    if all(space.id != host for space in spaces):
        unit = max(device.alignment for device in graph.devices)
        room = sum(-(-copy.sizes[0] // unit) * unit for copy in copies.values())
        spaces = (*spaces, Space(host, max(room, unit), unit, SpaceKind.HOST))
    return check_taskgraph(_homes_of_the_hosts_own(replace(graph, spaces=spaces, vertices=tuple(vertices)), host))


def _copied(number: int, ref: Ref, size: int, source: int, target: int) -> Vertex:
    return Vertex(number, VertexKind.COPY, target, "", (ref,), (size,), source=source)


def _homes_of_the_hosts_own(graph: TaskGraph, host: int) -> TaskGraph:
    """Inputs that kernels of ``host`` alone use belong to it: they never leave home."""
    homes = HomeUses.of(graph).homes
    used: dict[Ref, set[int]] = {}
    for vertex in graph.vertices:
        for ref in vertex.inputs:
            if ref in homes:
                used.setdefault(homes[ref], set()).add(vertex.space)
    own = {ref for ref, devices in used.items() if devices == {host}}
    vertices = (replace(v, space=host) if (v.id, 0) in own else v for v in graph.vertices)
    return replace(graph, vertices=tuple(vertices))


def balanced_share(graph: TaskGraph, found: Mapping[int, float], machine: Machine) -> float:
    """Share of the updates that belongs on the processors if these and the link to the device work equally long."""
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    readers: dict[Ref, int] = {}
    for vertex in graph.vertices:
        for ref in vertex.inputs:
            readers[ref] = readers.get(ref, 0) + 1
    moved = sum(
        by_id[ref[0]].sizes[ref[1]]
        for vertex in found
        for ref in (by_id[vertex].inputs[position] for _, position in by_id[vertex].inplace)
        if readers[ref] == 1
    )
    link = moved / machine.link(TO_DEVICE).bandwidth
    host = sum(found.values())
    return link / (link + host) if link + host else 0.0


def choose(
    updates: Sequence[int],
    build: Callable[[frozenset[int]], TaskGraph],
    machine: Machine,
    share: float,
    *,
    tries: int = _TRIES,
) -> list[Places]:
    """Return the fastest places that were found, beginning with ``share`` of ``updates`` on the processors; behind them
    the fastest of each pattern, for callers that plan several.

    ``build``: ids of updates on the processors → the step's graph. All here and all there are tried first: neither
    is expected to be better than the result. ``tries``: steps that are simulated, at most.
    """
    search = _PlaceSearch(build, machine, min(tries, _TRIES))
    search.attempt(frozenset())
    search.attempt(frozenset(updates))
    patterns = [best for pattern in _PATTERNS if (best := search.count_of(pattern, updates, share)) is not None]
    search.flip(updates)
    others = sorted({each.on_host: each for each in patterns}.values(), key=lambda each: each.seconds)
    return [search.best, *(each for each in others if each.on_host != search.best.on_host)]


def spread(updates: Sequence[int], count: int) -> Iterator[int]:
    """Every so many-th, ``count`` in all."""
    n = len(updates)
    return (each for i, each in enumerate(updates) if (i + 1) * count // n > i * count // n)


def _first(updates: Sequence[int], count: int) -> Sequence[int]:
    return updates[:count]


def _last(updates: Sequence[int], count: int) -> Sequence[int]:
    return updates[len(updates) - count :]


_Pattern = Callable[[Sequence[int], int], Iterable[int]]
_PATTERNS: tuple[_Pattern, ...] = (spread, _first, _last)


class _PlaceSearch:
    def __init__(self, build: Callable[[frozenset[int]], TaskGraph], machine: Machine, tries: int) -> None:
        self.build, self.machine, self.tries = build, machine, tries
        self.tried: dict[frozenset[int], float] = {}
        self.best = Places(frozenset(), float("inf"))

    def attempt(self, on_host: frozenset[int]) -> float:
        """Return the seconds with ``on_host``, which replaces a best so far that is slower; infinite if there have been
        too many attempts."""
        if on_host not in self.tried:
            if len(self.tried) >= self.tries:
                return float("inf")
            self.tried[on_host] = estimated(self.build(on_host), self.machine).makespan
            if self.tried[on_host] < self.best.seconds * (1 - _GAIN):
                self.best = Places(on_host, self.tried[on_host])
        return self.tried[on_host]

    def count_of(self, pattern: _Pattern, updates: Sequence[int], share: float) -> Places | None:
        """Return the fastest number of updates of ``pattern``, by steps that become smaller."""

        def there(count: int) -> frozenset[int]:
            return frozenset(pattern(updates, min(max(count, 0), len(updates))))

        count, step = round(share * len(updates)), max(1, len(updates) // 8)
        seconds = self.attempt(there(count))
        while step:
            least, near = min((self.attempt(there(n)), n) for n in (count - step, count + step))
            if least < seconds * (1 - _GAIN):
                seconds, count = least, near
            else:
                step //= 2
        return Places(there(count), seconds) if seconds < float("inf") else None

    def flip(self, updates: Sequence[int]) -> None:
        """Move single updates, from both ends to the middle, as long as one makes a step faster."""
        n = len(updates)
        ends = [updates[i // 2 if i % 2 == 0 else n - 1 - i // 2] for i in range(n)]
        before = float("inf")
        while self.best.seconds < before and len(self.tried) < self.tries:
            before = self.best.seconds
            for each in ends:
                self.attempt(self.best.on_host ^ {each})
