"""``DiscoCallback``: the second door, for scripts built on the transformers Trainer."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState
from transformers import TrainerCallback

from disco_accel.config import DiscoConfig
from disco_accel.integrate.distributed import check_engine
from disco_accel.integrate.plugin import prepare


class DiscoCallback(TrainerCallback):  # type: ignore[misc]
    """``Trainer(..., callbacks=[DiscoCallback(config)])`` prepares the model before Accelerate wraps it."""

    def __init__(self, config: DiscoConfig) -> None:
        self.config = config

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # The Trainer has made its Accelerator by now.
        check_engine(AcceleratorState())
        prepare(kwargs["model"], self.config)
        return control

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # Covers a callback added after the Trainer was built; harmless where the model is prepared already.
        prepare(kwargs["model"], self.config)
        return control
