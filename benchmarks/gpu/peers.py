"""A LoRA step and a prompt at 7B shape beside what others offer: ``make gpu-peers WHEELS=folder``, on a GPU machine.

It needs no network: the wheels of what the machine lacks (deepspeed and its needs, axolotl) are installed from the
folder into a temporary one that only this run sees. The engines run one after the other, for the host has no room for
all of them; ``ENGINES`` names some of those that train, where the time does not suffice for all. ``step_peers.json``
and ``prefill_peers.json`` go to the folder that ``OUT`` names (default ``out/gpu``). DEVICE=cpu tries the same on the
host device with a tiny shape.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.wheels import unpacked

_ROOT = Path(__file__).resolve().parents[2]
_ENGINES = (
    "in-memory,disco,zero3-tuned,streamed,accelerate,zero3,checkpoint-offload,deepcompile,compile,axolotl,resident"
)
"""Those that say most come first."""
_SEVEN_B = ("--shape", "7b", "--batch", "8", "--tokens", "1024", "--dtype", "bfloat16", "--memory", "8GiB", "--apart")
_PROMPT = ("--shape", "7b", "--tokens", "1024", "--dtype", "bfloat16", "--memory", "8GiB")
_TINY_PROMPT = ("--shape", "tiny", "--tokens", "64", "--memory", "1.1MiB")
_PROMPT_SHARE = 0.25
"""Of the time, for the prompts; the steps may take the rest."""
_TINY = ("--shape", "tiny", "--batch", "2", "--tokens", "16", "--rank", "4", "--budgets", "0.9")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the worse exit status of both."""
    parser = argparse.ArgumentParser(prog="make gpu-peers", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheels", type=Path, required=True, help="folder of .whl files")
    parser.add_argument("--engines", default=_ENGINES)
    parser.add_argument("--seconds", type=float, default=540.0, help="for all engines together")
    args = parser.parse_args(argv)
    out = Path(os.environ.get("OUT") or "out/gpu")
    runs = commands(args.device, args.engines, args.seconds, out)
    with tempfile.TemporaryDirectory() as folder, unpacked(args.wheels, Path(folder)):
        return max(subprocess.run(run, cwd=_ROOT, check=False).returncode for run in runs)


def commands(device: str, engines: str, seconds: float, out: Path) -> list[list[str]]:
    """The steps, then the prompts; together they take ``seconds`` at most."""
    step, prompt = (_TINY, _TINY_PROMPT) if device == "cpu" else (_SEVEN_B, _PROMPT)

    def run(module: str, words: Sequence[str], share: float, file: str) -> list[str]:
        last = ["--rounds", "3", "--seconds", f"{share * seconds:g}", "-o", str(out / file)]
        return [sys.executable, "-m", f"benchmarks.{module}", *words, "--device", device, *last]

    return [
        run("step", [*step, "--engines", engines], 1 - _PROMPT_SHARE, "step_peers.json"),
        run("prefill.peers", prompt, _PROMPT_SHARE, "prefill_peers.json"),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
