"""TaskGraph: one training step or prefill as a dataflow graph of kernels and copies, before memory is planned.

Plain frozen data, no torch: the planner, the verifier and the simulator read nothing else. A vertex's
outputs are *storages*; views of them cost no vertex and appear only as ``TensorSpec`` in the arguments of an op.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from disco_accel.graph.spaces import HOST, Space, devices_of, host_of
from disco_accel.graph.traits import PER_STEP, Traits

Ref = tuple[int, int]
"""``(vertex id, output index)``: one value, that is, one storage with one content."""


class VertexKind(enum.IntEnum):
    INPUT = 0
    KERNEL = 1
    COPY = 2


@dataclass(frozen=True, slots=True)
class Vertex:
    """A value that exists at the start (INPUT), a kernel, or a copy. Field meanings follow docs/schema.md.

    ``space``: of an INPUT, the device that uses it; where a KERNEL runs; where a COPY writes. ``source``: the space
    that a COPY reads; the home of an INPUT that a backing space has. A copy that a plan adds has a backing space at one
    end: it *swaps in* from there, or *swaps out* to it. ``sizes`` are the bytes of each output's storage (0 = no
    memory); ``duration`` is in seconds. ``traits``: of an INPUT's value; a COPY may be MADE_FOREIGN. ``inplace``: pairs
    of an output and the position of the input that it is written over. ``graph/values.py`` gives their meaning for a
    plan. ``begin``: in a plan, the byte of its value from which on a COPY from a backing space copies, or a resident
    range holds (``graph/copies.py``).
    """

    id: int
    kind: VertexKind
    space: int
    op: str = ""
    inputs: tuple[Ref, ...] = ()
    sizes: tuple[int, ...] = (0,)
    duration: float | None = None
    traits: Traits = PER_STEP
    out: bool = False
    keep: bool = False
    after: tuple[int, ...] = ()
    inplace: tuple[tuple[int, int], ...] = ()
    may_inplace: tuple[int, ...] = ()
    begin: int = 0
    source: int = HOST


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """How a tensor lies in its storage: ``dtype`` is torch's name; ``stride`` and ``offset`` count elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class TensorArg:
    """A tensor argument: the value at position ``input`` of the vertex's ``inputs``, seen through ``spec``."""

    input: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class EnumArg:
    """A dtype, layout, device or memory format by torch's name, such as ``bfloat16`` or ``contiguous_format``."""

    kind: str
    value: str


Arg = TensorArg | EnumArg | None | bool | int | float | str | tuple["Arg", ...]


def tensor_args(args: tuple[Arg, ...]) -> Iterator[TensorArg]:
    """The tensors among ``args`` in order, those inside lists included."""
    for arg in args:
        if isinstance(arg, TensorArg):
            yield arg
        elif isinstance(arg, tuple):
            yield from tensor_args(arg)


@dataclass(frozen=True, slots=True)
class OpResult:
    """A tensor that the op returns: output ``output`` of the vertex, laid out as ``spec``."""

    output: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class RngSite:
    """Where random numbers are drawn. ``slot`` numbers a place for one state of the generator; -1 = none.

    A live site draws from the user's generator and, if it has a slot, first notes there the state it starts from. A
    ``replay`` starts from the state in its slot and leaves the generator as it found it. ``after`` edges order the live
    sites as eager execution draws, and each replay behind the live site of its slot.
    """

    slot: int = -1
    replay: bool = False


@dataclass(frozen=True, slots=True)
class OpCall:
    """The call behind a KERNEL: the functional overload as captured, its arguments in schema order, defaults filled in.

    ``name`` is ``aten::mm``, ``overload`` is torch's Python spelling (``default``, ``Tensor``, ``dim_IntList``). A
    number where the schema wants a Tensor is a wrapped number, as in ``x * 2``: it takes part in type promotion as a
    Python scalar does. ``results`` has one entry per returned tensor in order; ``None`` where nobody reads it and it
    owns no output. ``module`` is the dotted path of the module that issued the op ("" if unknown), for messages.
    ``rng``: the op draws random numbers. ``body``: of a fused kernel, the calls that it computes in one, in order. A
    ``TensorArg`` there has the number of a tensor among ``args`` or, behind these, of an earlier call of the body; the
    output of a result there is -1 where it is not written.
    """

    name: str
    overload: str
    args: tuple[Arg, ...]
    results: tuple[OpResult | None, ...]
    module: str = ""
    rng: RngSite | None = None
    body: tuple[OpCall, ...] = ()


def is_fused(call: OpCall) -> bool:
    """Whether ``call`` is of a kernel that computes several calls in one."""
    return bool(call.body)


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """``vertices`` in a topological order, which is the serial order V of the paper. ``spaces``: the devices, and each
    backing space that is limited or that is not the host's memory. ``ops`` maps KERNEL ids to their calls; it is empty
    for graphs that come from files."""

    name: str
    spaces: tuple[Space, ...]
    vertices: tuple[Vertex, ...]
    ops: Mapping[int, OpCall] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[Space, ...]:
        """The spaces in which kernels run."""
        return devices_of(self.spaces)

    @property
    def host(self) -> Space:
        """The host's memory; its ``memory``: bytes that swapped-out values may take there at most."""
        return host_of(self.spaces)


def with_memory(graph: TaskGraph, size: Callable[[Space], int]) -> TaskGraph:
    """Return ``graph`` with arenas of ``size(device)`` bytes on its devices, but for those in host memory."""
    spaces = (
        replace(space, memory=size(space)) if space.id >= 0 and not space.is_host_device else space
        for space in graph.spaces
    )
    return replace(graph, spaces=tuple(spaces))


def with_at_least(graph: TaskGraph, memory: int) -> TaskGraph:
    """Return ``graph`` with arenas of ``memory`` bytes where its devices have less, but for those in host memory."""
    return with_memory(graph, lambda device: max(device.memory, memory))
