"""Rules of the propagation, by the name of the op: results of arguments that are cut or partial."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from disco_accel.decompose.tensor.local_graph import PARTIAL, REPLICATED, Call, LocalGraph, RankValue, Result, Shard
from disco_accel.decompose.tensor.views import VIEW_RULES
from disco_accel.decompose.tensor.vocabulary import VOCABULARY_RULES

Rule = Callable[[LocalGraph, Call], Result]

_ATEN = torch.ops.aten


def _pointwise(local: LocalGraph, call: Call) -> RankValue:
    """Operands are broadcast to one shape; each that is whole is cut as the others are."""
    if _keeps_partial(call):
        return local.called(call, PARTIAL)
    call = call.with_values(local.whole)
    # Counted from the last dimension, which is how shapes are broadcast.
    cuts = {(s.dim - v.tensor.dim(), s.outer) for v in call.values if isinstance(s := v.placement, Shard)}
    if not cuts:
        return local.called(call, REPLICATED)
    if len(cuts) > 1:
        raise call.refusal("has operands that are cut along different dimensions")
    ((dim, outer),) = cuts

    def cut(value: RankValue) -> RankValue:
        there = isinstance(value.placement, Shard)
        if there or value.tensor.dim() < -dim or value.tensor.shape[dim] == 1:
            return value
        return local.cut(value, Shard(value.tensor.dim() + dim, outer))

    call = call.with_values(cut)
    return local.called(call, Shard(len(call.shape) + dim, outer))


def _keeps_partial(call: Call) -> bool:
    """Whether the sum of the ranks' results is the result of one device."""
    partial = [v.placement == PARTIAL for v in call.values]
    if not any(partial):
        return False
    name = call.target._schema.name.removeprefix("aten::")
    if name in ("add", "sub"):
        return len(partial) == 2 and all(partial)
    if name == "_to_copy":
        # What is sent is the narrower of the two.
        to = call.kwargs.get("dtype") or call.values[0].tensor.dtype
        return bool(to.is_floating_point) and to.itemsize <= call.values[0].tensor.dtype.itemsize
    if name in ("neg", "clone"):
        return True
    # A factor that is a number, or a tensor of one.
    if call.kwargs:
        return False
    one = [v.tensor.dim() == 0 for v in call.values if v.placement != PARTIAL]
    return (name == "mul" or (name == "div" and partial[0] and len(call.args) == 2)) and sum(partial) == 1 and all(one)


def _product(local: LocalGraph, call: Call) -> RankValue:
    """mm, and bmm, whose first dimension is that of the batch."""
    batch = call.values[0].tensor.dim() - 2
    rows, inner, columns = batch, batch + 1, batch + 1
    a, b = call.values
    if a.placement == PARTIAL and b.placement == PARTIAL:
        smaller = min(a, b, key=lambda value: value.tensor.numel())
        call = call.with_values(lambda value: local.whole(value) if value is smaller else value)
        a, b = call.values
    if PARTIAL in (a.placement, b.placement):
        if REPLICATED in (a.placement, b.placement):
            return local.called(call, PARTIAL)
        call = call.with_values(local.whole)
        a, b = call.values
    of_a = a.placement if isinstance(a.placement, Shard) else None
    of_b = b.placement if isinstance(b.placement, Shard) else None
    if batch and any(s is not None and s.dim == 0 for s in (of_a, of_b)):
        if of_a != of_b:
            raise call.refusal("has operands that are cut along different dimensions")
        assert of_a is not None
        return local.called(call, of_a)
    if (of_a is not None and of_a.dim == inner) or (of_b is not None and of_b.dim == rows):
        return _over_inner(local, call, inner, rows)
    if of_a is not None and of_b is not None:
        raise call.refusal("has rows and columns that are cut")
    if of_a is not None:
        return local.called(call, of_a)
    assert of_b is not None and of_b.dim == columns
    return local.called(call, of_b)


def _over_inner(local: LocalGraph, call: Call, inner: int, rows: int) -> RankValue:
    """A product whose inner dimension is cut: every rank has a summand."""
    a, b = call.values
    if a.placement == REPLICATED:
        assert isinstance(b.placement, Shard)
        a = local.cut(a, Shard(inner, b.placement.outer))
    elif b.placement == REPLICATED:
        assert isinstance(a.placement, Shard)
        b = local.cut(b, Shard(rows, a.placement.outer))
    placements = a.placement, b.placement
    if placements != (Shard(inner, placements[0].outer), Shard(rows, placements[0].outer)):  # type: ignore[union-attr]
        raise call.refusal("has an inner dimension of which only one operand is cut")
    operands = iter((a, b))
    return local.called(call.with_values(lambda _: next(operands)), PARTIAL)


def _product_and_sum(local: LocalGraph, call: Call) -> RankValue:
    """addmm: a bias that each rank has a part of, or that is added once to the sum of the products."""
    if call.kwargs:
        raise call.refusal("scales its operands")
    call = call.with_values(local.whole)
    bias, a, b = call.args
    product = Call(call.node, _ATEN.mm.default, (a, b), {})
    made = _product(local, product)
    if made.placement == PARTIAL:
        # The product alone stays in the graph: the kernel with a bias would add it on every rank.
        return _sum_of(local, call, local.whole(made), bias)
    local.graph.erase_node(made.node)
    assert isinstance(made.placement, Shard)
    if made.placement.dim == 1 and bias.placement == REPLICATED:
        bias = local.cut(bias, Shard(bias.tensor.dim() - 1, made.placement.outer))
    return local.value(made.placement, call.target, bias, *call.args[1:])


def _sum_of(local: LocalGraph, call: Call, product: RankValue, bias: RankValue) -> RankValue:
    if bias.placement != REPLICATED:
        raise call.refusal("adds a bias that is cut to a sum that is not")
    return local.value(REPLICATED, _ATEN.add.Tensor, product, bias)


def _reduction(local: LocalGraph, call: Call) -> RankValue:
    """sum, mean and the like over ``dim``."""
    name = call.target._schema.name.removeprefix("aten::")
    (value,) = call.values
    if value.placement == PARTIAL:
        if name == "sum":
            return local.called(call, PARTIAL)
        value = local.whole(value)
        return local.called(call.with_values(lambda _: value), REPLICATED)
    assert isinstance(value.placement, Shard)
    count = value.tensor.dim()
    dims = [d % count for d in (call.args[1] if len(call.args) > 1 else None) or range(count)]
    if value.placement.dim in dims:
        if name != "sum":
            raise call.refusal("goes over the dimension that is cut")
        return local.called(call, PARTIAL)
    keeps = len(call.args) > 2 and bool(call.args[2])
    before = 0 if keeps else sum(d < value.placement.dim for d in dims)
    return local.called(call, Shard(value.placement.dim - before, value.placement.outer))


def _along(local: LocalGraph, call: Call) -> RankValue:
    """Ops along one dimension, the first number among the arguments: softmax, concatenation and the like."""
    call = call.with_values(local.whole)
    dim = next((arg for arg in call.args if isinstance(arg, int)), 0) % len(call.shape)
    cuts = {v.placement for v in call.values if isinstance(v.placement, Shard)}
    if not cuts:
        return local.called(call, REPLICATED)
    shard = cuts.pop()
    if cuts or shard.dim == dim:
        raise call.refusal("goes along a dimension that is cut")

    def cut(value: RankValue) -> RankValue:
        # A cache starts with a tensor of shape (0,), which fits to any other.
        as_it_is = value.placement != REPLICATED or value.tensor.shape == (0,)
        return value if as_it_is else local.cut(value, shard)

    return local.called(call.with_values(cut), shard)


def _attention(local: LocalGraph, call: Call) -> Result:
    """Heads are independent: each rank computes its own. Which results are cut, shapes tell."""
    call = call.with_values(local.whole)
    shards = {v.placement for v in call.values if isinstance(v.placement, Shard)}
    if shards - {Shard(1)}:
        raise call.refusal("is cut along another dimension than that of its heads")
    if not shards:
        made = local.emit(call.target, *call.args, **call.kwargs)
        return local.items(made, [REPLICATED] * len(made.meta["val"]))
    heads = {v.tensor.shape[1] * local.ranks for v in call.values if isinstance(v.placement, Shard)}

    def cut(value: RankValue) -> RankValue:
        # A mask, or a bias, may have a part for each head.
        per_head = value.placement == REPLICATED and value.tensor.dim() == 4 and value.tensor.shape[1] in heads
        return local.cut(value, Shard(1)) if per_head and value.tensor.shape[1] > 1 else value

    call = call.with_values(cut)
    made = local.emit(call.target, *call.args, **call.kwargs)
    placements: list[Any] = []
    for ours, whole in zip(made.meta["val"], call.node.meta["val"], strict=True):
        same = not isinstance(ours, torch.Tensor) or ours.shape == whole.shape
        placements.append(REPLICATED if same else Shard(1))
    return local.items(made, placements)


def _like(local: LocalGraph, call: Call) -> RankValue:
    """Tensors that are filled with a number, of the dtype of a given one."""
    if call.target._schema.name.endswith("_like"):
        (value,) = call.values
        if value.placement == PARTIAL:
            return local.called(call, REPLICATED)
        return local.called(call, value.placement)
    return local.called(call, REPLICATED)


def _table() -> dict[str, Rule]:
    pointwise = (
        "add sub mul div neg pow exp log rsqrt sqrt reciprocal cos sin abs sigmoid sigmoid_backward silu silu_backward "
        "gelu gelu_backward relu threshold_backward tanh tanh_backward where masked_fill eq ne lt le gt ge "
        "logical_and logical_not bitwise_and bitwise_or bitwise_not maximum minimum clamp clone _to_copy"
    )
    reductions = "sum mean amax amin"
    attention = "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention"
    groups: list[tuple[str, Rule]] = [
        (pointwise, _pointwise),
        (reductions, _reduction),
        ("mm bmm", _product),
        ("addmm", _product_and_sum),
        ("cat _softmax _safe_softmax _softmax_backward_data", _along),
        ("zeros_like ones_like full_like new_zeros new_ones new_full", _like),
    ]
    kinds = itertools.product(attention.split(), ("", "_backward"))
    groups.append((" ".join(f"_scaled_dot_product_{kind}{end}" for kind, end in kinds), _attention))
    table = {f"aten::{name}": rule for names, rule in groups for name in names.split()}
    return table | VIEW_RULES | VOCABULARY_RULES


RULES: dict[str, Rule] = _table()
"""Name of an op → its rule; other ops have none for values that are cut or partial."""


def _empty_like(local: LocalGraph, call: Call) -> RankValue:
    """Memory that is about to be filled, with random numbers mostly, is whole."""
    like: torch.Tensor = call.node.meta["val"]
    if not like.is_contiguous():
        raise call.refusal("has a rule for contiguous tensors alone")
    shape = list(like.shape)
    return local.value(REPLICATED, _ATEN.empty.memory_format, shape, dtype=like.dtype, device=like.device)


def _dropout(local: LocalGraph, call: Call) -> Result:
    """native_dropout of ones is the mask of the whole tensor, scaled."""
    call = call.with_values(local.whole)
    value, probability, train = call.args
    shape, like = list(call.source_shape(0)), value.tensor
    ones = local.value(REPLICATED, _ATEN.ones.default, shape, dtype=like.dtype, device=like.device)
    made = local.emit(call.target, ones, probability, train)
    assert local.source is not None
    local.drawn[local.source] = made
    scaled, mask = local.items(made, [REPLICATED, REPLICATED])
    assert scaled is not None and mask is not None
    if isinstance(value.placement, Shard):
        scaled, mask = local.cut(scaled, value.placement), local.cut(mask, value.placement)
    return local.value(value.placement, _ATEN.mul.Tensor, value, scaled), mask


def _dropout_backward(local: LocalGraph, call: Call) -> RankValue:
    call = call.with_values(local.whole)
    shards = {v.placement for v in call.values if isinstance(v.placement, Shard)}
    if len(shards) > 1:
        raise call.refusal("has operands that are cut along different dimensions")
    if not shards:
        return local.called(call, REPLICATED)
    shard = shards.pop()
    call = call.with_values(lambda value: local.cut(value, shard) if value.placement == REPLICATED else value)
    return local.called(call, shard)


DRAW_RULES: dict[str, Rule] = {
    "aten::empty_like": _empty_like,
    "aten::native_dropout": _dropout,
    "aten::native_dropout_backward": _dropout_backward,
}
"""Those of dropout: its numbers are drawn for the whole tensor, as on one device, and each rank takes its part."""
