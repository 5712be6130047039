"""Bad files: one message that names the place, status 2 (1 for what is merely too large or unsafe), and soon.

``data/bad`` holds a file for each mistake, named after the command that reads it first; ``expected.json`` says what the
message must contain. Damage at random is in ``tests.cli.fuzz``; DISCO_MUTATIONS sets how much of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disco_accel.cli.main import main

DATA = Path(__file__).parents[1] / "data"
BAD = DATA / "bad"
EXPECTED: dict[str, str] = json.loads((BAD / "expected.json").read_text())
INTRO = str(DATA / "graphs" / "intro_n10.memgraph.json")
MUTATIONS = int(os.environ.get("DISCO_MUTATIONS", "500"))


def commands(name: str, plan: Path) -> Iterator[tuple[list[str], int]]:
    """The commands that read the file ``name`` and the status each must have."""
    file = str(BAD / f"{name}.json")
    kind = name.split("-")[0]
    if kind in ("task", "fit"):
        status = 1 if kind == "fit" else 2
        yield ["compile", file, "-o", str(plan)], status
        yield ["compile", file, "-o", str(plan), "--planner", "timed", "--cyclic"], status
        yield ["bound", file], status
    if kind == "task":
        yield ["verify", file, INTRO], 2
    if kind in ("plan", "no", "large"):
        yield ["simulate", file], 2
        yield ["simulate", file, "--steps", "3"], 2
    if kind == "plan":
        yield ["verify", str(BAD / "no.task.json"), file], 2
    if kind == "instance":
        yield ["weights", file], 2
    if kind == "machine":
        yield ["simulate", INTRO, "--machine", file], 2
        yield ["bound", str(BAD / "no.task.json"), "--machine", file], 2


def test_every_file_has_its_message_and_every_message_its_file() -> None:
    assert sorted(EXPECTED) == sorted(p.stem for p in BAD.glob("*-*.json"))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_one_message_names_the_place(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    for arguments, status in commands(name, plan):
        assert main(arguments) == status
        captured = capsys.readouterr()
        assert captured.err.startswith(f"disco-accel {arguments[0]}: ")
        assert captured.err.count("\n") == 1 and len(captured.err) < 1000
        assert EXPECTED[name] in captured.err
        assert captured.out == "" and not plan.exists()


@pytest.mark.parametrize("name", sorted(name for name in EXPECTED if name.startswith("no-")))
def test_plans_that_can_never_run_are_answered_with_no_by_verify(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(BAD / "no.task.json"), str(BAD / f"{name}.json")]) == 1
    assert json.loads(capsys.readouterr().out)["verified"] is False


def task(vertices: list[dict[str, Any]]) -> str:
    devices = [{"id": 0, "memory": 4096}]
    return json.dumps({"format": "taskgraph", "version": 1, "devices": devices, "vertices": vertices})


def kernel(id: int, *inputs: int) -> dict[str, Any]:
    return {"id": id, "kind": "compute", "device": 0, "size": 1, "inputs": list(inputs)}


MANY = 30_000
LARGE = {
    "10^7 lists in each other": lambda: "[" * 10**7,
    "10^6 objects in each other": lambda: '{"format":' * 10**6,
    "a cycle of all": lambda: task([kernel(i, (i + 1) % MANY) for i in range(MANY)]),
    "a cycle, and a chain behind it": lambda: task(
        [kernel(0, 1), kernel(1, 0), *(kernel(i, i - 1) for i in range(2, MANY))]
    ),
    "the same key at the end": lambda: "{" + ",".join(f'"{i % (MANY - 1)}": 1' for i in range(MANY)) + "}",
    "4 * 10^7 empty lists": lambda: "[" + "[]," * (4 * 10**7) + "[]]",
    "more devices than there are": lambda: task([]).replace("[{", "[" + '{"id": 0, "memory": 1}, ' * MANY + "{", 1),
}


@pytest.mark.parametrize("name", sorted(LARGE))
def test_large_mistakes_are_found_in_linear_time(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "large.json"
    file.write_text(LARGE[name]())
    for arguments in (["compile", str(file), "-o", str(tmp_path / "plan.json")], ["bound", str(file)]):
        began = time.process_time()
        assert main(arguments) == 2
        assert time.process_time() - began < 10
        assert len(capsys.readouterr().err) < 1000


def test_places_where_no_file_can_be_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, folder = str(BAD / "no.task.json"), str(tmp_path)
    for arguments, message in (
        (["compile", folder, "-o", "x.json"], "cannot be read"),
        (["compile", good, "-o", folder], "cannot be written"),
        (["simulate", folder], "cannot be read"),
        (["simulate", INTRO, "--machine", folder], "cannot be read"),
        (["weights", folder], "cannot be read"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ids_that_are_texts_are_named_as_the_file_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(BAD / "no.task.json")
    plan = str(tmp_path / "plan.json")
    assert main(["compile", file, "-o", plan]) == 0
    content = Path(plan).read_text().replace('"size":256', '"size":128')
    Path(plan).write_text(content)
    capsys.readouterr()
    assert main(["verify", file, plan]) == 1
    captured = capsys.readouterr()
    assert "vertex mm (mm): sizes" in captured.err
    assert "vertex mm (mm): sizes" in json.loads(captured.out)["reason"]


def test_files_damaged_at_random_are_answered(tmp_path: Path) -> None:
    """In a process of its own, whose memory is limited. What goes wrong is printed, with its traceback."""
    command = [sys.executable, "-m", "tests.cli.fuzz", "--count", str(MUTATIONS), "--seed", "7"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["mutations"] == MUTATIONS
