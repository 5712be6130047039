"""Stages ``*_zero3`` and ``*_soup``: what others offer, on the same model, adapter and batch."""

from __future__ import annotations

from importlib.util import find_spec
from statistics import median
from typing import Any

from safetensors.torch import load_file

from benchmarks.common.shapes import PRESETS
from benchmarks.gpu.stage import NOT_HERE, Run
from benchmarks.gpu.subject import ROUNDS, case_of, references_in
from benchmarks.step.engines import Job
from benchmarks.step.process import FIRST_STEPS
from benchmarks.step.suite import measure as measured
from disco_accel.selfcheck.agreement import agreement

_FACTS = ("build_seconds", "used", "reserved", "host", "h2d", "d2h", "pinned_bytes", "buffer_bytes")
_ENGINES = {"zero3": ("zero3-tuned", "deepspeed"), "soup": ("soup", "soup_cli")}
"""By the stage's end: the engine of ``bench step``, and the library that it takes."""
_LIMIT = 600.0
"""Seconds for any one answer; the stage's own limit is lower."""


def measure(run: Run) -> dict[str, Any]:
    """Its row, in a process of its own whose log stays in the stage's folder; gradients beside those of eager."""
    engine, library = _ENGINES[run.stage.rpartition("_")[2]]
    if find_spec(library) is None:
        return {NOT_HERE: f"{library} is not installed; WHEELS names a folder with its wheel"}
    case, folder = case_of(run), run.folder / run.stage
    folder.mkdir(exist_ok=True)
    job = Job(
        engine=engine,
        shape=dict(PRESETS[case.shape]),
        batch=case.batch,
        tokens=case.tokens,
        dtype="bfloat16",
        rank=4 if run.small else 16,
        device=run.device,
        budget=None,
        bandwidth=None,
        planner="timed",
        folder=str(folder),
    )
    (worker,) = measured([job], 2 if run.small else ROUNDS, apart=True, limit=_LIMIT)
    if worker.error is not None:
        return {"error": worker.error}
    seconds = worker.seconds
    row: dict[str, Any] = {
        "seconds": median(seconds),
        "spread": max(seconds) - min(seconds),
        "tokens_per_second": case.batch * case.tokens / median(seconds),
        "losses": worker.losses,
        **{name: worker.facts[name] for name in _FACTS if name in worker.facts},
    }
    if references := references_in(run.folder, case):
        # Some hand out gradients in float32.
        kinds = {name: tensor.dtype for name, tensor in references[0].items()}
        outcome = {n: t.to(kinds.get(n, t.dtype)) for n, t in load_file(folder / FIRST_STEPS[0]).items()}
        row["verdict"] = str(agreement(outcome, references, outputs=("loss",)))
    return row
