"""verify and a judge that checks every pair of values by definition agree, on good plans and on spoilt ones."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections import Counter, defaultdict
from dataclasses import replace
from types import ModuleType

import pytest

from disco_accel.errors import PlanError, VerifyError
from disco_accel.graph.carried_values import carried_values
from disco_accel.graph.copies import swaps, swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import HOST, SpaceKind
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import arrives_at_gate, host_copy_exists
from disco_accel.plan import make_plan
from disco_accel.verify import homes, judged_plan, same_graph, static
from disco_accel.verify.static import verify
from tests.support.faults.faults import FAULTS
from tests.support.faults.home_faults import HOME_FAULTS
from tests.support.faults.state_faults import STATE_FAULTS
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets
from tests.support.oracles.naive_judge import is_safe
from tests.support.plans.home_plans import home_plans
from tests.support.plans.plans import tight_plans
from tests.support.plans.state_plans import state_plans, timed_state_plans

PLANS = int(os.environ.get("DISCO_ORACLE_PLANS", "100"))
PLANNERS = ("build", "timed")
SHAPES = (
    Shape(vertices=14),
    Shape(vertices=14, devices=3),
    Shape(vertices=12, gate=False, keep=0.3),
    Shape(vertices=12, inplace=0.4, may_inplace=0.4),
)


def accepted(graph: TaskGraph, plan: MemGraph) -> bool:
    try:
        verify(graph, plan)
    except VerifyError:
        return False
    return True


def plans(count: int, seed: int) -> list[tuple[TaskGraph, MemGraph]]:
    made: list[tuple[TaskGraph, MemGraph]] = []
    rng = random.Random(seed)
    while len(made) < count:
        graph = with_working_sets(random_taskgraph(rng, rng.choice(SHAPES)), rng.choice((1.0, 1.3, 2.0)))
        try:
            made.append((graph, make_plan(graph, cyclic=rng.random() < 0.5, planner=rng.choice(PLANNERS))))
        except PlanError:
            continue
    return made


def moved(plan: MemGraph, rng: random.Random) -> MemGraph:
    """A value somewhere else in its device."""
    if not on_devices(plan):
        return plan
    ref = rng.choice(on_devices(plan))
    slot = plan.slots[ref]
    device = next(d for d in plan.devices if d.id == slot.space)
    places = [s.offset for s in plan.slots.values() if s.space == slot.space]
    places.append(rng.randrange(device.memory // device.alignment + 1) * device.alignment)
    return replace(plan, slots={**plan.slots, ref: replace(slot, offset=rng.choice(places))})


def on_devices(plan: MemGraph) -> list[Ref]:
    """The values that have a slot on a device."""
    return sorted(ref for ref, slot in plan.slots.items() if slot.space != HOST)


def bytes_of(plan: MemGraph, ref: Ref) -> int:
    return next(v for v in plan.vertices if v.id == ref[0]).sizes[ref[1]]


def rewired(plan: MemGraph, rng: random.Random) -> MemGraph:
    """An edge more or less."""
    ids = [v.id for v in plan.vertices]
    if plan.memory_edges and rng.random() < 0.6:
        return replace(plan, memory_edges=tuple(rng.sample(plan.memory_edges, len(plan.memory_edges) - 1)))
    return replace(plan, memory_edges=(*plan.memory_edges, (rng.choice(ids), rng.choice(ids))))


def reread(plan: MemGraph, rng: random.Random) -> MemGraph:
    """A vertex reads something else; its data edges follow."""
    readers = [v for v in plan.vertices if v.inputs]
    if not readers:
        return plan
    victim = rng.choice(readers)
    sources = [v for v in plan.vertices if v.id != victim.id]
    source = rng.choice(sources)
    at = rng.randrange(len(victim.inputs))
    inputs = (*victim.inputs[:at], (source.id, rng.randrange(len(source.sizes))), *victim.inputs[at + 1 :])
    edges = plan.data_edges if source.kind is VertexKind.INPUT else (*plan.data_edges, (source.id, victim.id))
    return replace(
        plan,
        vertices=tuple(replace(v, inputs=inputs) if v.id == victim.id else v for v in plan.vertices),
        data_edges=edges,
    )


def rehosted(plan: MemGraph, rng: random.Random) -> MemGraph:
    """An offload goes elsewhere on the host, or has no place there."""
    offsets = {ref: slot.offset for ref, slot in plan.slots.items() if slot.space == HOST}
    if not offsets:
        return plan
    ref = rng.choice(sorted(offsets))
    slots = {**plan.slots, ref: Slot(HOST, rng.choice((0, 256, 128, plan.host.memory, *offsets.values())))}
    if rng.random() < 0.1:
        del slots[ref]
    return replace(plan, slots=slots)


def shrunk(plan: MemGraph, rng: random.Random) -> MemGraph:
    """Less memory, cyclic or not."""
    memory = rng.choice((0, 256, 1 << 20))
    devices = tuple(replace(d, memory=max(0, d.memory - memory)) for d in plan.devices)
    return replace(plan, spaces=(*devices, plan.host), cyclic=rng.random() < 0.5)


def host_shrunk(plan: MemGraph, rng: random.Random) -> MemGraph:
    """Another host arena: smaller, of less than nothing, or aligned otherwise."""
    if rng.random() < 0.3:
        host = replace(plan.host, memory=rng.choice((plan.host.memory, -1)), alignment=rng.choice((0, 1, 512)))
    else:
        host = replace(plan.host, memory=max(0, plan.host.memory - rng.choice((0, 1, 256))))
    return replace(plan, spaces=(*plan.devices, host))


def unwaited(plan: MemGraph, rng: random.Random) -> MemGraph:
    """A data edge less: of a value, or of an ``after``."""
    if not plan.data_edges:
        return plan
    reads = {(ref[0], v.id) for v in plan.vertices for ref in v.inputs}
    after = [edge for edge in plan.data_edges if edge not in reads]
    lost = rng.choice(after if after and rng.random() < 0.8 else plan.data_edges)
    return replace(plan, data_edges=tuple(edge for edge in plan.data_edges if edge != lost))


def recopied(plan: MemGraph, rng: random.Random) -> MemGraph:
    """A copy from or to another device, or of another length; its slot follows."""
    copies = [v for v in plan.vertices if swaps(v)]
    if not copies:
        return plan
    old = rng.choice(copies)
    if rng.random() < 0.5:
        device = rng.choice(plan.devices).id
        new = replace(old, source=device) if swaps_out(old) else replace(old, space=device)
    else:
        new = replace(old, sizes=(rng.choice((old.sizes[0] - 1, old.sizes[0] + 256, 256)),))
    slots = dict(plan.slots)
    if (old.id, 0) in slots:
        slots[old.id, 0] = replace(slots[old.id, 0], space=new.space)
    return replace(plan, vertices=tuple(new if v.id == old.id else v for v in plan.vertices), slots=slots)


def uncopied(plan: MemGraph, rng: random.Random) -> MemGraph:
    """An offload or reload less: its readers read its source, and wait for that."""
    copies = [v for v in plan.vertices if swaps(v)]
    if not copies:
        return plan
    lost = rng.choice(copies)
    source = lost.inputs[0]
    inputs = {v.id: tuple(source if ref == (lost.id, 0) else ref for ref in v.inputs) for v in plan.vertices}
    from_input = any(v.id == source[0] and v.kind is VertexKind.INPUT for v in plan.vertices)
    added = [] if from_input else [(source[0], v.id) for v in plan.vertices if (lost.id, 0) in v.inputs]
    return replace(
        plan,
        vertices=tuple(replace(v, inputs=inputs[v.id]) for v in plan.vertices if v != lost),
        slots={ref: slot for ref, slot in plan.slots.items() if ref[0] != lost.id},
        data_edges=(*(edge for edge in plan.data_edges if lost.id not in edge), *added),
        memory_edges=tuple(edge for edge in plan.memory_edges if lost.id not in edge),
    )


def swapped(plan: MemGraph, rng: random.Random) -> MemGraph:
    """Two values of one size on one device change places, or two vertices of one output change sizes."""
    kinds = {ref: (plan.slots[ref].space, bytes_of(plan, ref)) for ref in on_devices(plan)}
    pairs = [(a, b) for a in kinds for b in kinds if a < b and kinds[a] == kinds[b]]
    if rng.random() < 0.8 and pairs:
        a, b = rng.choice(pairs)
        return replace(plan, slots={**plan.slots, a: plan.slots[b], b: plan.slots[a]})
    v, w = rng.choice(plan.vertices), rng.choice(plan.vertices)
    sizes = {v.id: w.sizes, w.id: v.sizes} if len(v.sizes) == len(w.sizes) else {}
    return replace(plan, vertices=tuple(replace(v, sizes=sizes.get(v.id, v.sizes)) for v in plan.vertices))


def gated(plan: MemGraph, rng: random.Random) -> MemGraph:
    """A value that is handed out waits for another vertex, or another value lies in its place."""
    outs = [v for v in plan.vertices if v.out and v.kind is not VertexKind.INPUT]
    if not outs:
        return plan
    out = rng.choice(outs)
    if rng.random() < 0.5:
        return replace(plan, memory_edges=(*plan.memory_edges, (rng.choice(plan.vertices).id, out.id)))
    refs = sorted(ref for ref, slot in plan.slots.items() if slot.space == out.space)
    if (out.id, 0) not in plan.slots or not refs:
        return plan
    ref = rng.choice(refs[-3:])
    return replace(plan, slots={**plan.slots, ref: replace(plan.slots[ref], offset=plan.slots[out.id, 0].offset)})


def stacked(plan: MemGraph, rng: random.Random) -> MemGraph:
    """An output where an input of its vertex is, or where a late input is."""
    pairs = [
        ((v.id, k), other)
        for v in plan.vertices
        for k in range(len(v.sizes))
        for other in (*v.inputs, *((w.id, 0) for w in plan.vertices if arrives_at_gate(w)))
        if (v.id, k) in plan.slots and other in plan.slots and other != (v.id, k)
    ]
    if not pairs:
        return plan
    ref, other = rng.choice(pairs)
    return replace(plan, slots={**plan.slots, ref: replace(plan.slots[ref], offset=plan.slots[other].offset)})


def regrown(plan: MemGraph, rng: random.Random) -> MemGraph:
    """Devices of other memory, alignment or number."""
    device = rng.choice(plan.devices)
    other = rng.choice(
        (
            replace(device, memory=device.memory + 1),
            replace(device, alignment=max(1, device.alignment // 2)),
            replace(device, alignment=device.alignment * 2),
            replace(device, id=device.id + 1),
        )
    )
    return replace(plan, spaces=tuple(other if space == device else space for space in plan.spaces))


def resourced(plan: MemGraph, rng: random.Random) -> MemGraph:
    """A reload of another content of the host that holds as many bytes; its data edge follows."""
    reloads = [v for v in plan.vertices if swaps_in(v)]
    if not reloads:
        return plan
    victim = rng.choice(reloads)
    sources = [v for v in plan.vertices if swaps_out(v) or host_copy_exists(v)]
    source = rng.choice([v for v in sources if v.sizes == victim.sizes])
    edges = () if source.kind is VertexKind.INPUT else ((source.id, victim.id),)
    vertices = tuple(replace(v, inputs=((source.id, 0),)) if v.id == victim.id else v for v in plan.vertices)
    return replace(plan, vertices=vertices, data_edges=(*plan.data_edges, *edges))


def overwritten_at_home(plan: MemGraph, rng: random.Random) -> MemGraph:
    """One more offload, of anything on a device; it waits for some vertices and some wait for it."""
    if not on_devices(plan):
        return plan
    ref = rng.choice(on_devices(plan))
    number = 1 + max(v.id for v in plan.vertices)
    others = [v.id for v in plan.vertices if v.kind is not VertexKind.INPUT]
    before = [(u, number) for u in others if rng.random() < 0.5]
    then = [(number, v) for v in others if (v, number) not in before and rng.random() < 0.5]
    size = bytes_of(plan, ref)
    offload = Vertex(number, VertexKind.COPY, HOST, "", (ref,), (size,), source=plan.slots[ref].space)
    slot = {(number, 0): Slot(HOST, plan.host.memory)} if rng.random() < 0.5 else {}
    host = replace(plan.host, memory=plan.host.memory + (size if slot else 0))
    return replace(
        plan,
        spaces=(*plan.devices, host),
        vertices=(*plan.vertices, offload),
        slots={**plan.slots, **slot},
        data_edges=(*plan.data_edges, (ref[0], number)),
        memory_edges=(*plan.memory_edges, *before, *then),
    )


def named_otherwise(plan: MemGraph, rng: random.Random) -> MemGraph:
    """A kernel on the host reads another copy of a value; its data edge follows."""
    hosts = {device.id for device in plan.devices if device.is_host_device}
    value = carried_values(plan)
    pairs = [
        (v, p, ref)
        for v in plan.vertices
        if v.space in hosts and v.kind is VertexKind.KERNEL
        for p, old in enumerate(v.inputs)
        for ref in value
        if ref != old and value[ref] == value[old] and ref[0] != v.id
    ]
    if not pairs:
        return plan
    victim, position, ref = rng.choice(pairs)
    inputs = (*victim.inputs[:position], ref, *victim.inputs[position + 1 :])
    from_input = any(v.id == ref[0] and v.kind is VertexKind.INPUT for v in plan.vertices)
    return replace(
        plan,
        vertices=tuple(replace(v, inputs=inputs) if v == victim else v for v in plan.vertices),
        data_edges=plan.data_edges if from_input else (*plan.data_edges, (ref[0], victim.id)),
    )


def elsewhere(plan: MemGraph, rng: random.Random) -> MemGraph:
    """A device is the host's, or no longer."""
    device = rng.choice(plan.devices)
    other = replace(device, kind=SpaceKind.DEVICE if device.is_host_device else SpaceKind.HOST)
    return replace(plan, spaces=tuple(other if space == device else space for space in plan.spaces))


def spoilt_at_home(plan: MemGraph, rng: random.Random) -> MemGraph:
    return HOME_FAULTS[rng.choice(sorted(HOME_FAULTS))](plan, rng) or plan


def spoilt(plan: MemGraph, rng: random.Random) -> MemGraph:
    name = rng.choice(sorted(FAULTS | STATE_FAULTS))
    return (FAULTS | STATE_FAULTS)[name](plan, rng) or plan


def handing_out(graph: TaskGraph, plan: MemGraph, rng: random.Random) -> tuple[TaskGraph, MemGraph]:
    """An input is wanted at the gate or at the end; the plan knows, and may not be made for it."""
    wanted = rng.choice([v for v in graph.vertices if v.kind is VertexKind.INPUT]).id
    out = rng.random() < 0.7

    def marked(vertices: tuple[Vertex, ...]) -> tuple[Vertex, ...]:
        return tuple(replace(v, out=v.out or out, keep=v.keep or not out) if v.id == wanted else v for v in vertices)

    return replace(graph, vertices=marked(graph.vertices)), replace(plan, vertices=marked(plan.vertices))


CHANGES = (
    *(moved, moved, rewired, rewired, reread, rehosted, shrunk, host_shrunk, unwaited, recopied, uncopied),
    *(stacked, stacked, swapped, gated, gated),
)
OF_STATES = (resourced, overwritten_at_home, rewired, unwaited, uncopied, shrunk)
OF_HOMES = (named_otherwise, named_otherwise, spoilt_at_home, spoilt_at_home, spoilt_at_home, elsewhere)
ALONE = (regrown, spoilt)
"""These take a plan as a planner made it."""


@functools.cache
def cases(seed: int) -> list[tuple[TaskGraph, MemGraph, bool]]:
    """Plans changed at random, each with the answer of the naive judge."""
    rng = random.Random(seed)
    changed = []
    for graph, plan in plans(PLANS, seed):
        assert accepted(graph, plan) and is_safe(graph, plan)
        for _ in range(16):
            if rng.random() < 0.4:
                bad = rng.choice(CHANGES)(rng.choice(CHANGES)(plan, rng), rng)
            else:
                bad = rng.choice((*CHANGES, *ALONE))(plan, rng)
            changed.append((graph, bad, is_safe(graph, bad)))
    for graph, plan in (*state_plans(PLANS // 3, 1000 * seed), *timed_state_plans(PLANS // 6, 1000 * seed)):
        assert accepted(graph, plan) and is_safe(graph, plan)
        for _ in range(16):
            if rng.random() < 0.2:
                graph, plan = handing_out(graph, plan, rng)
            bad = rng.choice((*CHANGES, *OF_STATES, *OF_STATES, *ALONE))(plan, rng)
            changed.append((graph, bad, is_safe(graph, bad)))
    for graph, plan in home_plans(PLANS // 4, 1000 * seed):
        assert accepted(graph, plan) and is_safe(graph, plan)
        for _ in range(16):
            bad = rng.choice((*CHANGES, *OF_STATES, *OF_STATES, *OF_HOMES, *OF_HOMES))(plan, rng)
            changed.append((graph, bad, is_safe(graph, bad)))
    return changed


@pytest.mark.parametrize("seed", range(4))
def test_two_judges_agree_on_plans_changed_at_random(seed: int) -> None:
    answers: Counter[bool] = Counter()
    for graph, plan, safe in cases(seed):
        assert accepted(graph, plan) == safe, (safe, graph, plan)
        answers[safe] += 1
    assert min(answers[True], answers[False]) > 3 * PLANS


CHECKS = (
    (judged_plan, "first_violated"),
    *((static, name) for name in ("check_same", "_check_values", "_check_copy", "_check_on_device")),
    *(
        (static, name)
        for name in ("_check_after", "_check_slots", "_check_overwrite", "_check_reuse", "_check_inplace")
    ),
    *((static, name) for name in ("_check_kept", "_check_cyclic", "_behind_gate")),
    *((static, name) for name in ("writes_home", "check_written_back")),
    *((homes, name) for name in ("_home_readers", "handed_out_at_gate")),
    *((same_graph, name) for name in ("_check_spaces", "_check_vertex", "_check_copies")),
)


@pytest.mark.parametrize(("module", "check"), CHECKS, ids=[name for _, name in CHECKS])
def test_the_judges_disagree_once_a_check_is_left_out(
    module: ModuleType, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So each check of the static judge is tried by the changes, and their agreement says something."""
    answer = {"_behind_gate": set(), "_home_readers": defaultdict(list)}.get(check)

    def differ(graph: TaskGraph, plan: MemGraph, safe: bool) -> bool:
        # The cases themselves need the whole judge, and may be made by this test first.
        with monkeypatch.context() as left_out, contextlib.suppress(LookupError, ZeroDivisionError):
            left_out.setattr(module, check, lambda *_: answer)
            return accepted(graph, plan) != safe
        return False  # A later check relies on this one.

    assert any(differ(*case) for seed in range(4) for case in cases(seed))


def test_two_judges_agree_on_planted_faults() -> None:
    rng = random.Random(11)
    planted: Counter[str] = Counter()
    for graph, plan in tight_plans(60):
        assert is_safe(graph, plan)
        for name, fault in FAULTS.items():
            bad = fault(plan, rng)
            if bad is not None and bad != plan:
                planted[name] += 1
                assert not is_safe(graph, bad) and not accepted(graph, bad), (name, graph, bad)
    assert planted.keys() == FAULTS.keys() and min(planted.values()) >= 3, planted
