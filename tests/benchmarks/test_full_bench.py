"""``bench full`` trains all weights with every engine to eager's bits and says what a step is made of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.common.shapes import PRESETS
from benchmarks.full import suite as full
from benchmarks.full.engines import ENGINES
from benchmarks.full.table import HEADER, OURS, TITLES, judge_whole, table
from benchmarks.report import pages as report
from benchmarks.step.engines import Job
from benchmarks.step.process import Worker
from benchmarks.step.table import Verdict
from disco_accel.cli.main import BENCHMARKS
from disco_accel.cli.main import main as cli

pytestmark = pytest.mark.usefixtures("forked")
JOB = Job("host-step", PRESETS["tiny"], 1, 8, "float32", 0, "cpu", 1 << 20, 1e9, "timed", "")


@pytest.mark.long
def test_ours_train_to_the_bits_of_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses, gradients and weights, in half of what eager holds, which is too little with the optimizer on the device;
    updates that are put off run in plans; every byte of weights and gradients crosses the link once."""
    words = ["--shape", "tiny", "--tokens", "8", "--rounds", "1", "--share", "0.5", "--bandwidth", "1e9"]
    engines = "in-memory,resident,device,host-step,host-deferred,host-half"
    assert cli(["bench", "full", *words, "--engines", engines, "-o", str(tmp_path / "full.json")]) == 0
    result = json.loads((tmp_path / "full.json").read_text())
    rows = {row["engine"]: row for row in result["rows"]}
    assert rows["device"]["error"].startswith("BudgetTooSmall")
    assert [row["verdict"] for name, row in rows.items() if name != "device"] == ["bits"] * 5
    weights = result["weights"]
    assert 4 * weights < result["eager_peak"] and result["budget"] == result["eager_peak"] // 2
    for name in ("host-step", "host-deferred", "host-half"):
        row = rows[name]
        assert row["used"] <= result["budget"] and row["h2d"] >= weights and row["d2h"] >= weights
        parts = row["facts"]["parts"]
        assert row["bound"] == max(parts.values()) and parts["h2d"] == row["h2d"] / 1e9
    assert rows["host-deferred"]["facts"]["updates_planned"] >= 2 and not rows["host-step"]["facts"]["updates_planned"]
    traced = {name: rows[name]["facts"]["traced"]["updates"] for name in ("host-step", "host-deferred")}
    assert traced["host-step"] == 0 < traced["host-deferred"]
    assert rows["host-half"]["facts"]["updates_planned"] >= 2
    assert rows["host-half"]["h2d"] > rows["host-deferred"]["h2d"], "moments too"
    assert rows["resident"]["h2d"] == rows["resident"]["d2h"] == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith(f"| {TITLES['host-half']} |")
    title, body = report.TABLES["full"](result)
    assert body == table(result) and "budget" in title


def _finished(engine: str, digest: str) -> tuple[Worker, Verdict]:
    worker = Worker(dataclasses.replace(JOB, engine=engine), 1)
    worker.facts = {"digest": digest}
    return worker, Verdict(True, "bits")


def test_other_weights_at_the_end_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal losses and gradients are not enough for ours."""
    pairs = [_finished("in-memory", "a"), _finished("host-step", "a"), _finished("host-deferred", "b")]
    pairs.append(_finished("zero2-offload", "b"))
    monkeypatch.setattr("benchmarks.full.table.judge", lambda *_: [verdict for _, verdict in pairs])
    found = judge_whole([worker for worker, _ in pairs], "float32")
    assert [verdict.equal for verdict in found] == [True, True, False, True]
    assert found[2].words == "no: other weights" and found[3].words == "losses and gradients to bits"


def test_every_engine_has_a_title_and_each_row_a_cell_for_each_heading() -> None:
    assert TITLES.keys() == set(full.SHOWN) == ENGINES.keys() - {"probe"} and TITLES.keys() > OURS
    assert "full" in BENCHMARKS
    row = {"engine": "device", "error": "BudgetTooSmall: at least 5 bytes (5B) of device memory"}
    failed = table({"rows": [row]}).splitlines()[-1]
    assert failed.count("|") == HEADER.splitlines()[0].count("|") and failed.endswith("| needs at least 5B |")


@pytest.mark.parametrize("words", [["--engines", "probe"], ["--share", "0"], ["--rounds", "x"]])
def test_wrong_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        full.main(words)
    assert words[0] in capsys.readouterr().err
