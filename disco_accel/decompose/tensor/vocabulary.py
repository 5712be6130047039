"""Rules where the vocabulary is cut: each rank has the rows of some tokens, and their logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from disco_accel.decompose.tensor.local_graph import (
    PARTIAL,
    REPLICATED,
    Call,
    LocalGraph,
    OfRank,
    RankValue,
    Result,
    Shard,
)

_ATEN = torch.ops.aten
_NOBODY = -(1 << 40)
"""An index that is no token's and that no rank makes of one."""


def _embedding(local: LocalGraph, call: Call) -> RankValue:
    """Rows of tokens that are another rank's are zeros. An index outside of the table is nobody's, and its lookup
    fails on rank 0 as it would on one device."""
    call = call.with_values(local.whole)
    table, indices = call.args[:2]
    if table.placement != Shard(0) or indices.placement != REPLICATED:
        raise call.refusal("has a rule for a table alone whose rows are cut")
    mine, foreign = _of_rank(local, indices, table.tensor.shape[0])
    nothing = local.emit(_ATEN.masked_fill.Scalar, RankValue(mine, REPLICATED), RankValue(foreign, REPLICATED), 0)
    # Padding and the like matter to gradients of the table alone.
    rows = local.emit(_ATEN.embedding.default, table, RankValue(nothing, REPLICATED))
    hidden = local.emit(_ATEN.unsqueeze.default, RankValue(foreign, REPLICATED), -1)
    zeros = local.emit(_ATEN.masked_fill.Scalar, RankValue(rows, REPLICATED), RankValue(hidden, REPLICATED), 0)
    # At once: a sum that is put off would make all that is added to it, layer after layer, partial too.
    return local.whole(RankValue(zeros, PARTIAL))


def _of_rank(local: LocalGraph, indices: RankValue, count: int) -> tuple[torch.fx.Node, torch.fx.Node]:
    """``indices`` counted from the rank's first, and whether each is another rank's."""
    mine = local.emit(_ATEN.sub.Tensor, indices, OfRank(0, count))
    inside = _between(local, mine, count)
    there = _between(local, indices.node, count * local.ranks)
    outside = local.emit(_ATEN.logical_not.default, RankValue(inside, REPLICATED))
    return mine, local.emit(_ATEN.bitwise_and.Tensor, RankValue(there, REPLICATED), RankValue(outside, REPLICATED))


def _between(local: LocalGraph, node: torch.fx.Node, end: int) -> torch.fx.Node:
    value = RankValue(node, REPLICATED)
    not_below, below = local.emit(_ATEN.ge.Scalar, value, 0), local.emit(_ATEN.lt.Scalar, value, end)
    return local.emit(_ATEN.bitwise_and.Tensor, RankValue(not_below, REPLICATED), RankValue(below, REPLICATED))


def _log_softmax(local: LocalGraph, call: Call) -> RankValue:
    """Each row's maximum and sum over all ranks, then as on one device."""
    call = call.with_values(local.whole)
    value, dim, to_float = call.args
    dim %= value.tensor.dim()
    if value.placement == REPLICATED or value.placement.dim != dim:
        return RankValue(local.emit_call(call), value.placement)
    shard = value.placement
    if to_float:
        value = RankValue(local.emit(_ATEN._to_copy.default, value, dtype=torch.float32), shard)
    largest = RankValue(local.emit(_ATEN.amax.default, value, [dim], True), PARTIAL)
    largest = RankValue(local.all_reduce(largest, "max"), REPLICATED)
    less = RankValue(local.emit(_ATEN.sub.Tensor, value, largest), shard)
    exponentials = RankValue(local.emit(_ATEN.exp.default, less), shard)
    total = local.whole(RankValue(local.emit(_ATEN.sum.dim_IntList, exponentials, [dim], True), PARTIAL))
    logarithm = RankValue(local.emit(_ATEN.log.default, total), REPLICATED)
    return RankValue(local.emit(_ATEN.sub.Tensor, less, logarithm), shard)


def _log_softmax_backward(local: LocalGraph, call: Call) -> RankValue:
    """The gradient less the share of each token in the row's sum of gradients."""
    call = call.with_values(local.whole)
    grad, output, dim, dtype = call.args
    dim %= output.tensor.dim()
    if output.placement == REPLICATED or output.placement.dim != dim:
        if grad.placement != output.placement:
            raise call.refusal("has operands that are cut along different dimensions")
        return RankValue(local.emit_call(call), output.placement)
    shard = output.placement
    if grad.placement == REPLICATED:
        grad = local.cut(grad, shard)
    total = local.whole(RankValue(local.emit(_ATEN.sum.dim_IntList, grad, [dim], True), PARTIAL))
    share = RankValue(local.emit(_ATEN.exp.default, output), shard)
    share = RankValue(local.emit(_ATEN.mul.Tensor, share, total), shard)
    result = RankValue(local.emit(_ATEN.sub.Tensor, grad, share), shard)
    if result.tensor.dtype is not dtype:
        result = RankValue(local.emit(_ATEN._to_copy.default, result, dtype=dtype), shard)
    return result


def _targets(local: LocalGraph, target: RankValue, ignored: int, count: int) -> RankValue:
    """``target`` counted from the rank's first token; tokens of others and ignored ones are ``_NOBODY``. An index that
    is no token's stays so, and fails on rank 0 as it would on one device."""
    mine, foreign = _of_rank(local, target, count)
    kept = local.emit(_ATEN.masked_fill.Scalar, RankValue(mine, REPLICATED), RankValue(foreign, REPLICATED), _NOBODY)
    skipped = local.emit(_ATEN.eq.Scalar, target, ignored)
    masked = local.emit(_ATEN.masked_fill.Scalar, RankValue(kept, REPLICATED), RankValue(skipped, REPLICATED), _NOBODY)
    return RankValue(masked, REPLICATED)


_NONE, _MEAN, _SUM = 0, 1, 2


def _nll(local: LocalGraph, call: Call) -> Result:
    """Each token's loss is that of the rank which has its logit, the others' are 0."""
    call = call.with_values(local.whole)
    logits, target, weight, reduction, ignored = call.args
    if logits.placement != Shard(1) or target.placement != REPLICATED or weight is not None:
        raise call.refusal("has a rule without weights alone, for classes that are cut")
    target = _targets(local, target, ignored, logits.tensor.shape[1])
    kind = _NONE if reduction == _NONE else _SUM
    made = local.emit(call.target, logits, target, None, kind, _NOBODY)
    loss, count = local.items(made, [PARTIAL, PARTIAL])
    assert loss is not None and count is not None
    if reduction == _MEAN:
        # The number of labels that count; a kernel that sums makes none.
        counted = RankValue(local.emit(_ATEN.ne.Scalar, target, _NOBODY), REPLICATED)
        numbers = RankValue(local.emit(_ATEN._to_copy.default, counted, dtype=count.tensor.dtype), REPLICATED)
        count = local.whole(RankValue(local.emit(_ATEN.sum.default, numbers), PARTIAL))
        loss = local.whole(loss)
        return RankValue(local.emit(_ATEN.div.Tensor, loss, count), REPLICATED), count
    return loss, local.whole(count)


def _nll_backward(local: LocalGraph, call: Call) -> RankValue:
    call = call.with_values(local.whole)
    grad, logits, target, weight, reduction, ignored, total = call.args
    if logits.placement != Shard(1) or weight is not None or total.placement != REPLICATED:
        raise call.refusal("has a rule without weights alone, for classes that are cut")
    if grad.placement != REPLICATED or target.placement != REPLICATED:
        raise call.refusal("has a rule without weights alone, for classes that are cut")
    target = _targets(local, target, ignored, logits.tensor.shape[1])
    return RankValue(local.emit(call.target, grad, logits, target, None, reduction, _NOBODY, total), Shard(1))


VOCABULARY_RULES: dict[str, Callable[[LocalGraph, Call], Result]] = {
    "aten::embedding": _embedding,
    "aten::_log_softmax": _log_softmax,
    "aten::_log_softmax_backward_data": _log_softmax_backward,
    "aten::nll_loss_forward": _nll,
    "aten::nll_loss_backward": _nll_backward,
}
"""Name of an op → its rule."""
