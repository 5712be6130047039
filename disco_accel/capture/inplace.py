"""Which inputs a kernel may be written over: pointwise ops read each element before they write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.taskgraph import OpCall, Ref, TensorSpec, Vertex, tensor_args


def overwritable(
    inputs: tuple[Ref, ...], sizes: tuple[int, ...], call: OpCall, vertices: Sequence[Vertex] | Mapping[int, Vertex]
) -> tuple[int, ...]:
    """Input positions that output 0 may exactly replace without changing a bit.

    Such an input has the output's dtype and layout in every argument it appears in, and nothing else in its storage.
    """
    result = call.results[0]
    if len(sizes) != 1 or result is None or not _is_safe(call, result.spec):
        return ()
    spec = result.spec
    if spec.offset != 0 or prod(spec.shape) != _extent(spec):
        return ()
    seen: dict[int, set[TensorSpec]] = {}
    for arg in tensor_args(call.args):
        seen.setdefault(arg.input, set()).add(arg.spec)
    return tuple(
        position
        for position, specs in sorted(seen.items())
        if specs == {spec} and _size(inputs[position], vertices) == sizes[0]
    )


def _is_safe(call: OpCall, spec: TensorSpec) -> bool:
    traits = op_traits(call.name)
    if not traits.row_by_row or not spec.shape:
        return traits.pointwise
    # dim is the first plain number: after the tensors, before flags and dtypes.
    dim = next(arg for arg in call.args if isinstance(arg, int) and not isinstance(arg, bool))
    last = len(spec.shape) - 1
    return dim % len(spec.shape) == last and spec.stride[last] == 1


def _extent(spec: TensorSpec) -> int:
    """Elements from the first to the last, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))


def _size(ref: Ref, vertices: Sequence[Vertex] | Mapping[int, Vertex]) -> int:
    return vertices[ref[0]].sizes[ref[1]]
