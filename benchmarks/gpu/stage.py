"""A stage of ``make gpu``: what it is called, what it may take, and where its figures go while it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disco_accel.native.backend import run_device, workspace_bytes
from disco_accel.sizes import parse_size

NOT_HERE = "not on this device"
"""The key of a stage's figures that says why it measures nothing here."""


@dataclass(frozen=True, slots=True)
class Stage:
    """``benchmarks.module.measure`` measures it. Stages of one ``process`` run in one, in order, and share its models.
    ``estimate``: seconds on a GPU; ``limit``: at which it is ended. ``check``: part of ``ONLY=check``."""

    name: str
    process: str
    module: str
    estimate: float
    limit: float
    check: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """What a stage is told. ``small``: tiny shapes; ``folder``: for figures, logs, gradients, passed checks."""

    stage: str
    device: str
    small: bool
    folder: Path

    @property
    def where(self) -> torch.device:
        """The device, with its index."""
        return run_device(self.device)

    @property
    def cache(self) -> str:
        """The folder of plans and of passed self-checks, which all stages share."""
        return str(self.folder / "cache")

    def budget(self, size: str, tiny: int) -> int:
        """Bytes: ``size``, or with tiny shapes ``tiny`` beside the workspaces of the device's library."""
        return tiny + 2 * workspace_bytes(self.where) if self.small else parse_size(size)

    def keep(self, figures: Mapping[str, Any]) -> None:
        """Write what is known by now: a stage that is cut off keeps it."""
        write(figures_file(self.folder, self.stage), figures)


def figures_file(folder: Path, stage: str) -> Path:
    """Where a stage's figures are, in the folder of its run."""
    return folder / f"{stage}.json"


def begun_file(folder: Path, stage: str) -> Path:
    """It is there from the stage's beginning; its process's number."""
    return folder / f"{stage}.begun"


def write(path: Path, content: Mapping[str, Any]) -> None:
    """As JSON, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1))
    part.replace(path)
