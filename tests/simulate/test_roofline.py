"""Estimated durations: products cost their arithmetic, the rest the bytes that it moves."""

from __future__ import annotations

import pytest

from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import OpCall, OpResult, TaskGraph, TensorArg, TensorSpec, Vertex, VertexKind
from disco_accel.native.backend import backend_of_kind
from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.simulate.roofline import estimate, flops, with_estimates

SPEED = backend_of_kind("cuda").speed


def spec(*shape: int, dtype: str = "bfloat16", broadcast: bool = False) -> TensorSpec:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size
    return TensorSpec(dtype, shape, tuple([0, *strides[1:]] if broadcast else strides))


def call(name: str, *specs: TensorSpec) -> OpCall:
    args = tuple(TensorArg(i, s) for i, s in enumerate(specs))
    return OpCall(name, "default", args, (OpResult(0, specs[0]),))


def kernel(size: int) -> Vertex:
    return Vertex(1, VertexKind.KERNEL, 0, "op", ((0, 0),), (size,))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (call("aten::mm", spec(64, 32), spec(32, 16)), 2 * 64 * 32 * 16),
        (call("aten::addmm", spec(16), spec(64, 32), spec(32, 16)), 2 * 64 * 32 * 16),
        (call("aten::bmm", spec(5, 64, 32), spec(5, 32, 16)), 2 * 5 * 64 * 32 * 16),
        (call("aten::linear", spec(2, 64, 32), spec(16, 32)), 2 * 2 * 64 * 32 * 16),
        (call("aten::_grouped_mm", spec(64, 32), spec(8, 32, 16), spec(8)), 2 * 64 * 32 * 16),
        (call("aten::add", spec(64, 32), spec(64, 32)), 0),
        (
            call("aten::_scaled_dot_product_flash_attention_for_cpu", *[spec(2, 4, 128, 16)] * 3),
            4 * 2 * 4 * 128 * 128 * 16 / 2,
        ),
        (
            call("aten::_scaled_dot_product_flash_attention_for_cpu_backward", *[spec(2, 4, 128, 16)] * 4),
            2.5 * 4 * 2 * 4 * 128 * 128 * 16 / 2,
        ),
    ],
)
def test_arithmetic_is_counted(op: OpCall, expected: float) -> None:
    assert flops(op) == expected


def test_a_large_product_takes_its_arithmetic() -> None:
    op = call("aten::mm", spec(4096, 4096), spec(4096, 4096))
    assert estimate(kernel(2 * 4096 * 4096), op, SPEED) == SPEED.kernel + 2 * 4096**3 / SPEED.half
    single = call("aten::mm", *[spec(4096, 4096, dtype="float32")] * 2)
    assert estimate(kernel(4 * 4096 * 4096), single, SPEED) == SPEED.kernel + 2 * 4096**3 / SPEED.single


def test_what_only_moves_takes_its_bytes() -> None:
    """Two operands read and one result written; what is broadcast is there once; a gather reads what it writes."""
    size = 2 * 1024 * 1024
    both = estimate(kernel(size), call("aten::add", spec(1024, 1024), spec(1024, 1024, broadcast=True)), SPEED)
    assert both == pytest.approx(SPEED.kernel + (2 * size + 2 * 1024) / SPEED.memory)
    rows = estimate(kernel(size), call("aten::embedding", spec(100_000, 1024), spec(1024, dtype="int64")), SPEED)
    assert rows == pytest.approx(SPEED.kernel + 2 * size / SPEED.memory)


def test_every_kernel_of_a_graph_gets_a_duration() -> None:
    vertices = (Vertex(0, VertexKind.INPUT, 0, "x", (), (64,)), kernel(64))
    graph = TaskGraph("g", (Space(0, 1 << 20),), vertices, {1: call("aten::neg", spec(32))})
    for speed in (backend_of_kind(kind).speed for kind in DEVICE_TYPES):
        found = with_estimates(graph, speed)
        assert found.vertices[0] == vertices[0]
        assert found.vertices[1].duration is not None and found.vertices[1].duration >= speed.kernel


def test_eight_bits_are_one_byte() -> None:
    """Read in float8 or int8, written in bfloat16: three bytes an element."""
    for dtype in ("float8_e4m3fn", "int8"):
        op = call("aten::_to_copy", spec(1024, 1024, dtype=dtype))
        assert estimate(kernel(2 << 20), op, SPEED) == pytest.approx(SPEED.kernel + (3 << 20) / SPEED.memory)
