"""Two processes train under plans, in DDP and in DeepSpeed's engine, to the bits that they reach without plans; so does
one process in DeepSpeed's engine.

Each entry is used once, for the cases that are tested; the script in the launched processes compares case by case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import forkserver

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "processes.py"
OURS = {"memory_budget": "64MiB", "device": "cpu", "plan_cache": None, "planner": "build"}
TWO_PROCESSES = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "num_machines": 1,
    "num_processes": 2,
    "mixed_precision": "no",
}
OFFLOADING = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.1,
    "steps_per_print": 10**6,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "stage3_prefetch_bucket_size": 1000,
    },
}
LAUNCHES = {
    "ddp": "accelerate launch --config disco.yaml",
    "deepspeed": "disco-accel launch --ds_config ds.json --num_processes 2",
    "alone": "disco-accel launch --ds_config ds.json --num_processes 1",
}
DDP_CASES = (
    "accumulation",
    "unused parameters",
    "static graph",
    "bucket views",
    "trainer",
    "devices",
    "shared weights",
)
DEEPSPEED_CASES = (
    "stage 0",
    "bf16 over fp32 weights",
    "shared weights",
    "stage 1 resumed",
    "stage 2 resumed",
    "migrated",
)
ALONE_CASES = ("stage 0", "stage 1 resumed", "stage 2 resumed")


def environment() -> dict[str, str]:
    from disco_accel.native.plain_library import cache_root

    ours = ("DISCO_", "ACCELERATE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(forkserver.start()), str(BIN), clean["PATH"]])
    # As accelerate's own tests do it: torchrun's processes on a machine whose devices are left alone.
    return clean | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONFAULTHANDLER": "1",
        "TORCH_EXTENSIONS_DIR": str(cache_root()),
    }


def launch(entry: str, cases: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """Files of a user's folder are JSON, which YAML parsers read too."""
    (folder / "processes.py").write_text(SCRIPT.read_text())
    (folder / "disco.yaml").write_text(json.dumps(TWO_PROCESSES | {"disco_config": OURS}, indent=1))
    (folder / "ds.json").write_text(json.dumps(OFFLOADING | {"disco_config": OURS}))
    command, *rest = [*LAUNCHES[entry].split(), "--main_process_port", "0", "processes.py", entry, *cases]
    variables = environment() | {"XDG_RUNTIME_DIR": str(folder)}
    if entry != "ddp":
        # It would keep accelerate from using DeepSpeed.
        del variables["ACCELERATE_USE_CPU"]
    words = [str(forkserver.start() / command), *rest]
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=1500)


Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """What the processes of an entry found, each of them in all cases of the entry that are tested in this run."""
    tested: dict[str, list[str]] = {entry: [] for entry in LAUNCHES}
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            given = item.callspec.params
            tested[given.get("entry", "alone")].append(given.get("case", "home"))
    return lambda entry: found_in(entry, tuple(tested[entry]))


@cache
def found_in(entry: str, cases: tuple[str, ...]) -> list[dict[str, Any]]:
    """A dictionary of each process of ``entry``, with what it found in each of the ``cases``."""
    with tempfile.TemporaryDirectory() as name:
        done = launch(entry, cases, Path(name))
        assert done.returncode == 0, f"{sorted(os.listdir(name))}\n{done.stdout[-1000:]}\n{done.stderr}"
        if entry != "ddp":
            assert done.stderr.count("planned instead") == 4, done.stderr
        return [json.loads(path.read_text()) for path in sorted(Path(name).glob("result-*.json"))]


def check(found: dict[str, Any], plans: int = 1) -> None:
    """``plans``: 2 where logits are read, never differentiated."""
    assert found["alone"], "the run to compare with must be without us"
    assert found["same"]
    assert found["eager"] == 0 and found["planned"] > 0
    assert found["plans"] == plans


@pytest.mark.parametrize(
    ("entry", "case"), [*(("ddp", case) for case in DDP_CASES), *(("deepspeed", case) for case in DEEPSPEED_CASES)]
)
def test_two_processes_train_to_the_bits_of_a_run_without_plans(entry: str, case: str, results: Results) -> None:
    """Losses and all weights after accumulation, clipping and AdamW; resumed: those of the uninterrupted run too.

    The processes begin with different weights and get different batches, so that nothing is equal by chance.
    """
    if entry == "deepspeed":
        pytest.importorskip("deepspeed")
    first, second = (result[case] for result in results(entry))
    assert [result["processes"] for result in results(entry)] == [2, 2]
    for found in (first, second):
        check(found, plans=2 if case == "unused parameters" else 1)
    assert first["weights"] == second["weights"]
    assert case == "trainer" or first["losses"] != second["losses"]


@pytest.mark.parametrize("case", ALONE_CASES)
def test_one_process_in_deepspeed_trains_to_the_bits_of_a_run_without_plans(case: str, results: Results) -> None:
    """As above; no gradient meets another process's."""
    pytest.importorskip("deepspeed")
    (result,) = results("alone")
    assert result["processes"] == 1
    check(result[case])


@pytest.mark.parametrize("entry", ["ddp", "deepspeed"])
def test_weights_that_stay_home_are_compared_in_place_of_broadcast(entry: str, results: Results) -> None:
    """As on a machine where the base is in host memory and the adapter on a device, which no collective takes."""
    if entry == "deepspeed":
        pytest.importorskip("deepspeed")
    first, second = (result["home"] for result in results(entry))
    assert first["kept"] and second["kept"]
    assert first["adapter"] == second["adapter"], "adapters are broadcast"
    for said in (first["said"], second["said"]):
        assert "embed_tokens.weight: this frozen tensor differs between processes" in said
        assert "load the same checkpoint" in said
