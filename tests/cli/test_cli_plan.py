"""compile and verify on the command line: JSON on stdout, status 0 yes, 1 no, 2 bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disco_accel.cli.main import main

GRAPHS = Path(__file__).parents[1] / "data" / "graphs"
LORA = str(GRAPHS / "lora_small.taskgraph.json")
KEYS = {
    "vertices",
    "data_edges",
    "memory_edges",
    "essential_memory_edges",
    "offload_bytes",
    "reload_bytes",
    "peak_bytes",
    "bound",
    "seconds",
}


def test_a_compiled_plan_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(tmp_path / "plan.json")
    assert main(["compile", LORA, "-o", plan, "--memory", "64MiB", "--cyclic"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) >= KEYS
    assert report["peak_bytes"] <= 64 << 20
    assert report["reload_bytes"] > 0
    assert main(["verify", LORA, plan]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] is True


def test_a_plan_of_another_graph_does_not_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(tmp_path / "plan.json")
    assert main(["compile", LORA, "-o", plan]) == 0
    assert main(["verify", str(GRAPHS / "toy.taskgraph.json"), plan]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["verified"] is False
    assert "vertex 0" in captured.err


def test_a_budget_that_is_too_small_says_what_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy, plan = str(GRAPHS / "toy.taskgraph.json"), str(tmp_path / "plan.json")
    assert main(["compile", toy, "-o", plan, "--memory", "256"]) == 1
    assert "at least 1024 bytes" in capsys.readouterr().err
    assert not Path(plan).exists()
    assert main(["compile", toy, "-o", plan, "--memory", "1024"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "absent.json", "-o", "x.json"], "absent.json"),
        (["compile", LORA, "-o", "x.json", "--memory", "much"], "not a size"),
        (["compile", LORA, "-o", "x.json", "--policy", "luck"], "belady, cost, fifo, latency_aware, lru, size_aware"),
        (["compile", LORA, "-o", "x.json", "--planner", "oracle"], "build"),
        (["compile", LORA, "-o", "no/such/folder/x.json"], "cannot be written"),
        (["verify", LORA, LORA], "expected 'memgraph'"),
        (["compile"], "required"),
        (["dance"], "invalid choice"),
    ],
)
def test_bad_input_is_status_2_with_a_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_judged_by_the_memory_that_was_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the graph's own unless --memory says otherwise; the message says how to say so."""
    graph = {**json.loads((GRAPHS / "toy.taskgraph.json").read_text())}
    graph["devices"] = [{**device, "memory": 1024} for device in graph["devices"]]
    task, plan = tmp_path / "task.json", str(tmp_path / "plan.json")
    task.write_text(json.dumps(graph))
    assert main(["compile", str(task), "-o", plan, "--memory", "4096"]) == 0
    capsys.readouterr()
    assert main(["verify", str(task), plan]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verified"] is False and "--memory 4096" in captured.err
    for memory, status in (("4096", 0), ("8192", 0), ("1GiB", 0), ("4095", 1), ("256", 1), ("much", 2), ("0", 2)):
        assert main(["verify", str(task), plan, "--memory", memory]) == status
    assert main(["compile", str(task), "-o", plan]) == 0
    assert main(["verify", str(task), plan]) == main(["verify", str(task), plan, "--memory", "1024"]) == 0


def test_a_plan_for_less_memory_than_there_is_verifies(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    assert main(["compile", LORA, "-o", plan, "--memory", "64MiB"]) == 0
    assert main(["verify", LORA, plan]) == main(["verify", LORA, plan, "--memory", "64MiB"]) == 0
    assert main(["verify", LORA, plan, "--memory", "63MiB"]) == 1


def test_a_plan_of_a_gigabyte_does_not_fit_a_device_of_3072_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However the file says that it has a device of that size."""
    chain, plan = str(GRAPHS.parents[2] / "docs" / "examples" / "chain.taskgraph.json"), tmp_path / "plan.json"
    assert main(["compile", chain, "-o", str(plan), "--memory", "3072", "--cyclic"]) == 0
    data = json.loads(plan.read_text())
    moved = next(v for v in data["vertices"] if v["kind"] == "kernel")
    moved["offset"], data["spaces"][0]["memory"] = (1 << 30) - 4096, 1 << 30
    plan.write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["verify", chain, str(plan), "--memory", "3072"]) == 1
    assert "1073741824 bytes" in capsys.readouterr().err
