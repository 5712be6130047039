"""The text adds up and names the parts."""

from __future__ import annotations

import json

import pytest

from disco_accel.graph.files import read_memgraph
from disco_accel.observe.report import budget_table, first_step_text, table, write_report
from tests.observe import traced_step as small

MIB = 1 << 20


@pytest.fixture
def stats():
    return {
        "budget": {
            "total": 100 * MIB,
            "arena": 80 * MIB,
            "adapters": 4 * MIB,
            "gradients": 4 * MIB,
            "optimizer": 8 * MIB,
            "batch": 2 * MIB,
        },
        "arena_bytes": 70 * MIB,
        "resident_weight_bytes": 30 * MIB,
        "kernels": 12,
        "reload_bytes": 5 * MIB,
        "offload_bytes": 0,
        "step_seconds": 1.5,
        "bound_seconds": 1.25,
        "compile_seconds": {"capture": 2.0, "plan": 1.0},
        "fallbacks": ["labels: not given"],
    }


def test_the_parts_of_a_budget_add_up_to_it(stats):
    lines = budget_table(stats).splitlines()
    sizes = {line.split("  ")[0].strip(): line.split()[-2] for line in lines[2:]}
    assert sizes["weights that stay"] == "30MiB"
    assert sizes["streamed weights, activations, scratch"] == "40MiB"
    assert sizes["unused"] == "12MiB"
    assert sum(int(v.removesuffix("MiB")) for k, v in sizes.items() if k != "budget") == 100


def test_the_first_step_text_says_time_bound_and_what_was_not_planned(stats):
    text = first_step_text(stats)
    assert "ratio 1.20" in text
    assert "capture 2.0 s" in text
    assert "not planned: labels: not given" in text


def test_columns_line_up():
    lines = table(["name", "n"], [["a", 1], ["longer", 200]]).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_a_report_folder_holds_the_plan_the_trace_the_statistics_and_the_text(stats, tmp_path):
    files = write_report(tmp_path / "r", small.plan(), small.events(), stats)
    assert {f.name for f in files} >= {"plan.json", "trace.json", "stats.json", "report.txt"}
    assert all(f.stat().st_size for f in files)
    assert {f.name for f in (tmp_path / "r").iterdir()} == {f.name for f in files}
    assert read_memgraph(tmp_path / "r" / "plan.json").slots == small.plan().slots
    assert json.loads((tmp_path / "r" / "stats.json").read_text()) == stats
