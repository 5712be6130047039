"""ARCHITECTURE's walk of one budget: its functions run in its order, its figures are the step's."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.pages.blocks import blocks_of
from tests.support import forkserver
from tests.test_imports import MAY_IMPORT, PACKAGE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "ARCHITECTURE.md"
FOLLOW = """
import json, runpy, sys
first, met = {}, {}

def follow(frame, event, argument):
    code = frame.f_code
    if id(code) not in met:
        met[id(code)] = code
        if "/disco_accel/" in code.co_filename and code.co_name[0] != "<":
            first.setdefault(code.co_filename.rsplit("/disco_accel/", 1)[1] + " " + code.co_qualname, len(first))

sys.settrace(follow)
names = runpy.run_path(sys.argv[1])
sys.settrace(None)
frozen = sum(p.numel() * p.element_size() for p in names["model"].parameters() if not p.requires_grad)
json.dump({"first": first, "stats": names["stats"](names["model"]), "frozen": frozen}, open(sys.argv[2], "w"))
"""
"""Runs a program and writes when each function of ours was first called, in the thread that called it."""


def rows(header: str) -> list[list[str]]:
    """The cells of the table that begins with ``header``."""
    table = PAGE.read_text().split(header)[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def test_the_walk_calls_what_the_page_says_in_its_order(tmp_path: Path) -> None:
    (program,) = [b for b in blocks_of(PAGE, PAGE.name) if b.language == "python"]
    (tmp_path / "walk.py").write_text(program.text)
    (tmp_path / "follow.py").write_text(FOLLOW)
    # What is imported already need not be followed.
    command = [str(forkserver.start() / "python"), "follow.py", "walk.py", "seen.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    said = [tuple(re.findall(r"`([^`]+)`", function)) for _, function, _, _ in rows("| stage | function |")]
    assert len(said) > 15
    missing = [call for call in said if " ".join(call) not in seen["first"]]
    assert not missing, f"{PAGE.name} names functions that did not run: {missing}"
    order = [seen["first"][" ".join(call)] for call in said]
    wrong = [b for a, b, after, before in zip(said, said[1:], order, order[1:], strict=False) if after > before]
    assert not wrong, f"{PAGE.name} names these too late: {wrong}"
    numbers = seen["stats"]
    figures = dict(re.findall(r"`(\w+)` (\d+)", " ".join(" ".join(row) for row in rows("| stage | function |"))))
    assert {**numbers, **numbers["budget"]} | {k: int(v) for k, v in figures.items()} == {
        **numbers,
        **numbers["budget"],
    }
    assert set(figures) == {"total", "adapters", "gradients", "optimizer", "batch", "arena", "kernels"}
    assert f"{seen['frozen']} bytes" in PAGE.read_text()
    assert numbers["steps_compiled"] == 3 and numbers["reload_bytes"] > 0 and numbers["peak_bytes"] <= 640 << 10
    assert {path.name for path in (tmp_path / "out" / "walk").iterdir()} >= {"plan.json", "trace.json", "stats.json"}


def test_the_folders_are_listed_in_the_order_of_imports() -> None:
    assert [row[0].strip("`/") for row in rows("| folder of `disco_accel/` |")] == list(MAY_IMPORT)


def test_the_page_fits_in_a_head() -> None:
    assert len(PAGE.read_text().splitlines()) <= 150


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_each_folder_has_a_readme_that_names_its_neighbours(part: str) -> None:
    """Those that it may import, and those that may import it."""
    text = " ".join((PACKAGE / part / "README.md").read_text().split())
    found = re.search(r"\*\*Imports\*\* (.+?)\. \*\*Imported by\*\* (.+?)\. ", text)
    assert found is not None
    before, after = (re.findall(r"`(\w+)`", names) for names in found.groups())
    assert sorted(before) == sorted(MAY_IMPORT[part])
    assert sorted(after) == sorted(name for name, allowed in MAY_IMPORT.items() if part in allowed)


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs", "disco_accel"])
def test_files_that_a_page_names_exist(page: str) -> None:
    """Paths below the repository, or below ``disco_accel`` as ARCHITECTURE writes them; in the README of a folder also
    names of files there."""
    pages = [ROOT / page] if page.endswith(".md") else sorted((ROOT / page).rglob("*.md"))
    missing = [
        f"{path.parent.name}/{path.name}: {name}"
        for path in pages
        for name in re.findall(r"`([\w/.]+\.(?:py|cpp|h|yaml|json))`", path.read_text())
        if ("/" in name or page == "disco_accel") and not name.startswith("out/")
        if not any((base / name).exists() for base in (ROOT, PACKAGE, path.parent, *path.parent.glob("*/")))
    ]
    assert not missing
