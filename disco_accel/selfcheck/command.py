"""``disco-accel doctor --selftest``: the self-check once more, whatever was found before."""

from __future__ import annotations

from typing import Any

from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import DiscoError
from disco_accel.native.backend import run_device
from disco_accel.selfcheck.first_use import conclude
from disco_accel.selfcheck.self_check import check


def selftest(device: str) -> dict[str, Any]:
    """The outcome for ``device`` (auto, cpu, cuda) as JSON, with ``problem``: what a user should know, or "".

    The answer takes the place of the one that is kept beside the plans. Raises ConfigError for a device that is not
    there.
    """
    config = DiscoConfig.from_env(DiscoConfig(device=device))
    where = run_device(config.resolve().device)
    try:
        outcome = check(where)
    except DiscoError as error:
        return {"passed": False, "problem": f"self-check: cannot run: {error}"}
    failed = conclude(outcome, config.plan_cache)
    return {**outcome.as_dict(), "problem": "" if failed is None else str(failed)}
