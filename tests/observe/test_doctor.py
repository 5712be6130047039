"""``disco-accel doctor`` answers in JSON what is there, and with its exit status whether training can run."""

from __future__ import annotations

import json

import pytest

from disco_accel.cli.main import main
from disco_accel.native import extension
from disco_accel.native.plain_library import ExtensionError


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disco_accel.observe.doctor._COPY_BYTES", 1 << 20)


def test_a_machine_with_all_that_training_needs_gets_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["extension"]["built"] is True
    assert all(report["versions"][name] for name in ("torch", "transformers", "accelerate", "peft"))
    assert report["device"]["memory"] > 0
    assert all(rate > 0 for rate in report["link"].values())
    host = report["host"]
    assert 0 < host["memory_left"] <= host["memory"] == min(limit["bytes"] for limit in host["limits"])
    assert host["limits"][0]["what"] == "the machine's memory" and host["numa_nodes"] >= 1
    assert {"most_locked", "huge_pages", "gpu_numa_node"} <= host.keys()


def test_an_extension_that_cannot_be_built_is_a_problem_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ExtensionError("no C++ compiler")

    monkeypatch.setattr(extension, "build", fail)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["extension"] == {"built": False, "why": "no C++ compiler"}
    assert report["problems"] == ["the engine's extension is not built: no C++ compiler"]


@pytest.mark.parametrize(("variable", "value"), [("DISCO_AUTOLOAD", "0"), ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")])
def test_a_door_that_is_switched_off_is_named_but_is_no_problem(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["doctor", "--json"]) == 0
    entry_points = json.loads(capsys.readouterr().out)["entry_points"]
    assert entry_points["accelerate_launch_config"] is False
    assert variable in entry_points["why"] and "disco-accel launch" in entry_points["why"]
