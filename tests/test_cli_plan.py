"""compile and verify on the command line: JSON on stdout, status 0 yes, 1 no, 2 bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from disco_accel.cli import main

GRAPHS = Path(__file__).parent / "data" / "graphs"
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


def test_the_same_graph_gives_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    plans = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        command = [sys.executable, "-m", "disco_accel.cli", "compile", LORA, "-o", str(path), "--memory", "64MiB"]
        root = str(Path(__file__).parent.parent)
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root}
        )
        plans.append(path.read_bytes())
    assert plans[0] == plans[1]
