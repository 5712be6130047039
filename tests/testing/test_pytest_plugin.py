"""Somebody else's suite under the plugin: what trains goes through plans, its results stay, all of it is reported."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import forkserver

ROOT = Path(__file__).resolve().parents[2]
SUITE = """
import torch
from accelerate import Accelerator
from torch import nn

from disco_accel import DiscoConfig, prepare

def model():
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    found[0].requires_grad_(False)
    return found

def step(given):
    given(torch.ones(3, 4)).sum().backward()
    return given[1].weight.grad

def test_trains():
    assert step(model()).abs().sum() > 0

def test_is_wrong():
    assert step(model()).abs().sum() < 0

def test_trains_with_accelerate():
    assert step(Accelerator(cpu=True).prepare(model())).abs().sum() > 0

def test_prepares():
    config = DiscoConfig(memory_budget="16MiB", device="cpu", plan_cache=None)
    assert step(prepare(model(), config)).abs().sum() > 0

def test_evaluates():
    with torch.no_grad():
        assert model()(torch.ones(3, 4)).shape == (3, 2)

def test_counts_batches():
    norm = nn.BatchNorm1d(4)
    norm(torch.randn(3, 4)).sum().backward()
    assert norm.num_batches_tracked == 1
"""
PLANNED = {
    "callback": ["prepares"],
    "launch": ["prepares", "trains_with_accelerate"],
    "models": ["is_wrong", "prepares", "trains", "trains_with_accelerate"],
}


def run(folder: Path, mode: str, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    (folder / "test_theirs.py").write_text(SUITE)
    config = '{"disco_config": {"memory_budget": "16MiB", "device": "cpu", "on_unsupported": "eager"}}'
    (folder / "disco.yaml").write_text(config)
    python = str(forkserver.start() / "python")
    command = [python, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder), *options]
    command += ["-p", "disco_accel.testing.pytest_plugin", f"--disco={mode}", "--disco-report=ran.json"]
    command.append("test_theirs.py")
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=1500)
    report = folder / "ran.json"
    tests = json.loads(report.read_text()) if report.exists() else {}
    return done, {name.split("::test_")[1]: ran for name, ran in tests.items()}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("mode", PLANNED)
def test_the_report_says_what_ran_from_plans_and_the_suites_results_stay(tmp_path: Path, mode: str) -> None:
    done, ran = run(tmp_path, mode, "--disco-config=disco.yaml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert {name for name, of in ran.items() if of["outcome"] == "failed"} == {"is_wrong"} and len(ran) == 6
    assert sorted(name for name, of in ran.items() if of["forwards"] == of["backwards"] == 1) == PLANNED[mode]
    assert f"disco: {len(PLANNED[mode])} tests trained through a plan" in done.stdout
    eager = ran["counts_batches"]
    assert (eager["eager"], len(eager["fallbacks"])) == ((1, 1) if mode == "models" else (0, 0))


def test_a_config_that_is_missing_is_a_usage_error(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "models", "--disco-config=no.yaml")
    assert done.returncode == 4 and "no.yaml" in done.stderr
