"""Stage ``qlora_1x1024``: ``bench step`` at 70B shape with NF4 weights within 22 GiB, beside all of them in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.step import figures_of
from benchmarks.gpu.suite import NOT_HERE
from benchmarks.quantised import folder_of
from benchmarks.step import suite as step
from benchmarks.step.table import cell_text, table
from disco_accel.errors import ConfigError
from disco_accel.native.backend import run_device, workspace_bytes

_SMALL_ARENA = 3 << 18


def measure(device: str, small: bool, stage: str) -> dict[str, Any]:
    """As the stages ``step_*``; it says so where there is no bitsandbytes, or no room for all weights at once."""
    try:
        folder_of("nf4")
    except ConfigError as error:
        return {NOT_HERE: str(error)}
    batch, tokens = stage.removeprefix("qlora_").split("x")
    words = ["--shape", "70b", "--batch", batch, "--tokens", tokens, "--memory", "22GiB", "--rounds", "2", "--apart"]
    if small:
        budget = _SMALL_ARENA + 2 * workspace_bytes(run_device(device))
        words = ["--shape", "tiny", "--tokens", "16", "--rank", "4", "--rounds", "2", "--memory", str(budget)]
    result = step.run(
        [*words, "--quant", "nf4", "--engines", "disco,in-memory", "--dtype", "bfloat16", "--device", device]
    )
    print(table(result))
    out = Path(os.environ.get("OUT") or "out/gpu")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{stage}.json").write_text(json.dumps(result, indent=1))
    return without_reference(result)


def without_reference(result: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the rows; why eager in memory could not run is one of them, for its weights may not fit."""
    failed = [row for row in result["rows"] if row["error"] is not None and not row["ours"]]
    rows = [row for row in result["rows"] if row not in failed]
    return figures_of({**result, "rows": rows}) | {row["engine"]: cell_text(row["error"]) for row in failed}
