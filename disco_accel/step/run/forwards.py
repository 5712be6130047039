"""Forwards without gradients, run from plans: evaluation, references, prompts.

Each tensor of the result is written to the caller's own memory as soon as it is made. All plans of a model share one
arena and one budget; a training step that waits for its backward is not affected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from disco_accel.capture.captured_step import CapturedStep, InputBinding, InputSource
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.traits import FROZEN, Traits
from disco_accel.native.host_memory import copied_from, writes_are_watched
from disco_accel.step.budget.moving_budget import retry_on_budget_change
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.conductor import CompileOptions, compile_forward
from disco_accel.step.run.frontend import ContextFactory
from disco_accel.step.run.pending import externals_of
from disco_accel.step.run.progress_messages import batch_text
from disco_accel.step.run.session import Session
from disco_accel.step.run.step_inputs import generator_from, generator_state, kept_on_failure
from disco_accel.step.run.step_plans import plan_of, with_shards
from disco_accel.step.state.step_key import step_key

PREFILL = "prefill"
"""The kind of a forward that reads a prompt."""
Tensors = dict[str, torch.Tensor]


class _TracedForward:
    """A forward in terms of tensors, as a plan has it. ``structure``: of the last result, without its tensors."""

    def __init__(self, trace: Callable[..., tuple[Tensors, Any]]) -> None:
        """``trace``: arguments → the tensors of the result by name, each a clone, and the rest of the result."""
        self._trace = trace
        self.structure: Any = None

    def __call__(self, **batch: Any) -> Tensors:
        tensors, self.structure = self._trace(**batch)
        return tensors


@dataclass(frozen=True)
class _GrowingBatch:
    """A batch with tensors that grow with a ``length`` from forward to forward. One plan is for all lengths from the
    smallest of ``captured`` to the largest: at these it is captured. ``at``: the arguments at a length, with tensors
    that may lack values."""

    length: int
    captured: Collection[int]
    at: Callable[[int], Mapping[str, Any]]

    @functools.cached_property
    def longest(self) -> Mapping[str, Any]:
        """The arguments that the plan has memory for."""
        return self.at(max(self.captured))


@dataclass(frozen=True)
class ForwardRequest:
    """A forward to run from a plan, on ``batch``.

    ``kind``: a word of the plan's key and of messages. ``trace``: arguments → the tensors of the result by name, each a
    clone, and the rest of the result. ``contexts``: around the trace. ``beside``: bytes of the budget that the caller
    takes for itself besides the batch and the results. ``releases``: the caller frees tensors of the batch as soon as
    it has the result. ``changed``: which tensors of the batch the forward may write to in place. ``at_home``: names of
    those, and of results, that are in host memory. ``growing``: ``batch`` is one of several, with one plan for all.
    """

    kind: str
    batch: Mapping[str, Any]
    trace: Callable[..., tuple[Tensors, Any]]
    contexts: Callable[[], Sequence[ContextFactory]]
    beside: Callable[[CapturedStep], int] = lambda _: 0
    releases: bool = False
    changed: Callable[[str], bool] = lambda _: False
    at_home: Collection[str] = ()
    growing: _GrowingBatch | None = None

    @property
    def planned_for(self) -> Mapping[str, Any]:
        """The arguments as the plan has them."""
        return self.batch if self.growing is None else self.growing.longest


def run_forward(state: Session, model: torch.nn.Module, request: ForwardRequest) -> tuple[Tensors, Any]:
    """The tensors of the result by name, in memory of their own, and the rest of the result.

    Raises:
        CaptureError: an argument, an op or a part of the result cannot be planned.
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets.
    """
    with state.placement.hidden():
        return retry_on_budget_change(state.budgets, functools.partial(_run, state, model, request))


def _run(state: Session, model: torch.nn.Module, request: ForwardRequest) -> tuple[Tensors, Any]:
    state.memory.require_own_process()
    # Results are inference tensors where eager's would be.
    with torch.no_grad(), state.memory.lock:
        step = _compiled(state, model, request)
        # A forward that changes what it is given cannot be run again, so that weights are looked at before it.
        again = not any(request.changed(binding.name) for binding in step.vertices_of(InputSource.BATCH))
        state.loader.make_current(model, step, check_ends_later=again)
        outside, on_host = step.vertices_of(InputSource.OUTSIDE), step.captured.at_home
        placed = {b: _empty(b, state.memory.device, on_host=b.vertex in on_host) for b in outside}
        # The last run may still reload the residents, for this very run.
        step.settle()
        if request.growing is not None:
            step.executor.set_length(request.growing.length)
        externals = externals_of(state, model, step, request.batch) | {b.vertex: t for b, t in placed.items()}
        with kept_on_failure(step):
            if again:
                _run_on_current_weights(state, model, step, externals)
            else:
                step.executor.run_out(externals)
        if request.releases and request.growing is not None:
            # The next token has this plan, for which weights are loaded now.
            step.executor.release_inputs([binding.vertex for binding in step.vertices_of(InputSource.BATCH)])
        elif request.releases:
            # The run would hold the tensors that it was given until its last copy, and the next has another plan.
            step.executor.abandon()
        state.reports.on_forward(step, request.kind)
        state.budgets.step_ended()
        return {b.name: tensor for b, tensor in placed.items()}, step.captured.structure


def _run_on_current_weights(
    state: Session, model: torch.nn.Module, step: CompiledStep, externals: dict[int, torch.Tensor]
) -> None:
    generator = generator_state(step)
    try:
        step.executor.run_out(externals)
    finally:
        written = state.loader.weights_seen.finish_check()
    if written:
        # Residents are older than a write that came before this forward.
        step.executor.abandon()
        state.loader.make_current(model, step)
        with generator_from(step, generator):
            step.executor.run_out(externals)


def _empty(binding: InputBinding, device: torch.device, *, on_host: bool) -> torch.Tensor:
    spec = binding.spec
    dtype = getattr(torch, spec.dtype)
    if on_host:
        return copied_from(spec.shape, spec.stride, dtype, device)
    return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device)


def _compiled(state: Session, model: torch.nn.Module, request: ForwardRequest) -> CompiledStep:
    traced, growing = _TracedForward(request.trace), request.growing

    def compiler(options: CompileOptions) -> CompiledStep:
        options = replace(options, trained=_between_updates(state, model, options.trained))
        return compile_forward(
            model,
            request.planned_for,
            forward=traced,
            structure=lambda: traced.structure,
            changed=request.changed,
            at_home=request.at_home,
            options=with_shards(state, model, options, state.setup.config.parallel),
            beside=request.beside,
            lengths=None if growing is None else {length: growing.at(length) for length in growing.captured},
        )

    what = "the reading of" if request.kind == PREFILL else "a forward without gradients on"
    what = f"{what} {batch_text(request.batch)}"
    key = step_key(model, request.planned_for, forward_on=state.memory.device), request.kind
    _require_room(state, key)
    if state.budgets.plan_sets.knows(key):
        state.calls.new_shapes.met()
    elif key not in state.calls.refused:
        state.calls.new_shapes.admit(key)
    try:
        return plan_of(state, model, key, request.contexts, compiler, what)
    except BudgetTooSmall as error:
        # The search takes as long as a plan's, and an evaluation goes on without one.
        state.calls.too_small[key] = state.budgets.grant.total, error.with_traceback(None)
        raise


def _between_updates(state: Session, model: torch.nn.Module, trained: Traits) -> Traits:
    """The traits of trained weights in forwards. An optimizer's writes to pages that are watched are seen, as those to
    frozen weights are: until then a weight need not be loaded again. To read it would take as long as a load."""
    if not (trained.host_has_it and writes_are_watched()):
        return trained
    weights = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return FROZEN if all(map(state.placement.holds, weights)) else trained


def _require_room(state: Session, key: tuple[Hashable, ...]) -> None:
    """Raise BudgetTooSmall where that is known of ``key``."""
    if key not in state.calls.too_small:
        return
    total, known = state.calls.too_small[key]
    if state.budgets.grant.total > total:
        del state.calls.too_small[key]
        return
    raise known.with_parts(known.parts)
