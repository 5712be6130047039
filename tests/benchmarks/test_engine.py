"""The engine's benchmark and the command that starts benchmarks."""

from __future__ import annotations

import pytest

from benchmarks.common.subjects import Shape, Times
from benchmarks.engine import suite as engine
from disco_accel.cli.main import main

TINY = Shape(hidden=64, layers=3, tokens=8, vocabulary=64)


@pytest.mark.long
def test_every_way_to_run_a_step_is_timed_against_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """Bits are compared with eager's inside: a variant that differs ends the benchmark."""
    rows = engine.overlap(TINY, (0.5e9,), 1, "build")
    assert rows[0]["reload_bytes"] > 0 and rows[0]["bound"] > 0
    assert {mode.name for mode in engine.MODES} < set(rows[0]["times"])
    engine.print_overlap(rows)
    disturbed = engine.jitter(TINY, (0.5e9,), 1, "build")
    engine.print_jitter(disturbed)
    engine.print_overhead(engine.overhead([TINY], 1))
    assert "±50%" in capsys.readouterr().out


def test_a_variant_with_another_loss_ends_the_benchmark() -> None:
    losses = iter([1.0, 1.0, 1.0, 2.0])
    with pytest.raises(engine.Differs, match="2 different losses"):
        engine.in_turn(1, {"a": lambda: (next(losses), 0.1), "b": lambda: (next(losses), 0.1)}, lambda _: None)


def test_times_are_medians_with_half_the_interquartile_range() -> None:
    times = Times((1.0, 2.0, 3.0, 4.0, 10.0))
    assert times.median == 3.0 and times.spread == pytest.approx((7.0 - 1.5) / 2)


def test_an_unknown_benchmark_is_named_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engines"]) == 2
    assert "'engines' is not a benchmark; there are devices, engine" in capsys.readouterr().err
