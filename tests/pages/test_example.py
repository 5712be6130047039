"""ARCHITECTURE's worked example is the plan that its own command makes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from disco_accel.cli.main import main
from disco_accel.graph.files import read_memgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import VertexKind
from tests.pages.blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "ARCHITECTURE.md"
Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Ids of vertices, their addresses, and what they wait for."""


def rows_of_page() -> list[Row]:
    """The rows of the example's table; numbers in words, such as "over `a`", are no address of their own."""
    table = PAGE.read_text().split("| vertex | what | address | may start after |")[1].split("\n\n")[0]
    rows = []
    for line in table.strip().splitlines()[1:]:
        vertices, _, addresses, after = (cell.strip() for cell in line.strip("|").split("|"))
        numbers = [tuple(int(n) for n in re.findall(r"\b\d+\b", cell)) for cell in (vertices, addresses)]
        rows.append((numbers[0], numbers[1], tuple(int(n) for n in re.findall(r"\b\d+\b", re.sub(r"\(.*", "", after)))))
    return rows


def rows_of_plan(plan: MemGraph) -> list[Row]:
    """The same of a plan: residents in one row, then every vertex that runs, by the order of the plan."""
    there = tuple(v.id for v in plan.vertices if v.kind is VertexKind.INPUT and (v.id, 0) in plan.slots)
    rows: list[Row] = [(there, tuple(plan.slots[v, 0].offset for v in there), ())]
    for vertex in plan.vertices:
        if vertex.kind is not VertexKind.INPUT:
            waits = sorted({u for u, v in (*plan.data_edges, *plan.memory_edges) if v == vertex.id})
            rows.append(((vertex.id,), (plan.slots[vertex.id, 0].offset,), tuple(waits)))
    return rows


def test_the_table_is_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vertices, addresses and what each may start after."""
    (block,) = [b for b in blocks_of(PAGE, "ARCHITECTURE.md") if "disco-accel compile" in b.text]
    command = block.text.splitlines()[0].split()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    assert main(command[1:]) == 0
    assert rows_of_page() == rows_of_plan(read_memgraph("mem.json"))
