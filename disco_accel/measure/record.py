"""Measures ops once before a plan is made: allocations, writes in place, seconds.

The engine then serves the n-th allocation of a call from the address that the plan chose for it, so a step allocates
nothing. Ops with equal signatures are measured once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from disco_accel.errors import CaptureError, DiscoError
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.order import working_bytes
from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import Arg, OpCall, TaskGraph, TensorArg, TensorSpec, Vertex, VertexKind, tensor_args
from disco_accel.graph.values import overwrites
from disco_accel.measure.dynamic_scratch import loose_bytes
from disco_accel.native.backend import backend_of, run_device
from disco_accel.native.engine_class import OpTable, op_table
from disco_accel.native.op_encoding import dispatcher_overload, encode_args, encode_out_call, label, op_overload
from disco_accel.native.out_of_memory import typed_out_of_memory
from disco_accel.shortage import is_shortage

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Allocation:
    """One allocation of a call: ``nbytes`` for output ``output``, or at ``offset`` in the scratch if that is None."""

    nbytes: int
    output: int | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class OpRecord:
    """Measurements of one op signature.

    ``native_out``: the out overload writes the outputs directly, with the same bits as the functional call.
    ``allocations``: of the call that will run, in order. ``scratch_bytes``: room for those that are no output.
    ``loose_bytes``: the end of the scratch, for an op whose further temporaries depend on the values it is given.
    ``seconds``: median of a few runs, with cold caches for a step that displaces what is in them.
    ``elsewhere``: outputs that are made on another device, which nobody needs.
    ``kernel``: of a fused call, the engine's handle of its kernel.
    """

    native_out: bool
    allocations: tuple[_Allocation, ...]
    scratch_bytes: int
    seconds: float
    loose_bytes: int = 0
    elsewhere: frozenset[int] = frozenset()
    kernel: int = 0


@dataclass(frozen=True, slots=True)
class _Signature:
    """All that a measurement depends on: the call over distinct input storages, and every storage's size in bytes.
    ``kinds``: the types of the numbers, because 0, 0.0 and False are equal but not treated alike by an op."""

    call: OpCall
    kinds: tuple[type, ...]
    input_sizes: tuple[int, ...]
    output_sizes: tuple[int, ...]
    inplace: tuple[tuple[int, int], ...]


Known = dict[tuple[torch.device, int | None, bool, _Signature], OpRecord]
"""Records by the device and the threads that they were made with, whether with cold caches, and the signature."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One recorded run. ``blocks`` are (nbytes, born, freed); ``results`` pairs each returned tensor with its block."""

    blocks: tuple[tuple[int, int, int], ...]
    results: tuple[tuple[torch.Tensor | None, int], ...]

    def sequence(self) -> tuple[Any, ...]:
        return self.blocks, tuple(block for _, block in self.results)


@typed_out_of_memory("measuring ops")
def record(
    graph: TaskGraph,
    *,
    device: str = "cpu",
    compute_threads: int | None = None,
    host_threads: int | None = None,
    only: frozenset[int] | None = None,
    known: Known | None = None,
) -> dict[int, OpRecord]:
    """KERNEL id to its record; equal signatures share one. ``only``: ids of those to measure (None: all). Kernels of
    devices in host memory are measured on the host, all others on ``device``. ``known``: earlier records, which are
    used and added to.

    ``compute_threads`` and ``host_threads`` are the numbers of intra-op threads that the engine will use (temporaries
    depend on them); None = torch.get_num_threads().

    Raises:
        CaptureError: names an op and its module that fails, or that does not allocate the same from run to run.
        ExecutionError: memory ran out, which says nothing about the graph.
    """
    chosen = [v for v in graph.vertices if v.kind is VertexKind.KERNEL and (only is None or v.id in only)]
    hosts, known = host_devices(graph.devices), {} if known is None else known
    on_host = [vertex for vertex in chosen if vertex.space in hosts]
    own = [vertex for vertex in chosen if vertex.space not in hosts]
    records = _record_on(run_device(device), graph, own, compute_threads, known)
    if on_host:
        records |= _record_on(torch.device("cpu"), graph, on_host, host_threads, known)
    return records


def _record_on(
    where: torch.device, graph: TaskGraph, kernels: Sequence[Vertex], compute_threads: int | None, known: Known
) -> dict[int, OpRecord]:
    backend = backend_of(where)
    vertices = {v.id: v for v in graph.vertices}
    # Graphs that share records are compared: all have the caches of the first one.
    cold = next((key[2] for key in known if key[0] == where), None)
    cold = backend.displaces(working_bytes(graph)) if cold is None else cold
    keys = {v.id: (where, compute_threads, cold, _signature(v, graph.ops[v.id], vertices)) for v in kernels}
    if known.keys() >= set(keys.values()):
        # Also in a thread beside steps, whose settings of PyTorch are not to change.
        return {vertex: known[key] for vertex, key in keys.items()}
    backend.prepare()
    # The engine runs ops outside any autocast region; the casts of the captured one are ops of the graph.
    outside = torch.autocast(where.type, enabled=False)
    with threads(compute_threads), outside:
        for vertex, key in keys.items():
            call = graph.ops[vertex]
            if key not in known:
                # Others may draw meanwhile, so the generator is set back around those ops alone that draw themselves.
                with backend.generator_kept() if call.rng is not None else nullcontext():
                    known[key] = _measure(key[3], label(call), where, cold=cold)
    return {vertex: known[key] for vertex, key in keys.items()}


def apply(graph: TaskGraph, records: Mapping[int, OpRecord]) -> TaskGraph:
    """The graph with durations, to two digits, and, where an op needs scratch, one more output that nobody reads."""
    vertices = []
    for vertex in graph.vertices:
        measured = records.get(vertex.id)
        if measured is None:
            vertices.append(vertex)
            continue
        scratch = (measured.scratch_bytes,) if measured.scratch_bytes else ()
        vertices.append(replace(vertex, sizes=vertex.sizes + scratch, duration=rounded(measured.seconds)))
    return replace(graph, vertices=tuple(vertices))


def measurements(records: Mapping[int, OpRecord]) -> GraphPass:
    """``apply`` as a pass."""
    return GraphPass("measurements", "seconds and scratch of each kernel, as measured", partial(apply, records=records))


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Inside, ops run on ``count`` intra-op threads; None: on as many as before."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _signature(vertex: Vertex, call: OpCall, vertices: Mapping[int, Vertex]) -> _Signature:
    """Positions that carry the same value become one input: an op may do something else when its operands alias."""
    order: dict[tuple[int, int], int] = {}
    for ref in vertex.inputs:
        order.setdefault(ref, len(order))

    def canonical(arg: Arg) -> Arg:
        if isinstance(arg, TensorArg):
            return TensorArg(order[vertex.inputs[arg.input]], arg.spec)
        return tuple(canonical(item) for item in arg) if isinstance(arg, tuple) else arg

    return _Signature(
        replace(call, args=tuple(canonical(arg) for arg in call.args), module="", rng=None),
        tuple(_kinds(call.args)),
        tuple(vertices[producer].sizes[k] for producer, k in order),
        vertex.sizes,
        tuple((output, order[ref]) for output, ref in overwrites(vertex)),
    )


def _kinds(args: tuple[Arg, ...]) -> Iterator[type]:
    for arg in args:
        yield type(arg)
        if isinstance(arg, tuple):
            yield from _kinds(arg)


def _sample_inputs(signature: _Signature, device: torch.device, ones: bool = False) -> list[torch.Tensor]:
    """A buffer per input storage: normal numbers, random booleans, zeros for integers (valid as any index). With
    ``ones``, for ops that refuse those: numbers from 0 to 1, and ones for integers (valid as any divisor)."""
    dtypes: dict[int, torch.dtype] = {}
    for arg in tensor_args(signature.call.args):
        dtypes.setdefault(arg.input, getattr(torch, arg.spec.dtype))
    generator = torch.Generator(device).manual_seed(0)
    buffers = []
    for position, nbytes in enumerate(signature.input_sizes):
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        dtype = dtypes.get(position, torch.uint8)
        values = buffer[: nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        if dtype.is_floating_point and dtype.itemsize > 1:
            values.uniform_(generator=generator) if ones else values.normal_(generator=generator)
        elif dtype is torch.bool:
            values.random_(0, 2, generator=generator)
        elif ones:
            values.fill_(1)
        buffers.append(buffer)
    return buffers


def _make_small(signature: _Signature, buffers: list[torch.Tensor]) -> None:
    """Scale the floating-point numbers in ``buffers`` down, and make the booleans there False."""
    dtypes = {a.input: getattr(torch, a.spec.dtype) for a in tensor_args(signature.call.args)}
    for position, dtype in dtypes.items():
        nbytes = buffers[position].numel() // dtype.itemsize * dtype.itemsize
        if dtype.is_floating_point and dtype.itemsize > 1:
            buffers[position][:nbytes].view(dtype).mul_(2**-10)
        elif dtype is torch.bool:
            buffers[position].zero_()


def _run_recorded(ops: OpTable, op: int) -> _Call:
    sizes, born, freed, tensors, where = ops.record(op)
    defined = iter(tensors)
    results = tuple((None if block == -2 else next(defined), block) for block in where)
    return _Call(tuple(zip(sizes, born, freed, strict=True)), results)


def _steady(ops: OpTable, op: int, name: str) -> _Call:
    """A run whose allocations repeat. The first run is not counted: libraries set up caches in it."""
    _run_recorded(ops, op)
    first, second = _run_recorded(ops, op), _run_recorded(ops, op)
    if first.sequence() != second.sequence():
        raise CaptureError(
            f"{name} does not allocate the same memory from run to run ({first.blocks} then {second.blocks}): "
            "it cannot be planned; keep it out of the captured step"
        )
    held = {block for _, block in second.results}
    leaked = [size for i, (size, _, freed) in enumerate(second.blocks) if freed < 0 and i not in held]
    if leaked:
        raise CaptureError(f"{name} keeps {sum(leaked)} bytes allocated after every call: it cannot be planned")
    return second


def _measure(signature: _Signature, name: str, device: torch.device, *, cold: bool) -> OpRecord:
    failures: list[Exception] = []
    for ones in (False, True):
        try:
            return _measure_on(_sample_inputs(signature, device, ones), signature, name, device, cold=cold)
        except DiscoError:
            raise
        except Exception as error:
            if is_shortage(error):
                raise
            failures.append(error)
    summary = str(failures[0]).strip().split("\n")[0]
    raise CaptureError(f"measuring {name} failed: {summary}; it cannot be planned") from failures[0]


def _measure_on(
    inputs: list[torch.Tensor], signature: _Signature, name: str, device: torch.device, *, cold: bool
) -> OpRecord:
    call = signature.call
    ops = op_table(device)
    outputs = [torch.zeros(size, dtype=torch.uint8, device=device) for size in signature.output_sizes]
    storages = [ops.add_fixed(buffer.data_ptr(), buffer.numel()) for buffer in inputs]
    functional = ops.add_op(
        call.name, dispatcher_overload(call.overload), encode_args(call, storages.__getitem__), name
    )
    reference = _steady(ops, functional, name)
    chosen, native_out = functional, False
    placed = _allocations(signature, reference, name)
    if not signature.inplace:
        out = _try_out(ops, signature, storages, outputs, reference, name)
        if out is not None and out[1][1] <= placed[1]:
            chosen, native_out, placed = out[0], True, out[1]
    loose = 0
    by_value = op_traits(call.name).scratch_by_value
    if by_value:
        loose = loose_bytes(call, inputs, lambda: _run_recorded(ops, functional).blocks, reference.blocks, name)
    seconds = backend_of(device).op_seconds(ops, chosen, cold=cold)
    if placed[1] and not by_value:
        _check_other_values(ops, chosen, signature, inputs, name)
    elsewhere = _elsewhere(signature, reference, name, device)
    return OpRecord(native_out, placed[0], placed[1] + loose, seconds, loose, elsewhere)


def _check_other_values(ops: OpTable, op: int, signature: _Signature, inputs: list[torch.Tensor], name: str) -> None:
    """Raises CaptureError for an op whose temporaries are others for small numbers, as those of matrix_exp are, or for
    an empty mask."""
    usual = _run_recorded(ops, op).sequence()
    _make_small(signature, inputs)
    try:
        small = _run_recorded(ops, op).sequence()
    except RuntimeError as error:
        if is_shortage(error):
            raise
        return
    if small != usual:
        raise CaptureError(f"{name} allocates memory according to the values that it is given: it cannot be planned")


def rounded(seconds: float) -> float:
    """``seconds`` to two significant digits, so that measurements within a few percent give the same search."""
    return float(f"{seconds:.1e}")


def _try_out(
    ops: OpTable, signature: _Signature, storages: list[int], outputs: list[torch.Tensor], reference: _Call, name: str
) -> tuple[int, tuple[tuple[_Allocation, ...], int]] | None:
    """The op number and allocations of the native out overload, if it gives the functional call's bits."""
    out_storages = {k: ops.add_fixed(buffer.data_ptr(), buffer.numel()) for k, buffer in enumerate(outputs)}
    encoded = encode_out_call(signature.call, storages.__getitem__, out_storages)
    if encoded is None:
        return None
    overload, args = encoded
    op = ops.add_op(signature.call.name, dispatcher_overload(overload), args, name)
    if op_traits(signature.call.name).moves and not ops.is_direct(op):
        return None
    try:
        call = _steady(ops, op, name)
    except (RuntimeError, IndexError, TypeError, ValueError, CaptureError) as error:
        if is_shortage(error):
            raise
        # Not every out overload takes the captured layout; the functional call always does.
        return None
    layouts = [(r.spec.shape, r.spec.stride) for r in signature.call.results if r is not None]
    if [(tuple(t.shape), tuple(t.stride())) for t, _ in call.results if t is not None] not in ([], layouts):
        # It resized an output, which the functional call's result never needs.
        return None
    for (expected, _), result in zip(reference.results, signature.call.results, strict=True):
        if (
            expected is None
            or result is None
            or not same_bits(expected, view_of_buffer(outputs[result.output], result.spec))
        ):
            return None
    return op, _pack({}, call)


def view_of_buffer(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The bytes of ``buffer`` as ``spec`` has them."""
    dtype = getattr(torch, spec.dtype)
    flat = torch.empty(0, dtype=dtype, device=buffer.device)
    return flat.set_(buffer.untyped_storage(), spec.offset, spec.shape, spec.stride)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both have the same data type, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    with torch.no_grad():
        left, right = (t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)


def _allocations(signature: _Signature, call: _Call, name: str) -> tuple[tuple[_Allocation, ...], int]:
    """Which block of a functional call becomes which output; the rest is scratch."""
    outputs: dict[int, int] = {}
    results = signature.call.results
    if len(results) != len(call.results):
        raise CaptureError(f"{name} returned {len(call.results)} tensors where {len(results)} were captured")
    for result, (got, block) in zip(results, call.results, strict=True):
        if result is None:
            continue
        if got is None:
            hint = op_traits(signature.call.name).undefined_hint
            raise CaptureError(f"{name} left a result undefined that the captured step reads{hint and f'; {hint}'}")
        dtype = str(got.dtype).removeprefix("torch.")
        if (dtype, tuple(got.shape)) != (result.spec.dtype, result.spec.shape):
            raise CaptureError(
                f"{name} returned {dtype}{list(got.shape)}, "
                f"but {result.spec.dtype}{list(result.spec.shape)} was captured"
            )
        same_layout = tuple(got.stride()) == result.spec.stride and got.storage_offset() == result.spec.offset
        fits = block >= 0 and call.blocks[block][0] <= signature.output_sizes[result.output]
        if same_layout and fits and result.output not in outputs.values():
            outputs[block] = result.output
    return _pack(outputs, call)


def _elsewhere(signature: _Signature, call: _Call, name: str, device: torch.device) -> frozenset[int]:
    """Outputs on another device: fused attention returns its seed and offset there, undefined when it drops nothing."""
    pairs = zip(signature.call.results, call.results, strict=True)
    found = {r.output for r, (got, _) in pairs if r is not None and got is not None and got.device != device}
    if found:
        schema = op_overload(signature.call.name, signature.call.overload)._schema
        given = dict(zip((a.name for a in schema.arguments), signature.call.args, strict=True))
        if given.get("dropout_p") != 0:
            raise CaptureError(
                f"{name} returns result {min(found)} outside {device}, which cannot be planned; "
                "where this is attention with dropout, set attention_dropout: 0 or attn_implementation: eager"
            )
    return frozenset(found)


def _pack(outputs: Mapping[int, int], call: _Call) -> tuple[tuple[_Allocation, ...], int]:
    """Places the blocks that are no output in a scratch: largest first, lowest offset that is free for their life."""
    lives: list[tuple[int, int, int, int]] = []
    offsets: dict[int, int] = {}
    scratch = [i for i in range(len(call.blocks)) if i not in outputs]
    for i in sorted(scratch, key=lambda i: (-call.blocks[i][0], i)):
        nbytes, born, freed = call.blocks[i]
        end = freed if freed >= 0 else 1 << 62
        offset = 0
        for lo, hi, other_born, other_end in sorted(lives):
            if born < other_end and other_born < end and offset + nbytes > lo and offset < hi:
                offset = -(-hi // _ALIGNMENT) * _ALIGNMENT
        offsets[i] = offset
        lives.append((offset, offset + nbytes, born, end))
    allocations = tuple(
        _Allocation(nbytes, outputs.get(i), offsets.get(i, 0)) for i, (nbytes, _, _) in enumerate(call.blocks)
    )
    size = max((hi for _, hi, _, _ in lives), default=0)
    return allocations, -(-size // _ALIGNMENT) * _ALIGNMENT
