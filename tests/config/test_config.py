"""DiscoConfig: every way in gives the same checked values, and every mistake is named with what would work."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from disco_accel.config import budget_why as reasons
from disco_accel.config import settings as module
from disco_accel.config.keys import PARSERS
from disco_accel.config.settings import DiscoConfig, host_memory_bytes, split_yaml
from disco_accel.config.strict_yaml import read_yaml
from disco_accel.errors import ConfigError
from disco_accel.host_limits import HostLimit

ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\nmixed_precision: bf16\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "disco.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_field_has_a_parser_and_every_default_is_valid() -> None:
    assert list(PARSERS) == [field.name for field in dataclasses.fields(DiscoConfig)]
    assert DiscoConfig() == DiscoConfig.from_dict({})


@pytest.mark.parametrize(
    ("key", "given", "stored"),
    [
        ("memory_budget", "12GiB", 12 << 30),
        ("memory_budget", 1048576, 1 << 20),
        ("memory_budget", "80 %", "80%"),
        ("memory_budget", "auto", "auto"),
        ("host_memory", "1.5GiB", 3 << 29),
        ("link_bandwidth", "0.5GB/s", 5e8),
        ("link_bandwidth", "500 MB / s".replace(" / ", "/"), 5e8),
        ("link_bandwidth", 2.5e8, 2.5e8),
        ("link_bandwidth", None, None),
        ("plan_seconds", "1e-5", 1e-5),
        ("buckets", [512, 256, 512], (256, 512)),
        ("buckets", False, "off"),
        ("compute_threads", None, None),
        ("lookahead", 0, 0),
        ("launch_graphs", "auto", "auto"),
        ("launch_graphs", False, "off"),
        ("plan_cache", None, None),
        ("enabled", False, False),
    ],
)
def test_values_are_normalised(key: str, given: Any, stored: Any) -> None:
    assert getattr(DiscoConfig.from_dict({key: given}), key) == stored


@pytest.mark.parametrize(
    ("key", "given", "works"),
    [
        ("memory_budget", "12 gigs", "12GiB"),
        ("memory_budget", "-1GiB", "12GiB"),
        ("memory_budget", 0, "12GiB"),
        ("memory_budget", True, "12GiB"),
        ("memory_budget", 1.5, "12GiB"),
        ("memory_budget", "120%", "up to 100%"),
        ("memory_budget", "0%", "above 0%"),
        ("memory_budget", None, "auto"),
        ("memory_budget", ["12GiB"], "12GiB"),
        ("host_memory", "lots", "80%"),
        ("planner", "oracle", "build"),
        ("policy", "newest", "belady"),
        ("plan_seconds", "long", "use auto, or seconds"),
        ("plan_seconds", -1, "use auto, or seconds"),
        ("plan_seconds", True, "use auto, or seconds"),
        ("plan_seconds", float("nan"), "use auto, or seconds"),
        ("lookahead", -1, "at least 0"),
        ("lookahead", True, "whole number"),
        ("lookahead", "2", "whole number"),
        ("launch_graphs", "on", "use auto or off"),
        ("launch_graphs", True, "use auto or off"),
        ("buckets", [], "list of sequence lengths"),
        ("buckets", [0], "list of sequence lengths"),
        ("buckets", "256", "list of sequence lengths"),
        ("plan_cache", 3, "folder"),
        ("on_unsupported", "ignore", "error or eager"),
        ("device", "gpu", "auto or cpu or cuda"),
        ("link_bandwidth", "fast", "0.5GB/s"),
        ("link_bandwidth", -1, "0.5GB/s"),
        ("link_bandwidth", float("inf"), "0.5GB/s"),
        ("link_bandwidth", float("nan"), "0.5GB/s"),
        ("compute_threads", 0, "at least 1"),
        ("enabled", "yes", "true or false"),
        ("enabled", 1, "true or false"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_works(key: str, given: Any, works: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DiscoConfig.from_dict({key: given}, "disco.yaml: disco_config")
    message = str(caught.value)
    assert message.startswith(f"disco.yaml: disco_config: {key}: {given!r}")
    assert works in message
    assert "\n" not in message


def test_the_constructor_checks_like_a_file() -> None:
    assert DiscoConfig(memory_budget="12GiB").memory_budget == 12 << 30
    with pytest.raises(ConfigError, match="memory_budget"):
        DiscoConfig(memory_budget="12 gigs")


@pytest.mark.parametrize(("key", "nearest"), [("memory_bugdet", "memory_budget"), ("lookahed", "lookahead")])
def test_an_unknown_key_is_named_with_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean '{nearest}'"):
        DiscoConfig.from_dict({key: 1})


@pytest.mark.parametrize("key", ["dispatch", "link_latency"])
def test_a_former_key_is_answered_with_its_place(key: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; leave it out: .* an option of the engine"):
        DiscoConfig.from_dict({key: 1})
    name = f"DISCO_{key.upper()}"
    with pytest.raises(ConfigError, match=f"environment variable {name} is unknown; leave it out"):
        DiscoConfig.from_env(environ={name: "1"})


def test_an_unknown_key_far_from_all_others_gets_no_wrong_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        DiscoConfig.from_dict({"zzz": 1})
    assert str(caught.value) == "disco_config: unknown key 'zzz'"


def test_planner_names_come_from_the_planners_own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    import disco_accel.plan

    monkeypatch.setattr(disco_accel.plan, "PLANNERS", {"build": None, "brand_new": None})
    assert DiscoConfig(planner="brand_new").planner == "brand_new"
    with pytest.raises(ConfigError, match="build or brand_new"):
        DiscoConfig(planner="timed")


def test_the_section_of_an_accelerate_file_is_split_off(tmp_path: Path) -> None:
    path = write(tmp_path, ACCELERATE + "disco_config:\n  memory_budget: 1GiB\n  lookahead: 3\n")
    rest, ours = split_yaml(path)
    assert list(rest) == ["compute_environment", "distributed_type", "num_processes", "mixed_precision"]
    assert ours == DiscoConfig(memory_budget="1GiB", lookahead=3) == DiscoConfig.from_yaml(path)


def test_a_file_may_be_only_the_section(tmp_path: Path) -> None:
    path = write(tmp_path, "memory_budget: 1GiB\n")
    assert split_yaml(path) == ({}, DiscoConfig(memory_budget="1GiB"))


def test_a_file_without_our_section_is_not_ours(tmp_path: Path) -> None:
    path = write(tmp_path, ACCELERATE)
    assert split_yaml(path)[1] is None
    with pytest.raises(ConfigError, match="no disco_config section"):
        DiscoConfig.from_yaml(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disco_config:\n  memory_budget: 1GiB\n  memory_budget: 2GiB\n", "line 3: key 'memory_budget' appears twice"),
        ("disco_config: {}\ndisco_config: {}\n", "line 2: key 'disco_config' appears twice"),
        ("disco_config:\n  memory_bugdet: 1GiB\n", "did you mean 'memory_budget'"),
        (ACCELERATE + "disco_confg:\n  memory_budget: 1GiB\n", "did you mean 'disco_config'"),
        (ACCELERATE + "memory_budget: 1GiB\n", "'memory_budget' belongs under disco_config"),
        ("disco_config: {}\nlookahead: 2\n", "'lookahead' belongs under disco_config"),
        ("memory_budget: 1GiB\nlookahed: 2\n", "did you mean 'lookahead'"),
        ("disco_config: 12GiB\n", "expected keys and values"),
        ("disco_config:\n", "expected keys and values"),
        ("disco_config: [\n", "not valid YAML"),
        ("disco_config: {memory_budget: !!python/object/apply:os.getcwd []}\n", "not valid YAML"),
        ("- 1\n", "key: value"),
        ("1: 2\n", "key: value"),
        ("", "empty"),
        ("[" * 5000, "not valid YAML"),
        ("memory_budget: 1GiB\n---\nlookahead: 2\n", "not valid YAML"),
    ],
)
def test_a_malformed_file_is_named_with_the_fault(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        DiscoConfig.from_yaml(path)
    assert str(caught.value).startswith(str(path))


def test_missing_binary_and_huge_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_yaml(tmp_path / "binary.yaml")
    (tmp_path / "huge.yaml").write_text("a: b\n" * 300_000)
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_yaml(tmp_path / "huge.yaml")


def test_environment_variables_go_over_the_file() -> None:
    environ = {
        "DISCO_MEMORY_BUDGET": "2GiB",
        "DISCO_LOOKAHEAD": "0",
        "DISCO_BUCKETS": "[256, 512]",
        "DISCO_ENABLED": "false",
        "DISCO_BUILD_EXT": "0",
        "DISCO_STU_HOME": "not ours",
        "PATH": "/bin",
    }
    base = DiscoConfig(memory_budget="1GiB", policy="lru")
    changed = DiscoConfig.from_env(base, environ)
    assert changed == dataclasses.replace(base, memory_budget=2 << 30, lookahead=0, buckets=(256, 512), enabled=False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DISCO_MEMORY_BUDGET", "much", "DISCO_MEMORY_BUDGET: memory_budget: 'much'"),
        ("DISCO_MEMORY_BUGDET", "1GiB", "DISCO_MEMORY_BUGDET is unknown; did you mean 'DISCO_MEMORY_BUDGET'"),
        ("DISCO_BUCKETS", "[1", "DISCO_BUCKETS"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiscoConfig.from_env(environ={name: value})


def test_as_dict_is_json_and_round_trips() -> None:
    config = DiscoConfig(memory_budget="80%", buckets=(256,), link_bandwidth="1GB/s")
    assert DiscoConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_resolve_turns_shares_into_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = HostLimit("the machine's memory", 1000 << 20, 600 << 20)
    monkeypatch.setattr(module, "host_limits", lambda: [limit])
    monkeypatch.setattr(module, "own_bytes", lambda: 100 << 20)
    settings = DiscoConfig(device="cpu", memory_budget="25%", host_memory="auto").resolve()
    assert (settings.device, settings.memory_budget, settings.host_memory) == ("cpu", 250 << 20, 700 << 20)
    assert DiscoConfig(device="cpu").resolve().memory_budget == 500 << 20


@pytest.mark.parametrize(("left", "warned"), [(600, False), (200, True)])
def test_a_budget_that_is_no_size_is_explained(left: int, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit that it is a share of, and the bytes that others use; a size and a store's are not."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    for each in (module, reasons):
        monkeypatch.setattr(each, "host_limits", lambda: [HostLimit("a control group (/x)", 1000 << 20, left << 20)])
        monkeypatch.setattr(each, "own_bytes", lambda: 100 << 20)

    def why(budget: str, **keys: Any) -> str:
        config = DiscoConfig(device="cpu", memory_budget=budget, **keys)
        return reasons.budget_why(config, config.resolve())

    assert why("100MiB") == why("shared") == ""
    said = why("auto")
    assert said.startswith("memory_budget auto: 500MiB is 50% of 1000MiB, a control group (/x); ")
    assert f"other programs, which use {900 - left}MiB now" in said
    assert ("only 300MiB can be had" in said) == warned
    assert "memory_budget 25%: 125MiB is 25% of 1000MiB, a control group (/x), for each of 2 devices; " in why(
        "25%", devices=2
    )


@pytest.mark.parametrize(("free", "warned"), [(70, False), (20, True)])
def test_the_share_of_a_gpu_is_explained(free: int, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the smallest one, with the bytes that neither are free nor this process's tensors have."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free << 30, (100 - 20 * (device or 0)) << 30))
    allocated = {"allocated_bytes": {"all": {"current": 4 << 30, "peak": 4 << 30}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device=None: allocated)
    config = DiscoConfig(device="cuda", devices=2)
    said = reasons.budget_why(config, config.resolve())
    assert said.startswith("memory_budget auto: 72GiB is 90% of cuda:1's 80GiB, the smallest of its devices; ")
    assert f"{80 - free - 4}GiB are in use now outside of this process's tensors" in said
    assert (f"only {free + 4}GiB can be had" in said) == warned


@pytest.mark.parametrize("key", ["memory_budget", "host_memory"])
def test_a_size_larger_than_the_machine_says_how_large_the_machine_is(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "host_memory_bytes", lambda: 1 << 30)
    with pytest.raises(ConfigError, match=rf"{key}: 2GiB is larger than the machine: cpu has 1GiB"):
        DiscoConfig.from_dict({"device": "cpu", "memory_budget": "1GiB", key: "2GiB"}).resolve()
    fits = DiscoConfig.from_dict({"device": "cpu", "memory_budget": "1GiB", key: "1GiB"})
    assert getattr(fits.resolve(), key) == 1 << 30


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_the_processes_of_a_machine_share_its_memory(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module._LOCAL_PROCESSES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "host_memory_bytes", lambda: 8 << 30)
    alone = DiscoConfig(device="cpu", host_memory="80%").resolve()
    monkeypatch.setenv(variable, "4")
    beside_three = DiscoConfig(device="cpu", host_memory="80%").resolve()
    assert (alone.memory_budget, beside_three.memory_budget) == (4 << 30, 1 << 30)
    assert beside_three.host_memory == alone.host_memory // 4
    assert DiscoConfig(device="cpu", memory_budget="2GiB").resolve().memory_budget == 2 << 30
    with pytest.raises(ConfigError, match=r"memory_budget: 3GiB for each of 4 processes .*use at most 2GiB"):
        DiscoConfig(device="cpu", memory_budget="3GiB").resolve()


def test_auto_follows_accelerate_to_the_cpu_and_cuda_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 30, 10 << 30))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert DiscoConfig().resolve().device == "cuda"
    assert DiscoConfig().resolve().memory_budget == (9 << 30)
    with pytest.raises(ConfigError, match="host device only"):
        DiscoConfig(link_bandwidth="1GB/s").resolve()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert DiscoConfig().resolve().device == "cpu"
    assert DiscoConfig(device="cuda").resolve().device == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        DiscoConfig(device="cuda").resolve()


def test_gpus_are_numbered_from_the_current_one_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of memory is one of the smallest; what is not there, and several processes, are refused."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 30, (10 + (device or 0)) << 30))
    for devices, gpus, memory in [(1, (), 10), (2, (1, 0), 10), ([3, 2], (3, 2), 12), ([2], (2,), 12)]:
        settings = DiscoConfig(device="cuda", devices=devices, memory_budget="50%").resolve()  # type: ignore[arg-type]
        assert (settings.devices, settings.gpus) == (max(1, len(gpus)), gpus)
        assert settings.memory_budget == memory << 29
    for devices in (5, [0, 4]):
        with pytest.raises(ConfigError, match="are not there, torch sees 4 GPUs"):
            DiscoConfig(device="cuda", devices=devices).resolve()  # type: ignore[arg-type]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="shares 2 GPUs in one process, and this run has 2"):
        DiscoConfig(device="cuda", devices=2).resolve()


def test_host_memory_is_at_most_what_the_kernel_reports() -> None:
    reported = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert reported is not None
    assert 64 << 20 < host_memory_bytes() <= int(reported[1]) * 1024
