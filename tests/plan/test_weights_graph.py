"""Task graphs as chains of layers: layers by dataflow, nothing lost or counted twice, and plans with what is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planner.chain import Chain, chain_of, residents_of
from disco_accel.errors import ConfigError, PlanError
from disco_accel.eviction import belady
from disco_accel.graph.spaces import TO_DEVICE, Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind, with_memory
from disco_accel.graph.traits import FROZEN
from disco_accel.plan.beaumont.selection import WeightGap, select, without_superfluous
from disco_accel.plan.beaumont.solve import solve
from disco_accel.plan.buildmemgraph.builder import build
from disco_accel.plan.timed.requirements import requirements_of
from disco_accel.simulate.simulator import Machine, simulate
from disco_accel.verify.static import verify
from tests.support.graphs.lora_graph import LoraShape, lora_graph, prefill_graph

MIB = 1 << 20
SHAPE = LoraShape(layers=6, hidden=1024, ffn=2816, vocabulary=4096, tokens=256, flops=2e13)
GRAPH = lora_graph(SHAPE, 90 * MIB)
"""Weights of 166 MiB."""


def names(chain: Chain, graph: TaskGraph) -> list[set[str]]:
    by_id = {vertex.id: vertex.op for vertex in graph.vertices}
    return [{by_id[id].split(".")[0] for id in layer} for layer in chain.layers]


def test_checkpointed_layers_are_found_by_dataflow() -> None:
    """An embedding, the layers in order, the head; all seven matrices of a layer are in it."""
    chain = chain_of(GRAPH, Machine())
    assert names(chain, GRAPH)[1:-1] == [{f"L{i}"} for i in range(SHAPE.layers)]
    assert [len(layer) for layer in chain.layers] == [1, *[7] * SHAPE.layers, 1]


def test_without_recomputation_every_weight_is_a_layer() -> None:
    """Products read each weight once forward and once backward: no two of them need to leave together."""
    vertices = [Vertex(i, VertexKind.INPUT, 0, f"w{i}", sizes=(4 * MIB,), traits=FROZEN) for i in range(4)]
    for i in range(4):
        inputs = ((i, 0), (3 + i, 0)) if i else ((0, 0),)
        vertices.append(Vertex(4 + i, VertexKind.KERNEL, 0, "forward", inputs, (MIB,), 1e-3))
    for i in range(4):
        inputs = ((3 - i, 0), (7 + i, 0), (7 - i, 0))
        vertices.append(Vertex(8 + i, VertexKind.KERNEL, 0, "backward", inputs, (MIB,), 2e-3))
    chain = chain_of(TaskGraph("products", (Space(0, 64 * MIB),), tuple(vertices)), Machine())
    assert chain.layers == ((0,), (1,), (2,), (3,))
    assert [(layer.u_f, layer.u_b) for layer in chain.instance.layers] == [pytest.approx((1e-3, 2e-3))] * 4
    assert [layer.a for layer in chain.instance.layers] == [MIB] * 4


def test_nothing_is_lost_or_counted_twice() -> None:
    """Seconds and bytes of the chain are those of the graph; memory in use is never said to be less than it is."""
    chain, demand = chain_of(GRAPH, Machine()), requirements_of(GRAPH, Machine(), None)
    instance = chain.instance
    assert instance.sum_u == pytest.approx(sum(demand.seconds))
    small = sum(page.block for page in demand.swappable if page.ref[0] in chain.small)
    assert instance.weights.sum() + small == sum(page.block for page in demand.swappable if page.starts_on_host)
    assert instance.activations.max() >= demand.pinned_bytes[0].max() + small
    assert instance.frozen and instance.bandwidth < Machine().link(TO_DEVICE).bandwidth


@pytest.mark.parametrize("mebibytes", [70, 90, 120, 150])
def test_what_is_chosen_is_planned(mebibytes: int) -> None:
    """The residents of a choice leave room for a plan that the judge accepts, at most 30 % above the chain's time."""
    graph = with_memory(GRAPH, lambda device: mebibytes * MIB)
    chain = chain_of(graph, Machine())
    found = solve(chain.instance, 0)
    residents = residents_of(chain, found.greedy.chosen)
    plan = build(graph, belady, residents=residents, cyclic=True)
    verify(graph, plan)
    assert 0 < len(residents.permanent) < sum(map(len, (*chain.layers, chain.small)))
    assert simulate(plan, Machine()).makespan <= 1.3 * found.greedy.period


def test_more_memory_keeps_more() -> None:
    kept = []
    for mebibytes in (70, 90, 120, 150, 300):
        chain = chain_of(with_memory(GRAPH, lambda device, m=mebibytes: m * MIB), Machine())  # type: ignore[misc]
        chosen = without_superfluous(chain.instance, select(chain.instance), 1.0)
        kept.append(len(residents_of(chain, chosen).permanent))
    assert kept == sorted(kept) and kept[0] < kept[-1] == sum(map(len, (*chain.layers, chain.small)))


def test_gaps_say_who_is_there_at_the_start() -> None:
    """Without a gap for good; with one inside the step from its start; across steps only between its two uses."""
    chain = replace(chain_of(GRAPH, Machine()), layers=((1,), (2,), (3,), (4,)), small=(9,))
    residents = residents_of(chain, [WeightGap(0, True), WeightGap(1, False), WeightGap(2, False), WeightGap(2, True)])
    assert (residents.permanent, residents.visiting) == ((9, 4), (2,))


def test_what_is_no_chain_is_refused() -> None:
    with pytest.raises(PlanError, match="read in no order that turns round"):
        chain_of(prefill_graph(SHAPE, 90 * MIB), Machine())
    with pytest.raises(PlanError, match="has 2 devices"):
        chain_of(replace(GRAPH, spaces=(*GRAPH.devices, Space(1, MIB))), Machine())
    with pytest.raises(ConfigError, match="is too small: layer"):
        chain_of(with_memory(GRAPH, lambda device: 8 * MIB), Machine())
