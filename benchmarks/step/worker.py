"""One engine of the suite in a process of its own: builds it, then runs a step whenever it is told to.

Told by lines on standard input (``step``, ``mark``, ``figures``), it answers each with one JSON object. What
libraries print goes to standard error, in C too.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import save_file

from benchmarks.common.any_plan import wait_for_plans
from benchmarks.common.quantised import PLAIN
from benchmarks.step.engines import ENGINES, Engine, Job
from benchmarks.step.link_trace import link_bytes
from benchmarks.step.peers import PEERS
from benchmarks.step.process import FIRST_STEPS, REFERENCE
from disco_accel.capture.attention import cudnn_attention_off
from disco_accel.capture.parts import frozen_parts
from disco_accel.selfcheck.agreement import agreement
from disco_accel.step.run.session import find_state

_FOLDERS = re.compile(r"(?:(?<=-I)|(?<![\w.]))/(?:[\w.+-]+/)+")


class Session:
    """One engine and what was measured of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        began = time.perf_counter()
        self.engine = self.make_engine()
        self.build_seconds = time.perf_counter() - began
        self.steps = 0

    def make_engine(self) -> Any:
        """What the job names."""
        engine: Engine = {**ENGINES, **PEERS}[self.job.engine](self.job)
        return engine

    def step(self) -> dict[str, Any]:
        """Loss and seconds of one training step; the first one's loss and gradients go to the job's folder."""
        first = self.steps == 0
        self._synchronize()
        began = time.perf_counter()
        loss, gradients = self._first() if first else (self.engine.backward(), 0)
        self._synchronize()
        self.engine.update()
        self._synchronize()
        self.steps += 1
        answer = {"loss": loss, "seconds": time.perf_counter() - began}
        return answer | ({"gradients": gradients, "trainable": self._trainable()} if first else {})

    def _first(self) -> tuple[float, int]:
        """Loss and number of gradients. The reference runs until it is known whether it repeats its bits, with the
        attention that plans have."""
        reference = self.job.engine == REFERENCE
        runs: list[dict[str, torch.Tensor]] = []
        with cudnn_attention_off(self.job.where) if reference else nullcontext():
            for name in FIRST_STEPS if reference else FIRST_STEPS[:1]:
                if runs:
                    self.engine.optimizer.zero_grad()
                loss = self.engine.backward()
                self._synchronize()
                gradients = {n: g.contiguous() for n, g in self.engine.gradients().items()}
                runs.append({"loss": torch.tensor(loss, dtype=torch.float64), **gradients})
                save_file(runs[-1], Path(self.job.folder) / name)
                if len(runs) > 1 and agreement(runs[1], runs[:1]).bits:
                    break
        return loss, len(gradients)

    def mark(self) -> dict[str, Any]:
        """Forget the peaks so far. A planned step has its fused kernels from here on."""
        model = getattr(self.engine, "model", None)
        if model is not None and find_state(model) is not None:
            wait_for_plans(model, self._and_forget)
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        # Linux: resets VmHWM of this process. Where that is not allowed, the peak is of the whole run.
        try:
            Path("/proc/self/clear_refs").write_text("5")
            return {"host_peak": "of the steps"}
        except OSError:
            return {"host_peak": "of the whole run"}

    def _and_forget(self) -> None:
        self.engine.backward()
        self.engine.optimizer.zero_grad()

    def figures(self) -> dict[str, Any]:
        """What the engine knows of itself, memory, and on a GPU the bytes that one more step copies."""
        result: dict[str, Any] = {"build_seconds": self.build_seconds, "host": _high_water(), "used": None}
        if self.job.quant != PLAIN:
            result["packed"] = sum(part.nbytes for part in frozen_parts(self.engine.model).values())
        if not self._cuda:
            return result | self.engine.figures()
        # Before anything else is allocated to look at other things.
        peak = {"used": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        found = self.engine.figures()
        return result | ({} if "h2d" in found else link_bytes(self.step)) | found | peak

    def _trainable(self) -> dict[str, int]:
        sizes = [getattr(p, "ds_numel", p.numel()) for p in self.engine.trainable.values()]
        return {"tensors": len(sizes), "elements": sum(sizes)}

    @property
    def _cuda(self) -> bool:
        return self.job.where.type == "cuda"

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _high_water() -> int:
    """The most memory, in bytes, that this process had since ``mark``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def _private_stdout() -> TextIO:
    """Standard output for the answers alone; file descriptor 1 becomes standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return answers


def serve(start: Callable[[], Session], answers: TextIO) -> None:
    """Answer until standard input ends. An engine that fails says why in ``error`` and is done."""
    try:
        session = start()
        answers.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            answer = {"step": session.step, "mark": session.mark, "figures": session.figures}[line.strip()]()
            answers.write(json.dumps(answer) + "\n")
    except (Exception, SystemExit) as error:
        answers.write(json.dumps({"error": first_line(error)}) + "\n")
        raise


def first_line(error: BaseException) -> str:
    """Type and first line, without the folders of this machine."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {_FOLDERS.sub('', text[0]) if text else ''}"


def main(kind: type[Session] = Session) -> None:
    """``argv[1]`` is the job as JSON."""
    job = Job(**json.loads(sys.argv[1]))
    if job.device == "cpu":
        torch.set_num_threads(1)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    serve(functools.partial(kind, job), _private_stdout())


if __name__ == "__main__":
    main()
