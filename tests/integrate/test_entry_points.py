"""Every entry point trains an unchanged script, raw Accelerate loop and Trainer alike, to the bits it reaches alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import forkserver

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
ACCELERATE = "distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\nmixed_precision: 'no'\n"
SECTION = "disco_config:\n  memory_budget: {budget}\n  device: cpu\n"
TRAIN = ["train.py", "--config", "theirs.yaml"]

ENTRY_POINTS = {
    "disco-accel launch": [str(BIN / "disco-accel"), "launch", "--config", "disco.yaml", *TRAIN],
    "disco_accel.run": [
        *(str(BIN / "accelerate"), "launch", "--config_file", "plain.yaml"),
        *("-m", "disco_accel.run", "--config", "disco.yaml", *TRAIN),
    ],
    "accelerate launch --config": [str(BIN / "accelerate"), "launch", "--config", "disco.yaml", *TRAIN],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: an unchanged script, an accelerate config, and the same with our section."""
    for script in SCRIPTS.glob("*.py"):
        (tmp_path / script.name).write_text(script.read_text())
    (tmp_path / "plain.yaml").write_text(ACCELERATE)
    (tmp_path / "disco.yaml").write_text(ACCELERATE + SECTION.format(budget="64MiB"))
    return tmp_path


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DISCO_", "ACCELERATE_"))}
    return clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_EXTENSIONS_DIR": extensions()}


def extensions() -> str:
    from disco_accel.native.plain_library import cache_root

    return str(cache_root())


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    changed = environment() | variables
    return subprocess.run(command, cwd=folder, env=changed, capture_output=True, text=True, timeout=1500)


def served(entry: str) -> list[str]:
    """The same where PyTorch and accelerate are imported already, in the launcher and in the script."""
    program, *words = ENTRY_POINTS[entry]
    return [str(forkserver.start() / Path(program).name), *words]


@cache
def trained_alone() -> str:
    """What the script writes when plain Python runs it."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        for script in SCRIPTS.glob("*.py"):
            Path(name, script.name).write_text(script.read_text())
        done = run([str(forkserver.start() / "python"), *TRAIN], Path(name))
        assert done.returncode == 0, done.stderr
        return Path(name, "result.json").read_text()


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_an_entry_point_changes_no_bit_of_losses_or_adapters(entry: str, folder: Path) -> None:
    """The last one in processes that import all anew, where our hook runs within accelerate's import of PyTorch."""
    done = run(ENTRY_POINTS[entry] if entry.startswith("accelerate") else served(entry), folder)
    assert done.returncode == 0, done.stderr
    expected: dict[str, Any] = json.loads(trained_alone())
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert "planned_steps" not in expected, "the run alone must be without us"
    assert found.pop("planned_steps") == [found["steps"]] * 2, "every step of both loops runs from a plan"
    assert found == expected


def test_the_environment_overrides_the_file_and_the_user_is_told_what_runs(folder: Path) -> None:
    """``DISCO_*`` reaches the step; each plan says once, on stderr, what was captured and its budget."""
    changed = {"DISCO_MEMORY_BUDGET": "48MiB", "DISCO_PLAN_CACHE": str(folder / "plans")}
    done = run(served("accelerate launch --config"), folder, **changed)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("disco: ")]
    results = [line for line in told if "captured" in line and "budget 48MiB" in line]
    assert len(results) == 2, "one plan for each of the two loops"
    # A capture that takes long is told of again.
    assert sum("capturing a training step on 2 x 16 tokens, to plan" in line for line in told) == 2
    assert list((folder / "plans").iterdir())


def test_a_step_that_falls_back_is_told_once_with_its_reason(folder: Path) -> None:
    """Its hook looks at a value; with on_unsupported: eager the script trains on, to its own bits."""
    script = (folder / "train.py").read_text()
    hook = "model.base_model.model.lm_head.register_forward_pre_hook(lambda head, given: print(given[0].sum().item()))"
    (folder / "train.py").write_text(script.replace("    optimizer = ", f"    {hook}\n    optimizer = ", 1))
    (folder / "disco.yaml").write_text((folder / "disco.yaml").read_text() + "  on_unsupported: eager\n")
    done = run(served("accelerate launch --config"), folder)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("disco: ")]
    assert sum("depends on the data" in line and "eager mode" in line for line in told) == 1
    assert json.loads((folder / "result.json").read_text())["planned_steps"][0] == 0


@pytest.mark.parametrize("entry", ["disco-accel launch", "accelerate launch --config"])
def test_a_misspelt_key_ends_the_launch_with_status_2_and_one_line(entry: str, folder: Path) -> None:
    (folder / "disco.yaml").write_text(ACCELERATE + "disco_config:\n  memory_bugdet: 64MiB\n")
    done = run(ENTRY_POINTS[entry], folder)
    assert done.returncode == 2
    assert "unknown key 'memory_bugdet'; did you mean 'memory_budget'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "result.json").exists()


def test_a_budget_that_is_too_small_says_what_works_and_ends_every_process_with_status_2(folder: Path) -> None:
    (folder / "disco.yaml").write_text(ACCELERATE + SECTION.format(budget="64KiB"))
    done = run(served("accelerate launch --config"), folder)
    assert done.returncode == 2, done.stderr
    assert "BudgetTooSmall: " in done.stderr and "at least" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "result.json").exists()


def test_stock_accelerate_is_untouched_without_our_section(folder: Path) -> None:
    """As ``import torch`` alone is, in processes of their own: tests/autoload/test_bystanders.py."""
    (folder / "other.py").write_text(
        "import torch, sys\nprint([m for m in sys.modules if m.startswith('disco_accel.integrate.acc')])\n"
    )
    done = run([str(forkserver.start() / "accelerate"), "launch", "--config_file", "plain.yaml", "other.py"], folder)
    assert (done.returncode, done.stdout.strip()) == (0, "[]")


def test_ctrl_c_reaches_the_script_and_the_launcher_waits_for_it(folder: Path) -> None:
    command = [str(BIN / "accelerate"), "launch", "--config", "disco.yaml", "interrupted.py"]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, start_new_session=True)
    try:
        while not (folder / "started").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=1500)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert (folder / "saved").exists()
    assert b"Traceback" not in errors
