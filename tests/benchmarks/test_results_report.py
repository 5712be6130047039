"""The tables of pages are what the files of results say, and no file can claim a GPU that did not run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import pages as report
from benchmarks.step.table import SHORT, TITLES, cell_text
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


def test_the_pages_are_what_the_files_say() -> None:
    """``python -m benchmarks.report`` rewrites them."""
    assert report.main(["--check"]) == 0


def test_a_table_says_where_when_and_how(tmp_path: Path) -> None:
    made = _section(tmp_path)
    for word in (
        "host device on 2 cores, load 0.5; 2026-01-02; `disco-accel bench step`; torch 9.9",
        "| <sup>1</sup> |\n\n<sup>1</sup> cannot run (ImportError).",
    ):
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
    assert report.put(text, "new", "A.md") == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    with pytest.raises(ConfigError, match=r"A\.md.*once each"):
        report.put("no markers", "new", "A.md")


def test_the_readme_has_four_rows_of_the_first_step(tmp_path: Path) -> None:
    """Of a GPU if one ran, with where and when; whoever has no figure says why in words of ours."""
    timed = {"seconds": [2.0, 2.0], "tokens_per_second": 4.0, "used": 1 << 20, "verdict": "bits", "error": None}
    names = ("in-memory", "resident", "disco", "k0", "streamed", "zero3")
    rows = [{"engine": name, "budget": None, **timed} for name in names]
    rows.append({"engine": "zero3-tuned", "budget": None, "error": "RuntimeError: pin_memory=True requires a CUDA or"})
    (tmp_path / "b.json").write_text(
        json.dumps(STEP | {"device": "cuda", "machine": "Some GPU, CUDA 13", "rows": rows})
    )
    (tmp_path / "a.json").write_text(json.dumps(STEP))
    made = report.summary(tmp_path)
    table = [line for line in made.splitlines() if line.startswith("|")][2:]
    assert [line.split(" | ")[0].strip("| ") for line in table] == [TITLES[name] for name in SHORT]
    assert "Some GPU" in made and report.NOT_ON_GPU_SHORT not in made and "requires a CUDA" not in made
    assert table[-1].endswith("| needs a GPU |")


def test_the_first_screen_has_each_budget_that_a_gpu_has_run_beside_eager(tmp_path: Path) -> None:
    timed = {"seconds": [0.5, 0.5], "tokens_per_second": 4.0, "used": 1 << 20, "verdict": "bits", "error": None}
    rows = [
        {"engine": "in-memory", "budget": None, **timed},
        {"engine": "disco", "budget": 1 << 19, "error": "BudgetTooSmall: planted"},
        {"engine": "disco", "budget": 1 << 21, **timed, "seconds": [0.25]},
        {"engine": "disco", "budget": 1 << 22, **timed},
    ]
    assert report.first_screen(tmp_path) == report.NOT_ON_GPU_SHORT
    gpu = STEP | {"device": "cuda", "machine": "Some GPU, CUDA 13", "rows": rows, "note": "[here](a.md)."}
    (tmp_path / "b.json").write_text(json.dumps(gpu))
    (tmp_path / "a.json").write_text(json.dumps(STEP))
    assert report.first_screen(tmp_path).splitlines()[2:] == [
        "| tiny float32, 1 x 8 | 0.5 s, 1MiB | 0.25 s, 1MiB | 2MiB | Some GPU, 2026-01-02 |",
        "| tiny float32, 1 x 8 | 0.5 s, 1MiB | 0.5 s, 1MiB | 4MiB | Some GPU, 2026-01-02 |",
    ]
    short = report.summary(tmp_path)
    assert "| disco, 2MiB | 0.25" in short and "planted" not in short and "[here](docs/a.md)." in short


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ModuleNotFoundError: No module named 'axolotl'", "not installed"),
        ("RuntimeError: Error building extension 'dc': [1/7] c++ -MMD", "does not build here"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "out of memory"),
        (
            "the plan needs at least 22544384 bytes (21.50MiB) of device memory, but is given 9 and would run out of "
            "memory.",
            "needs at least 21.50MiB",
        ),
        ("ValueError: a | b", "cannot run (ValueError)"),
        ("nobody knows", "cannot run"),
    ],
)
def test_no_cell_has_a_library_s_error_in_it(error: str, words: str) -> None:
    assert cell_text(error) == words
