"""``DiscoPlugin``: plans in a raw Accelerate loop, without a launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import ConfigError
from disco_accel.integrate.accelerate.patches import prepare_for_training

if TYPE_CHECKING:
    from accelerate import Accelerator


class DiscoPlugin:
    """``DiscoPlugin(memory_budget="12GiB").prepare(accelerator, model, optimizer, loader)``.

    Works as ``accelerator.prepare``, after each model with a trained adapter over frozen weights got its plans.
    Accelerate has no place for plugins of others: ``kwargs_handlers`` takes its own classes alone, so this one takes
    the accelerator. DDP and DeepSpeed (ZeRO stage 0, 1 and 2) stay the accelerator's to set up.
    """

    def __init__(self, config: DiscoConfig | None = None, **keys: Any) -> None:
        """A config, or keys of one.

        Raises:
            ConfigError: a key is unknown or its value is wrong; or both a config and keys are given.
        """
        if config is not None and keys:
            raise ConfigError(f"DiscoPlugin: {next(iter(keys))!r} is given beside a config; put it into the config")
        self.config = DiscoConfig.from_dict(keys, "DiscoPlugin") if config is None else config

    def prepare(self, accelerator: Accelerator, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """``accelerator.prepare(*args, device_placement=device_placement)``, its models planned.

        Raises:
            ConfigError: the config does not fit this machine, or the accelerator's engine shards weights.
        """
        for arg in args:
            if isinstance(arg, torch.nn.Module) and self.config.enabled:
                prepare_for_training(arg, self.config, accelerator.state)
        return accelerator.prepare(*args, device_placement=device_placement)
