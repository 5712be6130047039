"""Fused kernels for a GPU, from the Triton that Inductor writes: compiled by Triton in a process without CUDA, for the
GPU that another process describes."""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from disco_accel.fuse.inductor import KernelSource

_MOST_BLOCKS = 65535
"""Of a grid along y."""
_WITHOUT_OPT_IN = 48 << 10
"""Bytes of shared memory that every kernel may have."""


def pretend_gpu(properties: Mapping[str, Any]) -> None:
    """From now on Inductor and Triton compile for such a GPU, as of ``Backend.target``, in this process, which must not
    use CUDA."""
    import triton.runtime
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    gpu = SimpleNamespace(**properties)
    capability = 10 * gpu.major + gpu.minor
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: gpu,
        "get_compute_capability": lambda device=None: capability,
        "get_raw_stream": lambda index: 0,
    }
    for name, answer in answers.items():
        setattr(CudaInterface, name, staticmethod(answer))
    for name in ("current_device", "get_device_properties"):
        setattr(CudaInterface.Worker, name, staticmethod(answers[name]))
    torch.cuda.get_device_properties = answers["get_device_properties"]
    torch.cuda.get_device_capability = lambda device=None: (gpu.major, gpu.minor)
    torch.cuda.current_device = answers["current_device"]
    target = GPUTarget("cuda", capability, gpu.warp_size)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    triton.runtime.driver.set_active(driver)
    # It looks for a driver of a GPU that is there.
    triton_helpers.set_driver_to_gpu = lambda: None


def build_cuda_library(
    sources: Sequence[KernelSource | None], refused: dict[int, str], folder: Path, name: str
) -> Path:
    """Compile ``sources``, None where there is none, into a file in ``folder``; those that cannot be launched join
    ``refused``."""
    kernels: dict[str, Any] = {}
    for number, source in enumerate(sources):
        if source is None:
            continue
        try:
            kernels[str(number)] = _compiled(source, folder / f"kernel_{number}.py")
        except Exception as error:
            refused[number] = f"{type(error).__name__}: {error}"
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"kernels": kernels, "refused": {str(n): reason for n, reason in refused.items()}}))
    return path


def _compiled(source: KernelSource, path: Path) -> dict[str, Any]:
    """Code and launch of one kernel; ``path``: for its Python, which Triton reads again."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime.driver import driver

    source_text, arguments, numbers = source
    call = ast.parse(source_text.strip(), mode="eval").body
    assert isinstance(call, ast.Call)
    kernel_name, text = (str(ast.literal_eval(argument)) for argument in call.args[:2])
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"disco_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tuner = getattr(module, kernel_name)
    config, meta = tuner.configs[0], tuner.triton_meta
    constants = {**meta.get("constants", {}), **config.kwargs}
    compiled = triton.compile(
        ASTSource(tuner.fn, meta["signature"], constants, meta["configs"][0]),
        target=driver.active.get_current_target(),
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "debug": False,
            "sanitize_overflow": False,
            # Eager's kernels round after each multiplication.
            "enable_fp_fusion": False,
        },
    )
    sizes = [name for name in meta["signature"] if name.endswith("numel")]
    if len(sizes) != len(numbers) or set(sizes) - {"xnumel", "ynumel"}:
        raise ValueError(f"a kernel over {', '.join(sizes)}")
    blocks = [
        -(-number // config.kwargs[f"{size[0].upper()}BLOCK"])
        for size, number in sorted(zip(sizes, numbers, strict=True))
    ]
    x, y = (*blocks, 1)[:2]
    shared = int(compiled.metadata.shared)
    if y > _MOST_BLOCKS or shared > _WITHOUT_OPT_IN or getattr(compiled.metadata, "global_scratch_size", 0):
        raise ValueError(f"it needs {y} blocks along y and {shared} bytes of shared memory")
    return {
        "name": compiled.metadata.name,
        "code": base64.b64encode(compiled.asm["cubin"]).decode(),
        "launch": [x, y, 1, 32 * int(compiled.metadata.num_warps), shared],
        "order": list(arguments),
        "numbers": list(numbers),
    }
