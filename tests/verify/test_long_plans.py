"""Plans of more than 16,384 vertices, with memory reused over all of their length: farther than a window of positions.

The window has its true size here; ``test_verify_order`` and ``test_transitive_reduction`` compare with brute force in
smaller ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from disco_accel.errors import VerifyError
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.order import data_edges
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.plan.common import transitive_reduction
from disco_accel.plan.common.transitive_reduction import remove_implied_edges
from disco_accel.verify import happens_before
from disco_accel.verify.static import verify

LANES = 6
LENGTH = 3000
LAST = LANES * LENGTH
UNIT = 256


def lanes() -> tuple[TaskGraph, MemGraph]:
    """Chains of kernels side by side, each with a last kernel that writes over the first value of its lane.

    A lane's first value is read by its second kernel only, and has bytes of its own; the others take turns in two more
    places. The last kernel reads nothing: a memory edge from the end of its lane is all that it waits for.
    """
    vertices = []
    slots = {}
    for position in range(LAST):
        turn, lane = divmod(position, LANES)
        inputs = ((position - LANES, 0),) if turn else ()
        vertices.append(Vertex(position, VertexKind.KERNEL, 0, f"lane {lane}", inputs, (UNIT,)))
        place = 3 * lane + (1 + turn % 2 if turn else 0)
        slots[position, 0] = Slot(0, place * UNIT)
    vertices += [Vertex(LAST + lane, VertexKind.KERNEL, 0, f"last {lane}", (), (UNIT,)) for lane in range(LANES)]
    slots |= {(LAST + lane, 0): Slot(0, 3 * lane * UNIT) for lane in range(LANES)}
    graph = TaskGraph("lanes", (Space(0, 3 * LANES * UNIT, UNIT),), tuple(vertices))
    ends = tuple((LAST - LANES + lane, LAST + lane) for lane in range(LANES))
    return graph, MemGraph(graph.name, graph.devices, graph.vertices, slots, data_edges(graph.vertices), ends)


def without(plan: MemGraph, lane: int) -> MemGraph:
    """``plan`` with a last kernel of ``lane`` that waits for nothing."""
    return replace(plan, memory_edges=tuple(edge for edge in plan.memory_edges if edge[0] % LANES != lane))


def test_reuse_after_a_whole_lane_is_safe_only_if_the_writer_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first four lanes are settled by long paths, the others by searches."""
    real, searches = happens_before._reaches, 0

    def counted(*arguments: object) -> bool:
        nonlocal searches
        searches += 1
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(happens_before, "_reaches", counted)
    graph, plan = lanes()
    assert len(plan.vertices) > 2 * happens_before._SPAN
    verify(graph, plan)
    assert searches == LANES - happens_before._LONG_PATHS
    for lane in range(LANES):
        with pytest.raises(VerifyError, match=rf"{LANES + lane} .*need not finish before .*{LAST + lane} "):
            verify(graph, without(plan, lane))


def test_an_edge_over_all_positions_is_removed_only_if_a_lane_implies_it() -> None:
    """Where the last kernel waits for the end of its lane, the edge from the lane's second kernel is implied."""
    _, plan = lanes()
    assert len(plan.vertices) > 2 * transitive_reduction._WINDOW
    long = {(LANES + lane, LAST + lane) for lane in range(LANES)}

    def reduced(ends: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        return set(remove_implied_edges(plan.vertices, plan.data_edges, (*ends, *long)))

    left = reduced(plan.memory_edges)
    assert set(plan.memory_edges) <= left
    assert len(left - set(plan.memory_edges)) == LANES - transitive_reduction._PATHS
    for lane in (0, LANES - 1):
        assert (LANES + lane, LAST + lane) in reduced(without(plan, lane).memory_edges)
