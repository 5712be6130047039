"""Processes that a launcher starts train on emulated devices as without plans: two in DDP, one in DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.emulated.build import ROOT

SCRIPT = Path(__file__).parent / "scripts" / "processes.py"
TIMEOUT_S = 400


def launch(kind: str, processes: int, folder: Path) -> list[dict[str, Any]]:
    """What each process found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, str(SCRIPT), kind, str(folder)], capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]


def check(found: dict[str, Any], processes: int, device: int) -> None:
    """The bits of training without plans, every step planned, on the device that is the process's own."""
    assert found["same"], found
    assert (found["planned"], found["eager"]) == (6, 0)
    assert (found["processes"], found["device"]) == (processes, device)


def check_ddp(folder: Path, devices: int) -> None:
    """Two processes in DDP over gloo, on as many devices or on the one that there is."""
    first, second = launch("ddp", 2, folder)
    check(first, 2, 0)
    check(second, 2, min(1, devices - 1))
    assert first["losses"] != second["losses"], "each has batches of its own"


def test_one_process_in_deepspeeds_engine(tmp_path: Path) -> None:
    (found,) = launch("deepspeed", 1, tmp_path)
    check(found, 1, 0)
