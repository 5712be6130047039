"""The source of one kernel for a run, from PyTorch's Inductor. It runs in a process of its own: Inductor's settings are
for all threads, and its import takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config as inductor
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from disco_accel.errors import DiscoError
from disco_accel.fuse.evaluate import evaluate
from disco_accel.graph.taskgraph import OpCall, TensorArg, TensorSpec

SETTINGS: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "eager_numerics.use_pytorch_libdevice": True,
    "force_pointwise_cat": True,
    "max_pointwise_cat_inputs": 16,
    "realize_reads_threshold": 1 << 20,
    "realize_acc_reads_threshold": 1 << 20,
    "realize_opcount_threshold": 1 << 20,
    "realize_cpu_opcount_threshold": 1 << 20,
    "realize_cpu_acc_reads_threshold": 1 << 20,
    "fallback_by_default": False,
    "implicit_fallbacks": False,
    "freezing": False,
    "cpp_wrapper": False,
}
"""Results are rounded where eager rounds them, and divisions as eager's; no value inside
a run lies in memory, and nothing is left to another library."""


def _neg(value: torch.Tensor) -> torch.Tensor:
    """Triton's own is 0 - x, which has another sign of zero than eager's."""
    if not value.is_floating_point():
        return 0 - value
    return value * -1.0


class _NotOneKernel(DiscoError):
    """Inductor makes no single kernel of a run."""


def _slice_backward(
    gradient: torch.Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> torch.Tensor:
    """As zeros around it: Inductor's own way writes the zeros to memory first."""
    if step != 1:
        raise _NotOneKernel("a slice with a step")
    dim, size = dim % len(sizes), sizes[dim]
    start, end = (min(max(at + size if at < 0 else at, 0), size) for at in (start, end))
    around = [0] * (2 * (len(sizes) - dim))
    around[-2:] = [start, size - max(start, end)]
    padded: torch.Tensor = torch.ops.aten.constant_pad_nd(gradient, around, 0)
    return padded


KernelSource = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A function in the language of the device; its pointers, by numbers of tensors; and the numbers that it gets behind
them. The tensors are those that the call reads and, behind them, its results."""


_RULES: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.slice_backward.default: _slice_backward,
    torch.ops.aten.neg.default: _neg,
}


def kernel_source(call: OpCall, device: str) -> KernelSource | str:
    """The kernel of a run on ``device``, or why there is none."""
    reads = [arg.spec for arg in call.args if isinstance(arg, TensorArg)]
    writes = [result.spec for result in call.results if result is not None]
    mode = FakeTensorMode()
    with mode:
        given = [_fake(spec, device) for spec in (*reads, *writes)]

    def whole(*tensors: torch.Tensor) -> None:
        for result, out in zip(evaluate(call, tensors[: len(reads)]), tensors[len(reads) :], strict=True):
            out.copy_(result)

    try:
        # Older versions of PyTorch lack some.
        known = vars(inductor)["_config"]
        with inductor.patch({name: value for name, value in SETTINGS.items() if name in known}):
            with mode:
                rules = select_decomp_table() | _RULES
                graph = make_fx(whole, decomposition_table=rules, tracing_mode="real")(*given)
            calls, defined = _lowered(graph, given, mode)
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        return f"{type(error).__name__}: {''.join(first)}"
    if len(calls) != 1 or len(defined) != 1:
        return f"it takes {len(calls)} kernels"
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    pointers = [name for name in calls[0] if not name.isdecimal()]
    numbers = tuple(int(name) for name in calls[0][len(pointers) :] if name.isdecimal())
    others = [name for name in pointers if name not in names]
    if others or len(pointers) + len(numbers) != len(calls[0]):
        return f"it needs {', '.join(others)} besides its operands"
    return defined[0], tuple(names.index(name) for name in pointers), numbers


def _fake(spec: TensorSpec, device: str) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device=device)


def _lowered(
    graph: torch.fx.GraphModule, given: Sequence[torch.Tensor], mode: FakeTensorMode
) -> tuple[list[list[str]], list[str]]:
    """Names of the arguments of each kernel that ``graph`` calls, and the sources of its kernels."""
    calls: list[list[str]] = []
    defined: list[str] = []
    with _heard(calls, defined):
        lowering = GraphLowering(graph, example_inputs=list(given), shape_env=None)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            lowering.run(*given)
            lowering.codegen()
    return calls, defined


@contextmanager
def _heard(calls: list[list[str]], defined: list[str]) -> Iterator[None]:
    """Note the kernels that Inductor's wrapper is told to call and to define."""
    call, define = PythonWrapperCodegen.generate_kernel_call, PythonWrapperCodegen.define_kernel

    def generate_kernel_call(self: Any, kernel_name: str, call_args: Sequence[Any], *rest: Any, **more: Any) -> Any:
        calls.append([str(argument) for argument in call_args])
        return call(self, kernel_name, call_args, *rest, **more)

    def define_kernel(self: Any, kernel_name: str, kernel_body: str, *rest: Any, **more: Any) -> Any:
        defined.append(kernel_body)
        return define(self, kernel_name, kernel_body, *rest, **more)

    hooks: dict[str, Callable[..., Any]] = {
        "generate_kernel_call": generate_kernel_call,
        "define_kernel": define_kernel,
    }
    for name, hook in hooks.items():
        setattr(PythonWrapperCodegen, name, hook)
    try:
        yield
    finally:
        for name, own in (("generate_kernel_call", call), ("define_kernel", define)):
            setattr(PythonWrapperCodegen, name, own)
