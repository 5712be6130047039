"""Kernels of runs on the host: compiled, kept on disk, and compared with the ops that they stand for."""

from __future__ import annotations

import logging
import shutil
from math import prod
from pathlib import Path

import pytest

from disco_accel.errors import ExtensionError
from disco_accel.fuse import kernels
from disco_accel.fuse.call_json import kernel_text
from disco_accel.fuse.fused_runs import kind_of
from disco_accel.fuse.kernels import compile_kernels, kernel_of, library_kernel, load_kernels
from disco_accel.fuse.twins import alone, half_of, twin_of
from disco_accel.graph.taskgraph import OpCall, TensorArg, TensorSpec
from disco_accel.measure.fused_bits import RESULTS, measure_fused
from tests.support.fused_calls import HALF, gated, inner, nearly, normalised, routed, run_of, scaled

NEAR = 1 + 2.0**-22
CALLS = (
    scaled(2.0),
    scaled(3.0),
    scaled(0.0),
    scaled(-0.0),
    gated("mul"),
    gated("div"),
    normalised(),
    nearly(1.0),
    nearly(NEAR),
    routed(),
)


@pytest.fixture(scope="module", autouse=True)
def compiled(compiler_of_our_priority: None) -> None:
    compile_kernels(CALLS, "cpu")


def test_kernels_have_the_bits_of_their_ops() -> None:
    """With all kinds of numbers; and output 0 may take the place of inputs that are read element by element."""
    found = measure_fused([(call, kernel_of(call) or 0) for call in CALLS], "cpu", 1)
    assert [record.refused for record in found] == [""] * len(CALLS)
    assert [record.over for record in found] == [*[(0, 1)] * 6, (0,), (0,), (0,), (0,)]
    assert all(record.record is not None and record.record.seconds > 0 for record in found)
    assert all(record.within(cold=True).seconds == record.cold_seconds > 0 for record in found)


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


def test_a_last_bit_that_16_bits_hide_is_found_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel whose float32 result is one or two units off before it is rounded to bfloat16."""
    call, other = nearly(1.0), nearly(NEAR)
    twin, other_twin = twin_of(call), twin_of(other)
    assert twin is not None and other_twin is not None
    kernel, wrong_twin = kernel_of(call), kernel_of(other_twin)
    assert isinstance(kernel, int) and wrong_twin is not None
    monkeypatch.setattr(kernels, "_known", {**kernels._known, kernel_text(twin): wrong_twin})
    (found,) = measure_fused([(call, kernel)], "cpu", 1)
    assert found.differs and "in float32" in found.refused


def test_runs_without_functions_or_16_bit_numbers_have_no_twin() -> None:
    """A sum has one right result; and what is in float32 hides nothing."""
    assert twin_of(scaled(2.0)) is None and twin_of(normalised()) is None
    twin = twin_of(gated("div"))
    assert twin is not None and half_of(twin) is None and half_of(gated("div")) == "bfloat16"


def test_a_function_is_tried_alone_on_many_elements() -> None:
    """Whatever shape it has; one call for each number that it gets. Others keep their shape, as slices must."""
    silu = gated("mul").body[0]
    assert prod(alone(silu).body[0].results[0].spec.shape) >= RESULTS
    assert alone(gated("mul").body[1]).args[0] == TensorArg(0, HALF)
    square, cube = (inner("pow", "Tensor_Scalar", (TensorArg(0, HALF), power), HALF, 0) for power in (2, 3))
    assert kind_of(square) != kind_of(cube)


def test_a_kernel_that_fails_is_refused_and_the_next_one_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    """As where memory runs out for it; the log says why."""
    large = TensorSpec("float32", (1 << 46,), (1,))
    huge = run_of((large,), inner("neg", "default", (TensorArg(0, large),), large, 0))
    kernel = kernel_of(scaled(2.0))
    assert isinstance(kernel, int)
    with caplog.at_level(logging.DEBUG, "disco_accel"):
        failed, good = measure_fused([(huge, kernel), (scaled(2.0), kernel)], "cpu", 1)
    assert failed.record is None and not failed.differs and "allocate" in failed.refused
    assert good.record is not None
    assert failed.refused in caplog.text


def test_calls_that_python_takes_for_equal_have_kernels_of_their_own() -> None:
    """A product with -0.0 has other signs than one with 0.0, whose call is equal to it."""
    assert scaled(0.0) == scaled(-0.0)
    zero, negative = kernel_of(scaled(0.0)), kernel_of(scaled(-0.0))
    assert isinstance(zero, int) and isinstance(negative, int) and zero != negative
    (found,) = measure_fused([(scaled(-0.0), zero)], "cpu", 1)
    assert found.differs


def test_the_next_process_loads_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler; and other calls are not there."""
    monkeypatch.setattr(
        "disco_accel.fuse.compiler_process._CompilerProcess.compile", lambda *_: pytest.fail("compiles")
    )
    monkeypatch.setattr(kernels, "_known", {})
    load_kernels(CALLS, "cpu")
    assert all(isinstance(kernel_of(call), int) for call in CALLS)
    load_kernels([scaled(5.0)], "cpu")
    assert kernel_of(scaled(5.0)) is None


def test_a_kernel_is_found_in_any_library_by_its_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever else was compiled with it; not by an index that is not the library's."""
    call = scaled(2.0)
    kernel = kernel_of(call)
    assert isinstance(kernel, int)
    origin = library_kernel(kernel)
    assert origin is not None
    folder, index = tmp_path / origin.folder.name, tmp_path / origin.folder.name / "fused.names"
    shutil.copytree(origin.folder, folder)
    monkeypatch.setattr(kernels, "cache_root", lambda: tmp_path)

    def found() -> bool:
        monkeypatch.setattr(kernels, "_known", {})
        load_kernels([call], "cpu")
        assert len(kernels._known) <= 1
        return isinstance(kernel_of(call), int)

    names = index.read_text()
    assert found() and len(names.split()) > 1
    for wrong in ("", names + names.split()[0] + "\n", "\n".join(reversed(names.split())), "\xff" * 9):
        index.write_text(wrong)
        assert not found()
    index.write_text(names)
    index.chmod(0o666)
    assert not found()
    index.chmod(0o644)
    assert found()
    folder.rename(tmp_path / f"{folder.name}0")
    assert not found()


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
