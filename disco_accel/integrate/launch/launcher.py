"""accelerate's own launcher, taught ``--config`` and the ``disco_config`` section.

``disco-accel launch`` uses the patches below explicitly; the literal ``accelerate launch --config`` gets them
from ``hook.autoload``.
"""

from __future__ import annotations

import functools
import importlib.util
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import yaml

from disco_accel.config.deepspeed_keys import migrate, read_ds_config
from disco_accel.config.settings import SECTION, DiscoConfig, set_ds_config_file, set_launch_config_file, split_yaml
from disco_accel.errors import ConfigError
from disco_accel.integrate.launch.exit_status import USER_ERRORS, child_status, user_message

RUN_MODULE = "disco_accel.run"


def main(argv: Sequence[str]) -> int:
    """``disco-accel launch --config disco.yaml [accelerate's options] script.py [its arguments]``.

    With ``--ds_config ds.json``, beside ``--config`` or in place of it, DeepSpeed runs the script's training under that
    config, but for the offloading in it, which plans replace.

    Returns:
        The exit status of the script; 2 with a message on stderr for a wrong config.
    """
    try:
        args = _parse(list(argv))
        from accelerate.commands.launch import launch_command

        launch_command(args)
    except USER_ERRORS as error:
        sys.stderr.write(f"{user_message(error)}\n")
        return 2
    except Exception as error:
        status = child_status(error)
        if status is None:
            raise
        return status
    return 0


def _parse(argv: list[str]) -> Any:
    from accelerate.commands import config, utils

    alias_config_option(utils)
    patch_config_reader(config)
    from accelerate.commands import launch

    parser = launch.launch_command_parser()
    parser.add_argument("--ds_config", help="DeepSpeed config whose offloading plans replace")
    args = parser.parse_args(argv)
    if args.config_file is None and args.ds_config is None:
        raise ConfigError(
            f"launch: --config is missing; name a YAML file with a {SECTION} section, or a DeepSpeed config "
            "with --ds_config"
        )
    if args.no_python:
        raise ConfigError("launch: --no_python does not work, the script must be Python for its model to be prepared")
    if args.config_file is not None:
        DiscoConfig.from_yaml(args.config_file)
    if args.ds_config is not None:
        _use_ds_config(args)
    as_module = ["-m"] if args.module else []
    args.training_script_args = [*as_module, args.training_script, *args.training_script_args]
    args.training_script, args.module = RUN_MODULE, True
    return args


def _use_ds_config(args: Any) -> None:
    if args.cpu:
        raise ConfigError("launch: --cpu does not work with --ds_config; leave it out, DeepSpeed finds the device")
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("launch: --ds_config needs DeepSpeed; pip install 'disco-accel[deepspeed]'")
    _, planned, section = migrate(read_ds_config(args.ds_config), args.ds_config)
    DiscoConfig.from_env(DiscoConfig.from_dict(section, f"{args.ds_config}: {SECTION}"))
    if args.config_file is not None and section:
        raise ConfigError(f"launch: {args.ds_config} has a {SECTION} object and {args.config_file} too; keep one")
    for line in planned:
        sys.stderr.write(f"disco-accel: {line}\n")
    set_ds_config_file(args.ds_config)
    args.use_deepspeed, args.deepspeed_config_file = True, args.ds_config
    _leave_interrupts_to_child()


def alias_config_option(module: ModuleType) -> None:
    """Let parsers of ``module`` (accelerate.commands.utils) take ``--config`` for ``--config_file``."""
    cls = module.CustomArgumentParser
    add_argument = cls.add_argument
    if hasattr(add_argument, "_disco"):
        return

    @functools.wraps(add_argument)
    def add_aliased(self: Any, *names: str, **kwargs: Any) -> Any:
        if names[:1] == ("--config_file",):
            names = (*names, "--config")
        return add_argument(self, *names, **kwargs)

    add_aliased._disco = True  # type: ignore[attr-defined]
    cls.add_argument = add_aliased


def patch_config_reader(module: ModuleType) -> None:
    """Let ``module`` (accelerate.commands.config) read a file with our section, which then holds for the child."""
    original = module.load_config_from_file
    if hasattr(original, "_disco"):
        return

    @functools.wraps(original)
    def load_config_from_file(config_file: str | None) -> Any:
        if config_file is None:
            return original(None)
        rest, ours = split_yaml(config_file)
        if ours is None:
            return original(config_file)
        DiscoConfig.from_env(ours)
        set_launch_config_file(config_file)
        _leave_interrupts_to_child()
        return _load_rest(original, config_file, rest or _launch_defaults(ours))

    load_config_from_file._disco = True  # type: ignore[attr-defined]
    vars(module)["load_config_from_file"] = load_config_from_file
    launch = sys.modules.get("accelerate.commands.launch")
    if launch is not None and hasattr(launch, "load_config_from_file"):
        vars(launch)["load_config_from_file"] = load_config_from_file


def _load_rest(original: Any, config_file: str, rest: dict[str, Any]) -> Any:
    # accelerate refuses any key it does not know, so it gets a copy of the file without our section.
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(rest, file)
        file.flush()
        try:
            return original(file.name)
        except ValueError as error:
            raise ConfigError(str(error).replace(file.name, config_file)) from error


def _launch_defaults(ours: DiscoConfig) -> dict[str, Any]:
    """accelerate's side of a file that is only our section: one process, no autocast."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "num_processes": 1,
        "mixed_precision": "no",
        "use_cpu": ours.device == "cpu",
    }


def _leave_interrupts_to_child() -> None:
    """On Ctrl-C wait for the training process, which gets the signal too, to save and end."""
    if threading.current_thread() is threading.main_thread():
        # A handler, not SIG_IGN: a child would inherit the latter and never see the signal.
        signal.signal(signal.SIGINT, lambda *_: None)
