"""Stage ``self_check``: does a plan compute on this device what plain PyTorch computes, whatever the timing?"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.stage import Run
from disco_accel.native.backend import prepare_device
from disco_accel.selfcheck.first_use import conclude
from disco_accel.selfcheck.self_check import LINK_BYTES, check


def measure(run: Run) -> dict[str, Any]:
    """What was compared and measured, rates in GB/s; ``wrong``: all that differed."""
    where = run.where
    # Builds are none of the check's seconds.
    prepare_device(where)
    outcome = check(where, link_bytes=LINK_BYTES // 8 if run.small else LINK_BYTES)
    found = outcome.figures
    figures: dict[str, Any] = {
        "check_seconds": outcome.seconds,
        "compared": found.get("compared", "nothing"),
        "plan": found.get("plan", {}),
        "orders": found.get("orders", "not reached"),
        "link": {name: rate * 1e-9 for name, rate in found.get("link", {}).items()},
    }
    # Kept for the stages behind it, which ask for it as a training does.
    conclude(outcome, run.cache)
    if not outcome.passed:
        print(found.get("traceback", ""))
        figures["wrong"] = [str(difference) for difference in outcome.differences]
    return figures
