"""Kernels of runs on the host: compiled, kept on disk, and compared with the ops that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_accel.errors import ExtensionError
from disco_accel.fuse import kernels
from disco_accel.fuse.fused_runs import FUSED
from disco_accel.fuse.kernels import compile_kernels, kernel_of, load_kernels
from disco_accel.graph.taskgraph import Arg, EnumArg, OpCall, OpResult, TensorArg, TensorSpec
from disco_accel.measure.fused_kernels import measure_fused

WIDE = TensorSpec("float32", (8, 64), (64, 1))
HALF = TensorSpec("bfloat16", (8, 64), (64, 1))
COLUMN = TensorSpec("float32", (8, 1), (1, 1))


def inner(name: str, overload: str, args: tuple[Arg, ...], spec: TensorSpec, output: int = -1) -> OpCall:
    return OpCall(f"aten::{name}", overload, args, (OpResult(output, spec),))


def run_of(reads: tuple[TensorSpec, ...], *body: OpCall) -> OpCall:
    results = tuple(r for call in body for r in call.results if r is not None and r.output >= 0)
    args = tuple(TensorArg(i, spec) for i, spec in enumerate(reads))
    return OpCall(FUSED, "default", args, results, body=body)


def scaled(number: float) -> OpCall:
    """x + number * y in float32, and the same in bfloat16."""
    product = inner("mul", "Tensor", (TensorArg(1, WIDE), number), WIDE)
    total = inner("add", "Tensor", (TensorArg(0, WIDE), TensorArg(2, WIDE), 1), WIDE, 0)
    cast = EnumArg("dtype", "bfloat16")
    half = inner("_to_copy", "default", (TensorArg(3, WIDE), cast, None, None, None, False, None), HALF, 1)
    return run_of((WIDE, WIDE), product, total, half)


def gated(op: str) -> OpCall:
    """silu(x) ``op`` y, in bfloat16: with a rounding between the two."""
    silu = inner("silu", "default", (TensorArg(0, HALF),), HALF)
    return run_of((HALF, HALF), silu, inner(op, "Tensor", (TensorArg(2, HALF), TensorArg(1, HALF)), HALF, 0))


def normalised() -> OpCall:
    """x * rsqrt(column + eps)."""
    shifted = inner("add", "Tensor", (TensorArg(1, COLUMN), 1e-5, 1), COLUMN)
    root = inner("rsqrt", "default", (TensorArg(2, COLUMN),), COLUMN)
    return run_of(
        (WIDE, COLUMN), shifted, root, inner("mul", "Tensor", (TensorArg(0, WIDE), TensorArg(3, COLUMN)), WIDE, 0)
    )


CALLS = (scaled(2.0), scaled(3.0), scaled(0.0), scaled(-0.0), gated("mul"), gated("div"), normalised())


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_kernels(CALLS, "cpu")


def test_kernels_have_the_bits_of_their_ops() -> None:
    """With all kinds of numbers; and output 0 may take the place of inputs that are read element by element."""
    found = measure_fused([(call, kernel_of(call) or 0) for call in CALLS], "cpu", 1)
    assert [record.refused for record in found] == [""] * len(CALLS)
    assert [record.over for record in found] == [*[(0, 1)] * 6, (0,)]
    assert all(record.record is not None and record.record.seconds > 0 for record in found)


@pytest.mark.parametrize(
    ("call", "other"), [(scaled(2.0), scaled(3.0)), (gated("mul"), gated("div"))], ids=["fp32", "bf16"]
)
def test_a_kernel_of_other_bits_is_refused(call: OpCall, other: OpCall) -> None:
    """A kernel that computes something else in the place of the right one."""
    wrong = kernel_of(other)
    assert wrong is not None
    (found,) = measure_fused([(call, wrong)], "cpu", 1)
    assert found.record is None
    assert found.differs
    assert "other bits than its ops" in found.refused


def test_calls_that_python_takes_for_equal_have_kernels_of_their_own() -> None:
    """A product with -0.0 has other signs than one with 0.0, whose call is equal to it."""
    assert scaled(0.0) == scaled(-0.0)
    zero, negative = kernel_of(scaled(0.0)), kernel_of(scaled(-0.0))
    assert isinstance(zero, int) and isinstance(negative, int) and zero != negative
    (found,) = measure_fused([(scaled(-0.0), zero)], "cpu", 1)
    assert found.differs


def test_the_next_process_loads_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler; and other calls are not there."""
    monkeypatch.setattr("disco_accel.fuse.kernels._CompilerProcess.compile", lambda *_: pytest.fail("compiles"))
    monkeypatch.setattr(kernels, "_known", {})
    load_kernels(CALLS, "cpu")
    assert all(isinstance(kernel_of(call), int) for call in CALLS)
    load_kernels([scaled(5.0)], "cpu")
    assert kernel_of(scaled(5.0)) is None


def test_a_compiler_that_fails_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has the compiler's last words."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("disco_accel.fuse.kernels.load_extension", lambda: None)
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(ExtensionError, match="fused kernels cannot be compiled"):
        compile_kernels([scaled(7.0)], "cpu")


def test_what_the_compiler_cannot_join_is_refused() -> None:
    """With the reason; the others of the library are there."""
    square = TensorSpec("float32", (8, 8), (8, 1))
    product = inner("mm", "default", (TensorArg(0, square), TensorArg(1, square)), square)
    mixed = run_of((square, square), product, inner("neg", "default", (TensorArg(2, square),), square, 0))
    compile_kernels([mixed, scaled(4.0)], "cpu")
    refused, good = kernel_of(mixed), kernel_of(scaled(4.0))
    assert isinstance(refused, str) and isinstance(good, int)
    (found,) = measure_fused([(mixed, refused)], "cpu", 1)
    assert found.record is None and not found.differs and found.refused == refused != ""
