"""Rules of ops that look at a tensor otherwise, or move its elements, without computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from disco_accel.decompose.tensor.local_graph import (
    PARTIAL,
    REPLICATED,
    Call,
    LocalGraph,
    RankValue,
    Result,
    Shard,
    local_shape,
    refactored,
)

Arguments = Sequence[Any]
Of = Callable[[LocalGraph, Call, Shard], "tuple[Shard, Arguments] | None"]
"""Where the cut dimension of the first argument is in the result, and the other arguments for a rank's part. None: the
op goes along it."""


def _rule(of: Of) -> Callable[[LocalGraph, Call], Result]:
    def rule(local: LocalGraph, call: Call) -> RankValue:
        (value,) = call.values
        if value.placement == PARTIAL and any(isinstance(filler, float) and filler for filler in call.args[2:]):
            # Each rank would pad with another number than zero.
            value = local.whole(value)
            return local.value(REPLICATED, call.target, value, *call.args[1:], **call.kwargs)
        if value.placement == PARTIAL:
            return local.view_of_partial(value, lambda it: local.emit(call.target, it, *call.args[1:], **call.kwargs))
        assert isinstance(value.placement, Shard)
        made = of(local, call, value.placement)
        if made is None:
            raise call.refusal("goes along the dimension that is cut")
        shard, arguments = made
        return local.value(shard, call.target, value, *arguments, **call.kwargs)

    return rule


def _same(_local: LocalGraph, call: Call, shard: Shard) -> tuple[Shard, Arguments]:
    return shard, call.args[1:]


def _reshaped(local: LocalGraph, call: Call, shard: Shard) -> tuple[Shard, Arguments] | None:
    there = refactored(call.source_shape(0), call.shape, shard, local.ranks)
    return None if there is None else (there, [local_shape(call.shape, there, local.ranks)])


def _swapped(_local: LocalGraph, call: Call, shard: Shard) -> tuple[Shard, Arguments]:
    count = len(call.shape)
    first, second = (d % count for d in (call.args[1:] or (0, 1)))
    dim = {first: second, second: first}.get(shard.dim, shard.dim)
    return Shard(dim, shard.outer), call.args[1:]


def _permuted(_local: LocalGraph, call: Call, shard: Shard) -> tuple[Shard, Arguments]:
    order = [d % len(call.shape) for d in call.args[1]]
    return Shard(order.index(shard.dim), shard.outer), call.args[1:]


def _unsqueezed(_local: LocalGraph, call: Call, shard: Shard) -> tuple[Shard, Arguments]:
    dim = call.args[1] % len(call.shape)
    return Shard(shard.dim + (dim <= shard.dim), shard.outer), call.args[1:]


def _squeezed(_local: LocalGraph, call: Call, shard: Shard) -> tuple[Shard, Arguments] | None:
    before = call.source_shape(0)
    given = call.args[1] if len(call.args) > 1 else range(len(before))
    dims = {d % len(before) for d in (given if isinstance(given, Sequence | range) else (given,))}
    gone = [d for d in dims if before[d] == 1]
    if shard.dim in dims:
        # What a rank has may be of length 1 where the whole is not.
        return None
    return Shard(shard.dim - sum(d < shard.dim for d in gone), shard.outer), call.args[1:]


def _expanded(local: LocalGraph, call: Call, shard: Shard) -> tuple[Shard, Arguments]:
    new = len(call.shape) - len(call.source_shape(0))
    there = Shard(shard.dim + new, shard.outer)
    return there, [local_shape(call.shape, there, local.ranks)]


def _sliced(_local: LocalGraph, call: Call, shard: Shard) -> tuple[Shard, Arguments] | None:
    dim = (call.args[1] if len(call.args) > 1 else 0) % len(call.shape)
    if dim != shard.dim:
        return shard, call.args[1:]
    # All of it.
    return (shard, [dim]) if call.shape == call.source_shape(0) else None


def _selected(_local: LocalGraph, call: Call, shard: Shard) -> tuple[Shard, Arguments] | None:
    dim = call.args[1] % len(call.source_shape(0))
    if dim == shard.dim:
        return None
    return Shard(shard.dim - (dim < shard.dim), shard.outer), call.args[1:]


def _put_back(local: LocalGraph, call: Call, shard: Shard) -> tuple[Shard, Arguments] | None:
    """slice_backward: the gradient of a slice among zeros, in the shape of the whole tensor."""
    sizes, dim, *rest = call.args[1:]
    if dim % len(sizes) == shard.dim:
        whole = call.shape == call.source_shape(0)
        return (shard, [local_shape(sizes, shard, local.ranks), dim, 0, _END, 1]) if whole else None
    return shard, [local_shape(sizes, shard, local.ranks), dim, *rest]


_END = (1 << 63) - 1


def _padded(_local: LocalGraph, call: Call, shard: Shard) -> tuple[Shard, Arguments] | None:
    padding = call.args[1]
    # From the last dimension on, two numbers for each.
    at = 2 * (len(call.shape) - 1 - shard.dim)
    return None if any(padding[at : at + 2]) else (shard, call.args[1:])


def _table() -> dict[str, Of]:
    reshaping = dict.fromkeys(("view", "_unsafe_view", "reshape"), _reshaped)
    return {
        **dict.fromkeys(("detach", "alias"), _same),
        **reshaping,
        **dict.fromkeys(("t", "transpose"), _swapped),
        "permute": _permuted,
        "unsqueeze": _unsqueezed,
        "squeeze": _squeezed,
        "expand": _expanded,
        "slice": _sliced,
        "select": _selected,
        "slice_backward": _put_back,
        "constant_pad_nd": _padded,
    }


# Linear, so that a sum may come behind them.
VIEW_RULES: dict[str, Callable[[LocalGraph, Call], Result]] = {
    f"aten::{name}": _rule(of) for name, of in _table().items()
}
"""Name of an op → its rule."""
