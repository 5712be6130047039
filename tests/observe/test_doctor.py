"""``disco-accel doctor`` says in words or in JSON what is there, and with its exit status whether training can run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from disco_accel.cli.main import main
from disco_accel.config.settings import host_memory_bytes
from disco_accel.errors import ExtensionError
from disco_accel.native import extension, numa
from disco_accel.native.plain_library import compiler
from disco_accel.observe.doctor import report
from disco_accel.observe.doctor_words import checks_of, lines_of, problems_of
from disco_accel.observe.folder_facts import folder_facts
from tests.test_host_limits import FIRST, MIB, SECOND, first, second, tree
from tests.test_imports import ROOT

NEEDED = ("torch", "transformers", "accelerate", "peft", "numpy", "pyyaml", "safetensors", "scipy")
HERE = {"python", *NEEDED[:4], "packages", "optional", "engine", "compiler", "GPU", "link", "host memory"} | {
    *(
        "locked memory",
        "huge pages",
        "write watch",
        "NUMA nodes",
        "plan cache",
        "engine cache",
        "fused kernels",
        "launch",
    )
}
"""Checks on a machine without a GPU, beside that of limits of memory."""


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disco_accel.observe.doctor._COPY_BYTES", 1 << 20)


def checks(root: Path) -> dict[str, dict[str, str]]:
    """By name; of several limits of memory the first."""
    found: dict[str, dict[str, str]] = {}
    for check in checks_of(report(root=root)):
        found.setdefault(check["check"], check)
    return found


def test_a_machine_with_all_that_training_needs_gets_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["extension"]["built"] is True and Path(found["extension"]["library"]).is_file()
    assert found["extension"]["seconds"] >= 0
    assert all(found["versions"][name] for name in NEEDED) and {"deepspeed", "matplotlib"} <= found["versions"].keys()
    assert {"disco_accel", "python", "platform", "entry_points"} <= found.keys()
    assert found["device"]["memory"] > 0 and {"kind", "name"} <= found["device"].keys()
    assert all(rate > 0 for rate in found["link"].values())
    host = found["host"]
    smallest = min(limit["bytes"] for limit in host["limits"])
    assert 0 < host["memory_left"] <= host["memory"] == smallest == host_memory_bytes()
    assert host["limits"][0]["what"] == "the machine's memory" and host["numa_nodes"] >= 1
    assert {"cores", "threads", "most_locked", "huge_pages", "gpu_numa_node", "load_average"} <= host.keys()


def test_words_have_a_line_for_each_check_and_one_that_counts_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    said = {line[9:].split("  ")[0].rstrip() for line in lines}
    assert said >= HERE and said - HERE <= {"memory limits", "memory limit"}
    assert {line.split(" ")[0] for line in lines} <= {"ok", "note"}
    notes = sum(line.startswith("note") for line in lines)
    assert last == f"no problems, {notes or 'no'} note{'' if notes == 1 else 's'}"
    assert not [line for line in lines if "cannot be told" in line]


def test_the_page_explains_each_check() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    shown = {line[9:22].strip() for line in page.split("```text\n")[1].split("```")[0].splitlines()[:-1]}
    explained = page.split("| check |")[1].split("\n\n")[0]
    assert shown == HERE | {"memory limits"} and all(name in explained for name in shown)


def test_an_extension_that_cannot_be_loaded_or_built_is_a_problem_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What compiles it is looked for, and nothing is compiled."""

    def fail() -> None:
        raise ExtensionError("no room\nfor it")

    monkeypatch.setattr(extension, "load_extension", fail)
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["extension"]["built"] is False and found["extension"]["why"] == "no room\nfor it"
    assert found["problems"] == ["engine: no room for it"]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kept"))
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "not built yet; its first use compiles it" in said and str(tmp_path / "kept") in said
    monkeypatch.setenv("DISCO_BUILD_EXT", "0")
    assert main(["doctor"]) == 1
    assert "DISCO_BUILD_EXT=0 forbids building it" in capsys.readouterr().out
    monkeypatch.delenv("DISCO_BUILD_EXT")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert main(["doctor"]) == 1
    assert f"{tmp_path}/file is not a folder; set TORCH_EXTENSIONS_DIR" in capsys.readouterr().out
    assert not (tmp_path / "kept").exists()


def test_without_a_path_a_home_and_caches_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HOME", "")
    (tmp_path / "file").touch()
    monkeypatch.setenv("DISCO_PLAN_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "there is no C++ compiler 'c++' on PATH: install g++" in said
    assert f"{tmp_path}/file is not a folder; each run plans again: set plan_cache" in said
    monkeypatch.setenv("DISCO_DEVICE", "abacus")
    assert main(["doctor"]) == 1
    assert "problem  settings" in (said := capsys.readouterr().out) and "'abacus' does not work" in said


def test_without_pytorch_versions_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As where its import fails."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert "torch" in lines[-1] and "cannot be imported: ModuleNotFoundError" in lines[-1]
    assert last == "1 problem, no notes" and any("transformers" in line for line in lines)


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_all_groups_above_are_told_the_tightest_first(version: int, tmp_path: Path) -> None:
    files, mount, group = {}, FIRST, "4:memory:/a/b/c"
    for path, limit, used in (("/a/b/c", 9000, 0), ("/a/b", 4000, 1000), ("/a", 6000, 5500)):
        files |= first(path, limit, used) if version == 1 else second(f"{path[1:]}/", limit, used)
    if version == 2:
        mount, group = SECOND, "0::/a/b/c"
    found = report(root=tree(tmp_path, group, mount.format(root="/"), files))
    said = [check for check in checks_of(found) if check["check"] == "memory limit"]
    assert [check["status"] for check in said] == ["problem", "note", "note"]
    assert "/a/memory." in said[0]["found"] and "leaves 500MiB of 5.86GiB" in said[0]["found"]
    assert "docker run --memory" in said[0]["remedy"]
    assert len(problems_of(said)) == 1 and problems_of(said)[0].startswith("memory limit: a control group (/sys/fs/")
    assert found["host"]["memory"] == 4000 * MIB and found["host"]["memory_left"] == 500 * MIB


DAMAGED = {"empty": b"", "zeros": b"\0" * 9, "no text": b"\xff\xfe\n", "a number": b"9" * 5000, "below zero": b"-1\n"}
FILES = (
    *("proc/meminfo", "proc/self/cgroup", "proc/self/mountinfo", "proc/self/status", "proc/self/limits"),
    *("sys/fs/cgroup/job/memory.max", "sys/fs/cgroup/job/memory.current", "sys/fs/cgroup/job/memory.stat"),
    *("sys/kernel/mm/transparent_hugepage/enabled", "sys/devices/system/node/node0/meminfo"),
)


@pytest.mark.parametrize("damage", [*DAMAGED, "a folder", "absent"])
def test_files_of_the_kernel_that_are_damaged_end_in_notes(damage: str, tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/job", SECOND.format(root="/"), second("job/", 9000, 100))
    for name in FILES:
        (root / name).unlink(missing_ok=True)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if damage in DAMAGED:
            (root / name).write_bytes(DAMAGED[damage])
        elif damage == "a folder":
            (root / name).mkdir()
    found = checks(root)
    assert found.keys() >= HERE and not [check for check in found.values() if check["status"] == "problem"]
    assert found["host memory"] | {"remedy": ""} == {
        **{"status": "note", "check": "host memory", "remedy": ""},
        "found": "the system does not tell how much there is",
    }
    assert found["huge pages"]["status"] == "note" and "does not tell" in found["huge pages"]["found"]
    assert not [check for check in found.values() if "cannot be told" in check["found"]]


def test_a_part_that_fails_is_a_note_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the kernel says no")

    for name in ("host_limits", "cache_root", "writes_are_watched", "_link", "_gpus", "_entry_points"):
        monkeypatch.setattr(f"disco_accel.observe.doctor.{name}", fail)
    found = checks(tmp_path)
    told = [name for name, check in found.items() if check["found"] == "cannot be told: OSError: the kernel says no"]
    assert told == ["GPU", "link", "host memory", "engine cache", "fused kernels", "launch"]
    assert {found[name]["status"] for name in told} == {"note"} and found["engine"]["status"] == "ok"


def test_the_setting_of_huge_pages(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/", "", {})
    file = root / FILES[-2]
    file.parent.mkdir(parents=True)
    for text, status in (
        ("[always] madvise never", "ok"),
        ("always [madvise] never", "ok"),
        ("always [never]", "note"),
    ):
        file.write_text(text)
        assert checks(root)["huge pages"]["status"] == status
    assert "echo madvise" in checks(root)["huge pages"]["remedy"]


def test_processors_and_memory_of_a_node_that_a_process_may_use(tmp_path: Path) -> None:
    assert numa.within_reach(1, tmp_path) == (None, None)
    for path, text in {
        "proc/self/status": "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n",
        "sys/devices/system/node/node0/cpulist": "0-7\n",
        "sys/devices/system/node/node1/cpulist": "8-15\n",
        "sys/devices/system/node/node2/cpulist": "3-x,99999999999-99999999999\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert [numa.within_reach(node, tmp_path) for node in range(3)] == [(True, True), (False, False), (None, False)]


def test_files_of_a_folder_are_counted_by_the_pattern_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("one-a/x/y", 5), ("one-a/z", 7), ("one-b", 1), ("two/x", 2), ("three/x", 9)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"." * size)
    (tmp_path / "two" / "loop").symlink_to(tmp_path)
    found = folder_facts(tmp_path, ("one-*", "two"))
    assert (found["files"], found["bytes"], found["whole"], found["why"]) == ({"one-*": 3, "two": 1}, 15, True, "")
    monkeypatch.setattr("disco_accel.observe.folder_facts._MOST_FILES", 2)
    found = folder_facts(tmp_path, ("one-*", "two"))
    assert (sum(found["files"].values()), found["whole"]) == (2, False)
    assert folder_facts(tmp_path / "none" / "below", ("one",))["why"] == ""


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo 12.2.0", "12.2.0"),
        ("echo", None),
        ("exit 1", None),
        ("echo 9; kill $$", None),
        ("printf '\\377 x'", "\ufffd"),
    ],
)
def test_the_version_that_a_compiler_tells(
    script: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "cc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    assert compiler() == (str(program), version)
    program.write_text("\0")
    assert compiler() == (str(program), None)


@pytest.mark.parametrize(("variable", "value"), [("DISCO_AUTOLOAD", "0"), ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")])
def test_a_door_that_is_switched_off_is_named_but_is_no_problem(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    entry_points = found["entry_points"]
    assert entry_points["accelerate_launch_config"] is False
    assert variable in entry_points["why"] and "disco-accel launch" in entry_points["why"]
    (line,) = (line for line in lines_of(found["checks"]) if "launch" in line[:24])
    assert line.startswith("note") and line.endswith("; use disco-accel launch --config instead")
