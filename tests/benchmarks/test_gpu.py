"""``make gpu`` on the host device: every stage runs, a failing one hides no other, and the limits hold."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.quantised import folder_of
from benchmarks.gpu import suite as gpu
from benchmarks.gpu.table import table
from disco_accel.errors import ConfigError
from tests.support import forkserver

ROOT = Path(gpu.__file__).resolve().parents[2]


def _installed(form: str) -> bool:
    try:
        folder_of(form)
    except ConfigError:
        return False
    return True


# A minute; on emulated CUDA these stages run too.
@pytest.mark.long
def test_all_measurements_run_on_the_host_device(tmp_path: Path) -> None:
    """What needs CUDA says so; the rest measures, and nothing is wrong."""
    found = _run(tmp_path, "build", "8b", "1b", "70b", "lookahead", "link", "sanitizer")
    statuses = {name: stage["status"] for name, stage in found.items()}
    packed = "ok" if _installed("nf4") else "skipped"
    assert statuses == {
        "build": "ok",
        "8b_eager": "ok",
        "8b_no_checkpointing": "ok",
        "8b_ours_72GiB": "ok",
        "8b_ours_24GiB": "ok",
        "8b_ours_8GiB": "ok",
        "8b_ours_72GiB_unfused": "ok",
        "8b_eager_again": "ok",
        "8b_prompt": "ok",
        "8b_evaluation": "ok",
        "8b_checkpoint_offload": "skipped",
        "1b_eager": "ok",
        "1b_no_checkpointing": "ok",
        "1b_ours_16GiB": "ok",
        "1b_ours_2100MiB": "ok",
        "1b_ours_16GiB_unfused": "ok",
        "70b_eager": packed,
        "70b_ours_22GiB": packed,
        "lookahead": "ok",
        "link": "skipped",
        "sanitizer": "skipped",
    }
    rows = {name: stage["figures"] for name, stage in found.items()}
    trained = [name for name in rows if "losses" in rows[name]]
    assert len(trained) >= 6 and {rows[name]["verdict"] for name in trained} == {"bits"}
    assert rows["8b_prompt"]["ours_8GiB"]["verdict"] == "bits"
    assert [rows[f"8b_ours_72GiB{end}"]["fused_refused"] for end in ("", "_unfused")] == [0, 0]
    loaded = [rows[f"8b_ours_{budget}"]["reload_bytes"] for budget in ("72GiB", "24GiB", "8GiB")]
    assert loaded[0] == 0 < loaded[1] < loaded[2], "one capture, three budgets"
    assert ["capture" in rows[f"8b_ours_{b}"]["compile_seconds"] for b in ("72GiB", "24GiB", "8GiB")] == [
        True,
        False,
        False,
    ]
    assert list(tmp_path.glob("8b-?.safetensors")), "gradients stay for processes that come later"


@pytest.mark.parametrize("stage", ["self_check", "tests", "allocator"])
def test_the_checks_run_on_the_host_device(stage: str, tmp_path: Path) -> None:
    found = _run(tmp_path, "build", stage)
    assert {name: each["status"] for name, each in found.items()} == {"build": "ok", stage: "ok"}
    figures = found[stage]["figures"]
    if stage == "allocator":
        assert figures["ops"] > 50
    if stage == "self_check":
        assert figures["compared"] == "bits" and figures["plan"]["offloads"] > 0 and figures["plan"]["reloads"] > 0


def _run(out: Path, *only: str) -> dict[str, Any]:
    served = forkserver.start()
    command = [str(served / "python"), "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--only", *only]
    environment = {**os.environ, "OUT": str(out), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    result = json.loads((out / "gpu.json").read_text())
    stages = {row["stage"]: row for row in result["rows"]}
    assert all(name in done.stdout for name in stages), "the table shows them"
    for case in ("1b", "8b", "70b"):
        engines = [name for name in stages if name.startswith(case) and name not in ("8b_prompt", "8b_evaluation")]
        assert sum(line.startswith("| ") for line in table(result).splitlines()) >= len(engines)
    return stages


def test_the_stages_of_either_visit_fit_its_time() -> None:
    """By their estimates: all checks, and the measurements up to those of the largest model. The others are left out
    where the time does not suffice."""
    measured = gpu._chosen([])
    first = measured[: [stage.name for stage in measured].index("70b_ours_22GiB") + 1]
    for stages, seconds in ((gpu._chosen(["check"]), 150), (first, 480)):
        assert sum(stage.estimate for stage in stages) <= seconds
    assert all(stage.estimate <= stage.limit for stage in gpu.STAGES)
    assert [s.name for s in gpu._chosen(["check"])] == ["build", "self_check", "tests", "allocator"]


def test_a_stage_that_fails_or_hangs_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None
) -> None:
    """Its last words and its figures stay, those behind it run in a new process, and what has no time is left out."""
    module = tmp_path / "gpu_planted.py"
    module.write_text(
        "import os, time\n"
        "def measure(run):\n"
        "    print('last words of', run.stage)\n"
        "    run.keep({'process': os.getpid()})\n"
        "    if run.stage == 'fails': raise ValueError('planted')\n"
        "    if run.stage == 'hangs': time.sleep(3600)\n"
        "    found = {'process': os.getpid()}\n"
        "    return found | ({'wrong': ['planted']} if run.stage == 'wrong' else {})\n"
    )
    names = ("works", "fails", "wrong", "hangs", "last", "long")
    stages = tuple(
        gpu.Stage(n, "one", "gpu_planted", 900 if n == "long" else 1, 4 if n == "hangs" else 500) for n in names
    )
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import sys, benchmarks\n"
        f"benchmarks.__path__.append({str(tmp_path)!r})\n"
        "from benchmarks.gpu import suite as gpu\n"
        f"gpu.STAGES = tuple(gpu.Stage(n, 'one', 'gpu_planted', 1, 5) for n in {names!r})\n"
        "raise SystemExit(gpu.main(sys.argv[1:]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(gpu, "COMMAND", (str(driver),))
    outcomes = gpu.run_all(stages[:-1], "cpu", True, tmp_path, 500) + gpu.run_all(
        stages[-1:], "cpu", False, tmp_path, 9
    )
    assert {o.stage: o.status for o in outcomes} == {
        "works": "ok",
        "fails": "failed",
        "wrong": "failed",
        "hangs": "timeout",
        "last": "ok",
        "long": "left out",
    }
    by_name = {o.stage: o for o in outcomes}
    assert "last words of fails" in by_name["fails"].words and "planted" in by_name["fails"].words
    assert by_name["wrong"].words == "['planted']"
    process = {name: outcome.figures.get("process") for name, outcome in by_name.items()}
    assert process["works"] == process["fails"] != process["wrong"] == process["hangs"] != process["last"]
    assert gpu.table(outcomes).count("\n") >= 6
    assert set(json.loads((tmp_path / "gpu.json").read_text())) > {"rows", "machine", "date"}
