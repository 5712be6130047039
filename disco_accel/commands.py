"""Commands that plan without running anything: ``weights``, ``capture`` and ``plan``."""

from __future__ import annotations

import argparse
import json
import math

from disco_accel.errors import ConfigError


def weights_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``weights``."""
    parser.add_argument("instance", metavar="INSTANCE.json", help="memory, bandwidth, a0 and layers")
    parser.add_argument("--milp", metavar="SECONDS", default="30", help="time for the lower bound (default: 30)")


def weights(options: argparse.Namespace) -> int:
    """Which layers' weights leave the device, how long the step takes, and how long it must take at least."""
    from disco_accel.plan.weights_file import read_instance
    from disco_accel.plan.weights_solve import solve

    seconds = _seconds("--milp", options.milp)
    print(json.dumps(solve(read_instance(options.instance), seconds).as_dict()))
    return 0


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (0 <= seconds < math.inf):
        raise ConfigError(f"{option}: {text!r} does not work; give seconds, 0 or more")
    return seconds
