"""Copies of a forward's results to memory of the caller's, each as soon as its values are final."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from disco_accel.capture.storages import storage_key, written_storages
from disco_accel.errors import CaptureError


def copy_early(graph: fx.Graph, copies: Iterable[fx.Node]) -> None:
    """Move those of ``copies``, clones, that stand at the end of ``graph`` right behind the last op that makes their
    source or writes to its storage: the source may leave the arena then. Others stand where the forward made them."""
    known = set(copies)
    last = itertools.takewhile(lambda node: node.op == "output" or node in known, reversed(graph.nodes))
    waiting = {node: source for node in last if isinstance(source := node.args[0], fx.Node)}
    keys = {storage_key(source.meta["val"]) for source in waiting.values()}
    final: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            final.update(dict.fromkeys(keys & written_storages(node, node.target).keys(), node))
    for copy, source in waiting.items():
        after = max(source, final.get(storage_key(source.meta["val"]), source))
        if after.op not in ("placeholder", "get_attr"):
            after.append(copy)


def refuse_constants(graph: fx.Graph, copies: Mapping[str, fx.Node]) -> None:
    """Raise CaptureError where one of ``copies``, clones by the names of results, is of a tensor that is there before
    the forward, in an attribute, say: the caller would get a copy in its place."""
    constants = {storage_key(node.meta["val"]) for node in graph.find_nodes(op="get_attr")}
    for name, copy in copies.items():
        source = copy.args[0]
        if isinstance(source, fx.Node) and storage_key(source.meta["val"]) in constants:
            raise CaptureError(
                f"{name}: shares memory with a tensor that the forward does not make, and a plan would return a copy"
            )
