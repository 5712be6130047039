"""How a process that we started ends: bad input is a line on stderr and status 2, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

from disco_accel.errors import BudgetTooSmall, CaptureError, ConfigError, ExtensionError

USER_ERRORS = (ConfigError, CaptureError, BudgetTooSmall, ExtensionError)
"""Errors that the user can put right; every other error keeps its traceback."""

BAD_INPUT = 2
_CHILD_SPOKE = (BAD_INPUT, 130)


def user_message(error: BaseException) -> str:
    """``error`` as a line for stderr."""
    return f"disco-accel: {type(error).__name__}: {error}"


def child_status(error: BaseException) -> int | None:
    """The status of the training process whose end a launcher reports with ``error``; None for any other error.

    Of several processes, that of the first to fail. 128 + signal for one that a signal ended, as in shells.
    """
    if isinstance(error, subprocess.CalledProcessError):
        status = error.returncode
    elif type(error).__name__ == "ChildFailedError":
        # torchrun's; known by its name, because this module is loaded while torch is.
        status = error.get_first_failure()[1].exitcode  # type: ignore[attr-defined]
    else:
        return None
    return status if status > 0 else 128 - status


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
            # A process group's own hook, around this one, collects sys.stderr and loses it when the process ends here.
            print(user_message(error), file=sys.__stderr__ or sys.stderr, flush=True)
            raise SystemExit(BAD_INPUT)
        status = child_status(error)
        if status in _CHILD_SPOKE:
            raise SystemExit(status)
        previous(kind, error, trace)

    report._disco = True  # type: ignore[attr-defined]
    sys.excepthook = report
