"""Random ops in a step: found, and for now refused with the setting that turns them off."""

from __future__ import annotations

import torch
from torch import fx

from disco_accel.capture.nodes import arguments_of
from disco_accel.capture.tags import node_info
from disco_accel.errors import CaptureError


def check_no_random_ops(graph: fx.Graph) -> None:
    """Raise where the step draws random numbers.

    Raises:
        CaptureError: names the op, its module, and the setting to change.
    """
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and _draws(node):
            module = node_info(node).module
            raise CaptureError(
                f"{node.target} in module {module or '?'} draws random numbers, which a planned step cannot replay; "
                f"{_advice(module)}"
            )


def _draws(node: fx.Node) -> bool:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Fused attention is tagged as seeded whatever its dropout probability is.
    return bool(arguments_of(node, target).get("dropout_p", 1.0) != 0.0)


def _advice(module: str) -> str:
    if "lora_dropout" in module:
        return "set lora_dropout: 0"
    if "attn" in module or "attention" in module:
        return "set attention_dropout: 0 in the model's config"
    return "set its dropout probability to 0"
