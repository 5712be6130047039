"""OpCalls as the nested tuples that the engine's ``Ops.add_op`` decodes against the op's schema.

Encoding: ``("tensor", storage, dtype, shape, stride, offset)``, ``("enum", kind, value)``, ``("list", *items)``;
numbers, strings, booleans and None stand for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.taskgraph import Arg, EnumArg, OpCall, TensorArg, TensorSpec, is_fused

Encoded = Any
"""A nested tuple as described above."""

_DEDUCED = frozenset({"dtype", "layout", "device", "pin_memory"})
"""Arguments that an out overload may lack: the out tensor carries them."""


def encode_spec(storage: int, spec: TensorSpec) -> Encoded:
    """A tensor laid out as ``spec`` over the engine's storage number ``storage``."""
    return ("tensor", storage, spec.dtype, tuple(spec.shape), tuple(spec.stride), spec.offset)


def encode_arg(arg: Arg, storage_of: Callable[[int], int]) -> Encoded:
    """Encodes one argument; ``storage_of`` maps an input position of the vertex to a storage number."""
    if isinstance(arg, TensorArg):
        return encode_spec(storage_of(arg.input), arg.spec)
    if isinstance(arg, EnumArg):
        return ("enum", arg.kind, arg.value)
    if isinstance(arg, tuple):
        return ("list", *(encode_arg(item, storage_of) for item in arg))
    return arg


def encode_args(call: OpCall, storage_of: Callable[[int], int]) -> Encoded:
    """The functional call's arguments in schema order."""
    return tuple(encode_arg(arg, storage_of) for arg in call.args)


def encode_fused_call(
    call: OpCall, kernel: int, storage_of: Callable[[int], int], out_storages: Mapping[int, int]
) -> Encoded:
    """The arguments of a fused kernel, whose handle is ``kernel``: the tensors that it reads, and those it writes."""
    reads = [encode_arg(arg, storage_of) for arg in call.args]
    writes = [encode_spec(out_storages[result.output], result.spec) for result in call.results if result is not None]
    return kernel, ("list", *reads), ("list", *writes)


def label(call: OpCall) -> str:
    """The op in messages: its name and the module that issued it; of a fused kernel the ops that it computes."""
    if is_fused(call):
        ops = [inner.name.partition("::")[2] for inner in call.body]
        return f"{call.name} ({', '.join(ops)}){f' in {call.module}' if call.module else ''}"
    name = call.name if call.overload == "default" else f"{call.name}.{call.overload}"
    return f"{name} in {call.module}" if call.module else name


@cache
def op_overload(name: str, overload: str) -> torch._ops.OpOverload:
    """The operator ``aten::mm``, ``out`` as PyTorch's object. Raises AttributeError if it does not exist."""
    namespace, _, base = name.partition("::")
    op: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    return op


def dispatcher_overload(overload: str) -> str:
    """The dispatcher's spelling of an overload name: it calls ``default`` the empty string."""
    return "" if overload == "default" else overload


def _out_arguments(schema: torch.FunctionSchema) -> list[torch.Argument]:
    return [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


@cache
def out_overload(name: str, overload: str) -> tuple[str, tuple[int, ...]] | None:
    """The native out overload of a functional op, or None.

    Returns its overload name and, for each of its leading arguments, the position of that argument in the functional
    schema. Overloads tagged ``generated`` call the functional op and copy: they count only for ops that move elements,
    which the engine computes itself.
    """
    functional = op_overload(name, overload)._schema
    if _out_arguments(functional):
        return None
    positions = {a.name: i for i, a in enumerate(functional.arguments)}
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base)
    for candidate in packet.overloads():
        op = getattr(packet, candidate)
        outs = _out_arguments(op._schema)
        if not outs or len(outs) != len(functional.returns):
            continue
        if torch.Tag.generated in op.tags and not op_traits(name).moves:
            continue
        if not all(a.kwarg_only and str(a.type) == "Tensor" for a in outs):
            continue
        leading = [a for a in op._schema.arguments if a not in outs]
        if not all(_matches(a, functional, positions) for a in leading):
            continue
        if set(positions) - {a.name for a in leading} <= _DEDUCED:
            return candidate, tuple(positions[a.name] for a in leading)
    return None


def _matches(argument: torch.Argument, functional: torch.FunctionSchema, positions: dict[str, int]) -> bool:
    position = positions.get(argument.name)
    return position is not None and str(functional.arguments[position].type) == str(argument.type)


def encode_out_call(
    call: OpCall, storage_of: Callable[[int], int], out_storages: Mapping[int, int]
) -> tuple[str, Encoded] | None:
    """The call through its native out overload: ``(overload, arguments)``, or None where there is none.

    ``out_storages[k]`` is the storage of output k. Every returned tensor must be an output of the vertex.
    """
    native = out_overload(call.name, call.overload)
    if native is None or any(result is None for result in call.results):
        return None
    overload, positions = native
    leading = [encode_arg(call.args[i], storage_of) for i in positions]
    outs = [encode_spec(out_storages[result.output], result.spec) for result in call.results if result is not None]
    return overload, (*leading, *outs)
