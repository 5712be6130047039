"""Commands that take a while: their output goes to a file, and what they are at is shown meanwhile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_EVERY = 5.0
"""Seconds between two lines of progress where the output is no terminal; a terminal's line is drawn anew."""
_POLL = 0.25
_TAIL = 4096


def announce(text: str) -> None:
    """Say what comes next."""
    print(f"-- {text}", flush=True)


def run(command: list[str], log: Path, extra: Mapping[str, str], folder: Path) -> float:
    """Run a command in ``folder`` with its output in ``log`` and its latest line on stdout; returns seconds.

    ``extra``: environment variables beside this process's own.

    Raises:
        SystemExit: the command failed; the end of its log is shown.
    """
    began = time.perf_counter()
    with beside(command, log, extra, folder):
        pass
    return time.perf_counter() - began


@contextmanager
def beside(command: list[str], log: Path, extra: Mapping[str, str], folder: Path) -> Iterator[None]:
    """Run a command, as ``run`` does, beside the block; its latest line is shown while the block's end waits for it."""
    began = time.perf_counter()
    shown = Progress(sys.stdout)
    with log.open("wb") as stream:
        environment = {**os.environ, **extra}
        child = subprocess.Popen(command, cwd=folder, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        try:
            yield
            while child.poll() is None:
                shown.show(time.perf_counter() - began, last_line(log))
                time.sleep(_POLL)
        finally:
            shown.clear()
            if child.poll() is None:
                child.terminate()
                child.wait()
    if child.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        code = child.returncode
        print(f"{' '.join(command)}\nended with exit code {code}; the end of {log}:\n{tail}", file=sys.stderr)
        raise SystemExit(1)


def last_line(log: Path) -> str:
    """The latest line of a log that is being written; a bar that rewrites its line counts as it was last drawn."""
    with log.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL))
        text = stream.read().decode(errors="replace")
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    return next((line for line in reversed(lines) if line), "starting")


class Progress:
    """One line that says what is going on: rewritten on a terminal, else a new one every few seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._next = 0.0

    def show(self, seconds: float, text: str) -> None:
        """``seconds`` since the command began, and its latest line."""
        if not self._terminal and seconds < self._next:
            return
        self._next = seconds + _EVERY
        line = f"   {seconds:3.0f} s  {text}"[: shutil.get_terminal_size().columns - 1]
        self._out.write(f"\r\x1b[2K{line}" if self._terminal else f"{line}\n")
        self._out.flush()

    def clear(self) -> None:
        """Give a terminal's line back."""
        if self._terminal:
            self._out.write("\r\x1b[2K")
            self._out.flush()
