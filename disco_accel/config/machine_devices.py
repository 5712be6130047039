"""What number a device has on the machine: a process may see a part of them, in another order."""

from __future__ import annotations

import os
from collections.abc import Sequence

MOST_DEVICES = 64
"""A tensor store counts devices of smaller numbers."""


def numbers_on_machine(indices: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the GPUs that this process knows by ``indices``, by ``CUDA_VISIBLE_DEVICES`` if that is a list of
    numbers. Names of devices (``GPU-...``) cannot be told apart here: such a one counts by its place in the list, as
    it does for programs that a store counts."""
    listed: list[int] = []
    for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","):
        if not word.strip().isdecimal() or int(word) >= MOST_DEVICES:
            break
        listed.append(int(word))
    return tuple(listed[index] if index < len(listed) else index for index in indices)
