"""What a user of DeepSpeed or of several processes is told, and what a user of neither never meets."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from disco_accel.config.settings import CONFIG_FILE_VARIABLE, DS_CONFIG_VARIABLE
from disco_accel.errors import ConfigError
from disco_accel.integrate.accelerate.patches import patch_ds_config
from disco_accel.integrate.launch import launcher
from disco_accel.integrate.launch.exit_status import child_status
from disco_accel.native.host_memory import HostMemory
from disco_accel.step.placement.distributed import check_engine, check_same, exclude_from_collectives, include_again
from disco_accel.step.placement.model_placement import Placement
from tests.support import forkserver
from tests.support.models import tiny_lora


def state(kind: DistributedType, **zero: Any) -> Any:
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": zero})
    return SimpleNamespace(distributed_type=kind, deepspeed_plugin=plugin)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (state(DistributedType.DEEPSPEED, stage=3), r"stage: 3 .*disco_accel is what replaces it.*--ds_config"),
        (state(DistributedType.DEEPSPEED, stage=2, offload_param={"device": "cpu"}), "offload_param: leave it out"),
        (state(DistributedType.FSDP), "distributed_type: FSDP .*use MULTI_GPU, or DEEPSPEED"),
        (state(DistributedType.MEGATRON_LM), "distributed_type: MEGATRON_LM"),
    ],
)
def test_engines_that_shard_weights_are_refused_with_what_replaces_them(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_engine(given)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_engines_that_replicate_weights_are_not_refused(stage: int) -> None:
    check_engine(state(DistributedType.DEEPSPEED, stage=stage, offload_param=None))
    check_engine(state(DistributedType.MULTI_CPU))
    check_engine(state(DistributedType.MULTI_GPU))
    check_engine(state(DistributedType.NO))


def test_a_weight_that_stage_3_has_sharded_is_named() -> None:
    model = tiny_lora(layers=1)
    name, weight = next((n, p) for n, p in model.named_parameters() if not p.requires_grad)
    weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=rf"{name}: ZeRO stage 3 has sharded this weight"):
        Placement(model, torch.device("cpu")).apply()


def test_weights_that_a_cast_has_replaced_are_gathered_into_one_arena_again() -> None:
    model = tiny_lora(layers=1)
    placement = Placement(model, torch.device("cpu"))
    placement.apply()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    placement.gather()
    (arena,) = placement._arenas
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert all(arena.holds(p) for p in frozen)
    assert arena.nbytes == HostMemory.room_for(frozen), "the arena of the fp32 weights is given up"
    assert all(torch.equal(p, values[n]) for n, p in model.named_parameters())


def test_staying_home_is_undone_and_keeps_what_the_user_ignores() -> None:
    model: Any = tiny_lora(layers=1)
    model._ddp_params_and_buffers_to_ignore = ["theirs"]
    exclude_from_collectives(model)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen < set(model._ddp_params_and_buffers_to_ignore)
    assert not any("lora" in name for name in model._ddp_params_and_buffers_to_ignore)
    include_again(model)
    assert model._ddp_params_and_buffers_to_ignore == ["theirs"]
    assert not any(hasattr(p, "ds_optim_param") for p in model.parameters())


def test_one_of_several_processes_without_a_group_is_told_to_make_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"create the Accelerator, or call .*init_process_group, before"):
        check_same([], torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check_same([], torch.device("cpu"))


def test_configs_of_scripts_are_migrated_where_accelerate_reads_them() -> None:
    from accelerate.utils import deepspeed as module

    cls: Any = type("HfDeepSpeedConfig", (module.HfDeepSpeedConfig,), {})
    patch_ds_config(SimpleNamespace(HfDeepSpeedConfig=cls))  # type: ignore[arg-type]
    given = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    read = cls(given)
    assert read.get_value("zero_optimization.stage") == 2 and not read.is_offload()
    assert given["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.py"], "--config is missing; .*--ds_config"),
        (["--ds_config", "none.json", "train.py"], r"none\.json: cannot be read"),
        (["--ds_config", "zenflow.json", "train.py"], r"zenflow\.json: zero_optimization\.zenflow: does not work"),
        (["--ds_config", "ds.json", "--cpu", "train.py"], "--cpu does not work with --ds_config"),
        (["--ds_config", "ds.json", "--config", "disco.yaml", "train.py"], "has a disco_config object and disco.yaml"),
    ],
)
def test_a_wrong_launch_ends_with_status_2_and_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable in (CONFIG_FILE_VARIABLE, DS_CONFIG_VARIABLE):
        monkeypatch.setenv(variable, "")
    monkeypatch.chdir(tmp_path)
    Path("zenflow.json").write_text('{"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}')
    Path("ds.json").write_text('{"disco_config": {"memory_budget": "1GiB"}}')
    Path("disco.yaml").write_text("disco_config:\n  memory_budget: 1GiB\n")
    assert launcher.main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    with pytest.raises(ConfigError, match=said):
        raise ConfigError(errors)


@pytest.mark.parametrize(("status", "seen"), [(2, 2), (130, 130), (-9, 137)])
def test_a_launcher_ends_with_the_status_of_the_first_process_to_fail(status: int, seen: int) -> None:
    first, later = (ProcessFailure(rank, 100 + rank, code, "") for rank, code in ((1, status), (0, -15)))
    first.timestamp, later.timestamp = 1, 2
    assert child_status(ChildFailedError("train.py", {1: first, 0: later})) == seen
    assert child_status(subprocess.CalledProcessError(status, ["train.py"])) == seen
    assert child_status(ValueError()) is None


def test_deepspeed_is_not_imported_by_who_does_not_use_it(tmp_path: Path) -> None:
    program = """
import sys
from accelerate import Accelerator
from disco_accel import DiscoConfig, DiscoPlugin, prepare, stats
from tests.support.models import random_batch, tiny_lora
accelerator = Accelerator(cpu=True)
plugin = DiscoPlugin(memory_budget="64MiB", device="cpu", plan_cache=None, planner="build")
model = plugin.prepare(accelerator, tiny_lora(layers=1, hidden=32, vocabulary=32))
accelerator.backward(model(**random_batch(32, length=8)).loss)
assert stats(model)["steps_compiled"] == 1
print([name for name in sys.modules if name.partition(".")[0] == "deepspeed"])
"""
    done = subprocess.run(forkserver.program(program, tmp_path), capture_output=True, text=True, timeout=1500)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_process_of_a_group_says_why_it_ends(tmp_path: Path) -> None:
    """torch puts a hook of its own around ours when a process group is made."""
    program = """
import torch.distributed as dist
from disco_accel.errors import ConfigError
from disco_accel.integrate.launch import exit_status
exit_status.install()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
raise ConfigError("memory_budget: too much")
"""
    done = subprocess.run(forkserver.program(program, tmp_path), capture_output=True, text=True, timeout=1500)
    assert (done.returncode, done.stderr) == (2, "disco-accel: ConfigError: memory_budget: too much\n")
