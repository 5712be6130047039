"""Every test run starts without plans of earlier runs: a home folder of its own, also for the processes it starts."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from disco_accel.execute.build_ext import cache_root

_home = ""


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist inherit what their controller sets here."""
    global _home
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(cache_root())
        _home = os.environ["HOME"] = tempfile.mkdtemp(prefix="disco-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the home folder again."""
    if _home:
        shutil.rmtree(_home, ignore_errors=True)
