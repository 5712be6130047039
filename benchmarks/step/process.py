"""The processes of the suite: one engine each, told what to do over pipes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.quantised import folder_of
from benchmarks.step.engines import Job

COMMAND: tuple[str, ...] = ("-m", "benchmarks.step.worker")
"""What each process runs unless told otherwise, after the interpreter and before the job."""
REFERENCE = "in-memory"
"""The engine that all others are compared with."""
FIRST_STEPS = ("gradients.safetensors", "gradients-2.safetensors", "gradients-3.safetensors")
"""In a job's folder: loss and gradients of its first step; of the reference also of one or two more from the same
state, the third where the second has other bits."""
_ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """One engine's process, and all that it answered. ``error`` is why it could not go on, None if it could."""

    def __init__(self, job: Job, limit: float, end: float = math.inf, command: tuple[str, ...] | None = None) -> None:
        """``limit``: seconds that an answer may take; none comes after ``end`` of ``time.monotonic``.

        ``command``: in place of ``COMMAND``.
        """
        self.job = job
        self._command = command or COMMAND
        self.error: str | None = None
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.facts: dict[str, Any] = {}
        self._limit, self._end = limit, end
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process, which builds its model. Its own words go to ``log`` in the job's folder.

        Raises:
            ConfigError: the library of the job's form is not installed.
        """
        command = [sys.executable, *self._command, json.dumps(asdict(self.job))]
        path = [str(_ROOT), os.environ.get("PYTHONPATH", ""), folder_of(self.job.quant)]
        with (Path(self.job.folder) / "log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
                start_new_session=True,
            )

    def built(self) -> None:
        """Wait until the model is built."""
        self._answer()

    def steps(self, count: int, *, timed: bool) -> None:
        """Run ``count`` steps."""
        for _ in range(count):
            answer = self.ask("step")
            if answer is None:
                return
            self.losses.append(answer.pop("loss"))
            seconds = answer.pop("seconds")
            if timed:
                self.seconds.append(seconds)
            self.facts |= answer

    def finish(self) -> None:
        """Take the figures, and end the process."""
        self.facts |= self.ask("figures") or {}
        self.stop()

    def ask(self, word: str) -> dict[str, Any] | None:
        """The answer to ``word``; None if there is none any more."""
        if self.error is not None or self._process is None:
            return None
        assert self._process.stdin is not None
        # A process that is gone has left its reason in the other pipe, or none.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """End the process and whatever it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None

    def _answer(self) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdout is not None
        left = max(0.0, min(self._limit, self._end - time.monotonic()))
        ready, _, _ = select.select([self._process.stdout], [], [], left)
        line = self._process.stdout.readline() if ready else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            self.error = answer.get("error")
        elif ready:
            self.error = f"the process ended with {self._process.wait()}; its last words: {self._last_words()}"
        else:
            self.error = f"no answer within {self._limit:g} s" if left == self._limit else "no time was left"
        if self.error is not None:
            self.stop()
            return None
        return answer

    def _last_words(self) -> str:
        lines = (Path(self.job.folder) / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
