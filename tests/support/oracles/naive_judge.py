"""A judge of plans by definition, for small graphs, without code of verify's: all orders are safe, and end well.

Written from docs/schema.md alone; the letters are those of "What verify demands" there. What is judged vertex by vertex
is in ``naive_bounds``, what pair by pair in ``naive_order``; here is what there must be when a step ends.
"""

from __future__ import annotations

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, TaskGraph, VertexKind
from tests.support.oracles.naive_bounds import (
    Misplaced,
    before_step,
    foreign,
    goes_out,
    on_host,
    says_what_the_graph_says,
    versions,
)
from tests.support.oracles.naive_order import Orders


def is_safe(graph: TaskGraph, plan: MemGraph) -> bool:
    """Whether ``plan`` computes ``graph`` in any order that its edges allow, within the graph's devices."""
    try:
        if not says_what_the_graph_says(graph, plan):
            return False
        orders = Orders(graph, plan)
        return orders.are_safe() and ends_well(orders)
    except (LookupError, Misplaced):  # It names a vertex, an output or a device that does not exist.
        return False


def ends_well(orders: Orders) -> bool:
    """(g): the step ends with what the user wants and the next step needs."""
    chains = versions(orders.graph)
    intact: dict[Ref, list[Ref]] = {}
    for copy in orders.size:
        if orders.is_whole(copy) and orders.intact(copy):
            intact.setdefault(orders.value[copy], []).append(copy)
    for v in orders.graph.vertices:
        last = chains.get((v.id, 0), [(v.id, 0)])[-1]
        wanted = v.keep or (v.out and not orders.late)
        at_home = on_host(v) and last == (v.id, 0)
        for ref in ((v.id, k) for k, size in enumerate(v.sizes) if size):
            if wanted and not at_home and not foreign(v) and ref not in intact:
                return False
            if on_host(v) and not next_step_finds(orders, ref, last, intact.get(last, [])):
                return False
    ranges = [(v.id, 0) for v in orders.plan.vertices if v.kind == VertexKind.INPUT and v.inputs]
    return not orders.plan.cyclic or all(map(orders.holds_at_end, ranges))


def next_step_finds(orders: Orders, ref: Ref, last: Ref, copies: list[Ref]) -> bool:
    """Whether it finds the ``last`` version of the INPUT ``ref`` where this one found its first. ``copies`` of it are
    intact."""
    resident = orders.plan.cyclic and ref in orders.at
    back = any(orders.at.get(copy) == orders.at.get(ref) for copy in copies)
    back = back or (resident and last == ref and orders.holds_at_end(ref))
    loaded = any(before_step(ref) in orders.read(reader) for reader in orders.of.values())
    written = [copy for copy in copies if goes_out(orders.of[copy[0]]) or copy in orders.at_home]
    at_home = last == ref or bool(written)
    return (back or not resident) and (at_home or (resident and not loaded))
