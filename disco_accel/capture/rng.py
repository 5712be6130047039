"""Random ops of a step: which draw live, in eager's order, and which replay the draws of their segment's forward.

Eager execution draws from the default generator as its ops run. Non-reentrant checkpointing sets the generator back to
the state where the segment began before it recomputes, so the k-th random op of a recomputation repeats the k-th of its
forward. Recomputation may stop early, so it may draw less often than the forward, never more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from disco_accel.capture.thread_patches import patched
from disco_accel.capture.trace_log import FORWARD, RECOMPUTE, TraceLog, arguments_of, node_info
from disco_accel.errors import CaptureError
from disco_accel.graph.op_traits import Arithmetic, op_traits
from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import Ref, RngSite, TaskGraph, Vertex
from disco_accel.graph.values import arrives_at_gate


@contextmanager
def user_generator() -> Iterator[None]:
    """Notice a model that sets the user's generator itself, and leave the generator to other threads, which may draw.

    Nothing draws while a step is traced, so this thread sees the generator as it is now all the time, and
    checkpointing may set it to that.

    Raises:
        CaptureError: something under the trace sets the generator or seeds it.
    """
    state, seed = torch.get_rng_state(), torch.initial_seed()
    elsewhere: list[bool] = []

    def refused(_: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*_args: Any, **_kwargs: Any) -> None:
            raise CaptureError(_SEEDS)

        return refuse

    def reading(_: Callable[..., Any]) -> Callable[..., Any]:
        return state.clone

    def setting(_: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(new: torch.Tensor) -> None:
            if type(new) is not torch.Tensor or not torch.equal(new, state):
                raise CaptureError(_SEEDS)

        return set_state

    changes = {"manual_seed": refused, "seed": refused, "get_rng_state": reading, "set_rng_state": setting}
    with ExitStack() as stack:
        for owner in (torch, torch.random):
            for name, make in changes.items():
                stack.enter_context(patched(owner, name, make, lambda: elsewhere.append(True)))
        yield
    if torch.initial_seed() != seed and not elsewhere:
        # Past the names above. No other thread's draw changes the seed.
        torch.set_rng_state(state)
        raise CaptureError(_SEEDS)


_SEEDS = (
    "torch.manual_seed: the model's forward seeds or sets the random generator, or draws from it outside of torch ops, "
    "which a planned step cannot repeat; do it outside of the forward"
)


def random_sites(graph: fx.Graph, log: TraceLog) -> dict[fx.Node, RngSite]:
    """The use of the generator by each op that draws random numbers.

    Raises:
        CaptureError: a recomputed draw that is not the forward's, or one of unknown origin.
    """
    forward: dict[int, list[fx.Node]] = {}
    replayed: dict[int, int] = {}
    slots: dict[fx.Node, int] = {}
    live: list[fx.Node] = []
    replays: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if not draws(node):
            continue
        info = node_info(node)
        _check_origin(node, log)
        if info.phase != RECOMPUTE or info.layer in log.redrawn:
            live.append(node)
            if info.phase == FORWARD:
                forward.setdefault(info.layer, []).append(node)
            continue
        k = replayed.get(info.layer, 0)
        replayed[info.layer] = k + 1
        drawn = forward.get(info.layer, [])
        if k >= len(drawn) or _signature(drawn[k]) != _signature(node):
            raise CaptureError(
                f"{_where(node)} is drawn in the recomputation of a checkpointed segment, but its forward drew "
                f"{_where(drawn[k]) if k < len(drawn) else 'nothing more'}; the segment must do the same both times"
            )
        slots[drawn[k]] = len(slots)
        replays[node] = drawn[k]
    sites = {node: RngSite(slots.get(node, -1)) for node in live}
    return sites | {node: RngSite(slots[twin], replay=True) for node, twin in replays.items()}


def draws(node: fx.Node) -> bool:
    """Whether the call takes numbers from a generator."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Fused attention is tagged as seeded whatever its dropout probability is.
    return bool(arguments_of(node, target).get("dropout_p", 1.0) != 0.0)


def _check_origin(node: fx.Node, log: TraceLog) -> None:
    info = node_info(node)
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if arguments_of(node, target).get("generator") is not None:
        raise CaptureError(
            f"{_where(node)} draws from a generator of its own; a planned step draws from the default one: "
            "leave out generator="
        )
    if info.layer in log.nested:
        raise CaptureError(
            f"{_where(node)} draws random numbers in a checkpointed segment inside another one, "
            "which cannot be replayed; checkpoint one level only, or set its dropout probability to 0"
        )
    if op_traits(target._schema.name).arithmetic is Arithmetic.ATTENTION_BACKWARD:
        raise CaptureError(
            f"{_where(node)} draws the numbers of dropout again from a seed that the forward leaves in host memory, "
            'where no plan reads it; load the model with attn_implementation="eager", or set attention\'s dropout to 0'
        )
    if info.in_backward and info.phase != RECOMPUTE:
        raise CaptureError(
            f"{_where(node)} draws random numbers in the backward, outside of a checkpointed segment that is known; "
            "switch checkpointing on with model.gradient_checkpointing_enable()"
        )


def _where(node: fx.Node) -> str:
    return f"{node.target} in module {node_info(node).module or '?'}"


def _signature(node: fx.Node) -> tuple[Any, ...]:
    """The call with each tensor replaced by its dtype, shape and strides."""
    return (node.target, *fx.node.map_arg((node.args, dict(node.kwargs)), _looks))


def _looks(node: fx.Node) -> Any:
    tensor = node.meta["val"]
    return str((tensor.dtype, tuple(tensor.shape), tensor.stride()))


def chain_draws(loss: Ref) -> GraphPass:
    """The pass whose edges make every schedule draw as eager does: see ``RngSite``. It is run behind those that add
    other edges.

    The loss waits for the last draw of the forward, so that the user's generator is in eager's state when the forward
    returns. The pass raises CaptureError where the forward draws after it has computed the loss.
    """

    def chained(graph: TaskGraph) -> TaskGraph:
        vertices = {v.id: v for v in graph.vertices}
        for id_, other in _waits(graph, vertices, loss):
            vertex = vertices[id_]
            if other not in vertex.after and all(producer != other for producer, _ in vertex.inputs):
                vertices[id_] = replace(vertex, after=(*vertex.after, other))
        return replace(graph, vertices=tuple(vertices.values()))

    return GraphPass("chain draws", "random numbers are drawn in eager's order", chained)


def _waits(graph: TaskGraph, vertices: Mapping[int, Vertex], loss: Ref) -> Iterator[tuple[int, int]]:
    """Yield pairs: a vertex, and the one that it waits for."""
    sites = {id_: call.rng for id_, call in graph.ops.items() if call.rng is not None}
    first_late = min((v.id for v in graph.vertices if _reads_late(v, vertices)), default=len(graph.vertices))
    owner: dict[int, int] = {}
    live = [id_ for id_, site in sorted(sites.items()) if not site.replay]
    for before, id_ in zip([-1, *live], live, strict=False):
        owner[sites[id_].slot] = id_
        if loss[0] < id_ < first_late:
            call = graph.ops[id_]
            raise CaptureError(
                f"{call.name} in module {call.module or '?'} draws random numbers between the loss and its gradient; "
                "compute the loss last, and outside of checkpointed segments"
            )
        if before >= 0:
            yield id_, before
    before_loss = [id_ for id_ in live if id_ < loss[0]]
    if before_loss:
        yield loss[0], max(before_loss)
    for id_, site in sites.items():
        if site.replay:
            yield id_, owner[site.slot]


def _reads_late(vertex: Vertex, vertices: Mapping[int, Vertex]) -> bool:
    return any(arrives_at_gate(vertices[producer]) for producer, _ in vertex.inputs)
