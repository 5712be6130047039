"""How a process that one of the doors started ends: bad input is a line on stderr and status 2, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

from disco_accel.errors import BudgetTooSmall, CaptureError, ConfigError

USER_ERRORS = (ConfigError, CaptureError, BudgetTooSmall)
"""What the user can put right; every other error keeps its traceback."""

BAD_INPUT = 2
_CHILD_SPOKE = (BAD_INPUT, 130)


def user_message(error: BaseException) -> str:
    """``error`` as a line for stderr."""
    return f"disco-accel: {type(error).__name__}: {error}"


def install() -> None:
    """Report an uncaught user error in one line and end with status 2.

    In a launcher, a child that ended with status 2 or 130 (Ctrl-C) has said why: its status is passed on in silence.
    """
    previous = sys.excepthook
    if hasattr(previous, "_disco"):
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Python ends with the status of a SystemExit that its excepthook raises.
        if isinstance(error, USER_ERRORS):
            sys.stderr.write(f"{user_message(error)}\n")
            raise SystemExit(BAD_INPUT)
        if isinstance(error, subprocess.CalledProcessError) and error.returncode in _CHILD_SPOKE:
            raise SystemExit(error.returncode)
        previous(kind, error, trace)

    report._disco = True  # type: ignore[attr-defined]
    sys.excepthook = report
