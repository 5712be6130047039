"""The same graph gives the same plan: in another process, and wherever the file lists its inputs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.taskgraph import with_memory as with_bytes
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.support.graphs.lora_graph import LoraShape, lora_graph
from tests.support.graphs.strategies import random_taskgraph, with_working_sets
from tests.support.graphs.tensor_parallel import PrefillShape, tensor_parallel_prefill

SCRIPT = """
import hashlib, sys
from pathlib import Path
from disco_accel.graph.files import write_memgraph
from disco_accel.plan import make_plan
from tests.support.graphs.lora_graph import LoraShape, lora_graph
from tests.support.graphs.tensor_parallel import PrefillShape, tensor_parallel_prefill
small = LoraShape(layers=1, hidden=256, ffn=512, vocabulary=256, tokens=64)
wide = PrefillShape(layers=1, devices=2, tokens=512)
graphs = [(lora_graph(small, 1), 600 << 10), (tensor_parallel_prefill(wide, 1), 200 << 20)]
for graph, memory in graphs:
    for planner in ("build", "timed"):
        plan = make_plan(graph, memory=memory, planner=planner, cyclic=True)
        write_memgraph(plan, sys.argv[1])
        print(planner, hashlib.sha256(Path(sys.argv[1]).read_bytes()).hexdigest())
"""


def test_the_bytes_of_a_plan_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    found = set()
    for seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / f"{seed}.json")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=1500)
        assert done.stdout.count("\n") == 4
        found.add(done.stdout)
    assert len(found) == 1


def shuffled_inputs(graph: TaskGraph, rng: random.Random) -> TaskGraph:
    """Return ``graph`` with each input somewhere before its first reader, and the rest in the order it had."""
    vertices = [vertex for vertex in graph.vertices if vertex.kind is not VertexKind.INPUT]
    inputs = [vertex for vertex in graph.vertices if vertex.kind is VertexKind.INPUT]
    rng.shuffle(inputs)
    for vertex in inputs:
        readers = (i for i, other in enumerate(vertices) if any(ref[0] == vertex.id for ref in other.inputs))
        vertices.insert(rng.randint(0, next(readers, len(vertices))), vertex)
    return replace(graph, vertices=tuple(vertices))


@pytest.mark.parametrize("planner", ["build", "timed"])
def test_where_inputs_are_listed_makes_no_difference(planner: str) -> None:
    rng = random.Random(3)
    small = LoraShape(layers=1, hidden=256, ffn=512, vocabulary=256, tokens=64)
    graphs = [with_bytes(lora_graph(small, 1), lambda _: 600 << 10)]
    graphs.append(
        with_bytes(tensor_parallel_prefill(PrefillShape(layers=1, devices=2, tokens=512), 1), lambda _: 200 << 20)
    )
    graphs += [with_working_sets(random_taskgraph(random.Random(seed)), 2.0) for seed in range(8)]
    planned = moved = 0
    for graph in graphs:
        other = shuffled_inputs(graph, rng)
        moved += other != graph
        try:
            plan = make_plan(graph, planner=planner, cyclic=True)
        except BudgetTooSmall as error:
            with pytest.raises(BudgetTooSmall) as refused:
                make_plan(other, planner=planner, cyclic=True)
            assert refused.value.needed == error.needed
            continue
        verify(other, plan)
        planned += 1
        assert make_plan(other, planner=planner, cyclic=True) == plan
    assert planned > 5
    assert moved > 4


@pytest.mark.parametrize("planner", ["build", "timed"])
def test_a_graph_that_was_planned_before_gets_the_same_plan(planner: str) -> None:
    """What is kept of its vertices is as it was, whatever memory it was planned in."""
    graphs = [with_working_sets(random_taskgraph(random.Random(seed)), 2.0) for seed in range(12)]
    for graph in graphs:
        unknown = replace(graph, vertices=tuple([*graph.vertices]))
        first = make_plan(graph, planner=planner, cyclic=True)
        for factor in (2, 4):
            make_plan(with_bytes(graph, lambda space, f=factor: f * space.memory), planner=planner, cyclic=True)
        assert make_plan(graph, planner=planner, cyclic=True) == first
        assert make_plan(unknown, planner=planner, cyclic=True) == first
