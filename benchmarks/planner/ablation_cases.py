"""The cases on which each move of the timed planner's search is judged: small ones, and those where one move counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from disco_accel.graph.check import check_taskgraph, dependencies
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex
from disco_accel.graph.values import overwrites
from disco_accel.sizes import parse_size
from tests.support.graphs.lora_graph import LoraShape, prefill_graph

GRAPHS = Path(__file__).resolve().parents[2] / "tests" / "data" / "graphs"


@dataclass(frozen=True, slots=True)
class Case:
    """The graph that ``make`` gives, in each of ``memories`` with links of each of ``bandwidths`` in bytes/s."""

    name: str
    make: Callable[[], TaskGraph]
    memories: Sequence[str]
    bandwidths: Sequence[float] = (2e10,)


def cases() -> Iterator[tuple[TaskGraph, int, float]]:
    """Yield each graph of CASES with each of its memories in bytes and of its bandwidths."""
    for case in CASES:
        graph = replace(case.make(), name=case.name)
        for memory in case.memories:
            for bandwidth in case.bandwidths:
                yield graph, parse_size(memory), bandwidth


def in_random_order(graph: TaskGraph, seed: int) -> TaskGraph:
    """Return ``graph`` in a random order that keeps every dependency, and readers before the vertex that writes over
    their input."""
    rng = random.Random(seed)
    waits = {vertex.id: set(dependencies(vertex)) for vertex in graph.vertices}
    readers: dict[Ref, list[int]] = {}
    for vertex in graph.vertices:
        for _, overwritten in overwrites(vertex):
            waits[vertex.id].update(readers.get(overwritten, ()))
        for ref in vertex.inputs:
            readers.setdefault(ref, []).append(vertex.id)
    behind: dict[int, list[int]] = {}
    for vertex_id, others in waits.items():
        for other in sorted(others):
            behind.setdefault(other, []).append(vertex_id)
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    ready = [vertex_id for vertex_id, others in waits.items() if not others]
    order: list[Vertex] = []
    while ready:
        vertex_id = ready.pop(rng.randrange(len(ready)))
        order.append(by_id[vertex_id])
        for reader in behind.get(vertex_id, ()):
            waits[reader].discard(vertex_id)
            if not waits[reader]:
                ready.append(reader)
    return check_taskgraph(replace(graph, vertices=tuple(order)))


def _test_graph(name: str) -> TaskGraph:
    return read_taskgraph(GRAPHS / f"{name}.taskgraph.json")


def _captured_lora(name: str) -> TaskGraph:
    from benchmarks.planner.captures import STEPS, lora_step

    return lora_step(STEPS[name])


def _captured_prefill(name: str) -> TaskGraph:
    from benchmarks.planner.captures import PREFILLS, prefill

    return prefill(PREFILLS[name])


def _large_vocabulary() -> TaskGraph:
    """A prefill of the shape of Llama 3.2 1B with an output layer of its own: two weights of 501 MiB, others of 32."""
    from benchmarks.common.shapes import llama
    from benchmarks.planner.captures import Workload, prefill

    return prefill(Workload(llama(2048, 8192, 16, 32, 8, 128256), 1, 512))


CASES: Sequence[Case] = (
    Case("chain8", lambda: _test_graph("chain8"), ("8MiB", "12.8MiB", "19.2MiB", "24MiB")),
    Case(
        "lora_small",
        lambda: _test_graph("lora_small"),
        ("32.24MiB", "36.66MiB", "51.58MiB", "61.09MiB", "77.38MiB", "109.6MiB", "128MiB"),
    ),
    Case("lora_small", lambda: _test_graph("lora_small"), ("48.88MiB",), (5.5e10,)),
    Case("lora_small reordered", lambda: in_random_order(_test_graph("lora_small"), 2), ("36.66MiB", "78.2MiB")),
    Case("prefill-7B-1x1024", lambda: _captured_prefill("prefill-7B-1x1024"), ("4129MiB",), (1.2e10,)),
    Case("prefill-7B-8x1024", lambda: _captured_prefill("prefill-7B-8x1024"), ("2GiB",), (1.2e10, 1.6e10, 2e10)),
    Case("prefill-1B-128k", _large_vocabulary, ("2013MiB",)),
    Case("generated prefill 7B", lambda: prefill_graph(LoraShape(tokens=1024), 1), ("10925MiB",)),
    Case("lora-7B-8x1024", lambda: _captured_lora("lora-7B-8x1024"), ("2.5GiB",)),
)
"""chain8 and lora_small are those of the tests; the captured ones are traced anew, over fake tensors."""
