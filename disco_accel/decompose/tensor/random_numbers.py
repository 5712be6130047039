"""Rules of dropout: its numbers are drawn for the whole tensor, as on one device, and each rank takes its part."""

from __future__ import annotations

from collections.abc import Callable

import torch

from disco_accel.decompose.tensor.local_graph import Call, LocalGraph, RankValue, Result
from disco_accel.decompose.tensor.placements import REPLICATED, Shard

_ATEN = torch.ops.aten


def _empty_like(local: LocalGraph, call: Call) -> RankValue:
    """What is about to be filled, with random numbers mostly, is whole."""
    like: torch.Tensor = call.node.meta["val"]
    if not like.is_contiguous():
        raise call.refusal("has a rule for contiguous tensors alone")
    made = local.emit(_ATEN.empty.memory_format, list(like.shape), dtype=like.dtype, device=like.device)
    return RankValue(made, REPLICATED)


def _dropout(local: LocalGraph, call: Call) -> Result:
    """native_dropout of ones is the mask of the whole tensor, with the factor of what stays."""
    call = call.with_values(local.whole)
    value, probability, train = call.args
    shape, like = list(call.source_shape(0)), value.tensor
    ones = local.emit(_ATEN.ones.default, shape, dtype=like.dtype, device=like.device)
    made = local.emit(call.target, RankValue(ones, REPLICATED), probability, train)
    assert local.source is not None
    local.drawn[local.source] = made
    scaled, mask = local.items(made, [REPLICATED, REPLICATED])
    assert scaled is not None and mask is not None
    if isinstance(value.placement, Shard):
        scaled, mask = local.cut(scaled, value.placement), local.cut(mask, value.placement)
    return RankValue(local.emit(_ATEN.mul.Tensor, value, scaled), value.placement), mask


def _dropout_backward(local: LocalGraph, call: Call) -> RankValue:
    call = call.with_values(local.whole)
    shards = {v.placement for v in call.values if isinstance(v.placement, Shard)}
    if len(shards) > 1:
        raise call.refusal("has operands that are cut along different dimensions")
    if not shards:
        return RankValue(local.emit_call(call), REPLICATED)
    shard = shards.pop()
    call = call.with_values(lambda value: local.cut(value, shard) if value.placement == REPLICATED else value)
    return RankValue(local.emit_call(call), shard)


DRAW_RULES: dict[str, Callable[[LocalGraph, Call], Result]] = {
    "aten::empty_like": _empty_like,
    "aten::native_dropout": _dropout,
    "aten::native_dropout_backward": _dropout_backward,
}
"""Name of an op → its rule."""
