"""The types of devices that plans run on, as far as they are known without PyTorch; ``backend.py`` has the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _DeviceType:
    """``name``: as PyTorch calls it, ``label``: as its maker does. ``auto_share``: the part of its memory that is the
    budget where the user names none. ``separate_memory``: it has memory of its own, beside the host's."""

    name: str
    label: str
    auto_share: float
    separate_memory: bool


HOST = _DeviceType("cpu", "CPU", auto_share=0.5, separate_memory=False)
CUDA = _DeviceType("cuda", "CUDA", auto_share=0.9, separate_memory=True)
DEVICE_TYPES: Mapping[str, _DeviceType] = {each.name: each for each in (HOST, CUDA)}
"""By PyTorch's name."""
