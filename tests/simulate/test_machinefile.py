"""The machine file and the command that uses it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from disco_accel.cli.main import main
from disco_accel.errors import ConfigError
from disco_accel.graph.spaces import BETWEEN_DEVICES, HOST, ROUTE_OF, TO_DEVICE, TO_HOST, Space
from disco_accel.graph.taskgraph import Vertex, VertexKind
from disco_accel.plan import make_plan
from disco_accel.simulate.machine_file import read_machine
from disco_accel.simulate.simulator import Link, Machine, simulate
from tests.support.graphs.pipeline_graph import PipelineShape, pipeline_graph

GRAPHS = Path(__file__).parent.parent / "data" / "graphs"


def write(folder: Path, content: object) -> Path:
    path = folder / "machine.json"
    path.write_text(json.dumps(content))
    return path


def test_links_that_are_not_named_keep_the_default(tmp_path: Path) -> None:
    link = {"kinds": ["h2d"], "bandwidth": 1e9, "latency": 1e-6, "scope": "device"}
    machine = read_machine(write(tmp_path, {"compute_streams": 2, "links": [link]}))
    assert machine.compute_streams == 2
    assert (machine.link(TO_DEVICE), machine.link(TO_HOST)) == (Link(1e9, 1e-6), Link(2.0e10, 1e-5))


def test_keys_that_mean_nothing_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A link that is described otherwise would silently be the default one."""
    link = {"kinds": ["h2d"], "bandwidth": 1e9, "speed": 3}
    read_machine(write(tmp_path, {"h2d": {"bandwidth": 5e8}, "links": [link]}))
    (message,) = caplog.messages
    assert message.startswith("ignored in the machine file: 'h2d', 'speed' in links[0]; the keys are compute_streams, ")


def test_some_devices_may_have_links_of_another_bandwidth(tmp_path: Path) -> None:
    """The bandwidths of copies from, to and between devices: one between two is as fast as the slower."""
    kinds = {"kinds": ["h2d", "d2h", "p2p"], "bandwidth": 1e9, "bandwidths": {"1": 1e8, "2": 2e9}}
    machine = read_machine(write(tmp_path, {"links": [kinds]}))
    link = machine.link(BETWEEN_DEVICES)
    assert (link.rate(0), link.rate(1), link.rate(2), link.rate(2, 1)) == (1e9, 1e8, 2e9, 1e8)
    lanes = machine.lanes((Space(0), Space(1), Space(2)))
    copy = Vertex(0, VertexKind.COPY, 2, inputs=((9, 0),), sizes=(10**6,), source=1)
    assert lanes.seconds(copy) == pytest.approx(1e-2)
    assert lanes.seconds(replace(copy, source=HOST)) == pytest.approx(5e-4), "it comes over the target's link"
    assert lanes.seconds(replace(copy, space=HOST)) == pytest.approx(1e-2)


@pytest.mark.parametrize("kind", ["h2d", "d2h", "p2p"])
def test_a_slow_device_slows_its_own_copies_alone(kind: str) -> None:
    """Two devices do the same; with a slow link at one of them the other's lanes are busy for as long as before."""
    shape = PipelineShape(2, 4, weight=16 << 20)
    graph = pipeline_graph(shape, shape.held - 2 * shape.weight)
    plan = make_plan(graph, cyclic=True)
    even, route = simulate(plan).busy, ROUTE_OF[kind]
    link = Machine().link(route)
    slow = Machine(links={route: replace(link, bandwidths=((1, link.bandwidth / 4),))})
    uneven = simulate(plan, slow).busy
    slowed = {lane for lane in even if uneven[lane] > 1.5 * even[lane]}
    assert slowed == ({f"{kind}0", f"{kind}1"} if kind == "p2p" else {f"{kind}1"}), (
        "both ends of what goes between them"
    )


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ([], "expected an object"),
        ({"compute_streams": 0}, "compute_streams"),
        ({"links": [{"kinds": [], "bandwidth": 1e9}]}, "kinds"),
        ({"links": [{"kinds": ["h2d", "h2d"], "bandwidth": 1e9}]}, "kinds"),
        ({"links": [{"kinds": [[]], "bandwidth": 1e9}]}, "kinds"),
        ({"links": [{"kinds": ["h2d"], "bandwidth": 0}]}, "bandwidth"),
        ({"links": [{"kinds": ["h2d"], "bandwidth": 1e9, "latency": -1}]}, "latency"),
        ({"links": [{"kinds": ["h2d"], "bandwidth": 1e9, "scope": "galaxy"}]}, "scope"),
        ({"links": [{"kinds": ["h2d"], "bandwidth": 1e9, "scope": {}}]}, "scope"),
        ({"links": [{"kinds": ["h2d"], "bandwidth": 1e9, "groups": [[0, 1], [1]]}]}, "groups"),
        ({"links": [{"kinds": ["h2d"], "bandwidth": 1e9, "groups": [[0, [1]]]}]}, "groups"),
        ({"links": [{"kinds": ["h2d"], "bandwidth": 10**400}]}, "bandwidth"),
        ({"links": [{"kinds": ["h2d"], "bandwidth": 1e9, "bandwidths": [1e9]}]}, "bandwidths"),
        ({"links": [{"kinds": ["h2d"], "bandwidth": 1e9, "bandwidths": {"-1": 1e9}}]}, "device ids"),
        ({"links": [{"kinds": ["h2d"], "bandwidth": 1e9, "bandwidths": {"1": 0}}]}, "bandwidths: 1"),
        ({"links": [{"kinds": ["h2d"], "bandwidth": 1e9}, {"kinds": ["h2d"], "bandwidth": 1e9}]}, "already"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: object, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        read_machine(write(tmp_path, content))


def test_the_bound_of_a_graph_on_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, graph = str(GRAPHS / "intro.machine.json"), str(GRAPHS / "lora_small.taskgraph.json")
    assert main(["bound", graph, "--machine", machine]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"compute", "link", "critical_path", "phases", "lp_reload_bytes", "bound"}
    assert report["bound"] == max(report[key] for key in ("compute", "link", "critical_path", "phases"))
    assert main(["bound", graph, "--machine", str(tmp_path / "none.json")]) == 2
