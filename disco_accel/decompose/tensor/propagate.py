"""A step on one device as that of any one rank: each value replicated, cut or partial, sums where they are needed."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from disco_accel.capture.captured_step import InputSource, TracedStep
from disco_accel.capture.rng import draws
from disco_accel.capture.storages import storage_key
from disco_accel.decompose.tensor.local_graph import REPLICATED, Call, LocalGraph, RankValue, Result, Shard
from disco_accel.decompose.tensor.rules import DRAW_RULES, RULES
from disco_accel.errors import CaptureError


def of_one_rank(traced: TracedStep, shards: Mapping[str, int], ranks: int) -> TracedStep:
    """``traced`` as one of ``ranks`` ranks runs it.

    ``shards``: name of a weight → the dimension that is cut. A frozen one is an input of which each rank has a part, a
    trained one is an input as before, of which each rank takes its part. All outputs and gradients are whole.

    Raises:
        CaptureError: a weight's length is no multiple of ``ranks``, or an op has no rule for its arguments.
    """
    return _Propagation(traced, shards, ranks).run()


class _Propagation:
    def __init__(self, traced: TracedStep, shards: Mapping[str, int], ranks: int) -> None:
        self._traced, self._shards, self._ranks = traced, shards, ranks
        values = (node.meta["val"] for node in traced.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
        self._local = LocalGraph(ranks, next(values).fake_mode)
        self._env: dict[fx.Node, Result] = {}
        self._wanted = frozenset(traced.graph.output_node().all_input_nodes)
        self._handed_out: dict[fx.Node, fx.Node] = {}
        """Node of a result for the user → the node that has it whole."""

    def run(self) -> TracedStep:
        sources = dict(zip(self._traced.graph.find_nodes(op="placeholder"), self._traced.sources, strict=True))
        for node in self._traced.graph.nodes:
            self._local.source = node
            if node.op == "placeholder":
                self._env[node] = self._input(node, *sources[node])
            elif node.op == "get_attr":
                self._env[node] = RankValue(self._local.add(node, node.meta["val"]), REPLICATED)
            elif node.op == "output":
                self._local.graph.output(self._returned(node.args[0]))
            elif node.target is operator.getitem:
                self._env[node] = self._item(node)
            else:
                self._env[node] = self._call(node)
            if node in self._wanted:
                # Here: at the end of the graph a sum would wait for the backward.
                self._handed_out[node] = self._as_whole(node)
        sites = {self._first(node): site for node, site in self._traced.sites.items() if node in self._env}
        return TracedStep(self._local.graph, self._traced.sources, sites, self._output_grads())

    def _input(self, node: fx.Node, source: InputSource, name: str) -> RankValue:
        dim = self._shards.get(name)
        held = source in (InputSource.FROZEN, InputSource.BUFFER, InputSource.TRAINABLE)
        if dim is None or not held or not node.users:
            return RankValue(self._local.add(node, node.meta["val"]), REPLICATED)
        length = node.meta["val"].shape[dim]
        if length % self._ranks:
            raise CaptureError(
                f"parallel: tensor: {name} has {length} rows or columns to cut, which {self._ranks} devices do not "
                "divide; use another number of devices, or parallel: layers or batch"
            )
        if source is InputSource.TRAINABLE:
            return self._local.cut(RankValue(self._local.add(node, node.meta["val"]), REPLICATED), Shard(dim))
        return self._local.placeholder(node, Shard(dim))

    def _call(self, node: fx.Node) -> Result:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(f"parallel: tensor: {target} is not an aten op; use parallel: layers or batch")
        args: Any = fx.node.map_aggregate(node.args, self._argument)
        kwargs: Any = fx.node.map_aggregate(node.kwargs, self._argument)
        call = Call(node, target, args, kwargs)
        if all(value.placement == REPLICATED for value in call.values):
            return self._replicated(call)
        name = target._schema.name
        if target._schema.is_mutable or (draws(node) and name not in DRAW_RULES):
            what = "writes in place to" if target._schema.is_mutable else "draws random numbers for"
            raise call.refusal(f"{what} a tensor of which each rank has another part")
        rule = DRAW_RULES.get(name) or RULES.get(name)
        if rule is None:
            raise call.refusal("has no rule for tensors that are cut")
        return rule(self._local, call)

    def _replicated(self, call: Call) -> Result:
        """Every rank does the same; values that no exchange has touched are the tensors of the trace themselves."""
        if all(self._value(node).tensor is node.meta["val"] for node in call.node.all_input_nodes):
            made = self._local.graph.node_copy(call.node, lambda node: self._value(node).node)
            made.meta = dict(call.node.meta)
        else:
            made = self._local.emit(call.target, *call.args, **call.kwargs)
        if isinstance(made.meta["val"], torch.Tensor):
            return RankValue(made, REPLICATED)
        return self._local.items(made, [REPLICATED] * len(made.meta["val"]))

    def _value(self, node: fx.Node) -> RankValue:
        value = self._env[node]
        assert isinstance(value, RankValue)
        return value

    def _argument(self, value: Any) -> Any:
        return self._value(value) if isinstance(value, fx.Node) else value

    def _item(self, node: fx.Node) -> RankValue:
        of, index = node.args
        items = self._env[of]  # type: ignore[index]
        assert isinstance(items, tuple) and isinstance(index, int)
        item = items[index]
        assert item is not None, "an undefined result has no readers"
        return item

    def _returned(self, values: Any) -> Any:
        return type(values)(None if value is None else self._handed_out[value] for value in values)

    def _as_whole(self, node: fx.Node) -> fx.Node:
        value = self._local.whole(self._value(node))
        if not isinstance(value.placement, Shard):
            return value.node
        if value.placement.outer != 1:
            raise CaptureError(f"parallel: tensor: {node} is returned in parts; use parallel: layers or batch")
        gathered = self._local.gathered(value)
        if node.target is not torch.ops.aten.clone.default:
            return gathered
        # What the caller has memory for is a copy that the step makes.
        return self._local.emit(torch.ops.aten.clone.default, RankValue(gathered, REPLICATED), **node.kwargs)

    def _first(self, node: fx.Node) -> fx.Node:
        """The call that stands for ``node``, of one or of several results."""
        if node in self._local.drawn:
            return self._local.drawn[node]
        result = self._env[node]
        if isinstance(result, RankValue):
            return result.node
        node_of = next(item.node for item in result if item is not None)
        call = node_of.args[0]
        assert isinstance(call, fx.Node)
        return call

    def _output_grads(self) -> dict[int, Sequence[torch.Tensor]]:
        """The rank's tensors for those gradients of layers' outputs that work of the backward waits for."""
        there: dict[int, torch.Tensor] = {}
        for node, value in self._env.items():
            if isinstance(value, RankValue):
                there.setdefault(storage_key(node.meta["val"]), value.tensor)
        found = self._traced.output_grads.items()
        return {
            layer: [there[storage_key(grad)] for grad in grads if storage_key(grad) in there] for layer, grads in found
        }
