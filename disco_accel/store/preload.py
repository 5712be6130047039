"""Programs that know nothing of a store, started so that it knows of their device memory: ``docs/first_class.md``."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from disco_accel.errors import ConfigError
from disco_accel.native.interposed_library import WAIT_VARIABLE, interposed_library
from disco_accel.store.place import SOCKET_VARIABLE

MAX_WAIT = 600.0
"""Seconds."""


def counted_environment(environment: Mapping[str, str], socket: Path, wait: float | None = None) -> dict[str, str]:
    """``environment`` in which programs are counted by the store at ``socket``, and what they start in turn.

    ``wait``: seconds that an allocation without room waits for others to make some; None: two, as the library has it.

    Raises:
        ConfigError: ``wait`` is no such time, or the library's path cannot be preloaded.
        ExtensionError: the library cannot be built.
    """
    if wait is not None and not (math.isfinite(wait) and 0 <= wait <= MAX_WAIT):
        raise ConfigError(f"--wait: {wait} is not a number of seconds from 0 to {MAX_WAIT:.0f}")
    library = os.fspath(interposed_library())
    if re.search(r"[\s:]", library):
        raise ConfigError(
            f"{library}: the loader can't be told a path with blanks or colons: set TORCH_EXTENSIONS_DIR to a folder "
            "without"
        )
    others = [path for path in re.split(r"[\s:]+", environment.get("LD_PRELOAD", "")) if path and path != library]
    counted = {**environment, "LD_PRELOAD": ":".join([library, *others]), SOCKET_VARIABLE: os.fspath(socket)}
    if wait is not None:
        counted[WAIT_VARIABLE] = repr(wait)
    return counted


def run_counted(command: Sequence[str], socket: Path, wait: float | None = None) -> NoReturn:
    """Become the program ``command``, counted by the store at ``socket``.

    Raises:
        ConfigError: as ``counted_environment``; there is no such program, or it can't be started.
        ExtensionError: as ``counted_environment``.
    """
    if not command:
        raise ConfigError("store run: no program to run: write it after --, such as: disco-accel store run -- ./train")
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"store run: {command[0]}: no such program: give its path, or a name that is on PATH")
    counted = counted_environment(os.environ, socket, wait)
    try:
        os.execve(program, list(command), counted)
    except OSError as error:
        raise ConfigError(f"store run: {program}: cannot be started: {error.strerror}") from error
