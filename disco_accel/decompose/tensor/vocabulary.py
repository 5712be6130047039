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
    nothing = local.value(REPLICATED, _ATEN.masked_fill.Scalar, mine, foreign, 0)
    # Padding and the like matter to gradients of the table alone.
    rows = local.value(REPLICATED, _ATEN.embedding.default, table, nothing)
    hidden = local.value(REPLICATED, _ATEN.unsqueeze.default, foreign, -1)
    # Summed at once: a partial value would make all that is added to it, layer after layer, partial too.
    return local.whole(local.value(PARTIAL, _ATEN.masked_fill.Scalar, rows, hidden, 0))


def _of_rank(local: LocalGraph, indices: RankValue, count: int) -> tuple[RankValue, RankValue]:
    """``indices`` counted from the rank's first, and whether each is another rank's."""
    mine = local.value(REPLICATED, _ATEN.sub.Tensor, indices, OfRank(0, count))
    inside, there = _between(local, mine, count), _between(local, indices, count * local.ranks)
    outside = local.value(REPLICATED, _ATEN.logical_not.default, inside)
    return mine, local.value(REPLICATED, _ATEN.bitwise_and.Tensor, there, outside)


def _between(local: LocalGraph, value: RankValue, end: int) -> RankValue:
    not_below = local.value(REPLICATED, _ATEN.ge.Scalar, value, 0)
    below = local.value(REPLICATED, _ATEN.lt.Scalar, value, end)
    return local.value(REPLICATED, _ATEN.bitwise_and.Tensor, not_below, below)


def _log_softmax(local: LocalGraph, call: Call) -> RankValue:
    """Each row's maximum and sum over all ranks, then as on one device."""
    call = call.with_values(local.whole)
    value, dim, to_float = call.args
    dim %= value.tensor.dim()
    if value.placement == REPLICATED or value.placement.dim != dim:
        return local.called(call, value.placement)
    shard = value.placement
    if to_float:
        value = local.value(shard, _ATEN._to_copy.default, value, dtype=torch.float32)
    largest = local.value(PARTIAL, _ATEN.amax.default, value, [dim], True)
    largest = RankValue(local.all_reduce(largest, "max"), REPLICATED)
    less = local.value(shard, _ATEN.sub.Tensor, value, largest)
    exponentials = local.value(shard, _ATEN.exp.default, less)
    total = local.whole(local.value(PARTIAL, _ATEN.sum.dim_IntList, exponentials, [dim], True))
    logarithm = local.value(REPLICATED, _ATEN.log.default, total)
    return local.value(shard, _ATEN.sub.Tensor, less, logarithm)


def _log_softmax_backward(local: LocalGraph, call: Call) -> RankValue:
    """The gradient less the share of each token in the row's sum of gradients."""
    call = call.with_values(local.whole)
    grad, output, dim, dtype = call.args
    dim %= output.tensor.dim()
    if output.placement == REPLICATED or output.placement.dim != dim:
        if grad.placement != output.placement:
            raise call.refusal("has operands that are cut along different dimensions")
        return local.called(call, output.placement)
    shard = output.placement
    if grad.placement == REPLICATED:
        grad = local.cut(grad, shard)
    total = local.whole(local.value(PARTIAL, _ATEN.sum.dim_IntList, grad, [dim], True))
    share = local.value(shard, _ATEN.exp.default, output)
    share = local.value(shard, _ATEN.mul.Tensor, share, total)
    result = local.value(shard, _ATEN.sub.Tensor, grad, share)
    if result.tensor.dtype is not dtype:
        result = local.value(shard, _ATEN._to_copy.default, result, dtype=dtype)
    return result


def _targets(local: LocalGraph, target: RankValue, ignored: int, count: int) -> RankValue:
    """``target`` counted from the rank's first token; tokens of others and ignored ones are ``_NOBODY``. An index that
    is no token's stays so, and fails on rank 0 as it would on one device."""
    mine, foreign = _of_rank(local, target, count)
    kept = local.value(REPLICATED, _ATEN.masked_fill.Scalar, mine, foreign, _NOBODY)
    skipped = local.value(REPLICATED, _ATEN.eq.Scalar, target, ignored)
    return local.value(REPLICATED, _ATEN.masked_fill.Scalar, kept, skipped, _NOBODY)


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
        counted = local.value(REPLICATED, _ATEN.ne.Scalar, target, _NOBODY)
        numbers = local.value(REPLICATED, _ATEN._to_copy.default, counted, dtype=count.tensor.dtype)
        count = local.whole(local.value(PARTIAL, _ATEN.sum.default, numbers))
        loss = local.whole(loss)
        return local.value(REPLICATED, _ATEN.div.Tensor, loss, count), count
    return loss, local.whole(count)


def _nll_backward(local: LocalGraph, call: Call) -> RankValue:
    call = call.with_values(local.whole)
    grad, logits, target, weight, reduction, ignored, total = call.args
    if logits.placement != Shard(1) or weight is not None or total.placement != REPLICATED:
        raise call.refusal("has a rule without weights alone, for classes that are cut")
    if grad.placement != REPLICATED or target.placement != REPLICATED:
        raise call.refusal("has a rule without weights alone, for classes that are cut")
    target = _targets(local, target, ignored, logits.tensor.shape[1])
    return local.value(Shard(1), call.target, grad, logits, target, None, reduction, _NOBODY, total)


VOCABULARY_RULES: dict[str, Callable[[LocalGraph, Call], Result]] = {
    "aten::embedding": _embedding,
    "aten::_log_softmax": _log_softmax,
    "aten::_log_softmax_backward_data": _log_softmax_backward,
    "aten::nll_loss_forward": _nll,
    "aten::nll_loss_backward": _nll_backward,
}
"""Name of an op → its rule."""
