"""Every test run starts the same: no plans of earlier runs, and Ctrl-C as in a terminal, also in what it starts."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator

import pytest

from disco_accel.native.plain_library import cache_root

_home = ""


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist inherit the environment that their controller sets here."""
    global _home
    if threading.current_thread() is threading.main_thread():
        # Shells start background jobs with the signal ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(cache_root())
        # PyTorch's lock on an extension outlives a process that is killed while it builds, and whoever needs the
        # extension next waits for ever: DeepSpeed's, which no one builds but these tests, would hang all of them.
        for lock in cache_root().glob("deepspeed_*/lock"):
            lock.unlink(missing_ok=True)
        _home = os.environ["HOME"] = tempfile.mkdtemp(prefix="disco-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the home folder again."""
    if _home:
        shutil.rmtree(_home, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what these tests leave to another command."""
    if os.environ.get("EMULATED_CUDA") != "1":
        terminalreporter.write_line("not run here: the CUDA path on an emulated GPU (make emulated)")


@pytest.fixture(autouse=True)
def messages_as_before() -> Iterator[None]:
    """What one test has shown to its user (a recipe shows messages, an entry point does) no other test prints."""
    ours = logging.getLogger("disco_accel")
    level = ours.level
    # Fixtures of whole files may have left some.
    ours.handlers.clear()
    yield
    ours.setLevel(level)
    ours.handlers.clear()
