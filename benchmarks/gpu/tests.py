"""Stage ``tests``: tests/gpu on this device."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks.gpu.stage import Run

_FEW = "bf16-sdpa or callers_stream or evaluation"
"""With tiny shapes: one test of each kind."""
_PROCESSES = 5
"""On 16 cores and an H200 the tests take 44 s with five, and two minutes in one."""


class Tally:
    """A pytest plugin that counts outcomes and keeps the names of what failed."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: at its call, or where its set-up or tear-down went wrong or skipped it."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid)


def measure(run: Run) -> dict[str, Any]:
    """Counts of outcomes; pytest's own output goes to the log. In several processes where pytest-xdist is there."""
    os.environ["GPU_TESTS_ON"] = run.device
    tally = Tally()
    arguments = ["tests/gpu", "-v", "-p", "no:cacheprovider", "--no-header", "--tb=short", "--show-capture=no"]
    several = ["-n", str(_PROCESSES)] if run.device == "cuda" and find_spec("xdist") is not None else []
    code = pytest.main([*arguments, *(["-k", _FEW] if run.small else several)], plugins=[tally])
    figures: dict[str, Any] = dict(tally.counts)
    return figures if code == 0 else figures | {"wrong": tally.failed or [f"pytest ended with {int(code)}"]}
