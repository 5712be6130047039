"""A run that is killed at any moment resumes from its last whole checkpoint and ends as if it had never stopped.

DISCO_KILLS sets how often (once in CI, at a moment that hangs by the turn).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support import forkserver, turns

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("DISCO_KILLS", "1"))


def test_every_resumed_run_equals_the_uninterrupted_one(tmp_path):
    """No file under its final name is ever half written, and no resumed run differs in a bit of losses or adapter."""
    python = str(forkserver.start() / "python")
    command = [python, "-m", "tests.recipes.killed", str(tmp_path), str(KILLS), str(turns.number())]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1500 + 60 * KILLS)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["different"] == [] and found["half"] == []
    assert found["killed"] == KILLS
