"""The machine file and the command that uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disco_accel.cli.main import main
from disco_accel.errors import ConfigError
from disco_accel.simulate.machine_file import read_machine
from disco_accel.simulate.simulator import Link

GRAPHS = Path(__file__).parent.parent / "data" / "graphs"


def write(folder: Path, content: object) -> Path:
    path = folder / "machine.json"
    path.write_text(json.dumps(content))
    return path


def test_links_that_are_not_named_keep_the_default(tmp_path: Path) -> None:
    link = {"kinds": ["h2d"], "bandwidth": 1e9, "latency": 1e-6, "scope": "device"}
    machine = read_machine(write(tmp_path, {"compute_streams": 2, "links": [link]}))
    assert (machine.compute_streams, machine.h2d, machine.d2h) == (2, Link(1e9, 1e-6), Link(2.0e10, 1e-5))


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
