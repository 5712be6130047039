"""Scripts written for DeepSpeed's offloading, run unchanged: their configs lose what plans do instead."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from disco_accel.config.deepspeed_keys import migrate


def patch_ds_config(module: ModuleType) -> None:
    """Migrate every DeepSpeed config that ``module`` (accelerate.utils.deepspeed) reads.

    Accelerate's plugin and transformers' Trainer, whatever config a script names to them, both go through its class.
    """
    cls = module.HfDeepSpeedConfig
    original = cls.set_stage_and_offload
    if hasattr(original, "_disco"):
        return

    @functools.wraps(original)
    def set_stage_and_offload(self: Any) -> None:
        self.config, _, _ = migrate(self.config)
        original(self)

    set_stage_and_offload._disco = True  # type: ignore[attr-defined]
    cls.set_stage_and_offload = set_stage_and_offload
