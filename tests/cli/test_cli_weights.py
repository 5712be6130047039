"""``weights`` on the command line: JSON on stdout, status 2 and one line for every bad instance."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from disco_accel.cli.main import main

LAYER = {"u_f": 0.1, "u_b": 0.2, "w": 1000, "a": 10, "repeat": 6}
INSTANCE: dict[str, Any] = {"memory": 4000, "bandwidth": 20000.0, "a0": 10, "layers": [LAYER]}


def run(tmp_path: Path, instance: object, *options: str) -> int:
    file = tmp_path / "instance.json"
    file.write_text(json.dumps(instance), encoding="utf-8")
    return main(["weights", str(file), *options])


def test_the_answer_is_one_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, INSTANCE, "--milp", "5") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["sum_u"] == pytest.approx(6 * 0.3)
    assert answer["l2l"] == pytest.approx(6 * 0.3 + 2 * 6 * 1000 / 20000)
    assert answer["sum_u"] <= answer["lower_bound"] <= answer["greedy"]["time"] <= answer["greedy_star"]
    assert answer["greedy"]["time"] <= answer["l2l"]
    layers = [(k, d) for k, d in answer["greedy"]["chosen"]]
    assert layers and all(1 <= k <= 6 and d in (0, 1) for k, d in layers)
    assert len(set(layers)) == len(layers)


def test_repeat_is_the_same_as_writing_a_layer_often(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = {key: value for key, value in LAYER.items() if key != "repeat"}
    answers = []
    for layers in ([LAYER], [single] * 6):
        assert run(tmp_path, {**INSTANCE, "layers": layers}, "--milp", "0") == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]


def broken(path: tuple[str | int, ...], value: object = None, remove: bool = False) -> dict[str, Any]:
    instance = copy.deepcopy(INSTANCE)
    at: Any = instance
    for key in path[:-1]:
        at = at[key]
    if remove:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return instance


TOP = [
    (("memory",), -1),
    (("memory",), "12"),
    (("bandwidth",), 0),
    (("a0",), True),
    (("layers",), []),
    (("layers",), 3),
]
INSIDE = [(("layers", 0, key), value) for key in ("u_f", "u_b", "w", "a") for value in (-1, None, "x", 1e300)]
REPEAT = [(("layers", 0, "repeat"), value) for value in (0, -1, 1.5, True, 10**9)]
MORE = [(("frozen",), 1), (("memory_",), 3), (("layers", 0, "repeats"), 3), (("layers", 0), 7)]


@pytest.mark.parametrize(("path", "value"), [*TOP, *INSIDE, *REPEAT, *MORE], ids=str)
def test_a_bad_value_is_named(
    path: tuple[str | int, ...], value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, broken(path, value)) == 2
    message = capsys.readouterr().err
    assert "instance.json: " in message and len(message.splitlines()) == 1
    assert any(str(key) in message for key in path if key not in ("layers", 0)) or "layers" in message


@pytest.mark.parametrize("path", [("memory",), ("bandwidth",), ("a0",), ("layers",), *[("layers", 0, k) for k in "wa"]])
def test_a_missing_key_is_named(
    path: tuple[str | int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, broken(path, remove=True)) == 2
    assert f"{path[-1]}: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"memory": NaN}', '{"memory": 1, "memory": 1}', "[" * 100_000])
def test_what_is_no_instance_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "instance.json").write_text(text, encoding="utf-8")
    assert main(["weights", str(tmp_path / "instance.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["weights", str(tmp_path / "absent.json")]) == 2
    assert "absent.json: cannot be read" in capsys.readouterr().err


def test_a_layer_that_does_not_fit_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, broken(("memory",), 1050)) == 2
    assert "memory: " in (message := capsys.readouterr().err) and "layer 5" in message


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_bad_seconds(seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, INSTANCE, f"--milp={seconds}") == 2
    assert "--milp: " in capsys.readouterr().err
