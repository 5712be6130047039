"""The distance between a plan and the bound is a sum, each row of which is what it says."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest

from disco_accel.cli.main import main
from disco_accel.errors import BudgetTooSmall, ConfigError, PlanError
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.files import write_memgraph, write_taskgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST, Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN
from disco_accel.plan import make_plan
from disco_accel.plan.bound.ladder import ROWS, explain
from disco_accel.plan.bound.plan_replay import Replay, _ReplayMemory
from disco_accel.plan.bound.why_text import as_text
from disco_accel.simulate.simulator import Link, Machine, simulate
from tests.support.faults.range_faults import ranged_plans
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.graphs.weight_chains import tight_chain
from tests.support.plans.host_updated_plans import HOST_UPDATED_SHAPES
from tests.support.plans.state_plans import TIMED_SHAPES

MACHINE = Machine(links={TO_DEVICE: Link(1000.0, 0.0), TO_HOST: Link(1000.0, 0.0)})
SHAPES = (
    Shape(keep=0.05),
    Shape(vertices=40, devices=2),
    Shape(devices=1, inplace=0.4),
    *HOST_UPDATED_SHAPES,
    *TIMED_SHAPES,
)


def chain(weights: int, memory: int, seconds: float) -> TaskGraph:
    """Kernels in a row, each of a weight of 1000 bytes."""
    vertices = [Vertex(i, VertexKind.INPUT, 0, f"w{i}", sizes=(1000,), traits=FROZEN) for i in range(weights)]
    for i in range(weights):
        before = ((weights + i - 1, 0),) if i else ()
        vertices.append(Vertex(weights + i, VertexKind.KERNEL, 0, f"k{i}", ((i, 0), *before), (0,), seconds))
    return TaskGraph("chain", (Space(0, memory, 1),), tuple(vertices))


@cache
def some_plans() -> list[tuple[MemGraph, Machine]]:
    """Repeating plans of random graphs, one device and several, with states, host-updated values and ranges."""
    link = Link(3e6, 1e-5)
    ranged = [plan for _, plan in ranged_plans(8) if plan.cyclic]
    found = [(plan, Machine(links={TO_DEVICE: link, TO_HOST: link})) for plan in ranged[:4]]
    seed = 0
    while len(found) < 10:
        rng = random.Random(seed)
        seed += 1
        graph = tight_chain(rng) if seed % 2 else random_taskgraph(rng, rng.choice(SHAPES))
        graph = graph if seed % 2 else with_room(graph, rng.choice((0.5, 0.65, 0.8)))
        link = Link(rng.choice((3e6, 1e7)), rng.choice((0.0, 1e-5)))
        machine = Machine(rng.choice((1, 1, 2)), links={TO_DEVICE: link, TO_HOST: link})
        try:
            plan = make_plan(graph, cyclic=True, machine=machine, planner="timed")
        except (BudgetTooSmall, PlanError):
            continue
        if any(swaps_in(vertex) for vertex in plan.vertices):
            found.append((plan, machine))
    return found


def test_rows_add_up_and_none_is_negative() -> None:
    seen = set()
    for plan, machine in some_plans()[:5]:
        why = explain(plan, machine, search=0.05)
        assert sum(why.rows.values()) == pytest.approx(why.step - why.bound.bound, abs=1e-9 * why.step)
        assert why.step == simulate(plan, machine).makespan
        for name, seconds in why.rows.items():
            assert name == "latency" or seconds >= -1e-9 * why.step, name
        for link in why.links:
            together = link.bytes + link.latency + link.other + sum(link.idle.values())
            assert together == pytest.approx(why.step)
        seen |= {name for name, seconds in why.rows.items() if seconds > 1e-6 * why.step}
        assert why.sentence in as_text(why)
    assert len(seen & ROWS.keys()) >= 5, "most rows are somewhere more than nothing"


def test_a_replay_without_relaxation_is_the_simulation() -> None:
    for plan, machine in some_plans():
        run = simulate(plan, machine)
        assert Replay(plan, machine, run).seconds() == pytest.approx(run.makespan, rel=1e-12)


def test_each_relaxation_lets_a_plan_off_more() -> None:
    for plan, machine in some_plans():
        replay = Replay(plan, machine, simulate(plan, machine))
        asked: dict[str, bool] = {}
        last = replay.seconds()
        for name in ("anywhere", "free_offloads", "fine", "no_latency"):
            asked[name] = True
            seconds = replay.seconds(**asked)
            assert seconds <= last * (1 + 1e-12), name
            last = seconds


def test_a_load_that_waits_for_its_place_is_named() -> None:
    """Two weights fit and four take turns. A load takes 1 s, a kernel 2: half of the time both places are in use."""
    plan = make_plan(chain(4, 2000, 2.0), cyclic=True, machine=MACHINE)
    why = explain(plan, MACHINE)
    (link,) = why.links
    assert link.idle["no_room"] > 0 and link.idle["no_room"] >= max(link.idle.values())
    assert why.rows["latency"] == 0 == why.rows["offloads"]


def test_half_a_weight_that_could_stay_is_a_row() -> None:
    """One and a half weights beside each kernel's: in halves three could stay of four."""
    graph = chain(4, 2500, 0.0)
    why = explain(make_plan(graph, cyclic=True, machine=MACHINE), MACHINE)
    assert why.rows["whole_values"] == pytest.approx(why.distance, rel=1e-6) and why.distance > 0
    assert "parts of them could be kept" in why.sentence


def test_memory_gives_back_the_first_second_that_is_enough() -> None:
    """Against a sum by hand, in any order of what is given back."""
    for seed in range(50):
        rng = random.Random(seed)
        memory, promised = _ReplayMemory(10), 0
        given: list[tuple[float, int]] = []
        for _ in range(20):
            if (given and rng.random() < 0.5) or promised < 10:
                size = rng.randint(1, 3)
                if promised + size - 10 > sum(bytes for _, bytes in given):
                    continue
                promised += size
                enough = 0.0
                for at, _ in sorted(given):
                    if sum(bytes for when, bytes in given if when <= enough) >= promised - 10:
                        break
                    enough = at
                assert memory.take(size) == (enough if promised > 10 else 0.0)
            else:
                given.append((rng.random(), rng.randint(1, 3)))
                memory.give(*given[-1])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = chain(4, 2000, 1e-8)
    task, mem = str(tmp_path / "task.json"), str(tmp_path / "mem.json")
    write_taskgraph(graph, task)
    write_memgraph(make_plan(graph, cyclic=True), mem)
    assert main(["bound", "--why", mem, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert sum(answer["rows"].values()) == pytest.approx(answer["distance"])
    assert main(["bound", task, "--why", mem]) == 0
    assert capsys.readouterr().out.startswith(answer["sentence"])
    assert main(["bound", "--why", mem, "--memory", "2000"]) == 2
    assert main(["bound"]) == 2
    write_taskgraph(chain(5, 2000, 1e-8), task)
    assert main(["bound", task, "--why", mem]) == 1, "the plan of another graph"
    write_memgraph(make_plan(graph, cyclic=False), mem)
    assert main(["bound", "--why", mem]) == 2
    assert "--cyclic" in capsys.readouterr().err


def test_a_plan_that_does_not_repeat_is_refused() -> None:
    with pytest.raises(ConfigError, match="step after step"):
        explain(make_plan(chain(4, 2000, 1.0), cyclic=False, machine=MACHINE), MACHINE)
