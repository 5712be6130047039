"""Memory that runs out while a step is prepared, as a typed error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from disco_accel.errors import ExecutionError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator raised it. The CPU's has no class of its own for that, only words."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error).lower()


@contextmanager
def typed_out_of_memory(what: str) -> Iterator[None]:
    """Inside, or around a function that it decorates, an allocator's error becomes ExecutionError naming ``what``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ExecutionError(f"{what} ran out of memory: {error}") from error
