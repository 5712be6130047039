"""Accelerate's own setting to compile models, switched off beside plans."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("disco_accel")


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
