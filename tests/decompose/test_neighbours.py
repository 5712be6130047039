"""Weights that devices send each other: the same graph, with one home for each weight, and taken where it is faster."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from disco_accel.capture.captured_step import CapturedStep, InputBinding, InputSource
from disco_accel.decompose.decomposition import over_devices
from disco_accel.decompose.neighbours import from_neighbours
from disco_accel.decompose.spread import SpreadGraph, spread
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.passes import AppliedPass
from disco_accel.graph.spaces import BETWEEN_DEVICES, TO_DEVICE, TO_HOST, Space
from disco_accel.graph.taskgraph import Ref, TaskGraph, TensorSpec, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN, HOST_UPDATED, Traits
from disco_accel.graph.values import never_changes
from disco_accel.plan import make_plan
from disco_accel.simulate.machine import Link, Machine
from disco_accel.verify.static import verify
from tests.decompose.test_spread import randomly
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.oracles.adversary import run_reference

FAST = Machine(links={TO_DEVICE: Link(1e9, 0.0), TO_HOST: Link(1e9, 0.0), BETWEEN_DEVICES: Link(8e9, 0.0)})
SLOW = FAST.with_links({BETWEEN_DEVICES: Link(5e8, 0.0)})
SIZE = 1 << 20
LAYERS = 8


def assert_same(done: SpreadGraph, sent: SpreadGraph) -> None:
    """Kernels of ``sent`` read what those of ``done`` do, on the same devices; shared weights have one input."""
    before, after = ({v.id: v for v in each.graph.vertices} for each in (done, sent))

    def origin(ref: Ref, vertices: dict[int, Vertex], copies: dict[int, int]) -> Ref:
        while ref[0] in copies or vertices[ref[0]].op == "to_device":
            ref = (copies[ref[0]], 0) if ref[0] in copies else vertices[ref[0]].inputs[0]
        return ref

    for vertex in done.graph.vertices:
        if vertex.kind is VertexKind.KERNEL:
            other = after[vertex.id]
            assert replace(other, inputs=vertex.inputs) == vertex
            for old, new in zip(vertex.inputs, other.inputs, strict=True):
                assert origin(old, before, dict(done.copies)) == origin(new, after, dict(sent.copies))
                read = after[new[0]]
                assert read.kind is VertexKind.KERNEL or read.space == vertex.space
    for copy, of in sent.copies.items():
        assert not never_changes(after[of]) or not after[of].sizes[0]
        assert copy in after and of in after


def test_random_graphs_stay_what_they_are() -> None:
    """They obey the rules and have plans that both judges pass."""
    sending = planned = 0
    for seed in range(160):
        rng = random.Random(seed)
        graph = random_taskgraph(rng, Shape(devices=1, host_updated=0.1))
        done, _ = randomly(graph, rng, rng.randint(2, 5))
        sent = from_neighbours(replace(done, graph=with_room(done.graph, 2.0)), FAST)
        if sent is None:
            continue
        sending += 1
        assert_same(done, sent)
        checked = with_room(check_taskgraph(sent.graph), rng.choice((1.2, 2.0, 4.0)))
        try:
            plan = make_plan(checked, planner=rng.choice(("build", "build", "build", "timed")), cyclic=True)
        except BudgetTooSmall:
            continue
        except Exception as error:
            assert "cannot plan" in str(error), "host-updated weights are beyond one of the planners"
            continue
        planned += 1
        verify(checked, plan)
        run_reference(checked, plan, seed)
    assert sending > 30 and planned > 15


def there_and_back(devices: int, memory: int, traits: Traits = FROZEN) -> tuple[TaskGraph, dict[int, int]]:
    """For each device a kernel for each of eight weights, and then one again in the opposite order, as in training; and
    which is for which."""
    vertices = [Vertex(k, VertexKind.INPUT, 0, f"w{k}", sizes=(SIZE,), traits=traits) for k in range(LAYERS)]
    placed: dict[int, int] = {}
    for device in range(devices):
        before: tuple[Ref, ...] = ()
        for weight in (*range(LAYERS), *reversed(range(LAYERS))):
            made = Vertex(len(vertices), VertexKind.KERNEL, 0, "f", ((weight, 0), *before), (1024,), 4e-4)
            placed[made.id] = device
            vertices.append(made)
            before = ((made.id, 0),)
        vertices[-1] = replace(vertices[-1], keep=True)
    return TaskGraph("there and back", (Space(0, memory),), tuple(vertices)), placed


def test_each_device_loads_its_share_and_is_sent_the_others_when_it_needs_them() -> None:
    """For a forward and for a backward, but for what is read in both one after the other."""
    graph, placed = there_and_back(2, 16 * SIZE)
    sent = from_neighbours(spread(graph, placed, [Space(k, 16 * SIZE) for k in range(2)], []), FAST)
    assert sent is not None and not sent.copies
    home = {v.id: v.space for v in sent.graph.vertices if v.kind is VertexKind.INPUT}
    assert sorted(home.values()) == [0] * 4 + [1] * 4
    copies = [v for v in sent.graph.vertices if is_transfer(v)]
    of = [(v.inputs[0][0], v.space) for v in copies]
    assert all(home[weight] != device for weight, device in of)
    assert {weight: of.count((weight, 1 - home[weight])) for weight in home} == {
        weight: 1 if weight >= LAYERS - 4 else 2 for weight in home
    }
    # Of a device's copies all but the first wait for a kernel of that device, before the one that reads them.
    place = {v.id: k for k, v in enumerate(sent.graph.vertices)}
    waiting = [v for v in copies if v.after]
    assert len(waiting) == len(copies) - 2
    for vertex in waiting:
        (other,) = vertex.after
        assert place[other] < place[vertex.id] and sent.graph.vertices[place[other]].space == vertex.space


@pytest.mark.parametrize("devices", [2, 4])
def test_neighbours_are_asked_where_that_is_faster(devices: int) -> None:
    """Not where weights fit, copies between devices are slower than loads or go through the host, or weights change."""

    def applied(memory: int, machine: Machine, traits: Traits = FROZEN, *, peers: bool = True) -> str:
        graph, part_of = there_and_back(devices, memory, traits)
        spec = TensorSpec("uint8", (SIZE,), (1,))
        bindings = tuple(InputBinding(k, InputSource.FROZEN, f"w{k}", spec) for k in range(LAYERS))
        captured, passes = CapturedStep(graph, bindings, (), (), {}), list[AppliedPass]()
        over_devices(captured, graph, [memory] * devices, machine, passes, part_of, peers=peers)
        return passes[-1].effect

    assert applied(4 * SIZE, FAST).endswith("weights from neighbours")
    for other in (
        applied(4 * SIZE, SLOW),
        applied(9 * SIZE, FAST),
        applied(4 * SIZE, FAST, peers=False),
        applied(4 * SIZE, FAST, HOST_UPDATED),
    ):
        assert other == f"a part of the batch on each of {devices} devices"
