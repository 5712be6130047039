"""The budget that a refusal names: it works, a unit less does not, and it is found in a bounded number of walks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from disco_accel.cli.main import main
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.files import write_taskgraph
from disco_accel.graph.taskgraph import TaskGraph, with_at_least, with_memory
from disco_accel.plan import make_plan
from disco_accel.plan.buildmemgraph import min_memory as needed_module
from disco_accel.plan.buildmemgraph.min_memory import bisect, bisect_down, working_set
from disco_accel.plan.timed.smallest_memory import climb
from disco_accel.verify.static import verify
from tests.support.graphs.lora_graph import LoraShape, lora_graph
from tests.support.graphs.pipeline_graph import PipelineShape, pipeline_graph
from tests.support.graphs.strategies import random_taskgraph, with_working_sets
from tests.support.graphs.tensor_parallel import PrefillShape, tensor_parallel_prefill

MIB = 1 << 20


def refusals(planner: str, seeds: range) -> Iterator[None]:
    """Refuse random graphs, and check the number that each refusal names."""
    for seed in seeds:
        rng = random.Random(seed)
        graph = with_working_sets(random_taskgraph(rng), rng.choice((0.3, 0.7, 1.0, 1.1)))
        cyclic = rng.random() < 0.5
        try:
            make_plan(graph, planner=planner, cyclic=cyclic)
        except BudgetTooSmall as error:
            enough = with_at_least(graph, error.needed)
            assert working_set(graph) <= max(device.memory for device in enough.devices)
            verify(enough, make_plan(enough, planner=planner, cyclic=cyclic))
            unit = max(device.alignment for device in graph.devices)
            with pytest.raises(BudgetTooSmall):
                make_plan(with_at_least(graph, error.needed - unit), planner=planner, cyclic=cyclic)
            short = [device for device in graph.devices if device.id in error.devices]
            assert len(short) < len(graph.devices) and all(device.memory < error.needed for device in short)
            if short:
                # The others need no more than they have.
                raised = (replace(d, memory=error.needed) if d in short else d for d in graph.devices)
                enough = replace(graph, spaces=tuple(raised))
                verify(enough, make_plan(enough, planner=planner, cyclic=cyclic))
                assert f"device{'s' * (len(short) > 1)} {short[0].id}" in error.what
            yield


@pytest.mark.parametrize("planner", ["build", "timed"])
def test_the_number_works_and_a_unit_less_does_not(planner: str) -> None:
    assert len(list(refusals(planner, range(120)))) >= 60


def test_no_plan_exists_below_the_working_set() -> None:
    """A number that is proven: nothing below it is ever accepted, whatever is tried."""
    for seed in range(150):
        graph = random_taskgraph(random.Random(seed))
        least = working_set(graph)
        if least > 256:
            with pytest.raises(BudgetTooSmall):
                make_plan(graph, memory=least - 256)


@pytest.mark.parametrize(
    "graph",
    [
        lora_graph(LoraShape(layers=6, hidden=1024, ffn=2816, vocabulary=4096, tokens=1024), 1),
        tensor_parallel_prefill(PrefillShape(layers=2), 1),
    ],
    ids=["lora", "tensor parallel"],
)
def test_layered_graphs_need_little_more_than_their_largest_vertex(
    graph: TaskGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the search for it takes walks by the hundred at most, most of them short."""
    walks = 0
    real = needed_module.failing_position

    def counted(*args: object, **options: object) -> int | None:
        nonlocal walks
        walks += 1
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(needed_module, "failing_position", counted)
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(graph, memory=1 << 20, cyclic=True)
    assert working_set(graph) <= refused.value.needed <= 1.16 * working_set(graph)
    assert walks <= 300


def test_the_bisections_end_where_the_number_below_does_not_fit() -> None:
    """Also where fitting is not monotone."""
    for seed in range(300):
        rng = random.Random(seed)
        good = {n for n in range(101) if rng.random() < rng.choice((0.2, 0.5, 0.9))} | {100} - {0}
        least = bisect(0, 100, good.__contains__)
        assert (least in good and least - 1 not in good) or least == 1
        low = rng.randint(1, 100)
        least = bisect_down(100, low, good.__contains__)
        assert least in good and (least == low or least - 1 not in good)


def test_sizes_that_fail_by_chance_hide_no_smaller_one_that_works() -> None:
    """All from 120 on but 200 to 900: a bisection from the top ends at 900."""

    def fits(size: int) -> bool:
        return 120 <= size < 200 or size >= 900

    assert bisect(9, 2000, fits) == 900
    failing, found = climb(10, 2000, fits)
    assert found is not None and failing < 120 <= found < 200
    assert bisect(failing, found, fits) == 120
    assert climb(10, 100, fits)[1] is None and climb(120, 2000, fits) == (119, 120)
    assert climb(10, 2000, fits, lambda: False) == (9, None)


def test_of_two_devices_the_one_that_is_short_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other has more than the first needs, and needs more than the first."""
    shape = PipelineShape(2, 4)
    graph = with_memory(pipeline_graph(shape, shape.held * 2), lambda d: shape.held * 2 if d.id else 4 * MIB)
    with pytest.raises(BudgetTooSmall, match="on device 0 needs") as refused:
        make_plan(graph, planner="timed", cyclic=True)
    error = refused.value
    assert error.devices == (0,) and error.given == 4 * MIB < error.needed < shape.held
    enough = with_at_least(graph, error.needed)
    verify(enough, make_plan(enough, planner="timed", cyclic=True))
    file = tmp_path / "task.json"
    write_taskgraph(graph, file)
    assert main(["compile", str(file), "-o", str(tmp_path / "plan.json")]) == 1
    assert "backward" in capsys.readouterr().err, "a single kernel of that device is larger than it"
