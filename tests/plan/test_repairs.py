"""Each repair of BUILDMEMGRAPH is needed: with it switched off, a judge finds a fault or no plan is found."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from disco_accel.errors import BudgetTooSmall, VerifyError
from disco_accel.eviction import POLICIES, belady
from disco_accel.graph.copies import swaps_out
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN, FROZEN
from disco_accel.plan.buildmemgraph import builder
from disco_accel.plan.buildmemgraph.builder import build
from disco_accel.plan.buildmemgraph.sim_malloc import Repairs
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.select import plan_build
from disco_accel.simulate.simulator import Machine
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets


def outcomes(repairs: Repairs, seeds: range) -> Iterator[str]:
    """What goes wrong with ``repairs`` on graphs that are planned well with all of them."""
    for seed in seeds:
        rng = random.Random(seed)
        graph = with_working_sets(random_taskgraph(rng, Shape(devices=1)), rng.choice((1.2, 1.5, 2.0)))
        policy = POLICIES[rng.choice(sorted(POLICIES))]
        try:
            verify(graph, build(graph, policy))
        except Infeasible:
            continue
        try:
            verify(graph, build(graph, policy, repairs=repairs))
            yield "fine"
        except (VerifyError, Infeasible) as error:
            yield type(error).__name__


def test_inputs_of_the_executed_vertex_are_spared() -> None:
    """An input that is evicted for its own vertex's output is gone when the vertex reads it."""
    assert "VerifyError" in outcomes(Repairs(spare_inputs=False), range(400))


def test_reserved_space_is_revoked() -> None:
    """Without revoking what is reserved for copies not made yet, the builder gets stuck."""
    assert "Infeasible" in outcomes(Repairs(revoke=False), range(400))


def test_consumers_are_counted_from_the_execution_horizon() -> None:
    """A victim's readers between the horizons have not run: counting them as past makes cycles."""
    assert "VerifyError" in outcomes(Repairs(consumers_before_exec=False), range(800))


def test_release_sets_cover_every_byte() -> None:
    """An allocation over several former tensors must wait for the readers of all of them."""
    assert "VerifyError" in outcomes(Repairs(release_every_byte=False), range(400))


def test_the_end_reads_what_is_kept() -> None:
    """Without the virtual end vertex a kept value is freed after its last reader."""
    assert "VerifyError" in outcomes(Repairs(end_vertex=False), range(400))


def test_lookahead_is_shortened_before_giving_up() -> None:
    """Some graphs fit only with less look-ahead; with the repair their plan is found."""
    machine = Machine()
    for seed in range(3000):
        rng = random.Random(seed)
        graph = with_working_sets(random_taskgraph(rng, Shape(devices=1)), rng.choice((1.0, 1.1, 1.2)))
        try:
            plan_build(graph, belady, False, None, machine, SearchWork(), repairs=Repairs(shorten_lookahead=False))
        except Infeasible:
            try:
                plan, _ = plan_build(graph, belady, False, None, machine, SearchWork())
            except BudgetTooSmall:
                continue
            verify(graph, plan)
            return
    raise AssertionError("no graph needs less look-ahead")


def test_without_the_last_repair_the_needed_budget_is_not_known() -> None:
    """The repair turns a dead end into the budget that works."""
    vertices = (
        Vertex(0, VertexKind.INPUT, 0, "x", sizes=(512,), traits=FOREIGN),
        Vertex(1, VertexKind.KERNEL, 0, "big", ((0, 0),), (4096,), keep=True),
    )
    graph = TaskGraph("big", (Space(0, 1024),), vertices)
    with pytest.raises(Infeasible):
        plan_build(graph, belady, False, None, Machine(), SearchWork(), repairs=Repairs(shorten_lookahead=False))
    with pytest.raises(BudgetTooSmall) as error:
        plan_build(graph, belady, False, None, Machine(), SearchWork())
    assert (error.value.needed, error.value.given) == (4096, 1024)


def test_all_repairs_together_leave_no_fault() -> None:
    assert set(outcomes(Repairs(), range(400))) == {"fine"}


def test_inputs_make_place_for_one_that_has_to_come_back() -> None:
    """Two small inputs split the free memory into pieces that are too small for the third: they leave and come back."""
    unit = 256

    def kernel(id: int, inputs: tuple[int, ...], units: int) -> Vertex:
        return Vertex(id, VertexKind.KERNEL, 0, f"k{id}", tuple((i, 0) for i in inputs), (units * unit,), 1e-5)

    weight = Vertex(0, VertexKind.INPUT, 0, "weight", sizes=(4 * unit,), traits=FROZEN)
    made = [kernel(1, (), 2), kernel(2, (), 1), kernel(3, (), 2), kernel(4, (), 1), kernel(5, (), 2)]
    last = kernel(7, (0, 2, 4), 1)
    graph = TaskGraph("split", (Space(0, 8 * unit, unit),), (weight, *made, kernel(6, (1, 3, 5), 0), last))
    for policy in sorted(POLICIES):
        plan, _ = plan_build(graph, POLICIES[policy], False, None, Machine(), SearchWork())
        verify(graph, plan)
        assert sum(swaps_out(vertex) for vertex in plan.vertices) == 2


def test_the_page_names_every_repair_with_its_tests_and_only_code_that_exists() -> None:
    """plan/buildmemgraph/README.md, beside the code."""
    folder = Path(builder.__file__).parent
    page = (folder / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)`: .*\|(.*)\|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == [each.name for each in fields(Repairs)]
    assert all("`test_" in tests for _, tests in rows)
    assert set(re.findall(r"`(test_\w+)`", page)) <= globals().keys()
    files = [path for part in (folder, folder.parent / "common") for path in part.glob("*.py")]
    code = "\n".join((*(path.stem for path in files), *(path.read_text() for path in files)))
    names = {name for quoted in re.findall(r"`([A-Za-z_.]+)`", page) for name in quoted.split(".")}
    theirs = {"execHzn", "allocHzn", "py"}
    missing = {name for name in names - theirs - globals().keys() if not re.search(rf"\b{name}\b", code)}
    assert not missing, missing
