"""The self-check itself: every part in turn, with its differences and figures."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

import torch

from disco_accel.errors import DiscoError, ExtensionError
from disco_accel.execute.executor import EngineOptions
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.native.backend import backend_of, prepare_device, release_workspaces
from disco_accel.selfcheck.agreement import distance
from disco_accel.selfcheck.link import link
from disco_accel.selfcheck.orders import CASES, orders
from disco_accel.selfcheck.outcome import Difference, Outcome, compare, identity_of
from disco_accel.selfcheck.subject import Subject, batch_of, make_subject
from disco_accel.selfcheck.trial import Trial, circumstances, eager_runs, values_of
from disco_accel.shortage import met_shortage

LINK_BYTES = 32 << 20
"""Of the copies whose rate is measured; ``Checks`` may ask for less."""
_STALLED_SECONDS = 5.0
_STEPS = 3
_ATTEMPTS = 3

VARIANTS = {
    "as planned": EngineOptions(stall_timeout=_STALLED_SECONDS),
    "in random order": EngineOptions(dispatch="random", seed=1, stall_timeout=_STALLED_SECONDS),
    "without look-ahead": EngineOptions(lookahead=0, stall_timeout=_STALLED_SECONDS),
}
"""Ways to run the same plan, whose results must not depend on them."""


def check(
    device: torch.device,
    make: Callable[[torch.device], Subject] = make_subject,
    link_bytes: int = LINK_BYTES,
) -> Outcome:
    """Run the self-check on ``device``, which has its index. ``make``: the subject, for tests that plant faults.

    An error inside is a difference of the outcome. Raises ExtensionError where there is no engine to check, and
    shortages of memory for the moment (see ``shortage.py``).
    """
    # What is built at first is none of the check's seconds.
    prepare_device(device)
    outcome = Outcome(identity_of(device))
    began = time.perf_counter()
    try:
        with circumstances(device):
            _parts(device, make, link_bytes, outcome)
    except ExtensionError:
        raise
    except (DiscoError, RuntimeError) as error:
        if met_shortage(error):
            raise
        outcome.figures["traceback"] = traceback.format_exc()
        outcome.differences.append(
            Difference(
                str(outcome.figures["part"]), "the run", "an end without errors", f"{type(error).__name__}: {error}"
            )
        )
    finally:
        release_workspaces(device)
        backend_of(device).release_memory()
    outcome.seconds = time.perf_counter() - began
    return outcome


def _parts(device: torch.device, make: Callable[[torch.device], Subject], link_bytes: int, outcome: Outcome) -> None:
    figures, differences = outcome.figures, outcome.differences
    figures["part"] = "link"
    wrong, figures["link"] = link(device, link_bytes)
    differences += wrong
    figures["part"] = "plan"
    subject = make(device)
    figures["plan"] = {
        "kernels": subject.count(lambda vertex: vertex.kind is VertexKind.KERNEL),
        "offloads": subject.count(swaps_out),
        "reloads": subject.count(swaps_in),
        "memory": subject.plan.devices[0].memory,
    }
    figures["compared"] = _compared(subject)
    for name, options in VARIANTS.items():
        figures["part"] = f"steps {name}"
        with Trial(subject, options) as trial:
            began = time.perf_counter()
            differences += _steps(trial, figures["part"])
            if name == "as planned" and not differences:
                step_seconds = (time.perf_counter() - began) / _STEPS
                figures["part"] = "memory inside a step"
                differences += _allocations(trial)
                figures["part"] = "order"
                differences += orders(trial, step_seconds)
                figures["orders"] = (
                    list(CASES) if backend_of(device).has_streams else "without streams, which GPUs have"
                )
    del figures["part"]


def _compared(subject: Subject) -> str:
    """Bits, if plain PyTorch repeats them."""
    first, *others = eager_runs(subject, batch_of(0, subject.device), 0)
    same = not any(distance(value, run[name]) for run in others for name, value in first.items())
    return "bits" if same else "up to the distance of its own runs"


def _steps(trial: Trial, part: str) -> list[Difference]:
    """Steps one after another, each with a batch and random numbers of its own."""
    differences: list[Difference] = []
    for seed in range(_STEPS):
        batch = batch_of(seed, trial.subject.device)
        eager = eager_runs(trial.subject, batch, seed)
        got = trial.step(batch, values_of(trial.subject), seed)
        differences += compare(f"{part}, step {seed + 1}", eager, got)
    return differences


def _allocations(trial: Trial) -> list[Difference]:
    """Whether a step takes memory from PyTorch's allocator or, beneath it, from the driver."""
    device = trial.subject.device
    batch, trained = batch_of(0, device), values_of(trial.subject)
    for _ in range(_ATTEMPTS):
        tangent = torch.ones((), dtype=torch.float32, device=device)
        before = _taken(device)
        trial.begin(batch, trained, 0)
        trial.end(tangent)
        after = _taken(device)
        after["by the engine"] = int(trial.executor.counters()["c10_allocations"])
        differences = [
            Difference("memory inside a step", f"allocations {name}", str(before.get(name, 0)), str(count))
            for name, count in after.items()
            if count != before.get(name, 0)
        ]
        if not differences:
            return []
    # Once might have been another thread of this process.
    return differences


def _taken(device: torch.device) -> dict[str, int]:
    return backend_of(device).allocations()
