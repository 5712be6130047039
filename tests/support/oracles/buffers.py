"""The static judge of version-2 plans: does a plan compute its graph without races in any order that its edges allow?

One rule for memory of every kind: whatever has the same bytes of a space, or the same value's home, is written one
after the other, each when its readers have ended. Deliberately naive; no code of planners but the data classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from disco_accel.errors import VerifyError
from disco_accel.graph.schema2 import (
    GATE,
    Buffer,
    Graph,
    Plan,
    Planned,
    Value,
    Version,
    Work,
    handed_out_at_gate,
)
from disco_accel.graph.traits import Access, Arrival, Lifetime
from disco_accel.verify.happens_before import Claim, first_violated, topological_order
from disco_accel.verify.occupants import Occupants
from tests.support.oracles.buffer_ranges import check_all_bytes, check_range, check_ranges_back
from tests.support.oracles.judged_buffers import JudgedBuffers, Memory


def verify_buffers(graph: Graph, plan: Plan) -> None:
    """Raise VerifyError, naming the vertices, unless ``plan`` is a safe plan of ``graph`` in its spaces."""
    _check_graph(graph, plan.graph)
    judged = JudgedBuffers(graph, plan)
    _check_order(judged)
    order = topological_order(
        [planned.id for planned in plan.order], {v: waits - {GATE} for v, waits in judged.waits.items()}
    )
    _check_buffers(judged)
    for planned in plan.order:
        _check_planned(judged, planned)
    _check_arrivals(judged)
    behind = _behind_gate(judged, order)
    memories = _check_memory(judged, order, behind)
    _check_after(judged, behind)
    _resolve(judged, order)
    _check_end(judged, memories)


def _check_graph(graph: Graph, repeated: Graph) -> None:
    for key in ("values", "vertices", "at_gate", "at_end"):
        # Their order is the plan's to choose.
        if set(getattr(repeated, key)) != set(getattr(graph, key)):
            raise VerifyError(f"the plan is of another graph: {key} are not those of the graph")
    if repeated.space.keys() != graph.space.keys():
        raise VerifyError(f"the plan is for spaces {sorted(repeated.space)}, the graph has {sorted(graph.space)}")
    for space in repeated.spaces:
        own = graph.space[space.id]
        if space.kind is not own.kind or space.kernels != own.kernels:
            kinds = [f"{s.kind}{' with kernels' if s.kernels else ''}" for s in (own, space)]
            raise VerifyError(f"space {space.id}: is {kinds[0]} in the graph and {kinds[1]} in the plan")
        if own.bytes is not None and (space.bytes is None or space.bytes > own.bytes):
            raise VerifyError(f"space {space.id}: the plan counts on {space.bytes} bytes, the graph gives {own.bytes}")
        if space.alignment % own.alignment:
            raise VerifyError(f"space {space.id}: alignment {space.alignment} is not a multiple of {own.alignment}")


def _check_order(judged: JudgedBuffers) -> None:
    plan = judged.plan
    if len(judged.planned) != len(plan.order) or len(judged.buffers) != len(plan.buffers):
        raise VerifyError("two entries of the order, or two buffers, have the same id")
    for vertex in judged.graph.vertices:
        if vertex.id not in judged.planned:
            raise VerifyError(f"{judged.name(vertex.id)} of the graph is missing from the plan")
    for planned in plan.order:
        for number in (*planned.reads, *planned.writes):
            if number not in judged.buffers:
                raise VerifyError(f"{judged.name(planned.id)}: there is no buffer {number}")
        for number in planned.writes:
            if judged.writer.setdefault(number, planned.id) != planned.id or planned.writes.count(number) > 1:
                raise VerifyError(f"{judged.name(planned.id)}: buffer {number} is written more than once")
        for number in dict.fromkeys(planned.reads):
            judged.readers[number].append(planned.id)
    for u, v in (*plan.data_edges, *plan.memory_edges):
        if v not in judged.planned or (u != GATE and u not in judged.planned) or u == v:
            raise VerifyError(f"edge [{u}, {v}] names no two vertices of the plan")
        judged.waits[v].add(u)
    data = set(plan.data_edges)
    for planned in plan.order:
        for number in planned.reads:
            producer = judged.writer.get(number)
            if producer is not None and (producer, planned.id) not in data:
                raise VerifyError(f"{judged.name(planned.id)} reads {judged.name(producer)} without a data edge")
            if producer is None and judged.value(judged.buffers[number]).traits.arrival is Arrival.GATE:
                judged.waits[planned.id].add(GATE)


def _check_buffers(judged: JudgedBuffers) -> None:
    for buffer in judged.plan.buffers:
        value = judged.graph.value.get(buffer.version[0])
        if value is None or not 0 <= buffer.version[1] <= judged.graph.last_version[value.id]:
            raise VerifyError(f"buffer {buffer.id} is of version {list(buffer.version)}, which does not exist")
        if not judged.is_whole(buffer):
            check_range(judged, buffer)
        if buffer.offset is None:
            at_home = value.traits.lifetime is Lifetime.STEPS and buffer.space == value.home
            foreign = value.traits.access is Access.FOREIGN and buffer.space == value.space
            if value.bytes and not (at_home or foreign):
                raise VerifyError(f"buffer {buffer.id} of value {value.id} has no offset in space {buffer.space}")
            continue
        if value.traits.access is Access.FOREIGN:
            raise VerifyError(f"buffer {buffer.id}: value {value.id} is foreign, so that its place is not the plan's")
        space = judged.plan.graph.space.get(buffer.space)
        if space is None:
            raise VerifyError(f"buffer {buffer.id}: there is no space {buffer.space}")
        if space.kernels and value.home is not None:
            raise VerifyError(f"buffer {buffer.id}: value {value.id} is used at its home, not in space {space.id}")
        begin, end = judged.extent(buffer)
        if begin < 0 or (space.bytes is not None and end > space.bytes):
            raise VerifyError(
                f"buffer {buffer.id}: [{begin}, {end}) is outside the {space.bytes} bytes of space {space.id}"
            )
        if begin % space.alignment:
            raise VerifyError(f"buffer {buffer.id}: offset {begin} is not a multiple of {space.alignment}")


def _check_planned(judged: JudgedBuffers, planned: Planned) -> None:
    vertex = judged.vertices.get(planned.id)
    name = judged.name(planned.id)
    reads, writes = ([judged.buffers[number] for number in side] for side in (planned.reads, planned.writes))
    if vertex is None:
        if len(reads) != 1 or len(writes) != 1 or reads[0].version != writes[0].version:
            raise VerifyError(f"{name} must copy one buffer to another of the same version")
        if not judged.is_whole(reads[0]):
            raise VerifyError(f"{name} copies buffer {reads[0].id}, which does not have the whole value")
        return
    check_all_bytes(judged, planned, vertex, reads)
    further, reads = reads[len(vertex.reads) :], reads[: len(vertex.reads)]
    for buffer in further:
        if buffer.space != vertex.space:
            raise VerifyError(f"{name}: reads buffer {buffer.id} in space {buffer.space}, not in {vertex.space}")
    for key, buffers, versions in (("reads", reads, vertex.reads), ("writes", writes, vertex.writes)):
        if [buffer.version for buffer in buffers] != list(versions):
            raise VerifyError(f"{name} {key} {[b.version for b in buffers]}, where the graph says {list(versions)}")
        for buffer in buffers:
            used = judged.value(buffer)
            space = used.space if vertex.work is Work.COPY and key == "reads" else vertex.space
            if judged.graph.at_home(vertex, used):
                if used.bytes and (buffer.space, buffer.offset) != (used.home, None):
                    raise VerifyError(f"{name}: {key} buffer {buffer.id}, which is not the home of value {used.id}")
            elif buffer.space != space and (used.bytes or buffer.version not in judged.graph.written_at_home):
                raise VerifyError(f"{name}: {key} buffer {buffer.id} in space {buffer.space}, not in {space}")
    for written in writes:
        value, version = written.version
        lost = [buffer for buffer in reads if buffer.version == (value, version - 1)]
        if version and all((b.space, b.offset) != (written.space, written.offset) for b in lost):
            raise VerifyError(f"{name} changes value {value} in place, but buffer {written.id} is elsewhere")


def _check_arrivals(judged: JudgedBuffers) -> None:
    """What no vertex writes is there: at home, at the start, or from the gate on; one place for what is brought."""
    arriving: dict[Version, list[int]] = defaultdict(list)
    for buffer in judged.plan.buffers:
        if buffer.id in judged.writer:
            continue
        value = judged.value(buffer)
        if buffer.version[1] or value.traits.arrival is Arrival.MADE:
            raise VerifyError(f"buffer {buffer.id} of version {list(buffer.version)} is written by nobody")
        if value.bytes and buffer.offset is not None:
            if buffer.space != value.space:
                raise VerifyError(f"buffer {buffer.id}: nothing brings value {value.id} to space {buffer.space}")
            arriving[buffer.version].append(buffer.id)
    for value in judged.graph.values:
        brought = value.traits.lifetime is Lifetime.STEP and value.traits.arrival is not Arrival.MADE
        count = len(arriving[value.id, 0])
        several = count > 1 and any(judged.is_whole(judged.buffers[number]) for number in arriving[value.id, 0])
        if value.bytes and value.traits.access is not Access.FOREIGN and (several or (brought and count != 1)):
            raise VerifyError(f"value {value.id} arrives in {count} buffers, not in one")


def _behind_gate(judged: JudgedBuffers, order: dict[int, int]) -> set[int]:
    behind: set[int] = set()
    for number in sorted(order, key=order.__getitem__):
        vertex = judged.vertices.get(number)
        if GATE in judged.waits[number] or judged.waits[number] & behind:
            behind.add(number)
            for version in vertex.writes if vertex else ():
                if handed_out_at_gate(judged.graph, version):
                    raise VerifyError(f"{judged.name(number)} is handed out at the gate but waits for it")
    return behind


def _check_memory(judged: JudgedBuffers, order: dict[int, int], behind: set[int]) -> dict[Memory, Occupants[int]]:
    memories: dict[Memory, Occupants[int]] = defaultdict(Occupants)
    reserved: set[int] = set()

    def turn(buffer: Buffer) -> tuple[int, int]:
        return order[judged.writer[buffer.id]] if buffer.id in judged.writer else -1, buffer.id

    for buffer in sorted(judged.plan.buffers, key=turn):
        memory = judged.memory(buffer)
        if memory is None:
            continue
        writer = judged.writer.get(buffer.id)
        if writer is None and judged.value(buffer).traits.arrival is Arrival.GATE:
            reserved.add(buffer.id)
        replaced = memories[memory].replace(*judged.extent(buffer), buffer.id)
        if writer is not None and memory[0] == "home" and not replaced:
            # What a home holds when the step starts has a buffer only where a copy reads it.
            _check_handed_out(judged, (memory[1], 0), f"the home of value {memory[1]}", buffer, writer, behind)
        for number in replaced:
            former = judged.buffers[number]
            _check_reuse(judged, former, buffer, writer)
            if former.id in reserved:
                if writer not in judged.readers[former.id]:
                    raise VerifyError(
                        f"buffer {buffer.id} is where what arrives at the gate has its place all the time"
                    )
                reserved.add(buffer.id)
            first = judged.writer.get(former.id)
            if first is None or first in judged.vertices:
                _check_handed_out(judged, former.version, f"buffer {former.id}", buffer, writer, behind)
    return memories


def _check_handed_out(
    judged: JudgedBuffers, version: Version, place: str, buffer: Buffer, writer: int | None, behind: set[int]
) -> None:
    if judged.has_gate and writer not in behind and handed_out_at_gate(judged.graph, version):
        raise VerifyError(f"buffer {buffer.id} overwrites {place} before it is handed out")


def _check_reuse(judged: JudgedBuffers, former: Buffer, buffer: Buffer, writer: int | None) -> None:
    def both() -> str:
        return f"buffers {former.id} and {buffer.id} share memory"

    if writer is None or judged.writer.get(former.id) == writer:
        raise VerifyError(f"{both()} and are {'there at the start' if writer is None else 'written by one vertex'}")
    readers = judged.readers[former.id]
    if writer in readers:
        _check_overwrite(judged, former, buffer, writer)
    first = judged.writer.get(former.id)
    if first is not None and not readers:
        judged.claims.append((first, writer, both))
    judged.claims += [(reader, writer, both) for reader in readers if reader != writer]


def _check_overwrite(judged: JudgedBuffers, former: Buffer, buffer: Buffer, writer: int) -> None:
    """A vertex may write over what it reads only as a new version, or where ``may_overwrite`` says so."""
    vertex, planned = judged.vertices.get(writer), judged.planned[writer]
    (begin, end), (former_begin, former_end) = judged.extent(buffer), judged.extent(former)
    same = former.offset == buffer.offset and end - begin <= former_end - former_begin
    if vertex is not None and same:
        if buffer.version == (former.version[0], former.version[1] + 1):
            return
        taken_over = [planned.reads[position] for position in vertex.may_overwrite]
        if former.id in taken_over and planned.writes[0] == buffer.id:
            return
    raise VerifyError(f"{judged.name(writer)} reads buffer {former.id} and may not write buffer {buffer.id} over it")


def _check_after(judged: JudgedBuffers, behind: set[int]) -> None:
    for vertex in judged.graph.vertices:
        for other in vertex.after:
            if other != GATE:
                judged.claims.append((other, vertex.id, lambda: "the graph says after"))
            elif vertex.id not in behind:
                raise VerifyError(f"{judged.name(vertex.id)} need not wait for the gate, where the graph says after")


def _resolve(judged: JudgedBuffers, order: dict[int, int]) -> None:
    numbers = sorted(order, key=order.__getitem__)
    before: list[Sequence[int]] = [[order[p] for p in judged.waits[number] - {GATE}] for number in numbers]
    claims: list[Claim] = [(order[first], order[then], why) for first, then, why in judged.claims]
    wrong = first_violated(before, claims)
    if wrong is not None:
        first, then = (judged.name(numbers[position]) for position in wrong[:2])
        raise VerifyError(f"{first} need not finish before {then} starts: {wrong[2]()}")


def _check_end(judged: JudgedBuffers, memories: dict[Memory, Occupants[int]]) -> None:
    def holds(buffer: Buffer) -> bool:
        memory = judged.memory(buffer)
        return memory is None or memories[memory].at(*judged.extent(buffer)) == {buffer.id}

    check_ranges_back(judged, memories)
    copies: dict[Version, list[Buffer]] = defaultdict(list)
    for buffer in judged.plan.buffers:
        if judged.is_whole(buffer):
            copies[buffer.version].append(buffer)
    wanted = {*judged.graph.at_end, *(() if judged.has_gate else judged.graph.at_gate)}
    for version in sorted(wanted):
        value = judged.graph.value[version[0]]
        at_home = value.traits.lifetime is Lifetime.STEPS and version[1] == judged.graph.last_version[value.id] == 0
        if value.bytes and not at_home and not any(holds(buffer) for buffer in copies[version]):
            raise VerifyError(f"version {list(version)} is handed out at the end but overwritten by then")
    for value in judged.graph.values:
        if value.traits.host_has_it and value.bytes:
            _check_lasting(judged, value, copies, holds)


def _check_lasting(
    judged: JudgedBuffers, value: Value, copies: dict[Version, list[Buffer]], holds: Callable[[Buffer], bool]
) -> None:
    """The next step finds a value that lives over steps where this one did: on the device, or at its home."""
    last = (value.id, judged.graph.last_version[value.id])
    ends = [(buffer.space, buffer.offset) for buffer in copies[last] if holds(buffer)]
    start = [b for b in copies[value.id, 0] if b.id not in judged.writer]
    resident = [buffer for buffer in start if buffer.offset is not None]
    if value.traits.renewed and resident:
        raise VerifyError(f"value {value.id} is resident, but the host renews it: each step has to reload it")
    if judged.plan.cyclic and last[1]:
        for buffer in resident:
            if (buffer.space, buffer.offset) not in ends:
                raise VerifyError(f"value {value.id} is resident but not back in its place when the step ends")
    on_device = [b.id for b in judged.plan.buffers if b.version[0] == value.id and b.space == value.space]
    brought = [b for b in on_device if b in judged.writer and judged.writer[b] not in judged.vertices]
    if judged.plan.cyclic and value.traits.stays and brought:
        raise VerifyError(f"value {value.id} has to stay on its device, but a copy brings it there")
    read_at_home = any(judged.readers[buffer.id] for buffer in start if buffer.offset is None)
    needs_home = last[1] > 0 and (read_at_home or not resident or not judged.plan.cyclic)
    if needs_home and (value.home, None) not in ends:
        raise VerifyError(
            f"value {value.id} is changed, and its home does not have its last version when the step ends"
        )
