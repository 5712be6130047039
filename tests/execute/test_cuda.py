"""What runs on CUDA need of Python, as far as a machine without a GPU can tell."""

from __future__ import annotations

import pytest
import torch

from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import OpCall, OpResult, TaskGraph, TensorArg, TensorSpec, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN
from disco_accel.measure.record import record
from disco_accel.native.backend import release_workspaces, run_device, workspace_bytes
from disco_accel.native.cuda_backend import pin
from disco_accel.native.host_memory import HostMemory

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/gpu covers this")


def test_the_host_device_has_no_index_and_no_workspaces() -> None:
    assert run_device("cpu") == run_device("cpu:0") == torch.device("cpu")
    assert workspace_bytes(torch.device("cpu")) == 0
    release_workspaces(torch.device("cpu"))


@no_gpu
def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cuda:1 does not work here"):
        run_device("cuda:1")
    with pytest.raises(ConfigError, match="meta is not supported"):
        run_device("meta")


@no_gpu
def test_pinning_without_cuda_says_how_much_and_why() -> None:
    memory = HostMemory(1 << 16)
    with pytest.raises(ExecutionError, match=r"pinning 65536 bytes .* failed: .*(libcudart|cudaHostRegister)"):
        memory.pin()
    with pytest.raises(ExecutionError, match="only host memory"):
        pin(torch.empty(8, device="meta"))


def test_ops_are_recorded_as_the_engine_runs_them_outside_autocast() -> None:
    """A product in fp32 stays one when the caller is in a bf16 region."""
    spec = TensorSpec("float32", (1, 8, 8), (64, 8, 1))
    call = OpCall("aten::bmm", "default", (TensorArg(0, spec), TensorArg(1, spec)), (OpResult(0, spec),), "product")
    inputs = tuple(Vertex(i, VertexKind.INPUT, 0, sizes=(256,), traits=FOREIGN) for i in range(2))
    kernel = Vertex(2, VertexKind.KERNEL, 0, "bmm", inputs=((0, 0), (1, 0)), sizes=(256,))
    graph = TaskGraph("product", (Space(0, 1 << 10),), (*inputs, kernel), {2: call})
    plain = record(graph)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = record(graph)
    assert (plain[2].native_out, plain[2].allocations) == (inside[2].native_out, inside[2].allocations)
