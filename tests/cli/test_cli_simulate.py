"""simulate on the command line: one JSON line, status 2 and a message for what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disco_accel.cli.main import main

GRAPHS = Path(__file__).parents[1] / "data" / "graphs"
INTRO = ["simulate", str(GRAPHS / "intro_n10.memgraph.json"), "--machine", str(GRAPHS / "intro.machine.json")]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(list(arguments)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    found: dict[str, object] = json.loads(lines[0])
    return found


@pytest.mark.parametrize(("dispatch", "seconds"), [("priority", 21), ("fifo", 21), ("random", 21), ("fixed", 30)])
def test_the_intro_example(dispatch: str, seconds: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *INTRO, "--dispatch", dispatch)
    assert found["makespan"] == found["period"] == seconds
    assert found["bound"] == pytest.approx(20)
    assert found["ratio"] == pytest.approx(seconds / 20)
    assert found["busy"] == {"compute0": 10, "compute1": 10, "h2d": 20}


def test_the_period_is_that_of_the_steps_after_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *INTRO, "--steps", "6")
    assert (found["makespan"], found["period"], found["ratio"]) == (121, 20, pytest.approx(1))


def test_seeds_give_median_and_extremes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(tmp_path / "plan.json")
    lora = str(GRAPHS / "lora_small.taskgraph.json")
    assert main(["compile", lora, "-o", plan, "--memory", "64MiB", "--cyclic"]) == 0
    capsys.readouterr()
    exact = answer(capsys, "simulate", plan, "--steps", "3")
    assert {"makespan", "period", "bound", "ratio", "busy"} <= set(exact)
    assert exact["ratio"] >= 1 - 1e-9
    found = answer(capsys, "simulate", plan, "--jitter", "0.2", "--seeds", "7", "--steps", "3")
    for key, spread in (("makespan", found["makespans"]), ("period", found["periods"])):
        assert spread["min"] < spread["median"] < spread["max"]
        assert found[key] == spread["median"]
        assert 0.8 * exact[key] <= spread["median"] <= 1.2 * exact[key]
    assert answer(capsys, "simulate", plan, "--jitter", "0.2", "--seeds", "7", "--steps", "3") == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dispatch", "luck"], "priority, fifo, random, fixed"),
        (["--jitter", "2"], "--jitter"),
        (["--jitter", "nan"], "--jitter"),
        (["--jitter", "much"], "--jitter"),
        (["--seeds", "0"], "--seeds"),
        (["--seeds", "1000000"], "--seeds"),
        (["--steps", "-1"], "--steps"),
        (["--steps", "1e3"], "--steps"),
        (["--steps", "99999999999"], "steps"),
        (["--machine", "absent.json"], "absent.json"),
        (["--speed", "2"], "unrecognized"),
    ],
)
def test_bad_options_are_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*INTRO, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_plan_without_a_way_back_is_refused_for_several_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.json")
    assert main(["compile", str(GRAPHS / "lora_small.taskgraph.json"), "-o", plan, "--memory", "64MiB"]) == 0
    assert main(["simulate", plan]) == 0
    assert main(["simulate", plan, "--steps", "2"]) == 2
    assert "cyclic plan" in capsys.readouterr().err
