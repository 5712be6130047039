"""The README's tables are what the files of results say, and no file can claim a GPU that did not run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from disco_accel.errors import ConfigError

STEP: dict[str, Any] = {
    "benchmark": "step",
    "command": "disco-accel bench step",
    "date": "2026-01-02",
    "machine": "host device on 2 cores",
    "simulated": False,
    "versions": {"torch": "9.9"},
    "load": 0.5,
    "device": "cpu",
    "shape": {"name": "tiny"},
    "batch": 1,
    "tokens": 8,
    "dtype": "float32",
    "weights": 1 << 20,
    "bandwidth": 1e9,
    "rows": [{"engine": "zero3", "budget": None, "error": "ImportError: planted"}],
}


def _section(folder: Path, **changes: Any) -> str:
    (folder / "a.json").write_text(json.dumps(STEP | changes))
    return report.section(folder)


def test_the_readme_is_what_the_files_say() -> None:
    """``python -m benchmarks.report`` rewrites it."""
    assert report.main(["--check"]) == 0


def test_a_table_says_where_when_and_how(tmp_path: Path) -> None:
    made = _section(tmp_path)
    for word in ("host device on 2 cores, load 0.5; 2026-01-02; `disco-accel bench step`; torch 9.9", "planted"):
        assert word in made
    assert made.startswith(report.NOT_ON_GPU) and "busy" not in made
    assert "busy" in _section(tmp_path, load=3.0)


def test_a_gpu_that_ran_comes_first_and_ends_the_disclaimer(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(STEP | {"device": "cuda", "machine": "Some GPU, CUDA 13"}))
    made = _section(tmp_path)
    assert report.NOT_ON_GPU not in made
    assert made.index("Some GPU") < made.index("host device")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cuda"}, "without a GPU"),
        ({"benchmark": "simulated"}, "do not say so"),
        ({"benchmark": "guess"}, "unknown kind"),
    ],
)
def test_figures_with_a_false_origin_are_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        _section(tmp_path, **changes)


def test_a_file_without_its_origin_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({k: v for k, v in STEP.items() if k != "date"}))
    with pytest.raises(ConfigError, match="date"):
        report.section(tmp_path)


def test_only_what_is_between_the_markers_changes() -> None:
    text = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.put(text, "new") == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    with pytest.raises(ConfigError, match="once each"):
        report.put("no markers", "new")
