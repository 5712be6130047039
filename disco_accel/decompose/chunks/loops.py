"""Dimensions of an op's arguments and results that go together, op by op: those in which it can run in parts.

As in an einsum: a label for each loop of the op. A part of a loop needs the same part of every dimension that has its
label, and makes the same part of every result that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from disco_accel.graph.taskgraph import Arg, OpCall, TensorSpec, tensor_args
from disco_accel.native.op_encoding import op_overload


@dataclass(frozen=True, slots=True)
class _Axis:
    """A dimension of the loop ``label``, an index of which stands for ``scale`` steps of that loop."""

    label: int
    scale: int = 1


Axes = tuple[_Axis | None, ...]
"""Of each dimension of a tensor; None: it is needed, or made, whole."""


@dataclass(frozen=True, slots=True)
class Loops:
    """Axes of each tensor among an op's arguments, in order, and of each of its results.

    ``sums``: labels over which a result that has not got them is a sum. ``alike``: results that each part makes whole
    and alike. ``shape_at``: the argument that lists the first result's shape. ``part_args``: arguments of the call
    for a part, where they are others; ``mean``: the first result is that of the parts divided by the second.
    """

    args: tuple[Axes, ...]
    results: tuple[Axes, ...]
    sums: frozenset[int] = frozenset()
    alike: frozenset[int] = frozenset()
    shape_at: int | None = None
    part_args: tuple[Arg, ...] | None = None
    mean: bool = False
    units: dict[int, int] = field(default_factory=dict)
    """Label → the number that parts of it are multiples of, where that is not 1."""


def loops_of(call: OpCall) -> Loops | None:
    """The loops of ``call``; None for an op that runs whole."""
    rule = _RULES.get(call.name)
    if rule is None and _is_pointwise(call):
        rule = _pointwise
    return None if rule is None or call.rng is not None else rule(call)


def goes_by_strides(call: OpCall) -> bool:
    """Whether the kernels of ``call`` find elements by strides. Others take arguments for contiguous that always were:
    the backward of layer normalisation reads means and deviations so, and says nothing."""
    return call.name in _BY_STRIDES or _is_pointwise(call)


_BY_STRIDES = frozenset(
    f"aten::{name}"
    for name in ["mm", "bmm", "addmm", "cat", "clone", "copy_", "_to_copy", "sum", "mean", "amax", "amin"]
)


def _is_pointwise(call: OpCall) -> bool:
    try:
        return torch.Tag.pointwise in op_overload(call.name, call.overload).tags
    except AttributeError:
        return False


def _specs(call: OpCall) -> list[TensorSpec]:
    return [arg.spec for arg in tensor_args(call.args)]


def _result(call: OpCall, k: int = 0) -> TensorSpec | None:
    result = call.results[k]
    return None if result is None else result.spec


def _axes(labels: Sequence[int | None]) -> Axes:
    return tuple(None if label is None else _Axis(label) for label in labels)


def _broadcast(spec: TensorSpec, shape: Sequence[int], labels: Sequence[int | None]) -> Axes:
    """Axes of an operand of a result of ``shape``, aligned at the last dimension; of length 1 it serves every part."""
    behind = len(shape) - len(spec.shape)
    return tuple(
        _Axis(label) if label is not None and n == shape[behind + d] and n > 1 else None
        for d, n in enumerate(spec.shape)
        for label in [labels[behind + d]]
    )


def _pointwise(call: OpCall) -> Loops | None:
    """Each element from the same elements of the operands."""
    return _all_but(call, None)


def _all_but(call: OpCall, dim: int | None) -> Loops | None:
    """The same with a dimension along which an element needs all others."""
    spec = _result(call)
    if spec is None or len(call.results) != 1:
        return None
    labels = [None if d == dim else d for d in range(len(spec.shape))]
    args = tuple(_broadcast(each, spec.shape, labels) for each in _specs(call))
    return Loops(args, (_axes(labels),))


def _along_dim(position: int) -> Callable[[OpCall], Loops | None]:
    """Softmax and the like; the dimension is the argument at ``position``."""

    def rule(call: OpCall) -> Loops | None:
        dim = call.args[position]
        assert isinstance(dim, int)
        return _all_but(call, dim % max(len(_specs(call)[0].shape), 1))

    return rule


def _product(call: OpCall) -> Loops:
    """mm and bmm. Labels: rows, columns, the inner dimension, then the batch."""
    batch = (3,) if call.name == "aten::bmm" else ()
    args = _axes((*batch, 0, 2)), _axes((*batch, 2, 1))
    return Loops(args, (_axes((*batch, 0, 1)),), sums=frozenset({2}))


def _product_and_bias(call: OpCall) -> Loops | None:
    spec = _result(call)
    if spec is None:
        return None
    bias = _broadcast(_specs(call)[0], spec.shape, (0, 1))
    return Loops((bias, _axes((0, None)), _axes((None, 1))), (_axes((0, 1)),))


def _reduction(call: OpCall) -> Loops | None:
    """sum, mean and the like over some dimensions."""
    (spec,), made = _specs(call), _result(call)
    given = call.args[1] if len(call.args) > 1 else None
    if made is None or call.overload not in ("dim_IntList", "dim", "default"):
        return None
    count = len(spec.shape)
    dims = given if isinstance(given, tuple) and given else tuple(range(count))
    gone = {d % max(count, 1) for d in dims if isinstance(d, int)}
    keeps = len(made.shape) == count
    left = [None if d in gone else d for d in range(count)]
    of_result = left if keeps else [d for d in left if d is not None]
    is_sum = call.name == "aten::sum"
    of_arg = list(range(count)) if is_sum else left
    return Loops((_axes(of_arg),), (_axes(of_result),), sums=frozenset(gone if is_sum else ()))


def _concatenation(call: OpCall) -> Loops | None:
    """All dimensions but that along which tensors follow each other; that too, if only one of them has elements."""
    spec, dim = _result(call), call.args[1]
    if spec is None or not isinstance(dim, int):
        return None
    one = sum(0 not in each.shape for each in _specs(call)) == 1
    labels = [None if d == dim % len(spec.shape) and not one else d for d in range(len(spec.shape))]
    # A cache begins with a tensor of shape (0,), which fits to any other.
    args = tuple((None,) * len(s.shape) if 0 in s.shape else _axes(labels) for s in _specs(call))
    return Loops(args, (_axes(labels),))


def _embedding(call: OpCall) -> Loops:
    _, indices = _specs(call)
    rows = range(1, 1 + len(indices.shape))
    return Loops((_axes((None, 0)), _axes(tuple(rows))), (_axes((*rows, 0)),))


def _embedding_backward(call: OpCall) -> Loops | None:
    """The table's gradient is a sum over all tokens; each column on its own."""
    _, indices = _specs(call)
    if call.args[4] is not False:
        # Gradients are divided by how often a token comes.
        return None
    rows = tuple(range(1, 1 + len(indices.shape)))
    return Loops((_axes((*rows, 0)), _axes(rows)), (_axes((None, 0)),), sums=frozenset(rows))


def _norm(call: OpCall) -> Loops | None:
    """Normalisation over the last dimensions: rows are independent, weights and bias serve all of them."""
    specs, normalized = _specs(call), call.args[1]
    assert isinstance(normalized, tuple)
    rows = len(specs[0].shape) - len(normalized)
    of_rows = [d if d < rows else None for d in range(len(specs[0].shape))]
    results = tuple(() if r is None else _axes(of_rows[: len(r.spec.shape)]) for r in call.results)
    return Loops((_axes(of_rows), *((None,) * len(s.shape) for s in specs[1:])), results)


def _norm_backward(call: OpCall) -> Loops | None:
    """Gradients of rows, and sums over rows for weights and bias."""
    specs, normalized = _specs(call), call.args[2]
    assert isinstance(normalized, tuple)
    count, width = len(specs[0].shape), len(normalized)
    of_rows = [d if d < count - width else None for d in range(count)]
    args = tuple(_axes(of_rows) if len(s.shape) == count else (None,) * len(s.shape) for s in specs)
    weights = ((None,) * width for _ in call.results[1:])
    return Loops(args, (_axes(of_rows), *weights), sums=frozenset(range(count - width)))


def _loss(call: OpCall) -> Loops | None:
    """nll_loss: a sum over rows, perhaps divided by the sum of their weights, which is the second result."""
    specs, reduction = _specs(call), call.args[3]
    if len(specs[0].shape) != 2:
        return None
    weight: tuple[Axes, ...] = ((None,),) * (len(specs) - 2)
    args = (_axes((0, None)), _axes((0,)), *weight)
    if reduction == _NO_REDUCTION:
        return Loops(args, (_axes((0,)), ()), alike=frozenset({1}))
    as_sum = (*call.args[:3], _SUM, *call.args[4:])
    return Loops(args, ((), ()), sums=frozenset({0}), part_args=as_sum, mean=reduction == _MEAN)


_NO_REDUCTION, _MEAN, _SUM = 0, 1, 2


def _loss_backward(call: OpCall) -> Loops | None:
    specs = _specs(call)
    if len(specs[1].shape) != 2:
        return None
    rest = ((None,) * len(s.shape) for s in specs[3:])
    return Loops((_axes((0,) * len(specs[0].shape)), _axes((0, None)), _axes((0,)), *rest), (_axes((0, None)),))


def _attention(call: OpCall) -> Loops | None:
    """Rows of the batch and heads are independent. Heads of the query may share those of key and value."""
    backward = call.name.endswith("_backward")
    specs = _specs(call)
    query, key = specs[1:3] if backward else specs[:2]
    if len(query.shape) != 4:
        return None
    rows, heads, groups = query.shape[0], query.shape[1], key.shape[1]
    if heads % groups:
        return None
    of_heads = {groups: _Axis(1, heads // groups), heads: _Axis(1)}

    def axes(shape: Sequence[int]) -> Axes:
        if len(shape) < 3:
            return (None,) * len(shape)
        by_row = _Axis(0) if shape[0] == rows and rows > 1 else None
        return (by_row, of_heads.get(shape[1]) if shape[1] > 1 or heads == 1 else None, *(None for _ in shape[2:]))

    results: list[Axes] = []
    alike = set()
    for k, result in enumerate(call.results):
        results.append(() if result is None else axes(result.spec.shape))
        # States of a generator that nothing is drawn from.
        if result is not None and len(result.spec.shape) < 3:
            alike.add(k)
    args = tuple(axes(spec.shape) for spec in specs)
    return Loops(args, tuple(results), alike=frozenset(alike), units={1: heads // groups})


def _slice_backward(call: OpCall) -> Loops | None:
    """The gradient of a slice among zeros: all dimensions but the sliced one."""
    spec, dim = _result(call), call.args[2]
    if spec is None or not isinstance(dim, int):
        return None
    labels = [None if d == dim % len(spec.shape) else d for d in range(len(spec.shape))]
    return Loops((_axes(labels),), (_axes(labels),), shape_at=1)


def _padding(call: OpCall) -> Loops | None:
    spec, padding = _result(call), call.args[1]
    if spec is None or not isinstance(padding, tuple):
        return None
    padded = {len(spec.shape) - 1 - k // 2 for k, n in enumerate(padding) if n}
    labels = [None if d in padded else d for d in range(len(spec.shape))]
    return Loops((_axes(labels),), (_axes(labels),))


def _rows_by_index(call: OpCall) -> Loops | None:
    """x[i]: rows that one list of numbers names."""
    specs = _specs(call)
    if len(specs) != 2 or len(specs[0].shape) != 2 or len(specs[1].shape) != 1 or specs[1].dtype == "bool":
        return None
    return Loops((_axes((None, 1)), _axes((0,))), (_axes((0, 1)),))


def _copy_to_user(call: OpCall) -> Loops | None:
    """A result written to the user's memory, of which no tensor is handed on."""
    target, source = _specs(call)
    if call.results != (None,) or target.shape != source.shape:
        return None
    axes = _axes(tuple(range(len(target.shape))))
    return Loops((axes, axes), ((),))


def _table() -> dict[str, Callable[[OpCall], Loops | None]]:
    rules: dict[str, Callable[[OpCall], Loops | None]] = {}
    groups: list[tuple[str, Callable[[OpCall], Loops | None]]] = [
        ("_to_copy clone zeros_like ones_like full_like empty_like silu_backward gelu_backward", _pointwise),
        ("_softmax _log_softmax _safe_softmax", _along_dim(1)),
        ("_softmax_backward_data _log_softmax_backward_data", _along_dim(2)),
        ("mm bmm", _product),
        ("addmm", _product_and_bias),
        ("sum mean amax amin", _reduction),
        ("cat", _concatenation),
        ("embedding", _embedding),
        ("embedding_dense_backward", _embedding_backward),
        ("native_layer_norm _fused_rms_norm", _norm),
        ("native_layer_norm_backward _fused_rms_norm_backward", _norm_backward),
        ("nll_loss_forward", _loss),
        ("nll_loss_backward", _loss_backward),
        ("slice_backward", _slice_backward),
        ("constant_pad_nd", _padding),
        ("copy_", _copy_to_user),
        ("index", _rows_by_index),
    ]
    kinds = ("flash_attention", "flash_attention_for_cpu", "efficient_attention")
    groups += [(f"_scaled_dot_product_{kind}{end}", _attention) for kind in kinds for end in ("", "_backward")]
    for names, rule in groups:
        rules |= {f"aten::{name}": rule for name in names.split()}
    return rules


_RULES = _table()
