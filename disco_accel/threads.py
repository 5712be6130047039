"""Threads that work beside a program, and end with the interpreter of the process that started them; Ctrl-C in the main
one.

The threads are stopped and waited for before the interpreter goes down. CPython up to 3.13 ends a thread that asks for
its lock after that by unwinding the thread's stack. C++ code there, such as an op of PyTorch's, then aborts the
process: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

logger = logging.getLogger("disco_accel")

END_SECONDS = 10.0
"""How long the end of a process waits for its threads: one that a device or a store keeps for ever must not keep the
process too."""

_running: dict[threading.Thread, Callable[[], object]] = {}
"""The threads of this process, and how to stop them."""
_changing, _stopped = threading.Lock(), False


def start_thread(
    work: Callable[..., None], *given: object, name: str, stop: Callable[[], object]
) -> threading.Thread | None:
    """Run ``work(*given)`` in a thread that does not keep the process. ``stop`` makes it return soon; called from any
    thread, and may be called after the work has ended. It is kept as long as the thread runs.

    None, and nothing runs, once the threads of this process have been stopped, as in a function of ``atexit`` that is
    older than this module.
    """
    thread = threading.Thread(target=_run, args=(work, given), name=name, daemon=True)
    with _changing:
        if _stopped:
            return None
        _running[thread] = stop
        try:
            thread.start()
        except RuntimeError:
            del _running[thread]
            raise
    return thread


def _run(work: Callable[..., None], given: tuple[object, ...]) -> None:
    try:
        work(*given)
    finally:
        _running.pop(threading.current_thread(), None)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C comes when this ends. Around calls of C++ classes with arguments of any type: PyTorch drops an exception
    that a signal's handler raises while it converts one, and reports the argument."""
    handler: Any = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        yield
        return
    told: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *of: told.append(of))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if told:
            handler(*told[0])


def _end() -> None:
    global _stopped
    with _changing:
        _stopped = True
        running = list(_running.items())
    until = time.monotonic() + END_SECONDS
    for _, stop in running:
        stop()
    while (alive := [thread for thread, _ in running if thread.is_alive()]) and time.monotonic() < until:
        # Another Ctrl-C changes nothing: the process ends as it is.
        with suppress(KeyboardInterrupt):
            alive[0].join(max(0.0, until - time.monotonic()))
    if alive:
        names = ", ".join(sorted({thread.name for thread in alive}))
        logger.warning("this process ends while its threads still work after %.0f s: %s", END_SECONDS, names)


def _forked() -> None:
    """A child has none of its parent's threads, and nothing of the parent's to stop."""
    global _changing
    _changing = threading.Lock()
    _running.clear()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
