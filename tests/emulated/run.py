"""Runs a command, and all that it starts, on the emulated device: ``python -m tests.emulated.run -- COMMAND``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from tests.emulated.build import HERE, ROOT, Libraries, build

# Python finds this checkout and the entry point that PyTorch calls at the end of its import.
_PATHS = (str(ROOT), str(HERE / "site"))


def environment(libraries: Libraries, settings: Mapping[str, object]) -> dict[str, str]:
    """The variables of a process on the emulated device; ``settings`` are those of ``runtime/settings.h``.

    Everything that it compiles is kept beside the emulation's own libraries.
    """
    before = dict(os.environ)
    # A library that PyTorch names by its own path gives way to a preloaded one of the same name alone.
    made = {
        "EMULATED_CUDA": "1",
        "EMULATED_OPS": str(libraries.ops),
        "LD_PRELOAD": str(libraries.runtime),
        "LD_LIBRARY_PATH": _joined(str(libraries.folder), before.get("LD_LIBRARY_PATH", "")),
        "PATH": _joined(str(Path(sys.executable).parent), before.get("PATH", "")),
        "PYTHONPATH": _joined(str(settings.get("PYTHONPATH", "")), *_PATHS, before.get("PYTHONPATH", "")),
        # The tests keep plans and the engine's library below it.
        "TORCH_EXTENSIONS_DIR": before.get("TORCH_EXTENSIONS_DIR") or str(libraries.folder.parents[1] / "extensions"),
        "OMP_NUM_THREADS": before.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return {**before, **{name: str(value) for name, value in settings.items()}, **made}


def run(
    command: Sequence[str],
    libraries: Libraries,
    settings: Mapping[str, object],
    output: TextIO | None = None,
    folder: Path = ROOT,
) -> int:
    """The command's exit status in ``folder``; 1 if that is 0 and one of its processes left a complaint, which is
    printed to ``output``, as what they print is."""
    with tempfile.TemporaryDirectory(prefix="emulated-") as reports:
        variables = environment(libraries, {**settings, "EMULATED_REPORTS": reports})
        code = subprocess.call(command, env=variables, cwd=folder, stdout=output, stderr=output)
        texts = [path.read_text() for path in sorted(Path(reports).glob("*.txt"))]
    for text in texts:
        print("complaints of " + text, file=output or sys.stderr)
    return code or bool(texts)


def _joined(*parts: str) -> str:
    return os.pathsep.join(part for part in parts if part)


def main(argv: list[str] | None = None) -> int:
    """Command line: settings, ``--``, the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--jitter-us", type=float, default=0.0, help="each piece of work starts late by up to so much")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--link-gb-s", type=float, default=0.0, help="of copies, each direction; 0: not throttled")
    parser.add_argument(
        "--peers", choices=("right", "none", "wrong"), default="right", help="copies straight between devices"
    )
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    settings = {
        "EMULATED_DEVICES": args.devices,
        "EMULATED_JITTER_US": args.jitter_us,
        "EMULATED_SEED": args.seed,
        "EMULATED_LINK_GB_S": args.link_gb_s,
        "EMULATED_PEERS": args.peers,
    }
    return run(args.command, build(), settings)


if __name__ == "__main__":
    sys.exit(main())
