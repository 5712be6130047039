"""Stages that train: eager, compiled, and ours within budgets, each from the same adapter on the same model."""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.common.any_plan import any_plan_of, kernel_seconds, wait_for_plans
from benchmarks.common.quantised import folder_of
from benchmarks.gpu.models import checkpoint
from benchmarks.gpu.stage import NOT_HERE, Run
from benchmarks.gpu.subject import Subject, case_of, subject_of
from benchmarks.step.engines import COUNTED, link_rates
from disco_accel import DiscoConfig, prepare, restore, set_memory_budget, stats
from disco_accel.errors import ConfigError
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.simulate.simulator import Link, Machine
from disco_accel.sizes import format_size
from disco_accel.step.run.session import current_step, find_state

_TINY = {
    "72GiB": 64 << 20,
    "24GiB": 800_000,
    "22GiB": 400_000,
    "16GiB": 64 << 20,
    "8GiB": 600_000,
    "2100MiB": 800_000,
}
"""Bytes in the place of a budget with tiny shapes."""
UNFUSED = "_unfused"
"""At the end of a stage's name: every op is a kernel of PyTorch's."""


def measure(run: Run) -> dict[str, Any]:
    """The row of what the stage's name says behind its case."""
    case = case_of(run)
    what = run.stage.partition("_")[2]
    try:
        sys.path.append(folder_of(case.quant))
    except ConfigError as error:
        return {NOT_HERE: str(error)}
    if what == "checkpoint_offload" and run.device == "cpu":
        return {NOT_HERE: "transformers keeps what it offloads in page-locked memory"}
    began = time.perf_counter()
    subject = subject_of(case, run.where, run.folder)
    build_seconds = time.perf_counter() - began
    if what.startswith("ours_"):
        return _ours(run, subject, what.removeprefix("ours_"))
    return {"build": subject.seconds, "build_seconds": build_seconds} | _eager(run, subject, what)


def _eager(run: Run, subject: Subject, what: str) -> dict[str, Any]:
    if find_state(subject.model) is not None:
        restore(subject.model)
    subject.release()
    if what == "no_checkpointing":
        subject.base.gradient_checkpointing_disable()
    if what == "checkpoint_offload":
        checkpoint(subject.base, offload=True)
    if what == "compile":
        # Without the compiler of kernels, which takes minutes for any shape on two cores.
        subject.model.compile(backend="aot_eager" if run.small else "inductor")
    try:
        began = time.perf_counter()
        outcome = subject.first_step()
        first = time.perf_counter() - began
        if what == "eager":
            subject.refer(run.folder)
        row = subject.train()
        row |= {"first_step_seconds": first, "verdict": str(subject.agreement(outcome))}
    finally:
        checkpoint(subject.base)
    return row


def _ours(run: Run, subject: Subject, budget: str) -> dict[str, Any]:
    fuse, budget = "off" if budget.endswith(UNFUSED) else "auto", budget.removesuffix(UNFUSED)
    model, nbytes = subject.model, run.budget(budget, _TINY[budget])
    subject.release()
    began = time.perf_counter()
    state = find_state(model)
    if state is not None and state.setup.config.fuse != fuse:
        restore(model)
    if find_state(model) is None:
        prepare(model, DiscoConfig(memory_budget=nbytes, device=run.device, plan_cache=run.cache, fuse=fuse))
    else:
        set_memory_budget(model, nbytes)
    prepare_seconds = time.perf_counter() - began
    first = subject.first_step()
    row: dict[str, Any] = {"prepare_seconds": prepare_seconds, "first_step_seconds": time.perf_counter() - began}
    run.keep(row)
    wait_for_plans(model, subject.backward)
    subject.reset()
    # A plan that was made beside the first step takes its place now.
    outcomes = (first, subject.first_step())
    row["plans_seconds"] = time.perf_counter() - began
    compared = [subject.agreement(outcome) for outcome in outcomes]
    row |= {"verdict": str(compared[-1])} | subject.train()
    counted = stats(model)
    kept = ("peak_bytes", "reload_bytes", "offload_bytes", "resident_weight_bytes", *COUNTED, "compile_seconds")
    row |= {name: counted[name] for name in kept}
    row["h2d_gb_s"] = counted["reload_bytes"] / row["seconds"] * 1e-9
    wrong = [f"{budget}: {found}" for found in compared if found.wrong]
    if counted["steps_eager"]:
        wrong.append(f"steps ran in eager mode: {counted['fallbacks']}")
    if isinstance(limit := counted["budget"]["total"], int) and counted["peak_bytes"] > limit:
        wrong.append(f"the peak is above the budget of {format_size(limit)}")
    if wrong:
        row["wrong"] = wrong
    run.keep(row)
    return row | _any_plan(subject)


def _any_plan(subject: Subject) -> dict[str, float]:
    """``any_plan``: seconds that no plan of the step beats, its kernels as they were in the middle one of three steps;
    ``kernel_seconds``: theirs alone."""
    step = current_step(subject.model)
    assert step is not None, "a step has run"
    rates = link_rates() if subject.where.type == "cuda" else {"h2d": 1e12, "d2h": 1e12}
    runs = [kernel_seconds(step, subject.backward) for _ in range(3)]
    seconds = sorted(runs, key=lambda found: sum(found.values()))[1]
    subject.reset()
    machine = Machine(links={TO_DEVICE: Link(rates["h2d"], 0.0), TO_HOST: Link(rates["d2h"], 0.0)})
    return {"kernel_seconds": sum(seconds.values()), "any_plan": any_plan_of(step, seconds, machine)}
