"""Calls without the dispatcher give ATen's bits, whatever the layout; what they cannot do is left to ATen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disco_accel.execute.executor import Executor
from disco_accel.native.extension import load_extension
from disco_accel.native.op_encoding import dispatcher_overload, encode_spec
from tests.execute.programs import Builder, assert_bits, build, bump_plan, measured, spec_of, step

_SPECIAL = (0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38, float("inf"), -float("inf"), float("nan"), 1.0, -2.5)


def _values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    flat = values.view(-1)
    # Neighbouring arguments meet different special values.
    special = torch.tensor(_SPECIAL[seed:] + _SPECIAL[:seed])
    flat[: len(special)] = special[: flat.numel()]
    return values


def _prepare(name: str, overload: str, args: tuple[Any, ...]) -> tuple[Any, int]:
    load_extension()
    ops = torch.classes.disco_accel.Ops("cpu")
    encoded = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            storage = arg.untyped_storage()
            arg = encode_spec(ops.add_fixed(storage.data_ptr(), storage.nbytes()), spec_of(arg))
        encoded.append(arg)
    return ops, ops.add_op(name, dispatcher_overload(overload), tuple(encoded), name)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def _layouts(seed: int) -> dict[str, torch.Tensor]:
    """Tensors that are, or broadcast to, [3, 5, 8]."""
    return {
        "contiguous": _values((3, 5, 8), seed),
        "transposed": _values((3, 8, 5), seed).transpose(1, 2),
        "permuted": _values((5, 8, 3), seed).permute(2, 0, 1),
        "sliced": _values((3, 5, 16), seed)[:, :, 3:11],
        "stepped": _values((3, 5, 16), seed)[:, :, ::2],
        "column": _values((3, 5, 1), seed),
        "row": _values((8,), seed),
        "middle": _values((5, 1), seed),
        "single": _values((1,), seed),
        "zero-dim": torch.tensor(-0.37),
    }


@pytest.mark.parametrize("output", ["contiguous", "transposed"])
@pytest.mark.parametrize("second", [*_layouts(0), "number"])
@pytest.mark.parametrize("first", list(_layouts(0)))
def test_elementwise_calls_give_atens_bits(first: str, second: str, output: str) -> None:
    """Every pair of layouts and a Python number, with signed zeros, denormals, infinities and NaN among the values."""
    a = _layouts(0)[first]
    b: Any = 0.1 if second == "number" else _layouts(4)[second]
    for name in ("add", "sub", "mul", "div"):
        op = getattr(torch.ops.aten, name)
        want = torch.empty(3, 5, 8) if output == "contiguous" else torch.empty(3, 8, 5).transpose(1, 2)
        got = torch.zeros_like(want)
        op.out(a.expand(3, 5, 8), b, out=want)
        extra = (1,) if name in ("add", "sub") else ()
        ops, prepared = _prepare(f"aten::{name}", "out", (a, b, *extra, got))
        assert ops.is_direct(prepared)
        ops.run(prepared)
        assert torch.equal(_bits(got), _bits(want)), name
    for name, overload, extra in (("neg", "out", ()), ("rsqrt", "out", ()), ("pow", "Tensor_Scalar_out", (2,))):
        want, got = torch.empty(3, 5, 8), torch.zeros(3, 5, 8)
        getattr(getattr(torch.ops.aten, name), overload)(a.expand(3, 5, 8), *extra, out=want)
        ops, prepared = _prepare(f"aten::{name}", overload, (a, *extra, got))
        assert ops.is_direct(prepared)
        ops.run(prepared)
        assert torch.equal(_bits(got), _bits(want)), name


@pytest.mark.parametrize("shape", [(2, 2, 2), (16, 32, 32), (16, 4, 32), (33, 17, 65), (4, 64, 128), (7, 3, 5)])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt", "sliced"])
def test_small_products_give_atens_bits(shape: tuple[int, int, int], layout: str) -> None:
    """Matrices as they lie, transposed, and as slices of wider ones."""
    m, n, k = shape
    a = _values((k, m), 0).t() if layout[0] == "t" else torch.randn(m, k)
    b = _values((n, k), 0).t() if layout[1] == "t" else torch.randn(k, n)
    if layout == "sliced":
        a, b = torch.randn(m, k + 3)[:, 2 : k + 2], torch.randn(k, n + 5)[:, 1 : n + 1]
    got = torch.zeros(m, n)
    ops, prepared = _prepare("aten::mm", "out", (a, b, got))
    ops.run(prepared)
    assert ops.is_direct(prepared)
    assert torch.equal(_bits(got), _bits(a @ b))


@pytest.mark.parametrize(
    ("name", "overload", "args"),
    [
        ("mm", "out", (torch.randn(256, 256), torch.randn(256, 256), torch.zeros(256, 256))),
        ("mm", "out", (torch.randn(1, 8), torch.randn(8, 8), torch.zeros(1, 8))),
        ("mm", "out", (torch.randn(8, 8)[:, ::2], torch.randn(4, 8), torch.zeros(8, 8))),
        ("mul", "out", (torch.randn(8).bfloat16(), torch.randn(8).bfloat16(), torch.zeros(8).bfloat16())),
        ("mul", "out", (torch.randn(1 << 15), torch.randn(1 << 15), torch.zeros(1 << 15))),
        ("add", "out", (torch.randn(8), torch.randn(8), 0.5, torch.zeros(8))),
        ("pow", "Tensor_Scalar_out", (torch.randn(8), 3, torch.zeros(8))),
        ("mul", "out", (torch.randn(0), torch.randn(0), torch.zeros(0))),
    ],
)
def test_other_calls_go_through_the_dispatcher(name: str, overload: str, args: tuple[Any, ...]) -> None:
    """Large ones, vectors, other dtypes, layouts that ATen copies first, scaled sums: all give ATen's bits too."""
    ops, prepared = _prepare(f"aten::{name}", overload, args)
    assert not ops.is_direct(prepared)
    ops.run(prepared)
    want = torch.zeros_like(args[-1])
    schema = getattr(getattr(torch.ops.aten, name), overload)._schema
    named = {schema.arguments[i].name: args[i] for i in range(len(args) - 1) if schema.arguments[i].kwarg_only}
    plain = [args[i] for i in range(len(args) - 1) if not schema.arguments[i].kwarg_only]
    getattr(getattr(torch.ops.aten, name), overload)(*plain, **named, out=want)
    assert torch.equal(args[-1], want)


def test_external_operands_follow_their_pointer() -> None:
    """A step reads the tensors that it was given, not those of the step before."""

    def program(b: Builder, g: torch.Generator) -> None:
        x, y = (b.input(torch.randn(6, 7, generator=g)) for _ in range(2))
        total = b.call("add.Tensor", x, y.view(lambda t: t[:, 2:3]), keep="sum")
        b.call("mm", total, y.view(lambda t: t.t()), keep="product")

    builder = build(program)
    graph, records = measured(builder)
    with Executor(bump_plan(graph), graph.ops, records, clean={}) as executor:
        for seed in range(3):
            inputs = build(program, seed)
            assert_bits(step(executor, inputs), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("number", [0.25, 0.1, 3, 1e-6, -65504.5, True])
def test_numbers_keep_their_bits_in_every_dtype(dtype: torch.dtype, number: float) -> None:
    """x * 0.1 in reduced precision multiplies by 0.1, not by what the dtype makes of it."""
    x = torch.randn(40, generator=torch.Generator().manual_seed(0)).to(dtype)
    for name in ("add", "sub", "mul", "div"):
        if name == "sub" and number is True:
            continue
        extra = (1,) if name in ("add", "sub") else ()
        want = getattr(torch.ops.aten, name).Tensor(x, number)
        if want.dtype is not dtype:
            continue
        got = torch.zeros_like(want)
        ops, prepared = _prepare(f"aten::{name}", "out", (x, number, *extra, got))
        ops.run(prepared)
        assert torch.equal(got, want), name
