"""The suites of ``make outside`` name files that exist; what they need from the package index they get when it runs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.outside.suite import SUITES


def test_files_of_this_project_that_suites_run_are_there() -> None:
    own = [Path(file) for suite in SUITES for file in suite.files if Path(file).is_absolute()]
    assert own and all(file.is_file() for file in own), own
