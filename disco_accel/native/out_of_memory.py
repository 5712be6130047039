"""Memory that runs out while a step is prepared, as a typed error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from disco_accel.errors import ExecutionError
from disco_accel.shortage import is_shortage


@contextmanager
def typed_out_of_memory(what: str) -> Iterator[None]:
    """Inside, or around a function that it decorates, an allocator's error becomes ExecutionError naming ``what``."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_shortage(error):
            raise
        raise ExecutionError(
            f"{what} ran out of memory: {error or 'no more can be allocated'}; free some, and the next step tries again"
        ) from error
