"""Fused kernels on the emulated GPU: C++ for the host, launched by the emulated driver as a GPU's code would be."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from disco_accel.fuse import kernels
from disco_accel.fuse.host_library import ANSWER, symbol_of
from disco_accel.graph.taskgraph import OpCall, TensorArg, TensorSpec
from disco_accel.measure import fused_bits, fused_kernels
from disco_accel.native.cuda_backend import CudaBackend


def extent(spec: TensorSpec) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    elements = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    return elements * int(getattr(torch, spec.dtype).itemsize)


def launched(path: str, calls: Mapping[int, OpCall]) -> dict[int, kernels.Kernel]:
    """Handles of the kernels of a library of C++, for tensors of the emulated GPU, by number."""
    library = ctypes.CDLL(path)
    refused = json.loads(ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, ANSWER))))["refused"]
    found: dict[int, kernels.Kernel] = {}
    for number, call in calls.items():
        if str(number) in refused:
            found[number] = refused[str(number)]
            continue
        reads = [arg.spec for arg in call.args if isinstance(arg, TensorArg)]
        writes = [result.spec for result in call.results if result is not None]
        lines = [path, symbol_of(number), *(f"{extent(spec)} 0" for spec in reads)]
        lines += [f"{extent(spec)} 1" for spec in writes]
        code = torch.tensor(list("\n".join(lines).encode() + b"\n\0"), dtype=torch.uint8)
        order = list(range(len(reads) + len(writes)))
        launch = [1, 1, 1, 32, 0]
        handle = torch.ops.disco_accel.fused_cuda_kernel(code, symbol_of(number), launch, order, [])
        found[number] = int(handle)
    return found


@contextmanager
def fused_on_emulated_gpu() -> Iterator[None]:
    """Inside, kernels of the emulated GPU are compiled for the host, however short steps are; none are known yet."""

    def of_part(part: kernels._Part, path: str) -> tuple[dict[int, kernels.Kernel], str]:
        return launched(path, part.calls), hashlib.sha256(Path(path).read_bytes()).hexdigest()

    fused_kernels.fusing_on.cache_clear()
    with (
        mock.patch.object(CudaBackend, "target", lambda backend: None),
        mock.patch.object(kernels._Part, "_load", of_part),
        mock.patch.object(kernels, "_known", {}),
        mock.patch.object(fused_kernels, "WORTH_SECONDS", 0.0),
        # An op takes long here, and small tensors many draws; tests/fuse compares more.
        mock.patch.object(fused_bits, "RESULTS", 1 << 12),
    ):
        yield
    fused_kernels.fusing_on.cache_clear()
