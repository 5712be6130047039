"""The patches of a training process that a launcher started: every model with an adapter is prepared on its way through
``Accelerator.prepare``, whether the script is a raw Accelerate loop or uses transformers' Trainer. Configs of DeepSpeed
lose the keys that plans replace."""

from __future__ import annotations

import functools
import logging
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

from disco_accel.config import settings as configuration
from disco_accel.config.deepspeed_keys import migrate

logger = logging.getLogger("disco_accel")

if TYPE_CHECKING:
    # Importing torch here would, through its autoload, import this module while it is half done.
    import torch


def patch_accelerator(module: ModuleType) -> None:
    """Wrap ``prepare`` and ``prepare_model`` of the ``Accelerator`` in ``module`` (accelerate.accelerator)."""
    cls = module.Accelerator
    if hasattr(cls.prepare, "_disco"):
        return
    prepare, prepare_model = cls.prepare, cls.prepare_model

    # prepare as well as prepare_model: under DeepSpeed and FSDP models do not go through the latter.
    @functools.wraps(prepare)
    def prepare_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        for arg in args:
            if isinstance(arg, torch.nn.Module):
                prepare_launched(arg, self.state)
        return prepare(self, *args, **kwargs)

    @functools.wraps(prepare_model)
    def prepare_one(
        self: Any, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False, **kwargs: Any
    ) -> Any:
        if not evaluation_mode:
            prepare_launched(model, self.state)
        return prepare_model(self, model, device_placement, evaluation_mode, **kwargs)

    prepare_all._disco = True  # type: ignore[attr-defined]
    cls.prepare, cls.prepare_model = prepare_all, prepare_one


def patch_trainer(module: ModuleType) -> None:
    """Prepare a Trainer's model before its constructor moves the model, base weights and all, to the device."""
    cls = module.Trainer
    if hasattr(cls._move_model_to_device, "_disco"):
        return
    move = cls._move_model_to_device

    @functools.wraps(move)
    def move_prepared(self: Any, model: Any, device: torch.device) -> Any:
        if not str(device).startswith("cpu"):
            prepare_launched(model)
        return move(self, model, device)

    move_prepared._disco = True  # type: ignore[attr-defined]
    cls._move_model_to_device = move_prepared


def patch_ds_config(module: ModuleType) -> None:
    """Migrate every DeepSpeed config that ``module`` (accelerate.utils.deepspeed) reads.

    Accelerate's plugin and transformers' Trainer both go through its class, for any config that a script names to them.
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


def prepare_launched(model: torch.nn.Module, state: Any = None) -> None:
    """Prepare ``model`` under the launcher's config, as ``prepare_for_training`` does.

    A process that is not of the launch, but inherited its environment, may find the file gone: that is one warning.

    Raises:
        ConfigError: the config file or an environment override is wrong; or as ``prepare_for_training``.
    """
    gone = configuration.inherited_file_gone()
    if gone is not None:
        _say_gone(gone)
        return
    config = configuration.launch_config()
    if config.enabled:
        prepare_for_training(model, config, state)


def _say_left_alone(model: torch.nn.Module, why: str) -> None:
    text = f"disco_accel: all parameters of {type(model).__name__} are {why}; it runs as it is"
    warnings.warn(text, stacklevel=4)


@functools.cache
def _say_gone(path: str) -> None:
    logger.warning("%s, which another run left in the environment, is gone: this one runs without a plan", path)


def prepare_for_training(model: torch.nn.Module, config: configuration.DiscoConfig, state: Any = None) -> None:
    """Prepare ``model``. One without a trainable parameter is left alone, with a warning, and so is one that has no
    frozen ones while its optimizer updates on the device.

    ``state``: accelerate's, of the run, where there is one yet.

    Raises:
        ConfigError: the config does not fit this machine, or the run's engine shards weights.
    """
    from disco_accel.integrate import prepare
    from disco_accel.step.placement.distributed import check_engine, config_under
    from disco_accel.step.run.session import find_state

    trainable = [p.requires_grad for p in model.parameters()]
    if not any(trainable):
        _say_left_alone(model, "frozen, and plans of training steps are for models that train something")
        return
    if state is not None:
        config = config_under(config, state)
    if all(trainable) and find_state(model) is None and prepare.optimizer_of(model, config) == "device":
        _say_left_alone(
            model,
            "trainable, and with optimizer: device they take as much of the device as without plans; optimizer: host "
            "trains them under the budget",
        )
        return
    if state is not None:
        check_engine(state)
    prepare.prepare(model, config)
    if state is not None and find_state(model) is not None:
        leave_to_plans(state)


def leave_to_plans(accelerate_state: Any) -> None:
    """Switch off the compilation that an Accelerator would do in ``prepare``: ``torch_compile``, ``dynamo_backend``."""
    plugin = getattr(accelerate_state, "dynamo_plugin", None)
    if plugin is None or str(getattr(plugin.backend, "value", plugin.backend)).upper() == "NO":
        return
    from accelerate.utils import DynamoBackend

    logger.warning(
        "torch_compile, dynamo_backend: %s is not applied: plans take its place, and run with eager mode's bits; leave "
        "it out",
        getattr(plugin.backend, "value", plugin.backend),
    )
    plugin.backend = DynamoBackend.NO
