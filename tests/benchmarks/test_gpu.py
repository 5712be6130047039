"""``make gpu`` on the host device: every stage runs, a failing one hides no other, and the limits hold."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.gpu import suite as gpu
from benchmarks.gpu.qlora import without_reference
from benchmarks.quantised import folder_of
from disco_accel.errors import ConfigError
from tests import forkserver

ROOT = Path(gpu.__file__).resolve().parents[2]


def _installed(form: str) -> bool:
    try:
        folder_of(form)
    except ConfigError:
        return False
    return True


def test_all_stages_run_on_the_host_device(tmp_path: Path) -> None:
    """What needs CUDA says so; the rest measures, and nothing is wrong."""
    served = forkserver.start()
    command = [str(served / "python"), "-m", "benchmarks.gpu", "--device", "cpu", "--small"]
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    stages = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert {name: found["status"] for name, found in stages.items()} == {
        "self_check": "ok",
        "build": "ok",
        "allocator": "ok",
        "link": "skipped",
        "step_8x1024": "ok",
        "step_1x2048": "ok",
        "prefill_1x1024": "ok",
        "qlora_1x1024": "ok" if _installed("nf4") else "skipped",
        "tests": "ok",
        "lookahead": "ok",
        "sanitizer": "skipped",
    }
    steps = 3 if _installed("nf4") else 2
    assert report.section(tmp_path).count("| eager in memory") == steps, "each step's result is one for the README"
    assert stages["allocator"]["figures"]["ops"] > 50
    checked = stages["self_check"]["figures"]
    assert next(iter(stages)) == "self_check", "whoever sees it fail need not read on"
    assert checked["compared"] == "bits" and checked["plan"]["offloads"] > 0 and checked["plan"]["reloads"] > 0
    step, prompt = (stages[name]["figures"] for name in ("step_8x1024", "prefill_1x1024"))
    assert [figures["verdict"] for figures in step.values() if isinstance(figures, dict)] == ["bits", "bits"]
    assert [figures["apart"] for figures in prompt.values() if isinstance(figures, dict)] == [0.0]
    assert "mm_64_of_eager_speed = [" in done.stdout, "the table shows the figures"


def test_a_device_that_does_not_hold_all_weights_has_figures_of_ours_alone() -> None:
    """That eager in memory needs more is no fault; that a plan is not made, is one."""
    blank = {"budget": None, "seconds": [], "ours": False, "equal": False}
    eager = {**blank, "engine": "in-memory", "error": "OutOfMemoryError: CUDA out of memory."}
    ours = {**blank, "engine": "disco", "error": "BudgetTooSmall: planted", "ours": True, "budget": 22 << 30}
    figures = without_reference({"batch": 1, "tokens": 16, "rows": [ours, eager]})
    assert figures["in-memory"] == "out of memory" and figures["wrong"] == ["disco 22GiB: BudgetTooSmall: planted"]


def test_a_stage_that_fails_or_hangs_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words are printed, the others run, and the table has all of them."""
    module = tmp_path / "gpu_planted.py"
    module.write_text(
        "import time\n"
        "def measure(device, small, stage):\n"
        "    print('last words of', stage)\n"
        "    if stage == 'fails': raise ValueError('planted')\n"
        "    if stage == 'hangs': time.sleep(3600)\n"
        "    return {'wrong': ['planted']} if stage == 'wrong' else {'figure': 1.5}\n"
    )
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import sys, benchmarks\n"
        f"benchmarks.__path__.append({str(tmp_path)!r})\n"
        "from benchmarks.gpu import suite as gpu\n"
        "gpu.STAGES = tuple(gpu.Stage(n, 'gpu_planted', 5) for n in ('fails', 'hangs', 'wrong', 'works'))\n"
        "raise SystemExit(gpu.main(sys.argv[1:]))\n"
    )
    stages = tuple(
        gpu.Stage(n, "gpu_planted", 3 if n == "hangs" else 500) for n in ("fails", "hangs", "wrong", "works")
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(gpu, "COMMAND", (str(driver),))
    outcomes = gpu.run_all(stages, "cpu", True, tmp_path)
    assert [o.status for o in outcomes] == ["failed", "timeout", "failed", "ok"]
    assert "last words of fails" in outcomes[0].words and "planted" in outcomes[0].words
    assert outcomes[3].figures == {"figure": 1.5}
    assert gpu.table(outcomes).count("\n") >= 4
