"""Stage ``sanitizer``: a small planned model under compute-sanitizer, where that tool is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.stage import NOT_HERE, Run

_TOOLS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


def measure(run: Run) -> dict[str, Any]:
    """Memcheck's last lines; ``wrong`` when it found an error."""
    tool = next((found for name in _TOOLS if (found := shutil.which(name))), None)
    if run.device != "cuda" or tool is None:
        return {NOT_HERE: "no compute-sanitizer" if run.device == "cuda" else "no kernels to watch"}
    step = Path(__file__).with_name("small_step.py")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-8000:], done.stderr[-4000:])
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    figures: dict[str, Any] = {"summary": lines[-1] if lines else ""}
    return figures if done.returncode == 0 else figures | {"wrong": f"exit {done.returncode}"}
