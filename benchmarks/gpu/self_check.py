"""Stage ``self_check``: does a plan compute on this device what plain PyTorch computes, whatever the timing?"""

from __future__ import annotations

from typing import Any

from disco_accel.native.backend import prepare_device, run_device
from disco_accel.selfcheck.self_check import LINK_BYTES, check


def measure(device: str, small: bool, stage: str) -> dict[str, Any]:
    """What was compared and measured, rates in GB/s; ``wrong``: all that differed."""
    where = run_device(device)
    # Builds are none of the check's seconds.
    prepare_device(where)
    outcome = check(where, link_bytes=LINK_BYTES // 8 if small else LINK_BYTES)
    found = outcome.figures
    figures: dict[str, Any] = {
        "check_seconds": outcome.seconds,
        "compared": found.get("compared", "nothing"),
        "plan": found.get("plan", {}),
        "orders": found.get("orders", "not reached"),
        "link": {name: rate * 1e-9 for name, rate in found.get("link", {}).items()},
    }
    if not outcome.passed:
        print(found.get("traceback", ""))
        figures["wrong"] = [str(difference) for difference in outcome.differences]
    return figures
