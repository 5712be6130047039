"""A prepared model's step on its way into the plan table: captured, planned, bound to the host's bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.capture.fake_inputs import batch_tensors
from disco_accel.capture.parts import named_parts
from disco_accel.capture.several_lengths import lengths_of
from disco_accel.capture.step import capture_forward, capture_step
from disco_accel.capture.traced_modules import Forward
from disco_accel.decompose.cache_at_home import with_cache_at_home
from disco_accel.decompose.micro_batches import StepOnParts
from disco_accel.errors import BudgetTooSmall
from disco_accel.execute.engine_options import makes_graphs
from disco_accel.execute.executor import EngineOptions
from disco_accel.graph.lengths import _Lengths
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import BETWEEN_DEVICES, NAME_OF, TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.traits import FOREIGN, Traits
from disco_accel.measure.costs import Measured
from disco_accel.measure.fused_kernels import fusing_on
from disco_accel.measure.record import OpRecord
from disco_accel.measure.record_lengths import records_at_ends
from disco_accel.native.backend import backend_of, run_device
from disco_accel.plan import Machine
from disco_accel.plan.plan_cache import PlanCache
from disco_accel.simulate.machine import DEFAULT_LINKS, Link
from disco_accel.sizes import format_size
from disco_accel.step.compile.boundary import Boundary
from disco_accel.step.compile.budget_parts import (
    Budget,
    bytes_on_host,
    leaving_bytes,
    outputs_bytes,
    require_host_memory,
)
from disco_accel.step.compile.compiled_step import CompiledStep, host_bytes, shared_weights
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.compile.pipeline import PlannedStep, PlannerSettings, at_boundary, with_fused_kernels
from disco_accel.step.compile.planned_step import choice_of_rows, plan_in_chunks
from disco_accel.step.compile.stages import Chunks, PlanRequest, Sharing, StagedStep, whole_step
from disco_accel.step.placement.shard_memory import ShardMemory, packed_bytes
from disco_accel.version import __version__

logger = logging.getLogger("disco_accel")

_TAKING_TURNS = 0.6
"""Copies in both directions take turns on a link that brings less than so much of a direction's rate while both run. An
H200 behind PCIe 5 brings 0.87 of it (48 of 55 GB/s, 2026-11-26)."""

PlanCheck = Callable[[MemGraph, Machine], None]
"""Gets a plan before memory is taken for it, and the machine that plans are compared on; it may raise."""


@dataclass(frozen=True)
class CompileOptions:
    """How a step is planned and run; ``memory`` is the whole device budget, ``host_memory`` the host's, in bytes.

    ``others``: as of ``Budget``; a step that does not fit beside them gets an arena of its own.
    ``plan_seconds``: time for the search, None = as much work as the graph is worth. ``plan_cache``: folder for plans
    of earlier runs; None = always plan. ``say``: told of each stage as it begins.
    ``captured`` is called when the trace is over. ``trained``: as in ``capture_step``. ``gather`` puts host tensors
    that a step loads, and that no attribute holds, where it loads them from fast. ``devices`` share the step, each
    with ``memory``. ``shards``: name of a weight → the dimension that is cut, if each device gets a part of it;
    ``shard_memory`` has these parts. ``chunks``: as in ``PlanRequest``. ``recompute``: as in ``decide``.
    ``fuse``: plans may use fused kernels. ``link_rates``: as of ``machine_of``. ``boundary``: as in
    ``PlannerSettings``. ``check``: of the plan.
    """

    memory: int
    host_memory: int
    planner: str
    policy: str
    engine: EngineOptions
    rounded: int = 0
    plan_seconds: float | None = None
    plan_cache: str | None = None
    contexts: Sequence[Callable[[], Any]] = ()
    say: Callable[[str], None] = lambda _: None
    captured: Callable[[], None] = lambda: None
    trained: Traits = FOREIGN
    gather: Callable[[Iterable[torch.Tensor]], None] = lambda _: None
    devices: int = 1
    shards: Mapping[str, int] | None = None
    shard_memory: ShardMemory | None = None
    chunks: Chunks = 1
    recompute: str = "auto"
    fuse: bool = False
    check: PlanCheck = lambda *_: None
    others: int = 0
    link_rates: Mapping[str, float] = field(default_factory=dict)
    boundary: Boundary = field(default_factory=dict)


def compile_step(
    model: torch.nn.Module,
    fitted: FittedBatch,
    *,
    forward: Callable[..., Any],
    options: CompileOptions,
    outputs: Sequence[str] = ("loss",),
    differentiated: int = 1,
    cut: bool = False,
) -> CompiledStep:
    """Capture, record, plan and verify one training step of ``model`` for batches shaped like ``fitted``.

    ``outputs``, ``differentiated``: as in ``capture_step``. ``cut``: the user gets outputs without padding, in
    copies of their own.

    Raises:
        CaptureError: an op or module cannot be captured.
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets, not arenas.
    """
    began = time.perf_counter()
    device, sharing = run_device(options.engine.device), _sharing(options, fitted)
    captured = capture_step(
        model,
        fitted.part(0),
        forward=forward,
        contexts=options.contexts,
        device=device,
        outputs=outputs,
        differentiated=differentiated,
        trained=options.trained,
        rewrite=sharing.of_one,
    )
    options.captured()
    whole = whole_step(captured, sharing)
    tensors = {k: v for k, v in fitted.batch.items() if isinstance(v, torch.Tensor)}
    leaving = (1 + cut) * outputs_bytes(whole.captured)
    return _compile(model, whole, sharing, tensors, leaving, options, began)


def _sharing(options: CompileOptions, fitted: FittedBatch) -> Sharing:
    """How devices share the step on ``fitted``."""
    parallel = fitted.parallel if options.shards is None else "tensor"
    return Sharing(options.devices, parallel, fitted.parts, fitted.divided, options.shards or {})


def compile_forward(
    model: torch.nn.Module,
    kwargs: Mapping[str, Any],
    *,
    forward: Forward,
    structure: Callable[[], Any],
    options: CompileOptions,
    beside: Callable[[CapturedStep], int],
    changed: Callable[[str], bool] = lambda _: False,
    at_home: Collection[str] = (),
    lengths: Mapping[int, Mapping[str, Any]] | None = None,
) -> CompiledStep:
    """As ``compile_step``, for the outputs that ``forward`` returns without gradients, each a clone.

    They are written to memory of the caller's, as in ``capture_forward``. ``structure``: asked after the capture for
    ``CapturedStep.structure``. ``beside``: bytes of the budget that the caller needs for itself, besides the batch and
    that memory. ``changed``: as in ``capture_forward``. ``at_home``: as in ``with_cache_at_home``.
    ``lengths``: arguments at several lengths, ``kwargs`` at the longest: the plan is for all lengths between.

    Raises:
        CaptureError: an op or module cannot be captured.
        BudgetTooSmall: with ``needed`` and ``given`` as whole budgets, not arenas.
    """
    began = time.perf_counter()
    device, sharing = run_device(options.engine.device), _sharing(options, FittedBatch(kwargs))

    def capture(arguments: Mapping[str, Any]) -> CapturedStep:
        captured = capture_forward(
            model,
            arguments,
            forward=forward,
            contexts=options.contexts,
            device=device,
            outside=lambda _: True,
            changed=changed,
            trained=options.trained,
            rewrite=sharing.of_one,
        )
        return replace(captured, structure=structure())

    if lengths is None:
        captured = with_cache_at_home(capture(kwargs), at_home)
    else:
        captures = {length: capture(arguments) for length, arguments in lengths.items()}
        captured = replace(captures[max(captures)], lengths=lengths_of(captures))
        # A fused kernel is compiled for one length.
        options = replace(options, fuse=False)
    options.captured()
    outputs = sum(leaving_bytes(captured).values()) + beside(captured)
    on_device = {name: tensor for name, tensor in batch_tensors(kwargs).items() if name not in at_home}
    return _compile(model, whole_step(captured, sharing), sharing, on_device, outputs, options, began)


def _compile(
    model: torch.nn.Module,
    whole: StepOnParts,
    sharing: Sharing,
    batch: Mapping[str, torch.Tensor],
    outputs: int,
    options: CompileOptions,
    began: float,
) -> CompiledStep:
    """The rest of ``compile_step``; ``outputs``: bytes outside the arena for outputs that leave it."""
    seconds = {"capture": time.perf_counter() - began}
    engine, device = options.engine, run_device(options.engine.device)
    source, at_shortest = _source(engine, whole.captured.lengths)
    trainable = [p for p in model.parameters() if p.requires_grad]
    # The host's optimizer has them, their gradients and its state there.
    on_device = [] if options.trained.host_has_it else trainable
    # Chunks round otherwise: whether there are any must not hang by the steps before.
    others = options.others if options.chunks == 1 else 0
    graphs = makes_graphs(engine)
    budget = replace(Budget.of(options.memory, on_device, batch.values(), outputs, has_graphs=graphs), others=others)
    sharing = replace(sharing, peers=options.devices > 1 and _copies_straight(engine, options.devices))
    settings = _settings(options)
    # Attempts are compared without fused kernels, each with its own boundary: those of the one that is taken follow.
    plain = replace(settings, fusing=None, boundary={})
    asked = PlanRequest(sharing, source, budget, plain, options.chunks, device, say=options.say)
    made = _planned(whole, asked)
    captured, costs = made.captured, made.costs
    assert costs is not None
    if settings.fusing is not None:
        # Those of an earlier process are there at once; others are compiled beside the first steps.
        settings.fusing.use_compiled(made.planned.graph)
    planned = with_fused_kernels(captured, at_boundary(captured, made.planned, settings), settings, soon=True)
    if captured.lengths is not None:
        # Refuses what passes have made of kernels that depend on the length.
        captured.lengths.found_in(planned.graph)
    _tell(planned, options, asked.machine)
    options.gather(captured.constants.values())
    given, packed = (bytes_on_host(planned.plan), options.rounded), _packed_bytes(model, captured, options)
    require_host_memory(options.host_memory, planned.graph, *given, captured.copies, packed)
    clean = host_bytes(model, captured, options.shard_memory)
    return CompiledStep(
        captured,
        planned.graph,
        planned.plan,
        costs.records,
        clean,
        planned.budget,
        engine,
        settings,
        seconds | {"record": made.seconds} | planned.seconds,
        planned.cache_use,
        shards=options.shard_memory,
        chunked_kernels=0 if made.chunked is None else made.chunked.kernels,
        recomputation=planned.recomputation,
        fused=planned.fused,
        hasty=planned.hasty,
        rows=choice_of_rows(whole, asked, made),
        at_shortest=at_shortest,
    )


def _planned(whole: StepOnParts, asked: PlanRequest) -> StagedStep:
    """In memory beside the arenas of other steps, or, where it does not fit, in all."""
    try:
        return plan_in_chunks(whole, asked)
    except BudgetTooSmall:
        if not asked.budget.others:
            raise
        return plan_in_chunks(whole, replace(asked, budget=replace(asked.budget, others=0)))


def _source(engine: EngineOptions, lengths: _Lengths | None) -> tuple[Measured, Mapping[int, OpRecord]]:
    """The costs of kernels on this engine; and records at the shortest length of kernels that depend on one."""
    source = Measured(engine.device, engine.compute_threads, engine.compute_streams)
    if lengths is None:
        return source, {}
    ends = records_at_ends(lengths.graphs, lengths.calls, engine.device, engine.compute_threads, source.known)
    varying = [(lengths.calls[kernel].longest, record) for kernel, (record, _) in ends.items()]
    return replace(source, varying=varying), {kernel: record for kernel, (_, record) in ends.items()}


def _tell(planned: PlannedStep, options: CompileOptions, machine: Machine) -> None:
    """Warnings about a plan that is made. Raises as ``options.check``."""
    used = len({vertex.space for vertex in planned.graph.vertices if vertex.kind is VertexKind.KERNEL})
    if used < options.devices:
        logger.warning("devices: %d of %d have kernels: the step has no more layers", used, options.devices)
    options.check(planned.plan, machine)
    for note in planned.notes:
        logger.warning("%s", note)


def _copies_straight(engine: EngineOptions, count: int) -> bool:
    backend = backend_of(run_device(engine.device))
    return backend.copies_straight(backend.others(engine.devices, count))


def _packed_bytes(model: torch.nn.Module, captured: CapturedStep, options: CompileOptions) -> int:
    """Bytes of host memory for copies of parts of weights."""
    cut = shared_weights(captured)
    if options.shard_memory is None or not cut:
        return 0
    weights = {part.name: part.tensor for part in named_parts(model, remove_duplicate=False)}
    packed = packed_bytes(cut, weights)
    options.say(f"packing columns of weights for each device, {format_size(packed)} more of host memory")
    return packed


def _settings(options: CompileOptions) -> PlannerSettings:
    settings = PlannerSettings(
        options.planner,
        options.policy,
        machine_of(options.engine, options.link_rates),
        options.plan_seconds,
        recompute=options.recompute,
        fusing=fusing_on(options.engine.device, options.engine.compute_threads) if options.fuse else None,
        host_memory=options.host_memory,
        rounded=options.rounded,
        boundary=options.boundary,
    )
    if options.plan_cache is None:
        return settings
    return replace(settings, cache=PlanCache(options.plan_cache), environment=_environment(options.engine))


def _environment(engine: EngineOptions) -> dict[str, str]:
    """Facts that a stored plan depends on beside its graph and the planner."""
    device = run_device(engine.device)
    return {
        "torch": torch.__version__,
        "disco_accel": __version__,
        "device": f"{device.type} {backend_of(device).hardware()}",
        "threads": str(engine.compute_threads or torch.get_num_threads()),
        "streams": str(engine.compute_streams),
    }


def machine_of(engine: EngineOptions, rates: Mapping[str, float]) -> Machine | None:
    """The machine that plans are compared on: the throttled link where there is one, else that of ``rates``, else the
    planner's own. ``rates``: measured by the self-check, in bytes/s: ``h2d``, ``d2h``, and ``both`` for each way while
    both run."""
    if engine.link_bandwidth is not None:
        link = Link(engine.link_bandwidth, engine.link_latency)
        return Machine(links=dict.fromkeys((TO_DEVICE, TO_HOST, BETWEEN_DEVICES), link))
    if not {"h2d", "d2h"} <= rates.keys():
        return None
    up, down = (_rounded(rates[name]) for name in ("h2d", "d2h"))
    if rates.get("both", up) < _TAKING_TURNS * min(up, down):
        up = down = min(up, down)
        joint: tuple[tuple[str, ...], ...] = ((NAME_OF[TO_DEVICE], NAME_OF[TO_HOST]),)
    else:
        joint = ()
    links = {route: replace(DEFAULT_LINKS[route], bandwidth=rate) for route, rate in ((TO_DEVICE, up), (TO_HOST, down))}
    return Machine(links=links, joint=joint)


def _rounded(rate: float) -> float:
    """To two digits: a plan that is kept on disk is for the same link when that was measured again."""
    return float(f"{rate:.1e}")
