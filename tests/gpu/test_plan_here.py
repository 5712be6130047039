"""``disco-accel plan --gpu this``: kernels and link of the GPU that is here are measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from disco_accel.cli.main import main
from tests.cli.test_cli_recipe import CONFIG


@pytest.mark.parametrize("task", ["lora", "prefill", "decode"])
def test_this_gpu_is_measured_and_the_smallest_budget_fits(
    task: str, cuda: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del cuda
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
    words = ["plan", "--model", str(tmp_path), "--task", task, "--seq", "32", "--gpu", "this", "--json", "--budget"]
    assert main([*words, "1KiB"]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert refused["measured"] and not refused["without_scratch_of"]
    assert main([*words, str(refused["needed_bytes"])]) == 0
    fits = json.loads(capsys.readouterr().out)
    assert fits["fits"] and fits["step_seconds"] > 0 and fits["peak_bytes"] <= fits["budget_bytes"]
    assert main([*words, str(refused["needed_bytes"] * 98 // 100)]) == 1
