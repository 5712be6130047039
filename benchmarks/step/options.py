"""What the command lines of ``bench step`` and its like for prompts have in common."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from disco_accel.config.settings import DiscoConfig
from disco_accel.graph.files import write_atomically


def names_of(known: Sequence[str], text: str, *, none: bool = False) -> list[str]:
    """Names with commas between them, of those that are ``known``; with ``none`` that word is none of them."""
    words = [word for word in text.split(",") if word]
    if none and words == ["none"]:
        return []
    if not words or any(word not in known for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {', '.join(known)}{', or none' if none else ''}")
    return words


def count(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from 1 on")
    return int(text)


def add_run(made: argparse.ArgumentParser, what: str) -> None:
    """Options of where and for how long engines run ``what``, and of the file with the result."""
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--bandwidth", type=float, default=0.5e9, help="of the host device's link, bytes/s each way")
    made.add_argument("--planner", default=DiscoConfig().planner)
    made.add_argument("--limit", type=float, default=900.0, help=f"seconds for the building of a model, or {what}")
    made.add_argument("--seconds", type=float, default=math.inf, help="for everything; what is left then has no row")
    made.add_argument("-o", "--output", type=Path, help="everything as JSON")


def save(output: Path | None, result: Mapping[str, Any]) -> None:
    """Write ``result`` where ``-o`` said, if it did."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, json.dumps(result, indent=1).encode())
