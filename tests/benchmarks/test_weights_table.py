"""The benchmark of weight offloading: what the choice of layers is worth in plans of a training step."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_accel.cli.main import main
from disco_accel.graph.files import write_taskgraph
from tests.support.graphs.lora_graph import LoraShape, lora_graph, prefill_graph


def test_layers_as_residents_are_compared_with_both_planners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No plan beats the bound of the graph; a prefill, which is no chain that turns round, has no answer of layers."""
    shape = LoraShape(layers=1, hidden=1024, ffn=2816, vocabulary=2048, tokens=64, flops=1e12)
    files = [str(tmp_path / name) for name in ("step", "prefill")]
    write_taskgraph(lora_graph(shape, 1), files[0])
    write_taskgraph(prefill_graph(shape, 1), files[1])
    assert main(["bench", "weights", "0", "--graph", *files, "--memory", "31MiB"]) == 0
    step, prefill = capsys.readouterr().out.splitlines()[-2:]
    assert prefill.split()[-3:] == ["-", "-", "-"]
    assert all(float(cell) >= 0.999 for cell in step.split()[-5:-2])
