"""The graph of one rank, node by node as the rules make it, and how its values lie on the ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import fx

from disco_accel.capture.leaving_gradients import dense
from disco_accel.capture.storages import storage_bytes, tensor_spec
from disco_accel.capture.trace_log import node_info
from disco_accel.errors import CaptureError

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank has a run of dimension ``dim``. With ``outer`` > 1 that dimension counts ``outer`` times the one that
    is cut, as batch x heads does where a rank has some heads of each row."""

    dim: int
    outer: int = 1


REPLICATED: Final = "replicated"
"""Every rank has the value, with the same bits."""
PARTIAL: Final = "partial"
"""The value is the sum of those that the ranks have."""

Placement = Literal["replicated", "partial"] | Shard


class OfRank(int):
    """A number that each rank has another of: rank r ``first + r * step``. As an int it is that of rank 0."""

    step: int

    def __new__(cls, first: int, step: int) -> OfRank:
        """Rank 0 has ``first``."""
        made = super().__new__(cls, first)
        made.step = step
        return made

    def of(self, rank: int) -> int:
        """The number that ``rank`` has."""
        return int(self) + rank * self.step


def refactored(before: Sequence[int], after: Sequence[int], shard: Shard, ranks: int) -> Shard | None:
    """Where ``shard`` of a tensor of shape ``before`` is in a view of it of shape ``after``, both of all ranks
    together; None where each rank's part is no run of one dimension there."""
    lead = math.prod(before[: shard.dim]) * shard.outer
    ahead = 1
    for dim, length in enumerate(after):
        if lead < ahead * length:
            outer = lead // ahead
            even = lead % ahead == 0 and length % (outer * ranks) == 0
            return Shard(dim, outer) if even else None
        ahead *= length
    return None


def local_shape(shape: Sequence[int], shard: Shard, ranks: int) -> list[int]:
    """The shape of one rank's part of a tensor of ``shape``, cut as ``shard`` says."""
    return [length // ranks if dim == shard.dim else length for dim, length in enumerate(shape)]


_LIBRARY = torch.library.Library("disco_decompose", "DEF")
_LIBRARY.define("all_reduce(Tensor x, str op) -> Tensor")
_LIBRARY.define("all_gather(Tensor x, int dim) -> Tensor")

# Exchanges between ranks in the graph of one of them. Never run: ranks.py writes them out.
ALL_REDUCE: torch._ops.OpOverload = torch.ops.disco_decompose.all_reduce.default
ALL_GATHER: torch._ops.OpOverload = torch.ops.disco_decompose.all_gather.default


@dataclass(frozen=True, slots=True)
class RankValue:
    """One rank's part of a value, ``node`` of its graph, and how it lies among the others'."""

    node: fx.Node
    placement: Placement

    @property
    def tensor(self) -> torch.Tensor:
        """The fake tensor that the rank has."""
        tensor: torch.Tensor = self.node.meta["val"]
        return tensor


Result = RankValue | tuple[RankValue | None, ...]


@dataclass(frozen=True)
class Call:
    """A call of the step on one device, the ranks' values in place of its nodes."""

    node: fx.Node
    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def values(self) -> list[RankValue]:
        """Its tensors in order, those inside lists included."""
        return list(_values_in((self.args, tuple(self.kwargs.values()))))

    @property
    def shape(self) -> torch.Size:
        """Of its result on one device."""
        shape: torch.Size = self.node.meta["val"].shape
        return shape

    def source_shape(self, position: int) -> torch.Size:
        """Of its argument at ``position`` on one device."""
        shape: torch.Size = self.node.args[position].meta["val"].shape  # type: ignore[union-attr]
        return shape

    def with_values(self, change: Callable[[RankValue], RankValue]) -> Call:
        """The same call, ``change`` of each tensor in its place."""
        kwargs = {name: _mapped(value, change) for name, value in self.kwargs.items()}
        return Call(self.node, self.target, _mapped(self.args, change), kwargs)

    def refusal(self, why: str) -> CaptureError:
        """``why`` this call cannot be shared out among ranks."""
        placed = ", ".join(f"{tuple(v.tensor.shape)} {_named(v.placement)}" for v in self.values)
        module = node_info(self.node).module or "?"
        return CaptureError(
            f"parallel: tensor: {self.target} in module {module} {why} ({placed}); use parallel: layers or batch"
        )


@dataclass
class LocalGraph:
    """``graph`` is that of any of ``ranks`` ranks: numbers that they have different ones of are ``OfRank``."""

    ranks: int
    mode: Any
    graph: fx.Graph = field(default_factory=fx.Graph)
    source: fx.Node | None = None
    """The node of the step on one device whose work is being added."""
    drawn: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """A node that draws random numbers → the one that does so here, where that is not its counterpart."""
    _views: dict[fx.Node, tuple[RankValue, Callable[[RankValue], fx.Node]]] = field(default_factory=dict)
    _whole: dict[fx.Node, RankValue] = field(default_factory=dict)

    def emit(self, target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call on the rank's tensors."""
        node = self.graph.call_function(target, _mapped(args, _node_of), _mapped(kwargs, _node_of))
        assert self.source is not None
        with self.mode, torch.no_grad():
            try:
                val = target(*_mapped(args, _tensor_of), **_mapped(kwargs, _tensor_of))
            except (RuntimeError, ValueError, IndexError) as error:
                summary = str(error).strip().split("\n")[0]
                module = node_info(self.source).module or "?"
                raise CaptureError(
                    f"parallel: tensor: {target} in module {module} cannot run on a part: {summary}; "
                    "use parallel: layers or batch"
                ) from error
        node.meta = {**self.source.meta, "val": val}
        return node

    def value(self, placement: Placement, target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> RankValue:
        """Add a call on the rank's tensors; its result has ``placement``."""
        return RankValue(self.emit(target, *args, **kwargs), placement)

    def called(self, call: Call, placement: Placement) -> RankValue:
        """Add ``call`` as it is, on the rank's tensors; its result has ``placement``."""
        return self.value(placement, call.target, *call.args, **call.kwargs)

    def items(self, node: fx.Node, placements: Sequence[Placement]) -> tuple[RankValue | None, ...]:
        """The results of a call that has several, as they lie; None for a result that is no tensor."""
        made: list[RankValue | None] = []
        for index, (tensor, placement) in enumerate(zip(node.meta["val"], placements, strict=True)):
            item = None
            if isinstance(tensor, torch.Tensor):
                item = self.graph.call_function(operator.getitem, (node, index))
                item.meta = {**node.meta, "val": tensor}
            made.append(None if item is None else RankValue(item, placement))
        return tuple(made)

    def add(self, node: fx.Node, val: Any) -> fx.Node:
        """Add a copy of ``node``, an input or constant of the step, that stands for ``val``."""
        made = self.graph.node_copy(node)
        made.meta = {**node.meta, "val": val}
        return made

    def view_of_partial(self, value: RankValue, again: Callable[[RankValue], fx.Node]) -> RankValue:
        """``again`` of a partial ``value``: a reduction of it is the same view of the reduced value."""
        node = again(value)
        self._views[node] = value, again
        return RankValue(node, PARTIAL)

    def whole(self, value: RankValue) -> RankValue:
        """``value`` if each rank's is one, or a part of it, on its own; the sum of all where it is partial."""
        if value.placement != PARTIAL:
            return value
        known = self._whole.get(value.node)
        if known is None:
            if value.node in self._views:
                of, again = self._views[value.node]
                known = RankValue(again(self.whole(of)), REPLICATED)
            else:
                known = RankValue(self.all_reduce(value, "sum"), REPLICATED)
            self._whole[value.node] = known
        return known

    def all_reduce(self, value: RankValue, op: str) -> fx.Node:
        """The sum, or the max, of the ranks' tensors, in the order of their numbers."""
        if not _fills_memory(value.tensor):
            value = self.value(PARTIAL, _ATEN.clone.default, value, memory_format=torch.contiguous_format)
        return self._collective(ALL_REDUCE, value, op, value.tensor.shape, tuple(value.tensor.stride()))

    def gathered(self, value: RankValue) -> fx.Node:
        """All that the ranks have of a value that is cut."""
        assert isinstance(value.placement, Shard) and value.placement.outer == 1
        dim = value.placement.dim
        shape = [n * self.ranks if k == dim else n for k, n in enumerate(value.tensor.shape)]
        return self._collective(ALL_GATHER, value, dim, shape)

    def _collective(
        self, target: torch._ops.OpOverload, value: RankValue, how: str | int, shape: Any, stride: Any = None
    ) -> fx.Node:
        assert self.source is not None
        node = self.graph.call_function(target, (value.node, how))
        like = value.tensor
        with self.mode:
            if stride is None:
                val = torch.empty(shape, dtype=like.dtype, device=like.device)
            else:
                val = torch.empty_strided(tuple(shape), stride, dtype=like.dtype, device=like.device)
        node.meta = {**self.source.meta, "val": val}
        return node

    def cut(self, value: RankValue, shard: Shard) -> RankValue:
        """Each rank's part of a replicated ``value``."""
        length = value.tensor.shape[shard.dim]
        if shard.outer != 1 or length % self.ranks:
            raise CaptureError(
                f"parallel: tensor: dimension {shard.dim} of a tensor of shape {tuple(value.tensor.shape)} cannot be "
                f"cut into {self.ranks} parts; use parallel: layers or batch"
            )
        part = length // self.ranks
        begin, end = OfRank(0, part), OfRank(part, part)
        return self.value(shard, _ATEN.slice_copy.Tensor, value, shard.dim, begin, end, 1)

    def placeholder(self, node: fx.Node, shard: Shard) -> RankValue:
        """An input of which each rank has a part, contiguous."""
        like: torch.Tensor = node.meta["val"]
        with self.mode:
            val = torch.empty(local_shape(like.shape, shard, self.ranks), dtype=like.dtype, device=like.device)
        return RankValue(self.add(node, val), shard)


def _fills_memory(tensor: torch.Tensor) -> bool:
    # A kernel's whole result: ranks send each other its storage.
    whole = tensor.numel() * tensor.element_size() == storage_bytes(tensor)
    return whole and tensor.storage_offset() == 0 and dense(tensor_spec(tensor))


def _values_in(value: Any) -> Iterator[RankValue]:
    if isinstance(value, RankValue):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _values_in(item)


def _mapped(value: Any, change: Callable[[RankValue], Any]) -> Any:
    if isinstance(value, RankValue):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def _node_of(value: RankValue) -> fx.Node:
    return value.node


def _tensor_of(value: RankValue) -> torch.Tensor:
    return value.tensor


def _named(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"cut along dimension {placement.dim}"
    return placement
