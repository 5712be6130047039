"""Which layer a kernel is of, and which device gets which layers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from disco_accel.decompose.layers import layer_of_kernels, placements, way_fits
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST, Space
from disco_accel.graph.taskgraph import OpCall, Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN, LATE
from disco_accel.simulate.machine import Link, Machine

MACHINE = Machine(links={TO_DEVICE: Link(1e9, 0.0), TO_HOST: Link(1e9, 0.0)})


class Steps:
    """A forward through layers and a head, and its backward, kernel by kernel; ``modules`` name who issued each."""

    def __init__(self, layers: int, weight: int = 1000, seconds: float = 1e-3) -> None:
        self.vertices: list[Vertex] = []
        self.modules: dict[int, str] = {}
        self.weight, self.seconds = weight, seconds
        x = self.input("ids")
        positions = self.kernel("", [])
        x = self.kernel("model.embed", [x, self.input("w", FROZEN)])
        forward = []
        for k in range(layers):
            w = self.input("w", FROZEN)
            x = self.kernel(f"model.layers.{k}.mlp", [x, positions, w])
            forward.append((x, w))
            x = self.kernel("", [x])
        self.head = x = self.kernel("lm_head", [self.kernel("model.norm", [x])])
        self.vertices[-1] = replace(self.vertices[-1], out=True)
        x = self.kernel("lm_head", [x, self.input("tangent", LATE)])
        for k in reversed(range(layers)):
            x = self.kernel(f"model.layers.{k}.mlp", [x, *forward[k]])
            x = self.kernel("", [x])
        self.last = x
        self.kernel("model.vision.blocks.7", [x])

    def input(self, op: str, traits: object = None) -> Ref:
        vertex = Vertex(len(self.vertices), VertexKind.INPUT, 0, op, sizes=(self.weight if traits is FROZEN else 8,))
        self.vertices.append(vertex if traits is None else replace(vertex, traits=traits))
        return vertex.id, 0

    def kernel(self, module: str, inputs: list[Ref]) -> Ref:
        vertex = Vertex(len(self.vertices), VertexKind.KERNEL, 0, "f", tuple(inputs), (8,), self.seconds)
        self.vertices.append(vertex)
        self.modules[vertex.id] = module
        return vertex.id, 0

    def graph(self) -> TaskGraph:
        calls = {vertex: OpCall("aten::f", "default", (), (None,), module) for vertex, module in self.modules.items()}
        return TaskGraph("steps", (Space(0, 1 << 30),), tuple(self.vertices), calls)


def test_kernels_between_layers_belong_to_one() -> None:
    """Positions to the first layer, an embedding too; norm, head and loss to one more; sums to their terms."""
    steps = Steps(3)
    layers = layer_of_kernels(steps.graph())
    named = {vertex: layers[vertex] for vertex in layers}
    for vertex, module in steps.modules.items():
        if module.startswith("model.layers."):
            assert named[vertex] == int(module.split(".")[2])
        elif module in ("lm_head", "model.norm"):
            assert named[vertex] == 3
        elif module == "model.embed":
            assert named[vertex] == 0
    assert named[steps.last[0]] == 0 and min(named.values()) == 0 and max(named.values()) == 3


def test_without_numbered_modules_all_is_one_layer() -> None:
    steps = Steps(2)
    steps.modules = dict.fromkeys(steps.modules, "model.body")
    assert set(layer_of_kernels(steps.graph()).values()) == {0}


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_layers_that_fit_lie_in_a_row_with_equal_times(devices: int) -> None:
    graph = Steps(7).graph()
    way = placements(graph, [1 << 30] * devices, MACHINE)[0]
    layers = layer_of_kernels(graph)
    of_layer = {layers[kernel]: device for kernel, device in way.items()}
    row = [of_layer[layer] for layer in sorted(of_layer)]
    assert row == sorted(row) and set(row) == set(range(devices))
    assert {layers[k]: d for k, d in way.items()} == of_layer, "a layer is on one device"
    times = [sum(graph.vertices[k].duration or 0.0 for k, d in way.items() if d == device) for device in range(devices)]
    own = [
        sum(graph.vertices[k].duration or 0.0 for k, layer in layers.items() if layer == n) for n in sorted(of_layer)
    ]
    cuts = itertools.combinations(range(1, len(own)), devices - 1)
    best = min(max(sum(own[a:b]) for a, b in itertools.pairwise((0, *cut, len(own)))) for cut in cuts)
    assert max(times) == pytest.approx(best)


def test_more_devices_than_layers_leave_some_without() -> None:
    for way in placements(Steps(1).graph(), [1 << 30] * 5, MACHINE):
        assert set(way.values()) == {0, 1}


def test_a_device_with_less_memory_gets_fewer_weights() -> None:
    """Their loads count: a second for each, where kernels take a millisecond."""
    graph = Steps(8, weight=1 << 30).graph()
    way = placements(graph, [8 << 30, 1 << 30], MACHINE)[0]
    read = {0: set[int](), 1: set[int]()}
    for kernel, device in way.items():
        read[device] |= {p for p, _ in graph.vertices[kernel].inputs if graph.vertices[p].traits is FROZEN}
    assert len(read[1]) < len(read[0]) and read[1]


def test_layers_are_dealt_out_in_turn_too() -> None:
    graph = Steps(8, weight=1 << 20).graph()
    ways = placements(graph, [2 << 20] * 2, MACHINE)
    layers = layer_of_kernels(graph)
    rows = [[{layers[k]: d for k, d in way.items()}[layer] for layer in range(9)] for way in ways]
    assert rows[1:] == [[0, 0, 1, 1, 0, 0, 1, 1, 0], [0, 1] * 4 + [0]]
    assert rows[0] == sorted(rows[0])
    assert not way_fits(graph, ways[0], [2 << 20] * 2)
    assert way_fits(graph, ways[0], [9 << 20] * 2)
    assert not way_fits(graph, ways[0], [9 << 20, 1 << 20])
