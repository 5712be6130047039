"""``DiscoCallback``: the second entry point, for scripts built on the transformers Trainer."""

from __future__ import annotations

from typing import Any

import transformers.trainer
from accelerate.state import AcceleratorState
from transformers import TrainerCallback

from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import ConfigError
from disco_accel.integrate.accelerate.patches import leave_to_plans
from disco_accel.integrate.accelerate.trainer_runs import follow_trainers
from disco_accel.integrate.prepare import prepare, settle, trains
from disco_accel.step.placement.distributed import check_engine, config_under
from disco_accel.step.run.session import find_state


class DiscoCallback(TrainerCallback):
    """``Trainer(..., callbacks=[DiscoCallback(config)])`` prepares the model before Accelerate wraps it."""

    def __init__(self, config: DiscoConfig) -> None:
        self.config = config
        # Of the Trainer that it is for: in time for its train().
        follow_trainers(transformers.trainer)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # The Trainer has made its Accelerator by now.
        accelerate_state = AcceleratorState()
        check_engine(accelerate_state)
        self.config = config_under(self.config, accelerate_state)
        prepare(kwargs["model"], self.config)
        if find_state(kwargs["model"]) is not None:
            leave_to_plans(accelerate_state)
        return control

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.config.enabled and not trains(kwargs["model"]):
            raise ConfigError(
                "the model has no trainable parameter; add a LoRA adapter (peft.get_peft_model) before train()"
            )
        # Covers a callback added after the Trainer was built; harmless where the model is prepared already.
        prepare(kwargs["model"], self.config)
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # From here on weights are read from the parameters themselves.
        settle(kwargs["model"])
        return control
