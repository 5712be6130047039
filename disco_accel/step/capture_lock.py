"""One capture at a time, and none of a model that another thread runs."""

from __future__ import annotations

import threading
from collections import Counter
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


@contextmanager
def between_captures() -> Iterator[None]:
    """No other thread captures inside: nothing is replaced by PyTorch's tracer and ``thread_patches``. Inside a capture
    of this thread's own it makes no difference."""
    if in_capture():
        yield
        return
    with _lock:
        yield


def in_capture() -> bool:
    """Whether this thread is tracing a step. A prepared model that is part of another is traced as if it were not."""
    return _thread == threading.get_ident()


class Gate:
    """Keeps the model's own forwards in other threads apart from its trace, which may leave tensors without values in
    the attributes of modules."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: Counter[int] = Counter()
        self._tracing: int | None = None

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Around a forward of the model's own: waits while another thread traces the model."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._tracing in (None, me) or me in self._running)
            self._running[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[me] -= 1
                self._running += Counter()
                self._changed.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Around a trace: waits for the end of forwards in other threads."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._tracing in (None, me) and self._running.keys() <= {me})
            before, self._tracing = self._tracing, me
        try:
            yield
        finally:
            with self._changed:
                self._tracing = before
                self._changed.notify_all()
