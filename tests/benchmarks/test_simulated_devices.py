"""Simulated steps on several GPUs: rows are sound, files keep what they say they keep, tables hide nothing."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import pages as report
from benchmarks.simulated_devices import rows as rows_module
from benchmarks.simulated_devices import suite, tables
from benchmarks.simulated_devices.cells import MEMORY, Cell, Kind, grid
from benchmarks.simulated_devices.results_file import ResultsFile, planner_commit
from benchmarks.simulated_devices.rows import Row, at_most, row
from disco_accel.errors import ConfigError
from disco_accel.plan.bound.lower_bound import Bound
from disco_accel.sizes import format_size

TINY = [
    Cell(Kind.LORA, "tiny", "float32", 4, 32, "a100", 1, "layers"),
    Cell(Kind.LORA, "tiny", "float32", 4, 32, "a100", 2, "layers", 2),
    Cell(Kind.LORA, "tiny", "float32", 4, 32, "a100", 2, "batch", 2),
    Cell(Kind.LORA, "tiny", "float32", 4, 32, "a100", 2, "tensor"),
    Cell(Kind.PROMPT, "tiny", "bfloat16", 1, 32, "a100", 1, "layers"),
    Cell(Kind.PROMPT, "tiny", "bfloat16", 1, 32, "a100", 2, "layers"),
    Cell(Kind.PROMPT, "tiny", "bfloat16", 1, 32, "a100", 2, "tensor"),
]
ONE = TINY[0]


@pytest.fixture(scope="module")
def made() -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MEMORY, "a100", 16 << 20)
        return [row(cell) for cell in TINY]


def test_every_way_is_planned_and_no_step_beats_its_bound(made: list[Row]) -> None:
    for each in made:
        assert each.bound is not None and each.period is not None and each.bound <= each.period * 1.0005


def test_the_limit_is_a_part_that_is_as_good_as_the_bound(made: list[Row]) -> None:
    for each in made:
        parts = each.parts_of_bound
        assert parts is not None and each.limit is not None and max(parts.values()) == each.bound
        assert parts[each.limit] >= 0.99 * max(parts.values())
    assert made[0].limit == "compute"
    tie = rows_module.in_row(Bound(compute=1.0, link=0.9, critical_path=1.005, phases=0.0, lp_reload_bytes=0))
    assert (tie["limit"], tie["bound"]) == ("compute", 1.005)
    assert rows_module.in_row(Bound(1.0, 0.0, 1.02, 0.0, 0))["limit"] == "critical_path"


def test_weights_count_once_however_many_devices_have_them(made: list[Row]) -> None:
    for kind in Kind:
        whole, *others = [each for each in made if each.cell.kind is kind]
        assert whole.weights is not None and {each.weights for each in others} <= {whole.weights}


def test_float32_weights_take_twice_the_bytes_of_bfloat16(made: list[Row]) -> None:
    single, half = (
        next(each.weights for each in made if each.cell.dtype == dtype) for dtype in ("float32", "bfloat16")
    )
    assert single is not None and half is not None and 1.9 * half < single < 2.1 * half


def test_a_refused_row_says_a_budget_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEMORY, "a100", 1 << 16)
    refused = row(TINY[4])
    assert refused.needed is not None and refused.needed > 1 << 16 and refused.period is None
    assert f"needs {format_size(refused.needed)} |" in tables.line(refused.as_json())
    monkeypatch.setitem(MEMORY, "a100", refused.needed)
    assert row(refused.cell).period is not None


class Runs:
    """``main`` on one or two cells with a counted stand-in for ``row``, and a planner of a named commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, made: Row) -> None:
        self.monkeypatch, self.path, self.cells, self.counted = monkeypatch, path, TINY[:2], list[Cell]()
        self.made = made
        monkeypatch.setattr(suite, "grid", lambda: self.cells)
        self.count()

    def count(self) -> None:
        def row(cell: Cell, *_: Any) -> Row:
            self.counted.append(cell)
            return replace(self.made, cell=cell)

        self.monkeypatch.setattr(suite, "row", row)

    def main(self, *words: str, planner: str = "aaa") -> list[Cell]:
        self.counted.clear()
        self.monkeypatch.setattr("benchmarks.simulated_devices.results_file.planner_commit", lambda: planner)
        assert suite.main([*words, "-o", str(self.path)]) == 0
        return list(self.counted)

    def rows(self) -> Sequence[dict[str, Any]]:
        result = json.loads(self.path.read_text())
        return [{**each, "by": result["runs"][each["run"]]["planner"]} for each in result["rows"]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: list[Row]) -> Runs:
    return Runs(monkeypatch, tmp_path / "a.json", made[0])


def test_added_rows_leave_the_others_and_who_made_them(runs: Runs) -> None:
    assert runs.main("--devices", "1") == TINY[:1]
    assert runs.main("--add", planner="bbb") == TINY[1:2]
    assert [each["by"] for each in runs.rows()] == ["aaa", "bbb"]
    assert runs.main("--add", planner="ccc") == [] == runs.main("--renew", "--stop-after", "-1", planner="ccc")
    assert [each["by"] for each in runs.rows()] == ["aaa", "bbb"]
    assert runs.main("--renew", planner="bbb") == TINY[:1]
    assert [each["by"] for each in runs.rows()] == ["bbb", "bbb"]
    assert runs.main("--renew", planner="bbb") == []


def test_the_list_has_a_line_for_each_row_that_would_be_made(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.main("--devices", "1")
    for words, planner, count in (((), "aaa", 1), (("--renew",), "bbb", 2), (("--devices", "1"), "aaa", 0)):
        capsys.readouterr()
        assert runs.main("--list", *words, planner=planner) == []
        assert len(capsys.readouterr().out.splitlines()) == count


def test_rows_are_neither_begun_anew_nor_written_over_unasked(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.main("--devices", "1")
    before = runs.path.read_bytes()
    assert suite.main(["-o", str(runs.path)]) == 2 and runs.path.read_bytes() == before
    assert "give --add, or another file" in capsys.readouterr().err
    count, other = suite.row, before + b"\n"

    def beside(cell: Cell, *more: Any) -> Row:
        runs.path.write_bytes(other)
        return count(cell, *more)

    runs.monkeypatch.setattr(suite, "row", beside)
    assert suite.main(["--add", "-o", str(runs.path)]) == 2 and runs.path.read_bytes() == other
    assert "one process at a time" in capsys.readouterr().err


def test_a_file_is_there_after_every_row(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    count = suite.row

    def stopped(cell: Cell, *more: Any) -> Row:
        if cell == TINY[1]:
            raise KeyboardInterrupt
        return count(cell, *more)

    monkeypatch.setattr(suite, "row", stopped)
    with pytest.raises(KeyboardInterrupt):
        runs.main()
    assert len(runs.rows()) == 1


def test_a_row_that_cannot_be_made_is_told_and_the_others_are(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = suite.row

    def refused(cell: Cell, *more: Any) -> Row:
        if cell == TINY[0]:
            raise ConfigError("parallel: tensor: not this one")
        return count(cell, *more)

    monkeypatch.setattr(suite, "row", refused)
    assert suite.main(["-o", str(runs.path)]) == 1
    assert "ConfigError: parallel: tensor: not this one" in capsys.readouterr().err
    assert [each["devices"] for each in runs.rows()] == [TINY[1].devices]


def test_a_bound_is_renewed_where_the_graph_is_the_one_that_was_planned(
    runs: Runs, made: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MEMORY, "a100", 16 << 20)
    runs.cells = TINY[4:5]
    monkeypatch.setattr(suite, "row", lambda *_: made[4])
    runs.main()
    runs.count()
    before = rows_module.bound_of
    monkeypatch.setattr(rows_module, "bound_of", lambda *of: replace(before(*of), phases=7.0))
    assert runs.main("--rebound") == []
    assert runs.main("--rebound", planner="bbb") == []
    (after,) = runs.rows()
    assert after["by"] == "aaa" and after["limit"] == "phases" and after["bound"] == 7.0
    monkeypatch.setattr(rows_module, "bound_of", before)
    assert runs.main("--rebound", planner="bbb") == [] and runs.rows() == [after], "it is of this planner"
    result = json.loads(runs.path.read_text())
    assert result["runs"][after["bound_run"]][
        "planner"
    ] == "bbb" and "1 rows of aaa have bounds of bbb" in tables.table(result)
    # Other memory, another graph: nothing of the old plan is kept.
    monkeypatch.setitem(MEMORY, "a100", 17 << 20)
    assert runs.main("--rebound", planner="ccc") == TINY[4:5]
    (after,) = runs.rows()
    assert after["by"] == "ccc" and "bound_run" not in after


def test_a_row_that_takes_too_long_is_given_up_and_tried_again_with_more_time(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:

    def endless(*_: Any) -> Row:
        while True:
            with suppress(Exception):
                time.sleep(1)

    monkeypatch.setattr(suite, "row", endless)
    runs.main("--row-seconds", "0.01", "--devices", "1")
    assert "not finished in 0.01 s" in tables.line(runs.rows()[0])
    assert "Not finished in the time that a row had: tiny" in tables.table(json.loads(runs.path.read_text()))
    runs.count()
    assert runs.main("--add", "--row-seconds", "0.01", "--devices", "1") == []
    assert runs.main("--add", "--row-seconds", "5", "--devices", "1") == TINY[:1]
    with at_most(60):
        pass


@pytest.mark.parametrize("change", ["other file", "speeds", "figures"])
def test_a_file_of_other_things_is_not_added_to(runs: Runs, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    runs.main()
    result = json.loads(runs.path.read_text())
    if change == "speeds":
        result["speeds"]["a100"]["half"] = 1.0
    elif change == "figures":
        del result["rows"][0]["period"]
    else:
        result = {"benchmark": "step"}
    runs.path.write_text(json.dumps(result))
    before = runs.path.read_text()
    assert suite.main(["--add", "-o", str(runs.path)]) == 2
    assert "write to another file" in capsys.readouterr().err and runs.path.read_text() == before


def test_a_planner_is_known_by_its_commit_and_what_differs_from_it(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "disco_accel").mkdir()
    (tmp_path / "disco_accel" / "a.py").write_text("1")
    git("add", "-A")
    git("commit", "-m", "a")
    clean = planner_commit(tmp_path)
    (tmp_path / "page.md").write_text("elsewhere")
    git("add", "-A")
    git("commit", "-m", "b")
    assert planner_commit(tmp_path) == clean
    seen = {clean}
    for name, text in (("a.py", "2"), ("a.py", "3"), ("b.py", "1"), ("b.py", "2")):
        (tmp_path / "disco_accel" / name).write_text(text)
        assert planner_commit(tmp_path).startswith(f"{clean}+")
        seen.add(planner_commit(tmp_path))
    assert len(seen) == 5


def test_the_page_says_what_is_simulated_measured_and_missing(made: list[Row], tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "a.json", [])
    for each in made:
        file.put(each.as_json())
    papers = replace(made[0], cell=Cell(Kind.LORA, "7b", "float32", 8, 1024, "a100", 8, "tensor"), period=1.25)
    file.put(papers.as_json())
    shown = report.section(tmp_path)
    assert "no device ran them" in shown and "**measured**" in shown and "no race" in shown
    assert "| 7b, 8 x 1024 | 5.6 | 12.5 | not run | not run | 1.250 |" in shown
    missing = "LoRA 7b float32 8 x 1024 on A100s with 40 GB: 1 by layers, 2 by layers"
    assert f"Not run: LoRA 7b bfloat16 8 x 1024; {missing}" in shown and "8 by batch; LoRA 7b float32" in shown
    assert "; LoRA 13b; LoRA 65b; prompts." in shown
    for header, count in ((tables.HEADERS[Kind.LORA], 5), (tables.HEADERS[Kind.PROMPT], 3)):
        body = shown.split(header)[1].split("\n\n")[0].split("\n")[1:]
        assert len(body) == count and {each.count("|") for each in body} == {header.count("|") // 2}


def test_steps_over_the_bound_are_named(made: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    file = ResultsFile(None, [])
    for cell, ratio in zip(TINY, (1.01, 1.05, 1.3), strict=False):
        file.put(replace(made[0], cell=cell, bound=1.0, period=ratio, limit="link").as_json())
    file.put(replace(made[0], cell=TINY[3], bound=1.0, period=9.0, limit="critical_path", cut=True).as_json())
    text = "\n".join(tables.notes(file.as_json()))
    assert "2 of the 3 steps" in text
    assert "the others: tiny float32, 4 x 32, 2 A100s with 40 GB, batch 1.300." in text
    assert "A deadline ended the search for these plans: tiny float32, 4 x 32, 2 A100s with 40 GB, tensor." in text
    monkeypatch.setattr(tables, "_NAMED", 0)
    text = "\n".join(tables.notes(file.as_json()))
    assert "up to 1.30 (tiny float32, 4 x 32, 2 A100s with 40 GB, batch)" in text


def test_all_cells_of_the_tables_are_there_once() -> None:
    cells = grid()
    assert len(set(cells)) == len(cells) == 3 * 2 * 2 * 10 + 3 + 3 * 5 * 2 * 7
    assert tables.not_run(cells) == [] and tables.not_run([]) == ["all"]
    assert {cell.shape for cell in cells[:100]} == {"7b"}
