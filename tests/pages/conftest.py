"""What the tests of pages and examples share: a reader's folder and a shell's environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import workspace
from tests.support import forkserver

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = (*forkserver.HEAVY, "disco_accel.recipes.lora_training", "disco_accel.recipes.prefill")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder, shared by all pages: pages add files to it, as a reader does."""
    made = tmp_path_factory.mktemp("reader")
    workspace.make(made)
    return made


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a shell in the folder has: the environment's programs on PATH, no network, no GPU.

    All fork, scripts that launchers start too: tests/integrate/test_entry_points.py has launches that import anew."""
    served = tmp_path_factory.mktemp("served")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DISCO_", "ACCELERATE_"))}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with forkserver.serve(served, clean, PRELOAD, nested=True) as server:
        path = os.pathsep.join([str(served / "bin"), str(Path(sys.executable).parent), clean["PATH"]])
        yield clean | {"PATH": path}
        server.kill()
