"""``doctor``: what this machine has, in words or as JSON, and what keeps training from running or makes it slow."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.observe.doctor_words import checks_of, lines_of, problems_of

_LIBRARIES = ("trl",)
"""Their versions are told, although nothing here asks for one."""


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="all facts and checks as one JSON object")
    parser.add_argument(
        "--selftest", action="store_true", help="try small planned steps against plain PyTorch, ten seconds at most"
    )
    parser.add_argument(
        "--device", choices=("auto", *DEVICE_TYPES), default="auto", help="of the self-test (default: CUDA if there is)"
    )


def doctor(options: argparse.Namespace) -> int:
    """Print the checks; 0 where none is a problem, else 1. Raises ConfigError for a ``--device`` that is not there."""
    # What libraries print is not ours.
    with contextlib.redirect_stdout(sys.stderr):
        answer = _report(options.device if options.selftest else None)
    answer["checks"] = checks_of(answer)
    answer["problems"] = problems_of(answer["checks"])
    print(json.dumps(answer, indent=2) if options.json else "\n".join(lines_of(answer["checks"])))
    return 1 if answer["problems"] else 0


def _report(selftest_device: str | None) -> dict[str, Any]:
    """The report of ``observe``, with facts that later folders have. Without PyTorch its first part."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # Whatever a broken installation raises.
        from disco_accel.observe.package_versions import versions

        return versions(_LIBRARIES) | {"torch": {"fault": f"{type(error).__name__}: {error}"}}
    from disco_accel.fuse.kernels import CACHED
    from disco_accel.observe.doctor import report
    from disco_accel.quantised.libraries import LIBRARIES
    from disco_accel.selfcheck.first_use import kept_answers, selftest

    # First: it builds the engine where that is not built yet.
    tested = {} if selftest_device is None else {"selftest": selftest(selftest_device)}
    libraries = (*_LIBRARIES, *(library.package for library in LIBRARIES))
    return report({"self_checks": kept_answers}, libraries, CACHED) | tested
