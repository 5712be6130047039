"""Stage ``tests``: tests/gpu on this device."""

from __future__ import annotations

import os
from typing import Any

import pytest

_FEW = "bf16-sdpa or callers_stream or evaluation"
"""With tiny shapes: one test of each kind."""


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


def measure(device: str, small: bool, stage: str) -> dict[str, Any]:
    """Counts of outcomes; pytest's own output goes to the log."""
    os.environ["GPU_TESTS_ON"] = device
    tally = Tally()
    arguments = ["tests/gpu", "-v", "-p", "no:cacheprovider", "--no-header", "--tb=short", "--show-capture=no"]
    code = pytest.main([*arguments, *(["-k", _FEW] if small else [])], plugins=[tally])
    figures: dict[str, Any] = dict(tally.counts)
    return figures if code == 0 else figures | {"wrong": tally.failed or [f"pytest ended with {int(code)}"]}
