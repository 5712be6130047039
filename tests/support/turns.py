"""The turn of a test run: what samples take their cases by, so that each case has its turn on some commits.

It is a number made of the commit's hash, as good as drawn. Whoever repeats the tests of a commit has the same cases.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

NAME = "DISCO_TESTS_TURN"
"""The variable that holds it for all processes of a run. Set, it asks for the cases of another turn."""
_ROOT = Path(__file__).resolve().parents[2]

Case = TypeVar("Case")


def begin() -> None:
    """Set the variable, unless it is. The turn is 0 where git knows no commit."""
    if NAME not in os.environ:
        command = ["git", "-C", str(_ROOT), "rev-parse", "--short=7", "HEAD"]
        try:
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            commit = "0"
        os.environ[NAME] = str(int(commit[:7], 16))


def number() -> int:
    """The turn of this run; 0 in a process that no test run has started."""
    return int(os.environ.get(NAME, "0"))


def one_in(share: int, cases: Sequence[Case]) -> list[Case]:
    """One of each ``share`` neighbours among ``cases``: the first of them, the second and so on, as the turn says."""
    return list(cases[number() % share :: share])
