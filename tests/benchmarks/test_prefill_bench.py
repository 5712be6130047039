"""The prefill benchmark runs from end to end, and would notice a wrong bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine.suite import Differs
from benchmarks.prefill import unplanned
from benchmarks.prefill.suite import PromptPair, PromptShape, main
from benchmarks.report.pages import section
from disco_accel.cli.main import main as cli

pytestmark = pytest.mark.usefixtures("forked")
TINY = PromptShape(hidden=64, layers=2, tokens=24, batch=1, vocabulary=128, kv_heads=1, dtype=torch.float32)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_row_has_all_engines_and_its_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--hidden", "64", "--layers", "2", "--sequences", "24", "--vocabulary", "128"]
    words = [*shape, "--budgets", "0.8", "--rounds", "1", "--bandwidth", "1e8"]
    pytest.importorskip("deepspeed")
    assert cli(["bench", "prefill", *words, "-o", str(tmp_path / "prefill.json")]) == 0
    assert "same bits" in capsys.readouterr().out
    assert "| 24 |" in section(tmp_path), "the README can show it"
    (row,) = json.loads((tmp_path / "prefill.json").read_text())["rows"]
    assert set(row["times"]) == {"planned", "fixed order", "streamed", "in memory", "resident"}
    assert {name: peer["error"] or peer["words"] for name, peer in row["peers"].items()} == {
        "accelerate": "bits",
        "zero-inference": "bits",
    }
    assert all(len(peer["seconds"]) == 1 for peer in row["peers"].values())
    assert 0 < row["peak"] <= row["budget"] < row["weights"] and row["reload_bytes"] > 0
    assert 0 < row["bound"] <= row["times"]["planned"]["seconds"][0] * 1.05


def test_a_wrong_bit_is_noticed() -> None:
    pair = PromptPair(TINY, 1 << 20, 1e9, "build")
    pair.run_on("planned", pair.step.executor)
    pair.check("planned")
    pair.last["planned"].past_key_values.layers[1].values[0, 0, 3, 5] += 1e-6
    with pytest.raises(Differs, match="planned"):
        pair.check("planned")


def test_forwards_without_a_plan_are_measured_through_a_ring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With eager's bits; other bits are noticed."""
    words = ["--hidden", "64", "--layers", "2", "--tokens", "16", "--vocabulary", "128", "--rounds", "1"]
    assert unplanned.main([*words, "--bandwidth", "1e8"]) == 0
    shown = capsys.readouterr().out
    assert all(f"| {engine} |" in shown for engine in ("in memory", "ring", "module by module"))
    read = unplanned.read_eagerly
    scale = iter((1.0, 1.5) * 9)
    monkeypatch.setattr(unplanned, "read_eagerly", lambda model, ids: _scaled(read(model, ids), next(scale)))
    assert unplanned.main(words) == 1
    assert "differ from eager's" in capsys.readouterr().err


def _scaled(output: Any, factor: float) -> Any:
    output.logits = output.logits * factor
    return output


def test_streaming_takes_at_least_the_time_of_the_link() -> None:
    """The baseline is throttled as the plan's link is, and frees what it copied."""
    total = sum(p.nbytes for p in TINY.model().parameters())
    pair = PromptPair(TINY, int(0.8 * total), 1e7, "build")
    assert pair.step.resident_bytes < 0.9 * total
    _, seconds = pair.run_streamed()
    assert seconds >= (total - pair.step.resident_bytes) / 1e7
    pair.check("streamed")


@pytest.mark.parametrize("words", [["--sequences", "a"], ["--budgets", "0"], ["--sequences", "-4"]])
def test_wrong_lists_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
