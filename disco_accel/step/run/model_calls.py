"""What the calls of one prepared model share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disco_accel.step.capture_lock import Gate
from disco_accel.step.run.arguments import Arguments
from disco_accel.step.run.cast_regions import CastRegions
from disco_accel.step.run.last_fallback import LastFallback
from disco_accel.step.run.output_usage import UsageByStep
from disco_accel.step.run.shared_batches import SharedBatches
from disco_accel.step.run.verify_steps import StepVerifier


@dataclass(frozen=True)
class ModelCalls:
    """``forward``: the model's own. ``gate``: between forwards that run without a plan and captures."""

    forward: Callable[..., Any]
    arguments: Arguments
    gate: Gate
    usage: UsageByStep
    last_fallback: LastFallback
    casts: CastRegions
    batches: SharedBatches
    verifier: StepVerifier
