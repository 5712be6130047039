"""The gradients of one prepared model."""

from __future__ import annotations

from dataclasses import dataclass

from disco_accel.step.gradients.accumulation import Accumulation
from disco_accel.step.gradients.gradient_norms import GradientNorms
from disco_accel.step.placement.gradient_memory import GradientMemory


@dataclass(frozen=True)
class ModelGradients:
    """Their memory on the host, their norms, and the steps that add to those in ``.grad``."""

    memory: GradientMemory
    norms: GradientNorms
    accumulation: Accumulation
