"""PyTorch calls ``autoload`` at the end of its import, in every process that ``tests.emulated.run`` has started."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path


def autoload() -> None:
    """Put the emulated ops in the place of PyTorch's, where the process runs on the emulated device."""
    if os.environ.get("EMULATED_CUDA") != "1":
        return
    import torch

    torch.ops.load_library(os.environ["EMULATED_OPS"])
    torch.ops.emulated.install()
    # PyTorch would choose it for bf16 on this compute capability; EMULATED_CUDNN_SDP=1 lets it.
    torch.backends.cuda.enable_cudnn_sdp(os.environ.get("EMULATED_CUDNN_SDP") == "1")
    atexit.register(_report)


def _report() -> None:
    """Leave a file with what is wrong at the end of a process, for ``tests.emulated.run`` and for the test that started
    the process."""
    from tests.emulated import device

    found = device.complaints() + device.unemulated()
    if found:
        text = "\n".join([" ".join(sys.orig_argv), *found])
        Path(os.environ["EMULATED_REPORTS"], f"{os.getpid()}.txt").write_text(text)
