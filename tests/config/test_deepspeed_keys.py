"""A DeepSpeed config is divided between DeepSpeed and the plans; what neither can do is refused by its key."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from disco_accel.config.deepspeed_keys import migrate, read_ds_config
from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import ConfigError

OFFLOADED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 0.5,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu"},
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "sub_group_size": 1e9,
    },
    "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False},
}


def test_offloading_is_planned_and_the_rest_stays_deepspeeds() -> None:
    before = copy.deepcopy(OFFLOADED)
    engine, planned, _ = migrate(OFFLOADED)
    assert before == OFFLOADED
    assert engine == {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 0.5,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "activation_checkpointing": {"cpu_checkpointing": False, "partition_activations": False},
    }
    named = ("stage", "offload_param", "offload_optimizer", "stage3_max_live_parameters", "cpu_checkpointing")
    assert all(any(key in line and "planned instead" in line for line in planned) for key in named)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_config_that_offloads_nothing_goes_on_as_it_is(stage: int) -> None:
    content = {"zero_optimization": {"stage": stage}, "fp16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    engine, planned, _ = migrate(content)
    assert (engine, planned) == (content, ())


def test_migrating_again_changes_nothing() -> None:
    once, _, _ = migrate(OFFLOADED)
    assert migrate(once)[:2] == (once, ())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, r"zero_optimization\.zenflow: .*leave it out"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}, "super_offload: does"),
        ({"compile": {"deepcompile": True}}, r"compile\.deepcompile: does not work"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, r"offload_param\.device: nvme .*use cpu"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, r"offload_param\.device: 'disk' .*none or cpu"),
        ({"zero_optimization": {"offload_param": "cpu"}}, r"zero_optimization\.offload_param: expected an object"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage: 4 .*use 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, r"zero_optimization\.stage: True"),
        ({"zero_optimization": [2]}, "zero_optimization: expected an object, got a list of 1"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights: does not work"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size: 8"),
        ({"tensor_parallel": {"autotp_size": 2}}, r"tensor_parallel\.autotp_size: 2"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"bf16": {"enabled": 1}}, r"bf16\.enabled: expected true or false, got 1"),
        ({"activation_checkpointing": {"cpu_checkpointing": "yes"}}, "cpu_checkpointing: expected true or false"),
        ({"disco_config": {"memory_bugdet": 1}}, "disco_config: unknown key 'memory_bugdet'; did you mean"),
        ({"disco_config": 3}, "disco_config: expected an object"),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_key(content: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DiscoConfig.from_deepspeed(content)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a JSON file"),
        ("[1]", "expected a JSON object"),
        ('{"bf16": {}, "bf16": {}}', "key 'bf16' appears twice"),
        ("\ufeff{}" * 300_000, "larger than 1 MiB"),
    ],
)
def test_a_broken_file_is_refused_by_its_name(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"ds\.json: .*{said}"):
        read_ds_config(path)
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read: No such file"):
        read_ds_config(tmp_path / "none.json")


def test_a_file_gives_a_config_and_says_what_is_planned_instead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(OFFLOADED | {"disco_config": {"memory_budget": "3GiB"}}))
    with caplog.at_level(logging.WARNING, logger="disco_accel"):
        assert DiscoConfig.from_deepspeed(path) == DiscoConfig(memory_budget="3GiB")
    assert sum("planned instead" in message for message in caplog.messages) == 5
    assert DiscoConfig.from_deepspeed(OFFLOADED) == DiscoConfig()
