"""The rows of versions, what pip is asked for, and what is read from pytest's output."""

from __future__ import annotations

import re

from benchmarks.versions.suite import LIBRARIES, OWN, ROOT, ROWS, TESTS, TOOLS, Outcome, Row, outcome, pinned_tools

OUTPUT = """E   assert 3 failed, 2 passed in the text of a failure
FAILED tests/test_a.py::test_b - 1 failed in 0.1s
==== 1 failed, 88 passed, 2 skipped, 6 warnings, 2 errors in 181.45s (0:03:01) ====
"""


def test_counts_are_those_of_the_last_line_and_errors_are_failures() -> None:
    assert outcome(OUTPUT) == Outcome(88, 3, 2)
    assert outcome("89 passed in 7.25s\n") == Outcome(89)
    assert outcome("Killed") == Outcome() and not Outcome().well
    assert Outcome(1, 0, 3).well and not Outcome(5, 1).well


def test_the_oldest_row_is_what_the_package_asks_for() -> None:
    """So that no pin is lower than what is tried."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for library in LIBRARIES:
        floor = re.search(rf'"{library}>=([\d.]+)"', text)
        assert floor is not None
        pinned = getattr(ROWS[0], library)
        assert pinned == floor[1] or pinned == f"{floor[1]}.0", library


def test_what_pip_is_asked_for() -> None:
    assert Row("newest", torch="").requirements() == list(LIBRARIES)
    shared = Row("some", transformers="5.6.0", torch=OWN).requirements()
    assert shared == ["transformers==5.6.0", "peft", "accelerate", "deepspeed"]
    constraints = "# pytest==1\n" + "\n".join(f"{tool}==2.5" for tool in reversed(TOOLS))
    assert pinned_tools(constraints) == [f"{tool}==2.5" for tool in TOOLS]


def test_every_file_of_tests_is_there() -> None:
    assert all((ROOT / name).is_file() for name in TESTS)
    assert len({row.name for row in ROWS}) == len(ROWS)
