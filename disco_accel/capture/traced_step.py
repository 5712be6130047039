"""A step as it was traced, before it is lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from disco_accel.capture.captured_step import InputSource
from disco_accel.graph.taskgraph import RngSite


@dataclass(frozen=True)
class TracedStep:
    """``graph`` of aten ops on fake tensors. ``sources``: source and name, as in ``InputBinding``, of each placeholder.
    ``sites``: what ops that draw random numbers do with the generator. ``output_grads``: gradients of the outputs of
    checkpointed layers, which their recomputation waits for.
    """

    graph: fx.Graph
    sources: Sequence[tuple[InputSource, str]]
    sites: Mapping[fx.Node, RngSite]
    output_grads: Mapping[int, Iterable[torch.Tensor]]


Rewrite = Callable[[TracedStep], TracedStep]
"""Makes another step of a traced one, with the same inputs, outputs and gradients by name."""
