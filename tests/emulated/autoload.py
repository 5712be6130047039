"""PyTorch calls ``autoload`` at the end of its import, in every process that ``tests.emulated.run`` has started."""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_SPACES = {"bitsandbytes": "bitsandbytes", "optimum.quanto": "quanto"}
"""Module → the name under which it registers ops with CUDA kernels of its own, beside CPU kernels."""


def autoload() -> None:
    """Put the emulated ops in the place of PyTorch's, where the process runs on the emulated device."""
    if os.environ.get("EMULATED_CUDA") != "1":
        return
    import torch

    torch.ops.load_library(os.environ["EMULATED_OPS"])
    torch.ops.emulated.install()
    # PyTorch would choose it for bf16 on this compute capability; EMULATED_CUDNN_SDP=1 lets it.
    torch.backends.cuda.enable_cudnn_sdp(os.environ.get("EMULATED_CUDNN_SDP") == "1")
    sys.meta_path.insert(0, _OpsOfLibraries())
    atexit.register(_report)


class _OpsOfLibraries(importlib.abc.MetaPathFinder):
    """Puts the emulation in the place of a library's CUDA kernels when it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _SPACES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_replace(module: ModuleType) -> None:
                import torch

                run(module)
                torch.ops.emulated.install_space(_SPACES[name])

            spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def _report() -> None:
    """Leave a file with what is wrong at the end of a process, for ``tests.emulated.run`` and for the test that started
    the process."""
    from tests.emulated import device

    found = device.complaints() + device.unemulated()
    if found:
        text = "\n".join([" ".join(sys.orig_argv), *found])
        Path(os.environ["EMULATED_REPORTS"], f"{os.getpid()}.txt").write_text(text)
