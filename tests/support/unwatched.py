"""Arenas that the kernel does not watch, as on a machine whose kernel cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from disco_accel.native.extension import load_extension


@contextmanager
def without_watching_writes() -> Iterator[None]:
    """Arenas made meanwhile are read whole instead of being watched for writes."""
    load_extension()
    torch.ops.disco_accel.allow_watching_writes(False)
    try:
        yield
    finally:
        torch.ops.disco_accel.allow_watching_writes(True)
