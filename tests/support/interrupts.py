"""Ctrl-C at a moment that a test chooses: while the main thread waits for the engine, however long that takes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from disco_accel.execute.executor import Executor


def main_thread_waits() -> bool:
    """Whether the main thread is inside an executor's wait."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code is Executor._wait.__code__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def interrupt_when_waiting() -> Iterator[None]:
    """Send SIGINT to this process once its main thread waits for the engine; not at all if it never does inside."""
    over = threading.Event()

    def send() -> None:
        while not over.is_set() and not main_thread_waits():
            time.sleep(0.001)
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def interrupted(attempt: Callable[[], Callable[[], object]]) -> None:
    """Returns when what ``attempt`` returned was interrupted; one that was over by then is attempted again."""
    while True:
        run, done = attempt(), False
        try:
            with interrupt_when_waiting():
                run()
                done = True
        except KeyboardInterrupt:
            if not done:
                return
