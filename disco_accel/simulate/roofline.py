"""Durations of kernels that nobody has measured: the longer of arithmetic and memory traffic on a named device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from disco_accel.graph.op_traits import Arithmetic, op_traits
from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import OpCall, TaskGraph, TensorSpec, Vertex, VertexKind, tensor_args
from disco_accel.simulate.machine import Machine


@dataclass(frozen=True, slots=True)
class Speed:
    """Rates of a device: FLOP/s of matrix products in 16 and in 32 bits, bytes/s of its memory, seconds that any kernel
    takes, and the links that go with it. ``name`` says which device that is."""

    name: str
    half: float
    single: float
    memory: float
    kernel: float
    machine: Machine


_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
_CAUSAL = 0.5
_BACKWARD = 2.5
"""Attention's backward multiplies five pairs of matrices where the forward multiplies two."""


def with_estimates(graph: TaskGraph, speed: Speed, host: Speed | None = None) -> TaskGraph:
    """``graph`` with an estimated duration for every kernel; it needs the calls that capture notes (``graph.ops``).
    ``host``: of devices that lie in host memory, if not ``speed``."""
    on_host = {device.id for device in graph.devices if device.is_host_device}

    def timed(vertex: Vertex) -> Vertex:
        if vertex.kind is not VertexKind.KERNEL:
            return vertex
        own = host if host is not None and vertex.space in on_host else speed
        return replace(vertex, duration=estimate(vertex, graph.ops[vertex.id], own))

    return replace(graph, vertices=tuple(timed(vertex) for vertex in graph.vertices))


def estimates(speed: Speed, host: Speed | None = None) -> GraphPass:
    """``with_estimates`` as a pass."""
    what = f"seconds of each kernel on {speed.name}"
    return GraphPass("estimates", what, partial(with_estimates, speed=speed, host=host))


def estimate(vertex: Vertex, call: OpCall, speed: Speed) -> float:
    """Seconds of one kernel."""
    specs = [arg.spec for arg in tensor_args(call.args)]
    moved = sum(vertex.sizes) + sum(_traffic(spec) for spec in dict.fromkeys(specs))
    if op_traits(call.name).gathers:
        # Of the table only the rows that are asked for.
        moved = 2 * sum(vertex.sizes)
    single = any(spec.dtype in ("float32", "float64") for spec in specs[:2])
    arithmetic = flops(call) / (speed.single if single else speed.half)
    return speed.kernel + max(arithmetic, moved / speed.memory)


def fused_estimate(call: OpCall, speed: Speed) -> float:
    """Seconds of a fused kernel: it reads each of its inputs once, and writes its results."""
    reads = dict.fromkeys((arg.input, arg.spec) for arg in tensor_args(call.args))
    writes = [result.spec for result in call.results if result is not None]
    return speed.kernel + sum(map(_traffic, [*(spec for _, spec in reads), *writes])) / speed.memory


def flops(call: OpCall) -> float:
    """Additions and multiplications of a matrix product or attention; 0 for all else, which memory bounds."""
    return _FLOPS[op_traits(call.name).arithmetic]([arg.spec.shape for arg in tensor_args(call.args)])


Shapes = list[tuple[int, ...]]


def _product(shapes: Shapes) -> float:
    """(.., m, k) times (.., k, n). A tensor that is added comes first and counts nothing."""
    left, right = shapes[-2:]
    return 2.0 * math.prod(left) * right[-1]


def _linear(shapes: Shapes) -> float:
    """(.., k) times the transpose of (n, k)."""
    return 2.0 * math.prod(shapes[0]) * shapes[1][0]


def _attention(shapes: Shapes) -> float:
    """Queries (.., s, d) against keys (.., t, d), and their weights against the values."""
    query, key = shapes[:2]
    return 4.0 * math.prod(query) * key[-2] * _CAUSAL


def _attention_backward(shapes: Shapes) -> float:
    # The gradient of the output comes first.
    return _attention(shapes[1:]) * _BACKWARD


def _grouped(shapes: Shapes) -> float:
    """(tokens, k) times (experts, k, n): each token goes to one expert."""
    return 2.0 * math.prod(shapes[0]) * shapes[1][-1]


_FLOPS: Mapping[Arithmetic, Callable[[Shapes], float]] = {
    Arithmetic.NONE: lambda _: 0.0,
    Arithmetic.PRODUCT: _product,
    Arithmetic.LINEAR: _linear,
    Arithmetic.GROUPED: _grouped,
    Arithmetic.ATTENTION: _attention,
    Arithmetic.ATTENTION_BACKWARD: _attention_backward,
}


def _traffic(spec: TensorSpec) -> int:
    """Bytes read of a tensor; elements expanded along an axis (stride 0) are one element in memory."""
    elements = math.prod(size for size, stride in zip(spec.shape, spec.stride, strict=True) if stride)
    return elements * _BYTES.get(spec.dtype, 4)
