"""The processes that compile fused kernels beside a training, as ``compiler.py``: started with their first library. One
is kept for a while for the next libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from disco_accel.errors import ExtensionError
from disco_accel.native.cuda_headers import TOOLKITS
from disco_accel.threads import start_thread

FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""A variable of the environment → the name of the folder where a compiler keeps its files."""
_IDLE_SECONDS = 30.0
"""A process without work ends after so long. One takes 5 s of a core to start. The comparison of kernels with their ops
may lead to other runs: of a Llama of 8 layers a second after the compilation."""
_KNOWS_VECTORS = "TORCHINDUCTOR_VEC_ISA_OK"
"""1: Inductor takes the vector instructions of the processor. Else it first compiles a program for each, which shows
whether the compiler and PyTorch know them. Six such programs took 9 of the 43 s to the first fused step of a Llama of 8
layers, on two cores of an AMD EPYC with AVX-512."""
_ROOT = Path(__file__).parents[2]
_PROGRAM = "import sys; sys.path[:0] = sys.argv[1:]; from disco_accel.fuse.compiler import main; main()"


class _Stopped(ExtensionError):
    """This process ends."""


class _CompilerProcess:
    """One process, for one kind of kernels: the compilers of the host, or those of one GPU."""

    def __init__(self, folder: Path, gpu: dict[str, Any] | None) -> None:
        """``folder``: for files of the compilers. ``gpu``: as of ``Backend.target``, None for the host."""
        self.gpu = gpu
        self.command = [sys.executable, "-c", _PROGRAM, str(_ROOT)]
        folders = {name: str(folder / below) for name, below in FOLDERS.items()}
        # It compiles for a GPU that it does not see: a context of its own would take memory there.
        ours = {**folders, **_libdevice(), "CUDA_VISIBLE_DEVICES": ""}
        self.environment = {_KNOWS_VECTORS: "1", **os.environ, **ours}
        self._child: subprocess.Popen[bytes] | None = None
        self._lock, self._stopped = threading.Lock(), False

    def compile(self, request: dict[str, Any]) -> Path:
        """The library of ``request``. Raises ExtensionError."""
        answer = self._answer(request)
        if "error" in answer and not self._stopped and _KNOWS_VECTORS not in os.environ:
            # Perhaps the compiler is older than the processor: Inductor finds out what both have.
            with self._lock:
                self.environment.pop(_KNOWS_VECTORS, None)
                self._end()
            answer = self._answer(request)
        if self._stopped:
            raise _Stopped("compiling was stopped")
        if "error" in answer:
            raise ExtensionError(f"fused kernels cannot be compiled: {answer['error']}")
        return Path(answer["path"])

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            child = self._started()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            answer: dict[str, Any] = json.loads(child.stdout.readline() or b'{"error": "the compiling process ended"}')
        except (OSError, ValueError) as error:
            return {"error": str(error)}
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise _Stopped("compiling was stopped")
            if self._child is None:
                self._child = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=self.environment,
                )
            return self._child

    def may_serve(self, other: _CompilerProcess) -> bool:
        """Whether it runs, and compiles as ``other`` would."""
        runs = self._child is not None and self._child.poll() is None
        alike = (self.gpu, self.command, self.environment) == (other.gpu, other.command, other.environment)
        return runs and alike

    def stop(self) -> None:
        """End the process, from any thread."""
        with self._lock:
            self._stopped = True
            self._end()

    def _end(self) -> None:
        """Under ``_lock``."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


class _IdleProcess:
    """At most one process without work: the next call takes it, or else it ends after ``_IDLE_SECONDS``."""

    def __init__(self) -> None:
        self._lock, self._end = threading.Lock(), threading.Event()
        self._process: _CompilerProcess | None = None

    def forget(self) -> None:
        """In a forked process: the one here answers its parent."""
        self._lock, self._end, self._process = threading.Lock(), threading.Event(), None

    def take(self, folder: Path, gpu: dict[str, Any] | None) -> _CompilerProcess:
        """The one that is here, if it compiles for ``gpu`` with what this process has now, or else a new one."""
        new, found = _CompilerProcess(folder, gpu), self._taken()
        if found is not None and found.may_serve(new):
            return found
        if found is not None:
            found.stop()
        return new

    def keep(self, process: _CompilerProcess) -> None:
        """Keep ``process``, which nobody uses any more, for a while."""
        with self._lock:
            before, self._process = self._process, process
        if before is not None:
            before.stop()
        try:
            waits = start_thread(self._wait, process, name="disco-fused-idle", stop=self._end.set)
        except RuntimeError:
            waits = None
        if waits is None:
            self._stop(process)

    def _wait(self, process: _CompilerProcess) -> None:
        self._end.wait(_IDLE_SECONDS)
        self._stop(process)

    def _stop(self, process: _CompilerProcess) -> None:
        """Unless a call has it."""
        taken = self._taken(process)
        if taken is not None:
            taken.stop()

    def _taken(self, only: _CompilerProcess | None = None) -> _CompilerProcess | None:
        with self._lock:
            found = self._process
            if only is not None and found is not only:
                return None
            self._process = None
            return found


idle_process = _IdleProcess()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=idle_process.forget)


def _libdevice() -> dict[str, str]:
    """The toolkit's functions for Triton, whose own round some otherwise than PyTorch's kernels."""
    for home in (os.environ.get("CUDA_HOME"), *TOOLKITS):
        path = None if home is None else Path(home, "nvvm", "libdevice", "libdevice.10.bc")
        if path is not None and path.is_file():
            return {"TRITON_LIBDEVICE_PATH": str(path)}
    return {}
