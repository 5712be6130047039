"""One engine of ``engines.py`` in a process of its own: reads the prompt whenever it is told to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from benchmarks.prefill.engines import READERS, Reader, outputs_of
from benchmarks.step.worker import Session, main

COMMAND = ("-m", "benchmarks.prefill.worker")


class PromptSession(Session):
    """One reader and what was measured of it."""

    def make_engine(self) -> Reader:
        return READERS[self.job.engine](self.job)

    def step(self) -> dict[str, Any]:
        """Seconds of one prompt, and as ``loss`` the sum of its logits; the first one's outputs go to the folder."""
        self._synchronize()
        began = time.perf_counter()
        output = self.engine.read()
        self._synchronize()
        first_token = time.perf_counter() - began
        self.engine.settle()
        self._synchronize()
        seconds = time.perf_counter() - began
        if self.steps == 0:
            kept = {name: t.to("cpu").contiguous() for name, t in outputs_of(output).items()}
            save_file(kept, Path(self.job.folder) / "outputs.safetensors")
        self.steps += 1
        return {"loss": float(output.logits.float().sum()), "seconds": seconds, "first_token": first_token}


if __name__ == "__main__":
    main(PromptSession)
