"""Others read the same prompt: what they leave is compared, and who cannot has its own error in the table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.common.shapes import PRESETS
from benchmarks.prefill import peers as prefill_peers
from benchmarks.prefill import suite as prefill
from benchmarks.prefill.engines import READERS, TITLES
from benchmarks.prefill.peers import Peers, peer_cell, verdict_of
from benchmarks.prefill.worker import COMMAND
from benchmarks.report.pages import section
from benchmarks.step.engines import Job
from benchmarks.step.process import Worker

pytestmark = pytest.mark.usefixtures("forked")
JOB = Job("zero-inference", PRESETS["tiny"], 1, 8, "float32", 0, "cpu", None, None, "timed", "")
EXPECTED = {"logits": torch.ones(4), "keys.0": torch.full((2, 3), 2.0)}


def test_a_row_for_each_engine(tmp_path: Path) -> None:
    """Ours and hooks have eager's bits; ours stays within its budget; the README can show it."""
    words = ["--shape", "tiny", "--tokens", "16", "--memory", "0.9MiB", "--rounds", "2", "--device", "cpu"]
    engines = ["--engines", "in-memory,disco,accelerate", "-o", str(tmp_path / "peers.json")]
    assert prefill_peers.main([*words, *engines]) == 0
    result = json.loads((tmp_path / "peers.json").read_text())
    rows = {row["engine"]: row for row in result["rows"]}
    assert [row["words"] for row in rows.values()] == ["bits"] * 3
    assert 0 < rows["disco"]["used"] <= rows["disco"]["reserved"] <= 0.9 * 2**20 < result["weights"]
    assert rows["disco"]["h2d"] > 0 and rows["disco"]["any_plan"] > 0
    assert "| accelerate cpu_offload |" in section(tmp_path)


def _left(
    folder: Path, changes: dict[str, torch.Tensor], *, engine: str = "zero-inference", sum_: float = 4.0
) -> Worker:
    folder.mkdir()
    worker = Worker(dataclasses.replace(JOB, engine=engine, folder=str(folder)), 1)
    worker.losses = [4.0, sum_]
    save_file(EXPECTED | changes, folder / "outputs.safetensors")
    return worker


def test_other_outputs_are_noticed(tmp_path: Path) -> None:
    """One last bit is too much for ours and rounding for others; another size, value or later prompt is never equal."""
    near = {"logits": torch.tensor([1.0, 1.0, 1.0, 1.0 + 2**-23])}
    workers = [
        _left(tmp_path / "0", {}),
        _left(tmp_path / "1", near),
        _left(tmp_path / "2", near, engine="disco"),
        _left(tmp_path / "3", {"keys.0": torch.full((2, 3), 2.1)}),
        _left(tmp_path / "4", {"keys.0": torch.full((2, 4), 2.0)}),
        _left(tmp_path / "5", {"values.0": torch.ones(1)}),
        _left(tmp_path / "6", {}, sum_=5.0),
    ]
    verdicts = [verdict_of(worker, EXPECTED) for worker in workers]
    assert [v.equal for v in verdicts] == [True, True, False, False, False, False, False]
    assert verdicts[0].words == "bits" and verdicts[1].words == "to 6e-08"


def test_a_peer_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes end with the block; the others' turns go on."""
    script = 'print(\'{"error": "ImportError: no a|b"}\', flush=True)'
    monkeypatch.setattr(prefill_peers, "COMMAND", ("-c", script))
    with Peers(["accelerate"], lambda name, folder: dataclasses.replace(JOB, engine=name, folder=folder), 20) as peers:
        assert peers.turn("accelerate") != peers.turn("accelerate"), "not a number"
        row = peers.rows(EXPECTED, 2)["accelerate"]
    assert row["error"] == "ImportError: no a|b" and not row["equal"] and row["seconds"] == []
    assert peer_cell(row, 1.0) == "cannot run (ImportError)"


def test_a_cell_says_what_is_not_equal() -> None:
    row = {"error": None, "seconds": [2.0, 4.0, 3.0], "equal": True, "words": "bits"}
    assert [peer_cell(row, 2.0), peer_cell(row | {"words": "to 1e-06"}, 2.0), peer_cell(None, 2.0)] == [
        "1.50",
        "1.50 (to 1e-06)",
        "—",
    ]


def test_a_prompt_that_does_not_fit_has_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many cells as headings, and the command goes on."""
    shape = ["--hidden", "64", "--layers", "2", "--sequences", "512", "--vocabulary", "128", "--peers", "none"]
    assert prefill.main([*shape, "--budgets", "0.5", "-o", str(tmp_path / "prefill.json")]) == 0
    (row,) = json.loads((tmp_path / "prefill.json").read_text())["rows"]
    assert "needs at least" in row["error"]
    for line in (prefill.show(row), capsys.readouterr().out.splitlines()[-3]):
        assert line.count("|") == prefill.HEADER.splitlines()[0].count("|") and "needs at least" in line
    assert "needs at least" in section(tmp_path)


@pytest.mark.parametrize("words", [["--engines", "magic"], ["--engines", ""], ["--dtype", "int8"]])
def test_wrong_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefill_peers.main(["--memory", "1MiB", *words])
    assert words[0] in capsys.readouterr().err


def test_every_engine_has_a_title_and_a_process() -> None:
    assert TITLES.keys() == READERS.keys() and COMMAND[0] == "-m"
