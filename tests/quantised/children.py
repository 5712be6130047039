"""Processes of their own for the quantisation libraries, which import slowly and change what PEFT imports."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forkserver

ROOT = Path(__file__).resolve().parents[2]
APART = Path(sys.prefix) / "quantised"
"""Where ``make setup`` puts the libraries."""
IMPORTED = (*forkserver.HEAVY, "disco_accel.integrate.prepare", "tests.support.quantised")
"""What nearly every script imports, the libraries among them."""


def environment() -> dict[str, str]:
    """That of a process that finds the libraries; without them the test is skipped."""
    paths = [str(ROOT)]
    if APART.is_dir():
        paths.append(str(APART))
    elif importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip(f"no quantisation libraries in {APART}: run make setup")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def lines_of(script: str, *arguments: str, seconds: float = 1500) -> list[dict[str, Any]]:
    """What ``script`` of this folder printed, a line of JSON each. Fails with its stderr."""
    variables = environment()
    paths = tuple(variables["PYTHONPATH"].split(os.pathsep))
    done = subprocess.run(
        [str(forkserver.start(paths, IMPORTED) / "python"), str(Path(__file__).parent / script), *arguments],
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
