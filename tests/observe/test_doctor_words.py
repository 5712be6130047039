"""The checks that follow from the facts of ``doctor``: of machines that are not here, with GPUs and old libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disco_accel.observe.doctor_words import checks_of, lines_of, problems_of
from disco_accel.observe.package_versions import floors, is_older
from tests.test_imports import ROOT

GIB = 1 << 30
GPU = {
    **{"kind": "cuda", "name": "NVIDIA H200", "memory": 140 * GIB, "free": 139 * GIB, "capability": "9.0"},
    "driver": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build; CUDA 13000",
    **{"cuda_runtime": "13.0", "shares_host_memory": False, "index": 0, "numa_node": 1},
    **{"runs_on_node": True, "takes_from_node": True, "uuid": "GPU-1"},
}
PASSED = {"when": 1795694400.0, "seconds": 7.2, "figures": {"compared": "bits", "link": {"h2d": 52.2e9}}, "changed": []}
LOCKED = {"tried": True, "bytes": 4 * GIB, "refused": ""}
HOST = {
    "limits": [{"what": "the machine's memory", "bytes": 126 * GIB, "left": 120 * GIB}],
    **{"most_locked": 8 << 20, "may_lock_more": False, "largest_lock": LOCKED, "system": "6.8.0-51"},
    **{"huge_pages": "always [madvise] never", "write_watch": True, "numa_nodes": 2},
}
UNSEEN = {"seen": [], "driver_has": 0, "why": "no driver", "visible_devices": None}
LINK = {"h2d_bandwidth": 52e9, "d2h_bandwidth": 52e9, "pageable_h2d_bandwidth": 7.8e9, "h2d_latency": 6e-6}
ENGINE = {"built": False, "compiler": "g++", "compiler_version": "12.2.0", "folder": "/kept/engine"}
CACHE = {"folder": "/kept", "files": {"plans": 2}, "bytes": 5, "whole": True, "free": GIB, "why": ""}


def seen(*gpus: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A report with these GPUs."""
    return {"gpus": {"seen": list(gpus), "headers": ["/cuda/include"]}, **more}


def said(report: dict[str, Any], name: str) -> tuple[str, str]:
    """The status of a check, and its words."""
    (check,) = [check for check in checks_of(report) if check["check"] == name]
    return check["status"], lines_of([check])[0]


def test_a_machine_with_a_gpu_where_all_is_well() -> None:
    report = seen(GPU, self_checks=[PASSED], link=LINK, host=HOST)
    checks = checks_of(report)
    assert {check["status"] for check in checks} == {"ok"} and problems_of(checks) == []
    gpu, check, node, headers, link, _, _, locked, *_ = lines_of(checks)
    assert gpu.endswith(
        "NVIDIA H200, 140GiB, 139GiB free, compute capability 9.0, driver 580.159.04 for CUDA 13.0, PyTorch's CUDA 13.0"
    )
    assert "GPU 0 self-check" in check and "passed on 2026-11-2" in check and "bit for bit" in check
    assert node.endswith("NUMA node 1, where this process may run and take memory")
    assert headers.endswith("/cuda/include") and "52 GB/s to the GPU" in link
    assert locked.endswith("8MiB by ulimit -l; one call locks 4GiB, and more was not tried")
    assert lines_of(checks)[-1] == "no problems, no notes"


@pytest.mark.parametrize(
    ("gpu", "check", "status", "words"),
    [
        ({"free": 9 * GIB}, "GPU 0", "note", "other programs hold most of it"),
        ({"driver": "unknown module"}, "GPU 0", "ok", "driver unknown, PyTorch's CUDA 13.0"),
        ({"shares_host_memory": True}, "GPU 0 memory", "note", "do not stream"),
        ({"takes_from_node": False}, "GPU 0 node", "problem", "numactl --cpunodebind=1 --preferred=1"),
        ({"runs_on_node": False}, "GPU 0 node", "note", "may not run; start with numactl"),
        ({"runs_on_node": None, "takes_from_node": None}, "GPU 0 node", "ok", "NUMA node 1"),
    ],
)
def test_what_is_wrong_with_a_gpu(gpu: dict[str, Any], check: str, status: str, words: str) -> None:
    found = said(seen(GPU | gpu), check)
    assert found[0] == status and words in found[1]


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({}, "note", "not checked yet; the first plan begins with it, in seconds; disco-accel doctor --selftest"),
        (PASSED | {"changed": ["driver", "sources", "disco_accel"]}, "note", "and driver, this package changed since"),
        ({"fault": "OSError: no"}, "note", "cannot be told: OSError: no"),
    ],
)
def test_what_was_checked_on_a_gpu(answer: dict[str, Any], status: str, words: str) -> None:
    found = said(seen(GPU, self_checks=[answer]), "GPU 0 self-check")
    assert found[0] == status and words in found[1]


@pytest.mark.parametrize(
    ("part", "status", "words"),
    [
        ({}, "note", "none (no driver); plans run on the host device"),
        ({"driver_has": 2, "visible_devices": ""}, "note", "CUDA_VISIBLE_DEVICES='' leaves none"),
        ({"driver_has": 2}, "problem", "the driver has 2, and PyTorch sees none: no driver; mend the driver"),
        ({"driver_has": 1, "why": "a build without CUDA"}, "problem", "install the PyTorch for this driver's CUDA"),
    ],
)
def test_a_gpu_that_is_not_seen(part: dict[str, Any], status: str, words: str) -> None:
    found = said({"gpus": UNSEEN | part}, "GPU")
    assert found[0] == status and words in found[1]


def test_a_gpu_that_cannot_be_used_and_headers_that_are_missing() -> None:
    report = seen(GPU, {"fault": "RuntimeError: lost"})
    report["gpus"]["headers"] = {"fault": "ExtensionError: install the headers"}
    assert problems_of(checks_of(report)) == [
        "GPU 1: cannot be used: RuntimeError: lost; see whether other programs can use it",
        "CUDA headers: install the headers",
    ]


@pytest.mark.parametrize(
    ("host", "check", "status", "words"),
    [
        ({"largest_lock": LOCKED | {"bytes": 64 << 20, "refused": "error 2"}}, "locked memory", "problem", "ulimit -l"),
        ({"largest_lock": LOCKED | {"bytes": 2 * GIB, "refused": "error 2"}}, "locked memory", "ok", "locks 2GiB"),
        ({"largest_lock": LOCKED | {"tried": False}}, "locked memory", "ok", "could lock 4GiB; only a GPU needs it"),
        ({"largest_lock": {"fault": "OSError: no"}}, "locked memory", "note", "cannot be told: OSError: no"),
        ({"most_locked": None}, "locked memory", "ok", "no limit; one call"),
        ({"may_lock_more": True}, "locked memory", "ok", "does not hold for this process (CAP_IPC_LOCK)"),
        ({"huge_pages": "always madvise [never]"}, "huge pages", "note", "echo madvise"),
        (
            {"write_watch": False},
            "write watch",
            "note",
            "read twice a step, 0.1 to 0.2 s of a core for each GiB; allow",
        ),
        ({"write_watch": False, "system": "6.1.0-9"}, "write watch", "note", "use Linux 6.7 or newer"),
        ({"write_watch": None}, "write watch", "note", "known when the engine is built"),
        ({"limits": [HOST["limits"][0] | {"left": GIB // 2}]}, "host memory", "problem", "512MiB left; end other"),
    ],
)
def test_what_is_wrong_with_host_memory(host: dict[str, Any], check: str, status: str, words: str) -> None:
    found = said({"host": HOST | host}, check)
    assert found[0] == status and words in found[1]


@pytest.mark.parametrize(
    ("part", "cache", "check", "status", "words"),
    [
        ({}, {}, "engine", "note", "into /kept/engine; python -m disco_accel.native.extension does so now"),
        ({}, {"free": 5}, "engine", "problem", "cannot be kept in /kept/engine: 5B are left there; set TORCH_EXT"),
        ({"why": "no ninja"}, {}, "engine", "problem", "no ninja"),
        ({"compiler_version": None}, {}, "compiler", "note", "install g++"),
        ({"compiler_version": "10.2.1"}, {}, "compiler", "note", "g++ 10.2.1 is older than 11; install g++"),
        ({"compiler": "clang++", "compiler_version": "9.0"}, {}, "compiler", "ok", "clang++ 9.0"),
        ({}, {"why": "it is full"}, "engine cache", "note", "it is full; a changed engine is not compiled"),
        ({}, {"whole": False}, "engine cache", "ok", "more than 2 files"),
    ],
)
def test_the_engine_and_its_folder(
    part: dict[str, Any], cache: dict[str, Any], check: str, status: str, words: str
) -> None:
    caches = {"plans": None, "extension": CACHE | cache, "fused_kernels": CACHE}
    report = {"extension": ENGINE | part, "caches": caches}
    found = said(report, check)
    assert found[0] == status and words in found[1]
    assert said(report, "plan cache") == ("note", "note     plan cache  off (plan_cache is null); each run plans again")


@pytest.mark.parametrize(
    ("name", "version", "status", "words"),
    [
        ("transformers", None, "problem", "is not installed; pip install 'transformers>=5.6'"),
        ("transformers", "5.5.9", "problem", "5.5.9 is older than 5.6, the oldest that is tried; pip install"),
        ("transformers", "5.10.0", "ok", "5.10.0 (5.6 or newer)"),
        ("transformers", "odd", "ok", "odd (5.6 or newer)"),
        ("numpy", None, "problem", "is not installed; pip install 'numpy'"),
        ("deepspeed", "0.18", "note", "pip install 'deepspeed>=0.18.6'"),
        ("python", "3.10.2", "problem", "use a newer interpreter"),
    ],
)
def test_versions_beside_the_oldest(name: str, version: str | None, status: str, words: str) -> None:
    oldest = {"needed": {"python": "3.11", "transformers": "5.6", "numpy": ""}, "optional": {"deepspeed": "0.18.6"}}
    given = {"transformers": "5.6", "numpy": "2.0", "deepspeed": None, "trl": "1.16.0"}
    report = {"python": "3.11", "versions": given, "oldest": oldest}
    if name == "python":
        report["python"] = version
    else:
        given[name] = version
    found = said(report, name)
    assert found[0] == status and words in found[1]
    assert "trl 1.16.0" in said(report, "optional")[1]


def test_part_of_a_report_that_is_not_as_it_should_be_is_a_note() -> None:
    checks = checks_of({"host": {}, "link": {}, "extension": {}, "gpus": {}, "entry_points": {}, "versions": {}})
    assert len(checks) > 5 and {check["status"] for check in checks} == {"note"}
    assert checks_of({}) == []


def test_a_failed_self_test_is_a_problem_in_its_own_words() -> None:
    checks = checks_of({"selftest": {"passed": False, "problem": "self-check: a loss\ndiffers"}})
    assert problems_of(checks) == ["self-test: self-check: a loss differs"]


def test_floors_are_those_of_the_project_or_of_the_installed_package(tmp_path: Path) -> None:
    needed, optional = floors()
    expected = {"python": "3.11", "torch": "2.11", "transformers": "5.6", "accelerate": "1.11", "peft": "0.18.1"}
    assert expected.items() <= needed.items() and needed["numpy"] == ""
    assert optional["deepspeed"] == "0.18.6" and "ruff" not in needed | optional
    installed = floors(tmp_path / "none.toml")
    assert installed[0].keys() == needed.keys() and "ruff" not in installed[1]
    for text in ("", "[project]", "\0", '[project]\nname = "another"', '[project]\nname = "disco-accel"'):
        (tmp_path / "pyproject.toml").write_text(text)
        assert floors(tmp_path / "pyproject.toml") == installed


def test_the_tests_run_with_no_older_versions_than_are_asked_for() -> None:
    """Of the libraries that pack weights, with those very versions."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.lower(): pin for name, pin in pins.items()}
    needed, optional = floors()
    asked = {name: oldest for name, oldest in (needed | optional).items() if oldest and name != "python"}
    assert {"bitsandbytes", "torchao", "hqq", "optimum-quanto", "torch"} <= asked.keys()
    assert not [name for name, oldest in asked.items() if is_older(pins[name], oldest)]


@pytest.mark.parametrize(
    ("version", "oldest", "older"),
    [
        *[("2.9", "2.11", True), ("2.11", "2.11.0", False), ("2.13.0+cpu", "2.11", False), ("2.11rc1", "2.11", False)],
        *[("", "1", False), ("9" * 5000, "1", False), ("0.2.8.post1", "0.2.8", False), ("1", "1.0.1", True)],
    ],
)
def test_which_version_is_older(version: str, oldest: str, older: bool) -> None:
    assert is_older(version, oldest) == older
