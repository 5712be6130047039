"""``python -m disco_accel.run [--config disco.yaml] [-m] script.py ...``: an unchanged script, its models prepared."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from disco_accel.config import settings
from disco_accel.errors import ConfigError
from disco_accel.integrate.launch import exit_status, import_hook


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script (or, with ``-m``, a module) as ``__main__`` with every adapter model prepared by accelerate.

    The config comes from ``--config`` or from the launcher's environment variable. Errors that the user can fix end the
    process with one line on stderr and status 2.
    """
    parser = argparse.ArgumentParser(prog="python -m disco_accel.run", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with a disco_config section")
    parser.add_argument("-m", "--module", action="store_true", help="script names a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    exit_status.install()
    if args.config is not None:
        settings.set_launch_config_file(args.config)
    settings.launch_config()
    if not args.module and not os.path.isfile(args.script):
        raise ConfigError(f"script {args.script!r} does not exist")
    import_hook.activate()
    sys.argv = [args.script, *args.arguments]
    if args.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        # As ``python script.py`` would have it.
        sys.path[0] = os.path.dirname(os.path.abspath(args.script))
        runpy.run_path(args.script, run_name="__main__")
