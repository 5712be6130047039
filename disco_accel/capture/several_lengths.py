"""A forward captured at several lengths, such as those of a cache that grows: one plan is for all between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from disco_accel.capture.captured_step import CapturedStep, InputSource
from disco_accel.errors import CaptureError
from disco_accel.graph.lengths import STATIC, _Between, _Lengths, _NotAffine, _VaryingCall, varying_calls
from disco_accel.graph.taskgraph import TensorSpec


def lengths_of(captures: Mapping[int, CapturedStep]) -> _Lengths:
    """``captures``: one forward, by length.

    Raises:
        CaptureError: it does not depend on the length by numbers that are affine in it, a result does at all, or so
            does how many random numbers it draws.
    """
    between = _Between(max(captures), min(captures))
    longest, shortest = captures[between.longest], captures[between.shortest]
    graphs = {length: captured.graph for length, captured in captures.items()}
    try:
        if len({len(graph.vertices) for graph in graphs.values()}) > 1:
            raise _NotAffine("the number of kernels")
        calls = varying_calls(graphs)
        for captured in captures.values():
            _require_same_inputs(longest, captured)
    except _NotAffine as error:
        raise CaptureError(
            f"past_key_values: the forward does not depend on the cache's length by sizes alone ({error}); {STATIC}"
        ) from error
    _require_no_draws(calls.values())
    inputs: dict[str, tuple[TensorSpec, TensorSpec]] = {}
    for one, other in zip(longest.bindings, shortest.bindings, strict=True):
        if one.spec == other.spec:
            continue
        if one.source is not InputSource.BATCH:
            raise CaptureError(f"{one.name}: its size depends on the length of a cache that grows; leave it out")
        inputs[one.name] = one.spec, other.spec
    vertices = frozenset(binding.vertex for binding in longest.bindings if binding.name in inputs)
    return _Lengths(between, graphs, calls, inputs, vertices)


def _require_no_draws(calls: Iterable[_VaryingCall]) -> None:
    """Of ``calls``, which depend on a length: the state of the generator behind them would depend on it too."""
    for call in (each.longest for each in calls):
        if call.rng is not None:
            raise CaptureError(
                f"{call.name} in module {call.module or '?'} draws more random numbers for a longer cache, as dropout "
                f"of attention does in training mode; call model.eval(), or {STATIC}"
            )


def _require_same_inputs(one: CapturedStep, other: CapturedStep) -> None:
    for a, b in zip(one.bindings, other.bindings, strict=True):
        if (a.vertex, a.source, a.name) != (b.vertex, b.source, b.name):
            raise _NotAffine(a.name)
    for name, constant in one.constants.items():
        again = other.constants[name]
        if constant is not again and not torch.equal(constant, again):
            raise _NotAffine(name)
    if one.structure != other.structure:
        raise _NotAffine("the result")
