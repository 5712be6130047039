"""Removal of ops from a traced graph whose results nothing reads."""

from __future__ import annotations

import torch
from torch import fx

from disco_accel.capture.rng import draws


def remove_unread(graph: fx.Graph) -> None:
    """Remove nodes whose results nobody reads, as ``eliminate_dead_code`` does, without its check of the graph."""
    for node in reversed(graph.nodes):
        if not node.users and not _must_stay(node):
            graph.erase_node(node)


def _must_stay(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    # Eager draws the numbers that nobody reads too.
    return draws(node) or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)
