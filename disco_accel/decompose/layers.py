"""Layers in a row: each device has a run of them, and values go from device to device."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disco_accel.graph.check import after_gate
from disco_accel.graph.spaces import TO_DEVICE
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.simulate.machine import Machine


def layer_of_kernels(graph: TaskGraph) -> dict[int, int]:
    """Kernel → the number of its layer, in the order in which the forward gets to them.

    Layers are the numbered modules of the container that takes most of the step's time, ``model.layers`` say. Kernels
    before the first belong to it; those behind the last, such as the head and the loss, are one layer more. Other
    kernels are of the layer that made the newest value that they read. Without such modules all are of layer 0.
    """
    tagged = _numbered(graph)
    last = max(tagged.values(), default=0)
    behind = after_gate(graph.vertices)
    place = {vertex.id: position for position, vertex in enumerate(graph.vertices)}
    readers: dict[int, list[int]] = defaultdict(list)
    layers: dict[int, int] = {}
    of_inputs: list[int] = []
    for vertex in graph.vertices:
        if vertex.kind is not VertexKind.KERNEL:
            continue
        for producer, _ in vertex.inputs:
            readers[producer].append(vertex.id)
        made = [producer for producer, _ in vertex.inputs if producer in layers]
        if vertex.id in tagged:
            layers[vertex.id] = tagged[vertex.id]
        elif made:
            newest = max(made, key=place.__getitem__)
            begins_head = newest in tagged and layers[newest] == last and vertex.id not in behind
            layers[vertex.id] = layers[newest] + begins_head
        else:
            of_inputs.append(vertex.id)
    # Made from inputs alone, as positions and a head's weight that is unpacked: of the first layer that reads it.
    for vertex_id in reversed(of_inputs):
        layers[vertex_id] = min((layers[reader] for reader in readers[vertex_id]), default=0)
    return layers


def _numbered(graph: TaskGraph) -> dict[int, int]:
    """Kernel → number of the module that issued it in the container that takes most of the time, from 0 on."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    seconds: dict[str, float] = defaultdict(float)
    for vertex in graph.vertices:
        call = graph.ops.get(vertex.id)
        parts = call.module.split(".") if call is not None else []
        number = next((position for position, part in enumerate(parts) if part.isdecimal()), None)
        if number is None:
            continue
        container = ".".join(parts[:number])
        found[container][vertex.id] = int(parts[number])
        seconds[container] += vertex.duration or 0.0
    if not found:
        return {}
    numbers = found[max(found, key=lambda container: (seconds[container], len(found[container])))]
    rank = {number: position for position, number in enumerate(sorted(set(numbers.values())))}
    return {vertex: rank[number] for vertex, number in numbers.items()}


@dataclass(frozen=True, slots=True)
class _Load:
    """A layer's load on its device: ``seconds`` of kernels, bytes of ``weights``, ``times`` that they are read."""

    seconds: float
    weights: int
    times: int


def placements(graph: TaskGraph, memory: Sequence[int], machine: Machine) -> list[dict[int, int]]:
    """Ways to give each kernel the position of its device in ``memory``, which has the bytes of each.

    The first has a run of layers on each device, cut where the device with the longest time has the least. The others
    deal shorter runs out in turn. That helps micro-batches: a device far down the row has its first part after a round
    of short runs, not after all layers before its own. And where weights do not fit, all links load at once: in a row
    such a device waits with its memory full while those before it load theirs one by one.
    """
    layers = layer_of_kernels(graph)
    order = sorted(set(layers.values()))
    loads = _loads(graph, layers)
    cuts = _cuts([loads[layer] for layer in order], memory, machine)
    runs = [{layer: bisect_right(cuts, position) - 1 for position, layer in enumerate(order)}]
    longest, count = -(-len(order) // len(memory)), len(memory)
    for length in dict.fromkeys((-(-longest // 4), 1)):
        if length < longest:
            runs.append({layer: position // length % count for position, layer in enumerate(order)})
    return [{kernel: run[layer] for kernel, layer in layers.items()} for run in runs]


def way_fits(graph: TaskGraph, way: Mapping[int, int], memory: Sequence[int]) -> bool:
    """Whether the weights that ``way`` gives each device, by its position in ``memory``, are no more than its bytes."""
    size = {vertex.id: vertex.sizes[0] for vertex in graph.vertices if host_copy_exists(vertex)}
    read = {(way[v.id], each) for v in graph.vertices if v.id in way for each, _ in v.inputs if each in size}
    weights: dict[int, int] = defaultdict(int)
    for device, each in read:
        weights[device] += size[each]
    return all(weights[device] <= memory[device] for device in weights)


def _cuts(loads: Sequence[_Load], memory: Sequence[int], machine: Machine) -> list[int]:
    """Where each device's run of layers begins, such that the longest time of a device is the least: its kernels', or
    that of the weights which do not fit on its link. Each has at least one layer, if there are as many."""
    count = min(len(memory), len(loads))

    def seconds(begin: int, end: int, device: int) -> float:
        parts = loads[begin:end]
        loaded = max(0, sum(part.weights for part in parts) - memory[device]) * max(part.times for part in parts)
        return max(sum(part.seconds for part in parts), loaded / machine.link(TO_DEVICE).bandwidth)

    # best[k][n]: the first k devices have the first n layers; the shortest longest time, and where device k begins.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for device in range(count):
        row = {}
        for end in range(device + 1, len(loads) - (count - device - 1) + 1):
            begins = ((begin, before) for begin, (before, _) in best[-1].items() if begin < end)
            row[end] = min((max(before, seconds(begin, end, device)), begin) for begin, before in begins)
        best.append(row)
    cuts, end = list[int](), len(loads)
    for device in reversed(range(count)):
        end = best[device + 1][end][1]
        cuts.append(end)
    return cuts[::-1]


def _loads(graph: TaskGraph, layers: Mapping[int, int]) -> dict[int, _Load]:
    seconds: dict[int, float] = defaultdict(float)
    readers: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    size = {vertex.id: vertex.sizes[0] for vertex in graph.vertices if host_copy_exists(vertex)}
    for vertex in graph.vertices:
        if vertex.id not in layers:
            continue
        layer = layers[vertex.id]
        seconds[layer] += vertex.duration or 0.0
        for producer in {producer for producer, _ in vertex.inputs if producer in size}:
            readers[layer][producer] += 1
    return {
        layer: _Load(spent, sum(size[w] for w in readers[layer]), min(2, max(readers[layer].values(), default=1)))
        for layer, spent in seconds.items()
    }
