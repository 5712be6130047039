"""Rows of large tables in the place of the tables: a kernel that needs a few rows of a frozen weight gets these alone.

A *host device* picks the rows where the weight has its home, and a copy takes them to the device. Kernels that gather,
such as an embedding or experts picked by number, run at home as they are. A product by expert gets the experts with
tokens, in their order. Packed experts are picked packed, and unpacked on the device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from disco_accel.graph.check import largest_need
from disco_accel.graph.op_traits import Arithmetic, op_traits
from disco_accel.graph.spaces import Space, SpaceKind
from disco_accel.graph.taskgraph import (
    EnumArg,
    OpCall,
    OpResult,
    Ref,
    TaskGraph,
    TensorArg,
    TensorSpec,
    Vertex,
    VertexKind,
    tensor_args,
)
from disco_accel.graph.values import is_foreign, is_handed_out, never_changes

_FEW = 2
"""Rows are picked where a table has at least so many times as many."""

_AHEAD = 4
"""The host device has room for so many times the most rows that one kernel picks: those of a layer, and of the next."""

_BESIDE = 4
"""Beside weights that stay there is room for so many times the most rows that one kernel picks, and other values."""

_WORTH = 64
"""Rows are picked where that saves more than the bytes of all weights through this: each pick waits for the host."""

_SMALL_VALUES = 1 << 20
"""Bytes of it for row numbers, and for scratch."""

_WORDS = ((8, "int64"), (4, "int32"), (2, "int16"), (1, "uint8"))
"""Rows are copied as integers of the largest size that divides them."""


@dataclass(frozen=True, slots=True)
class _RowReader:
    """Kernel ``vertex`` needs ``rows`` of the ``of`` rows that the weight of INPUT ``weight`` has, each of ``nbytes``.
    ``by_expert``: it multiplies by them; else it gathers them, so that its result is the rows. ``unpacks``: the kernel
    that unpacks the weight for it alone, with scales of ``beside`` bytes for each row."""

    vertex: int
    weight: int
    rows: int
    of: int
    nbytes: int
    by_expert: bool
    unpacks: int | None = None
    beside: int = 0

    @property
    def picked(self) -> int:
        """Bytes that the host picks for it."""
        return self.rows * (self.nbytes + self.beside)

    @property
    def saved(self) -> int:
        """Bytes of the weight that it does not need."""
        return (self.of - self.rows) * self.nbytes


def row_readers(graph: TaskGraph) -> list[_RowReader]:
    """Kernels of ``graph`` that need few rows of weights of which no other kernel needs more."""
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    users: dict[int, list[_RowReader | None]] = defaultdict(list)
    unpacked = _packed_readers(graph, by_id)
    for vertex in graph.vertices:
        found = unpacked.get(vertex.id) or _reader(graph, by_id, vertex)
        for producer in dict.fromkeys(producer for producer, _ in vertex.inputs if never_changes(by_id[producer])):
            users[producer].append(found if found is not None and found.weight == producer else None)
    return [reader for readers in users.values() if None not in readers for reader in readers if reader is not None]


def _reader(
    graph: TaskGraph, by_id: Mapping[int, Vertex], vertex: Vertex, unpacks: int | None = None
) -> _RowReader | None:
    """``unpacks``: the kernel that makes the weight."""
    call = graph.ops.get(vertex.id)
    if vertex.kind is not VertexKind.KERNEL or call is None or is_handed_out(vertex) or vertex.inplace:
        return None
    traits = op_traits(call.name)
    tensors = list(tensor_args(call.args))
    by_expert = traits.arithmetic is Arithmetic.GROUPED
    if not (len(tensors) == 3 if by_expert else traits.gathers and len(tensors) > 1):
        return None
    table = tensors[1 if by_expert else 0]
    weight, spec = by_id[vertex.inputs[table.input][0]], table.spec
    if by_expert and is_foreign(by_id[vertex.inputs[tensors[2].input][0]]):
        # Readers of it share the experts that they pick, and a kernel may write to it in between.
        return None
    rows = _rows_needed(tensors, call, by_expert)
    if unpacks is not None and not (by_expert and weight.id == unpacks):
        return None
    fixed = unpacks is not None or never_changes(weight)
    if not fixed or spec.offset or not spec.shape or rows is None or rows * _FEW > spec.shape[0]:
        return None
    nbytes, rest = divmod(weight.sizes[0], spec.shape[0])
    if rest or not _rows_lie_apart(spec, nbytes):
        return None
    return _RowReader(vertex.id, weight.id, rows, spec.shape[0], nbytes, by_expert)


def _packed_readers(graph: TaskGraph, by_id: Mapping[int, Vertex]) -> dict[int, _RowReader]:
    """Kernel that unpacks a weight → the only reader of its result, a product by expert that needs few rows."""
    found: dict[int, list[_RowReader | None]] = {}
    for vertex in graph.vertices:
        call = graph.ops.get(vertex.id)
        if vertex.kind is VertexKind.KERNEL and call is not None and op_traits(call.name).unpacks_blocks:
            found[vertex.id] = [None] if is_handed_out(vertex) or len(vertex.inputs) != 2 else []
            continue
        for producer in {producer for producer, _ in vertex.inputs if producer in found}:
            found[producer].append(_packed_reader(graph, by_id, by_id[producer], vertex))
    only = {unpacks: readers[0] for unpacks, readers in found.items() if len(readers) == 1}
    return {unpacks: reader for unpacks, reader in only.items() if reader is not None}


def _packed_reader(graph: TaskGraph, by_id: Mapping[int, Vertex], unpacks: Vertex, vertex: Vertex) -> _RowReader | None:
    whole = _reader(graph, by_id, vertex, unpacks.id)
    numbers, scales, block, *_ = graph.ops[unpacks.id].args
    if whole is None or not isinstance(numbers, TensorArg) or not isinstance(scales, TensorArg):
        return None
    weight, scale = (by_id[unpacks.inputs[each.input][0]] for each in (numbers, scales))
    elements = math.prod(numbers.spec.shape) * 2
    one, rest = divmod(elements, whole.of)
    # A row has whole blocks, of whole bytes.
    if (
        rest
        or not isinstance(block, int)
        or one % block
        or numbers.spec.dtype != "uint8"
        or weight.sizes[0] * 2 != elements
    ):
        return None
    flat = scales.spec.shape == (elements // block,) and not scales.spec.offset and not numbers.spec.offset
    if not flat or not never_changes(weight) or scales.spec.dtype != "float32":
        return None
    beside = 4 * one // block if never_changes(scale) else 0
    return replace(whole, weight=weight.id, nbytes=one // 2, unpacks=unpacks.id, beside=beside)


def _rows_needed(tensors: list[TensorArg], call: OpCall, by_expert: bool) -> int | None:
    """At most; None if that is not known."""
    if by_expert:
        tokens, experts, ends = (tensor.spec for tensor in tensors[:3])
        flat = len(tokens.shape) == 2 and len(experts.shape) == 3 and ends.shape == experts.shape[:1]
        return tokens.shape[0] if flat and ends.dtype == "int32" and ends.stride == (1,) and not ends.offset else None
    (result,) = call.results if len(call.results) == 1 else (None,)
    first = tensors[0].spec.shape
    if result is None or result.spec.shape[-len(first[1:]) :] != first[1:] or len(first) < 2:
        return None
    return math.prod(result.spec.shape[: 1 - len(first)])


def _rows_lie_apart(spec: TensorSpec, nbytes: int) -> bool:
    """Whether each row of ``spec`` is the next ``nbytes`` of the memory, all of them."""
    itemsize = nbytes // math.prod(spec.shape[1:]) if math.prod(spec.shape[1:]) else 0
    if not itemsize or itemsize * spec.stride[0] != nbytes:
        return False
    expected = 1
    for stride, size in sorted(zip(spec.stride[1:], spec.shape[1:], strict=True)):
        if stride != expected and size > 1:
            return False
        expected *= size
    return itemsize * expected == nbytes


def with_rows_at_home(graph: TaskGraph, readers: Collection[_RowReader]) -> TaskGraph:
    """Return ``graph`` with a host device that picks the rows of ``readers``."""
    return _Picking(graph, {reader.vertex: reader for reader in readers}).run() if readers else graph


class _Picking:
    """Walks ``graph`` in its order. Kernels that gather keep their ids, and so do products by expert."""

    def __init__(self, graph: TaskGraph, readers: Mapping[int, _RowReader]) -> None:
        self._graph, self._readers = graph, readers
        ids = (device.id for device in graph.devices if device.is_host_device)
        self._host = next(ids, max(device.id for device in graph.devices) + 1)
        self._fresh = max(vertex.id for vertex in graph.vertices) + 1
        self._sizes = {(vertex.id, k): size for vertex in graph.vertices for k, size in enumerate(vertex.sizes)}
        self._by_id = {vertex.id: vertex for vertex in graph.vertices}
        self._vertices: list[Vertex] = []
        self._calls = dict(graph.ops)
        self._at_home: dict[Ref, Ref] = {}
        """Value that a kernel of the device makes → its copy on the host device."""
        self._moved: dict[Ref, Ref] = {}
        """Result of a kernel that has moved to the host device → its copy on the device."""
        self._unpacks = {reader.unpacks for reader in readers.values()}
        self._picked: dict[tuple[Ref, int], tuple[Ref, Ref]] = {}
        """Ends of the tokens of each expert, and number of tokens → the experts to pick, on the host device, and the
        ends of their tokens, on the device."""

    def run(self) -> TaskGraph:
        for vertex in self._graph.vertices:
            vertex = replace(vertex, inputs=tuple(self._moved.get(ref, ref) for ref in vertex.inputs))
            reader = self._readers.get(vertex.id)
            if vertex.id in self._unpacks:
                # It runs in front of its reader, of what is picked.
                continue
            if reader is None:
                self._vertices.append(vertex)
            elif reader.by_expert:
                self._multiply(vertex, reader)
            else:
                self._gather(vertex)
        largest = max(reader.picked for reader in self._readers.values())
        others = {space.id: space for space in self._graph.spaces}
        taken = others.pop(self._host).memory if self._host in others else 0
        host = Space(self._host, taken + _AHEAD * largest + _SMALL_VALUES, kind=SpaceKind.HOST)
        backing = tuple(space for space in others.values() if space.id < 0)
        spaces = (*(space for space in others.values() if space.id >= 0), host, *backing)
        return replace(self._graph, spaces=spaces, vertices=tuple(self._vertices), ops=self._calls)

    def _gather(self, vertex: Vertex) -> None:
        by_id, refs = self._by_id, vertex.inputs
        inputs = tuple(ref if never_changes(by_id[ref[0]]) else self._to_host(ref, vertex) for ref in refs)
        self._vertices.append(replace(vertex, inputs=inputs, space=self._host, may_inplace=()))
        self._moved[vertex.id, 0] = self._copy((vertex.id, 0), self._host, vertex.space)

    def _multiply(self, vertex: Vertex, reader: _RowReader) -> None:
        """The expert of a token is the first whose tokens end behind it. Of equal experts that are picked the first
        gets all their tokens: the others, with the same end, get none."""
        call = self._calls[vertex.id]
        tokens, experts, ends = list(tensor_args(call.args))[:3]
        picked, new_ends = self._experts(vertex, vertex.inputs[ends.input], ends.spec, reader.rows)
        if reader.unpacks is None:
            moved = self._rows((reader.weight, 0), reader, reader.nbytes, picked, vertex, call.module)
        else:
            moved = self._unpacked(self._by_id[reader.unpacks], reader, picked, vertex)
        few = replace(experts.spec, shape=(reader.rows, *experts.spec.shape[1:]))
        lies = TensorSpec("int32", (reader.rows,), (1,))
        args = (replace(tokens, input=0), TensorArg(1, few), TensorArg(2, lies), *call.args[3:])
        self._calls[vertex.id] = replace(call, args=args)
        inputs = vertex.inputs[tokens.input], moved, new_ends
        self._vertices.append(replace(vertex, inputs=inputs, may_inplace=()))

    def _rows(
        self,
        table: Ref,
        reader: _RowReader,
        nbytes: int,
        picked: Ref,
        vertex: Vertex,
        module: str,
        *,
        at_home: bool = True,
    ) -> Ref:
        """The rows with numbers ``picked`` of ``table``, each of ``nbytes``, on the device of ``vertex``. ``at_home``:
        the host picks them; else the device does."""
        word = next((size, dtype) for size, dtype in _WORDS if nbytes % size == 0)
        count = nbytes // word[0]
        whole = TensorSpec(word[1], (reader.of, count), (count, 1))
        rows = TensorSpec(word[1], (reader.rows, count), (count, 1))
        index = TensorSpec("int64", (reader.rows,), (1,))
        select = _call("index_select", (TensorArg(0, whole), 0, TensorArg(1, index)), rows, module)
        if at_home:
            return self._copy(self._kernel(select, (table, picked), reader.rows * nbytes), self._host, vertex.space)
        there = self._copy(picked, self._host, vertex.space)
        return self._kernel(select, (table, there), reader.rows * nbytes, vertex.space)

    def _unpacked(self, unpacks: Vertex, reader: _RowReader, picked: Ref, vertex: Vertex) -> Ref:
        """The picked rows, unpacked on the device. Scales that are packed too are unpacked there whole."""
        call = self._calls[unpacks.id]
        numbers, scales, block, kind, shape, *dtype = call.args
        assert isinstance(numbers, TensorArg) and isinstance(scales, TensorArg) and isinstance(shape, tuple)
        refs = [self._moved.get(ref, ref) for ref in unpacks.inputs]
        of_scales = 4 * math.prod(scales.spec.shape) // reader.of
        inputs = (
            self._rows(refs[numbers.input], reader, reader.nbytes, picked, vertex, call.module),
            self._rows(refs[scales.input], reader, of_scales, picked, vertex, call.module, at_home=reader.beside > 0),
        )
        few = [
            replace(each.spec, shape=(each.spec.shape[0] * reader.rows // reader.of, *each.spec.shape[1:]))
            for each in (numbers, scales)
        ]
        (result,) = call.results
        assert result is not None
        made = replace(result, spec=replace(result.spec, shape=(reader.rows, *result.spec.shape[1:])))
        args = (TensorArg(0, few[0]), TensorArg(1, few[1]), block, kind, (reader.rows, *shape[1:]), *dtype)
        self._calls[unpacks.id] = replace(call, args=args, results=(made,))
        self._add(replace(unpacks, inputs=inputs, sizes=(unpacks.sizes[0] // reader.of * reader.rows,)))
        return unpacks.id, 0

    def _experts(self, reader: Vertex, ends: Ref, spec: TensorSpec, rows: int) -> tuple[Ref, Ref]:
        key = ends, rows
        if key not in self._picked:
            there, ints = self._to_host(ends, reader), TensorSpec("int32", (rows,), (1,))
            wide, scalar = replace(ints, dtype="int64"), spec.shape[0] - 1
            count = (rows, EnumArg("dtype", "int32"), None, EnumArg("device", "cpu"), False)
            places = self._kernel(_call("arange", count, ints), (), 4 * rows)
            search = (TensorArg(0, spec), TensorArg(1, ints), False, True, None, None)
            found = self._kernel(_call("searchsorted", search, wide, overload="Tensor"), (there, places), 8 * rows)
            clamp = _call("clamp_max", (TensorArg(0, wide), scalar), wide)
            picked = self._kernel(clamp, (found,), 8 * rows)
            select = _call("index_select", (TensorArg(0, spec), 0, TensorArg(1, wide)), ints)
            new = self._kernel(select, (there, picked), 4 * rows)
            self._picked[key] = picked, self._copy(new, self._host, reader.space)
        return self._picked[key]

    def _kernel(self, call: OpCall, inputs: tuple[Ref, ...], nbytes: int, space: int | None = None) -> Ref:
        where = self._host if space is None else space
        self._calls[self._fresh] = call
        return self._add(Vertex(self._fresh, VertexKind.KERNEL, where, call.name, inputs, (nbytes,)))

    def _to_host(self, ref: Ref, reader: Vertex) -> Ref:
        device = reader.space
        if is_foreign(self._by_id[ref[0]]):
            # A kernel may write to the user's memory in between: each reader has a copy that waits as it does.
            return self._copy(ref, device, self._host, reader.after)
        if ref not in self._at_home:
            self._at_home[ref] = self._copy(ref, device, self._host)
        return self._at_home[ref]

    def _copy(self, ref: Ref, source: int, target: int, after: tuple[int, ...] = ()) -> Ref:
        op, size = "to_host" if target == self._host else "to_device", (self._sizes[ref],)
        return self._add(Vertex(self._fresh, VertexKind.COPY, target, op, (ref,), size, after=after, source=source))

    def _add(self, vertex: Vertex) -> Ref:
        self._vertices.append(vertex)
        self._sizes[vertex.id, 0] = vertex.sizes[0]
        self._fresh += 1
        return vertex.id, 0


def _call(
    name: str, args: tuple[object, ...], spec: TensorSpec, module: str = "", *, overload: str = "default"
) -> OpCall:
    return OpCall(f"aten::{name}", overload, args, (OpResult(0, spec),), module)  # type: ignore[arg-type]


def readers_worth_it(graph: TaskGraph) -> list[_RowReader]:
    """As ``row_readers``; none where few bytes are saved."""
    readers = row_readers(graph)
    saved = sum({reader.weight: reader.saved for reader in readers}.values())
    return readers if saved * _WORTH > _weights(graph) else []


def _weights(graph: TaskGraph) -> int:
    return sum(vertex.sizes[0] for vertex in graph.vertices if never_changes(vertex))


def choices_of_rows(graph: TaskGraph, arena: int) -> list[list[_RowReader]]:
    """Kernels of ``graph``, a forward alone, whose rows the host may pick: all, and all but those whose weights fit
    into ``arena`` bytes beside the other weights. None where all weights fit, or where few bytes are saved."""
    most = max(largest_need(graph, device.id)[0] for device in graph.devices)
    readers, weights = readers_worth_it(graph), _weights(graph)
    if not readers or weights + most <= arena:
        return []
    tables = sum({reader.weight: reader.of * reader.nbytes for reader in readers}.values())
    picked = max(reader.picked for reader in readers)
    kept = set(_fitting(readers, arena - (weights - tables) - _BESIDE * picked))
    some = [reader for reader in readers if reader not in kept]
    return [some, readers] if kept and some else [readers]


def _fitting(readers: Collection[_RowReader], room: int) -> Iterator[_RowReader]:
    """Those of ``readers``, from the last on, whose weights fit into ``room`` bytes."""
    weights: dict[int, list[_RowReader]] = {}
    for reader in readers:
        weights.setdefault(reader.weight, []).append(reader)
    for of in reversed(weights.values()):
        size = of[0].of * of[0].nbytes
        if size <= room:
            room -= size
            yield from of
