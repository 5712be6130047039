"""The section ``loop`` of ``bench engine``, without its program."""

from __future__ import annotations

import pytest

from benchmarks.engine import loop


def test_rows_have_the_time_of_a_kernel_and_the_step_over_kernels_own() -> None:
    """Microseconds as bench_loop prints them: eight devices, a thousand kernels on each, three steps a case."""
    printed = [[8.0, 0.0, 0.0, step] for step in (400.0, 800.0, 480.0)] + [[1.0, 100.0, 5.0, 100_300.0]]
    none, own = loop.rows_of(printed, 1000)
    assert none.case == loop.Case(8, 0.0, 0.0) and none.over_own is None
    assert none.per_kernel == pytest.approx(60e-9)
    assert own.over_own == pytest.approx(1.003) and own.per_kernel == pytest.approx(100.3e-6)
    assert loop.line(none).startswith("| 8 | 1000 | 0 | 0 | 0.5 ±0.2 | 0.060 |")
    assert loop.line(own).endswith("| 1.003 |")
    assert loop.HEADER.splitlines()[0].count("|") == loop.line(own).count("|")
