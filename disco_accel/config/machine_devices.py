"""The machine's own numbers of the devices that a process sees, some of them in another order; a number of its run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from disco_accel.config.settings import local_processes

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


def visible_devices() -> str | None:
    """The devices that a process sees, as the variable names them; None: all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


_RUN = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def run_of_launcher() -> int:
    """A number below 2**62 that the processes of one run have in common, by where they meet; 0 where a launcher has
    started one on this machine, or does not say where they meet."""
    if local_processes() == 1 or not os.environ.get("MASTER_PORT"):
        return 0
    text = " ".join(os.environ.get(name, "") for name in _RUN)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2 or 1
