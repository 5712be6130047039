"""One capture at a time: tracing patches classes that all models share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_thread: int | None = None


@contextmanager
def capturing() -> Iterator[None]:
    """Waits for the captures of other threads."""
    global _thread
    with _lock:
        _thread = threading.get_ident()
        try:
            yield
        finally:
            _thread = None


def in_capture() -> bool:
    """Whether this thread is tracing a step. A prepared model that is part of another is traced as if it were not."""
    return _thread == threading.get_ident()
