"""Reading FX call nodes by the schema of the op they call."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def arguments_of(node: fx.Node, target: torch._ops.OpOverload) -> dict[str, Any]:
    """Argument name → value as traced, in schema order of ``target``, defaults filled in."""
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in target._schema.arguments}


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes of an argument, also those inside lists."""
    if isinstance(value, fx.Node):
        return [value]
    return [node for item in value for node in nodes_in(item)] if isinstance(value, (tuple, list)) else []
