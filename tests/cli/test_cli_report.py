"""``report``: one page from a folder, or status 2 with the file that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disco_accel.cli.main import main
from disco_accel.observe.report import write_report
from tests.observe import traced_step as small
from tests.observe.test_step_folder import STATS


def test_the_page_of_a_folder_is_the_one_that_was_written_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(tmp_path, small.plan(), small.events(), STATS)
    written = (tmp_path / "report.html").read_text()
    other = tmp_path / "new" / "page.html"
    assert main(["report", str(tmp_path), "-o", str(other), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"page": str(other), "events": "measured", "seconds": 8.0}
    assert other.read_text() == written
    (tmp_path / "report.html").unlink()
    assert main(["report", str(tmp_path)]) == 0
    words = capsys.readouterr().out.splitlines()
    assert words[0].startswith("These events were measured") and words[-1] == f"The page: {tmp_path / 'report.html'}"
    assert "h2d: busy for 62% of the step. Idle: it has nothing left to run (2 s), it waits for values" in words[-2]
    assert (tmp_path / "report.html").read_text() == written


def test_a_bad_folder_and_a_bad_target_are_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "plan.json: is not there; write the folder again" in capsys.readouterr().err
    write_report(tmp_path, small.plan(), small.events(), STATS)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "plan.json" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
