"""The process that compiles fused kernels: a line of JSON for each library that it is asked for, and one answer."""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOWER = 10
"""A lower priority, as ``nice`` counts them: a training step runs meanwhile. The lowest one would wait for ever where
steps keep all cores busy."""


def compile_library(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the kernels of ``request``. The answer has the path of the library, or an error."""
    from disco_accel.fuse.call_json import call_of
    from disco_accel.fuse.cuda_library import build_cuda_library, pretend_gpu
    from disco_accel.fuse.host_library import build_host_library
    from disco_accel.fuse.inductor import kernel_source

    gpu = request["gpu"]
    if gpu is not None:
        pretend_gpu(gpu)
    found = [kernel_source(call_of(data), "cpu" if gpu is None else gpu["kind"]) for data in request["calls"]]
    sources = [None if isinstance(source, str) else source for source in found]
    refused = {number: source for number, source in enumerate(found) if isinstance(source, str)}
    build = build_host_library if gpu is None else build_cuda_library
    path = build(sources, refused, Path(request["folder"]), request["name"])
    return {"path": str(path)}


def main() -> None:
    """Serve until stdin ends."""
    with suppress(OSError):
        os.nice(_LOWER)
    answers = os.dup(1)
    # Whatever a library prints is no answer.
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        try:
            answer = compile_library(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error).strip()[-2000:]}"}
        os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
