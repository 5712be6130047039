"""``disco-accel store``: serve one, ask one for its figures, run a program that it counts."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from disco_accel.errors import ConfigError
from disco_accel.eviction import STORE_DEFAULT, STORE_POLICIES
from disco_accel.sizes import format_size, parse_size

if TYPE_CHECKING:
    from disco_accel.store.tiers import DeviceTier

_SOCKET = (
    "where the store listens (default: $DISCO_STORE, else in $XDG_RUNTIME_DIR/disco_accel or /tmp/disco_accel-UID)"
)
_RATE = re.compile(r"(.*?)\s*/\s*s")
MAX_WAIT = 600.0
"""Seconds."""
_WAIT_VARIABLE = "DISCO_STORE_WAIT"
"""Seconds that an allocation without room waits for others to make some."""
_INTERPOSED_FLAGS = (
    *("-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-static-libgcc", "-Wl,--as-needed", "-Wl,-z,defs"),
)
"""The library needs the C library alone: the C++ library must be the program's own."""


def store_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``disco-accel store``."""
    kinds = parser.add_subparsers(dest="kind", metavar="serve|stats|run", required=True)
    serve = kinds.add_parser("serve", help="hold tensors for the processes of this user, until Ctrl-C")
    stats = kinds.add_parser("stats", help="figures of a store, as JSON")
    run = kinds.add_parser("run", help="a program that knows nothing of stores, its device memory counted by one")
    for kind in (serve, stats, run):
        kind.add_argument("--socket", metavar="PATH", help=_SOCKET)
    serve.add_argument("--host", metavar="SIZE", default="64GiB", help="host memory for objects (default: 64GiB)")
    serve.add_argument("--device", metavar="SIZE", default="8GiB", help="device memory, in all (default: 8GiB)")
    kinds_of_device = "host: a slice of host memory (default); cuda: the machine's first GPU"
    serve.add_argument("--device-kind", choices=("host", "cuda"), default="host", help=kinds_of_device)
    quotas = "the most that each client gets, or each of that label; may be given again (default: no limit)"
    serve.add_argument("--quota", metavar="[LABEL=]SIZE", action="append", default=[], help=quotas)
    policies = f"which objects leave first: {', '.join(STORE_POLICIES)} (default: {STORE_DEFAULT})"
    serve.add_argument("--policy", metavar="NAME", default=STORE_DEFAULT, help=policies)
    serve.add_argument("--link-bandwidth", metavar="RATE", help="of the device's link: 20GB/s (default: no limit)")
    run.add_argument("--wait", metavar="SECONDS", help="that an allocation without room waits (default: 2)")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program and its arguments")


def store(options: argparse.Namespace) -> int:
    """Run ``disco-accel store``."""
    kinds = {"serve": _serve, "stats": _stats, "run": _run}
    return kinds[options.kind](options)


def _serve(options: argparse.Namespace) -> int:
    from disco_accel.store.capacity_ledger import CapacityLedger
    from disco_accel.store.server import Server
    from disco_accel.store.socket_path import socket_path

    quota, quotas = parse_quotas(options.quota)
    ledger = CapacityLedger(parse_size(options.host), parse_size(options.device), quota, quotas)
    rate = None if options.link_bandwidth is None else parse_rate(options.link_bandwidth)
    tier = _tier(options.device_kind, ledger.device, rate)
    # Each object is a file in memory, with a descriptor in the store.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = Server(socket_path(options.socket), ledger, options.policy, tier)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: server.stop())
    link = "" if rate is None else f" behind {format_size(int(rate))}/s"
    link += f" of {tier.name}" if tier.name else ""
    print(
        f"store at {server.path}: host {format_size(ledger.host)}, device {format_size(ledger.device)}{link}, "
        f"policy {options.policy}",
        flush=True,
    )
    server.run()
    print("disco-accel: store: ended", file=sys.stderr)
    return 0


def parse_quotas(texts: Sequence[str]) -> tuple[int | None, dict[str, int]]:
    """Bytes for each client, None for no limit, and for clients of a label: of ``4GiB`` and ``train-a=8GiB``. Raises
    ConfigError: one is no such thing, or is given twice."""
    from disco_accel.store.messages import is_label

    found: dict[str, int] = {}
    for text in texts:
        label, equals, size = text.rpartition("=")
        if equals and not is_label(label):
            raise ConfigError(f"--quota: {text!r}: write LABEL=SIZE, such as train-a=4GiB, or SIZE for all clients")
        if label in found:
            raise ConfigError(f"--quota: {text!r}: {label or 'each client'} has a quota already")
        found[label] = parse_size(size)
    return found.pop("", None), found


def _tier(kind: str, nbytes: int, rate: float | None) -> DeviceTier:
    """The device tier of ``nbytes``. Raises ConfigError."""
    if kind == "host":
        from disco_accel.store.tiers import SharedMemoryTier

        return SharedMemoryTier(rate)
    if rate is not None:
        raise ConfigError("--link-bandwidth: is of the host device; a GPU's link is as fast as it is: leave it out")
    from disco_accel.store.cuda_tier import CudaTier

    return CudaTier(nbytes)


def parse_rate(text: str) -> float:
    """Bytes/s of ``20GB/s``. Raises ConfigError for anything else."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--link-bandwidth: {text!r} is not a rate: write a size with /s, such as 20GB/s")
    return float(parse_size(match[1]))


def _stats(options: argparse.Namespace) -> int:
    from disco_accel.store.connection import Channel, ask_figures
    from disco_accel.store.socket_path import socket_path

    channel = Channel(socket_path(options.socket), timeout=10.0)
    print(json.dumps(ask_figures(channel), indent=2))
    channel.close()
    return 0


def _run(options: argparse.Namespace) -> int:
    """Become the program of ``options``, counted by the store. Raises ConfigError, ExtensionError."""
    from disco_accel.store.socket_path import socket_path

    try:
        wait = None if options.wait is None else float(options.wait)
    except ValueError:
        raise ConfigError(f"--wait: {options.wait!r} is not a number of seconds") from None
    words = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not words:
        raise ConfigError("store run: no program to run: write it after --, such as: disco-accel store run -- ./train")
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(f"store run: {words[0]}: no such program: give its path, or a name that is on PATH")
    counted = counted_environment(os.environ, socket_path(options.socket), wait)
    try:
        os.execve(program, words, counted)
    except OSError as error:
        raise ConfigError(f"store run: {program}: cannot be started: {error.strerror}") from error


def interposed_library() -> Path:
    """The library that counts a program's device memory from within (``docs/first_class.md``), built on first use: its
    functions replace CUDA's that allocate and free. Raises ExtensionError."""
    from disco_accel.native.plain_library import ROOT, build_plain

    sources = [f"interpose/{source.name}" for source in sorted((ROOT / "interpose").glob("*.cpp"))]
    return build_plain("disco_interpose", sources, flags=_INTERPOSED_FLAGS)


def counted_environment(environment: Mapping[str, str], socket: Path, wait: float | None = None) -> dict[str, str]:
    """``environment`` in which programs are counted by the store at ``socket``, and their children too.

    ``wait``: seconds that an allocation without room waits for others to make some; None: two, as the library has it.

    Raises:
        ConfigError: ``wait`` is no such time, or the library's path cannot be preloaded.
        ExtensionError: the library cannot be built.
    """
    from disco_accel.store.socket_path import SOCKET_VARIABLE

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
        counted[_WAIT_VARIABLE] = repr(wait)
    return counted
