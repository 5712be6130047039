"""Kernels that compute the same bits: which are found, and that a graph without some of them computes what it did."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
import torch

from disco_accel.errors import GraphFileError, PlanError
from disco_accel.graph import value_numbering
from disco_accel.graph.check import after_gate, check_taskgraph, dependencies
from disco_accel.graph.dequantise_again import dequantise_again
from disco_accel.graph.recompute_again import recompute_again
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import (
    Arg,
    OpCall,
    OpResult,
    Ref,
    RngSite,
    TaskGraph,
    TensorArg,
    TensorSpec,
    Vertex,
    VertexKind,
)
from disco_accel.graph.traits import FOREIGN, FROZEN, LATE_FOREIGN, Traits
from disco_accel.graph.value_numbering import Clone, clones, graph_of_plan, kept, left_out, without
from disco_accel.graph.values import never_changes
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.support.interpret import interpret
from tests.support.oracles.adversary import run_reference
from tests.support.oracles.naive_judge import is_safe

CODES = TensorSpec("uint8", (4,), (1,))
WIDE = TensorSpec("float32", (4,), (1,))
ONE = TensorSpec("float32", (1,), (1,))
BYTES = {"uint8": 1, "float32": 4}
_DRAW = (None,) * 5


@dataclass
class Maker:
    """A graph vertex by vertex; ``specs`` says how a value lies in memory."""

    vertices: list[Vertex] = field(default_factory=list)
    ops: dict[int, OpCall] = field(default_factory=dict)
    specs: dict[Ref, TensorSpec] = field(default_factory=dict)

    def add_input(self, spec: TensorSpec, traits: Traits) -> Ref:
        return self._append(VertexKind.INPUT, "in", (), spec, traits=traits)

    def call(
        self,
        name: str,
        overload: str,
        read: Iterable[Ref],
        *rest: Arg,
        after: tuple[int, ...] = (),
        rng: RngSite | None = None,
        over: bool = False,
        keep: bool = False,
        out: bool = False,
    ) -> Ref:
        """A kernel of tensors ``read`` and then ``rest``, which writes ``over`` the first of them or four floats."""
        inputs = tuple(dict.fromkeys(read := tuple(read)))
        args = (*(TensorArg(inputs.index(ref), self.specs[ref]) for ref in read), *rest)
        results = (OpResult(0, WIDE),)
        self.ops[len(self.vertices)] = OpCall(f"aten::{name}", overload, args, results, rng=rng)
        inplace = ((0, 0),) if over else ()
        kind = VertexKind.KERNEL
        return self._append(kind, name, inputs, WIDE, after=after, inplace=inplace, keep=keep, out=out)

    def _append(self, kind: VertexKind, op: str, inputs: tuple[Ref, ...], spec: TensorSpec, **more: object) -> Ref:
        ref = len(self.vertices), 0
        size = spec.shape[0] * BYTES[spec.dtype]
        self.vertices.append(Vertex(ref[0], kind, 0, op, inputs, (size,), 1e-6, **more))  # type: ignore[arg-type]
        self.specs[ref] = spec
        return ref

    def dequantised(self, codes: Ref, scale: Ref, **more: object) -> Ref:
        return self.call("div", "Tensor", (codes, scale), **more)  # type: ignore[arg-type]

    def sum(self, *read: Ref, **more: object) -> Ref:
        return self.call("add", "Tensor", read, 1, **more)  # type: ignore[arg-type]

    def graph(self, memory: int = 1 << 20) -> TaskGraph:
        return check_taskgraph(TaskGraph("g", (Space(0, memory, 16),), tuple(self.vertices), dict(self.ops)))


def random_graph(rng: random.Random) -> TaskGraph:
    """Chains over packed inputs, many of them twice, read beside a batch and a value that arrives at the gate."""
    maker = Maker()
    frozen = [maker.add_input(CODES, FROZEN) for _ in range(2)]
    scales = [maker.add_input(ONE, FROZEN) for _ in range(2)]
    batch = maker.add_input(WIDE, FOREIGN)
    late = maker.add_input(WIDE, LATE_FOREIGN)
    wide, seen = [batch, late], list[tuple[str, str, tuple[Ref, ...], tuple[Arg, ...]]]()
    twins: dict[Ref, list[Ref]] = {}
    of: dict[object, list[Ref]] = {}
    gone: set[Ref] = set()
    last = [late[0]]
    drawn = list[tuple[int, tuple[Ref, ...]]]()

    def alive(refs: Iterable[Ref]) -> list[Ref]:
        return [ref for ref in refs if ref not in gone]

    for _ in range(rng.randint(8, 26)):
        after = tuple({rng.choice(last)}) if rng.random() < 0.3 else ()
        dice = rng.random()
        if dice < 0.5 and seen:
            name, overload, read, rest = rng.choice(seen)
            read = tuple(rng.choice(alive(twins.get(ref, [ref])) or [ref]) for ref in read)
        elif dice < 0.65:
            name, overload, read, rest = "div", "Tensor", (rng.choice(frozen), rng.choice(scales)), ()
        else:
            name, overload, rest = rng.choice((("add", "Tensor", (1,)), ("mul", "Tensor", ()), ("mul", "Scalar", (2,))))
            read = tuple(rng.choice(alive(wide)) for _ in range(1 if overload == "Scalar" else 2))
        if any(ref in gone for ref in read):
            continue
        if rng.random() < 0.12:
            copied = (
                maker.call("clone", "default", read[:1], None) if read[0] in wide else maker.call("div", "Tensor", read)
            )
            made = maker.call("mul_", "Scalar", (copied,), 3, over=True, after=after)
            gone.add(copied)
        elif rng.random() < 0.1:
            read = (rng.choice(alive(wide)),)
            made = maker.call("rand_like", "default", read, *_DRAW, after=after, rng=RngSite(len(drawn)))
            drawn.append((made[0], read))
        elif (again := [slot for slot, (_, read) in enumerate(drawn) if not gone & {*read}]) and rng.random() < 0.2:
            slot = rng.choice(again)
            site, read = drawn[slot]
            made = maker.call("rand_like", "default", read, *_DRAW, after=(site,), rng=RngSite(slot, True))
        else:
            made = maker.call(name, overload, read, *rest, after=after, keep=rng.random() < 0.1)
            seen.append((name, overload, read, rest))
            same = of.setdefault((name, overload, rest, tuple(min(twins.get(r, [r])) for r in read)), [])
            same.append(made)
            twins[made] = same
        wide.append(made)
        last.append(made[0])
    graph = maker.graph()
    behind = after_gate(graph.vertices)
    outs = [v for v in graph.vertices if v.kind is VertexKind.KERNEL and v.id not in behind and (v.id, 0) not in gone]
    chosen = {v.id for v in outs if rng.random() < 0.1}
    return replace(graph, vertices=tuple(replace(v, out=v.id in chosen) for v in graph.vertices))


def values_of(graph: TaskGraph) -> dict[Ref, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = {
        v.id: torch.randint(1, 255, (4,), dtype=torch.uint8, generator=generator)
        if v.sizes == (4,) and v.id < 2
        else torch.rand(v.sizes[0] // 4, generator=generator) + 0.5
        for v in graph.vertices
        if v.kind is VertexKind.INPUT
    }
    torch.manual_seed(2)
    return interpret(graph, inputs)


def is_live(graph: TaskGraph, vertex: Vertex) -> bool:
    """Whether ``vertex`` draws numbers that no other has drawn."""
    site = graph.ops[vertex.id].rng if vertex.id in graph.ops else None
    return site is not None and not site.replay


def ancestors(graph: TaskGraph) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for vertex in graph.vertices:
        found[vertex.id] = set().union(*({d} | found[d] for d in dependencies(vertex)))
    return found


def test_a_graph_without_some_of_its_clones_computes_the_same() -> None:
    """Values, what waits for what, and what waits for the gate are as before; a plan's vertices say which graph it is
    one of."""
    rng = random.Random(16)
    total = chains = 0
    for _ in range(300):
        graph = random_graph(rng)
        found = clones(graph)
        chosen = [clone for clone in found if rng.random() < 0.4]
        total += len(chosen)
        smaller = check_taskgraph(without(graph, rng.sample(chosen, len(chosen))))
        ids = {v.id for v in smaller.vertices}
        chains += len(graph.vertices) - len(ids) - len(chosen)
        before, after = values_of(graph), values_of(smaller)
        assert all(torch.equal(before[ref], after[ref]) for ref in after)
        assert {v.id for v in graph.vertices if v.keep or v.out or is_live(graph, v)} <= ids
        assert after_gate(smaller.vertices) == after_gate(graph.vertices) & ids
        constant = {v.id for v in graph.vertices if never_changes(v)}
        were, are = ancestors(graph), ancestors(smaller)
        assert all((were[v] & ids) - constant <= are[v] for v in ids)
        # As planners number their copies: the first numbers that the smaller graph has not.
        free = (k for k in range(len(graph.vertices)) if k not in ids)
        copies = [Vertex(id=k, kind=VertexKind.COPY, space=0, op="reload") for k in free]
        assert graph_of_plan(graph, [*smaller.vertices, *copies]) == smaller
        assert {clone.vertex for clone in chosen} <= {clone.vertex for clone in left_out(graph, smaller)}
        assert without(graph, left_out(graph, smaller)) == smaller
        assert {v for v, _ in kept(graph, chosen)} <= ids
        fewer = ids - {rng.choice(sorted(set(graph.ops) & ids))}
        other = graph_of_plan(graph, [v for v in smaller.vertices if v.id in fewer])
        assert other is None or {v.id for v in other.vertices} == fewer
    assert total > 300 and chains > 5, "the graphs have clones, and some are ends of chains"


def test_dequantised_again_for_each_reader_a_graph_computes_the_same() -> None:
    """Each copy runs in its reader's turn, and a graph without all clones makes every weight once."""
    rng = random.Random(17)
    copies = 0
    for _ in range(300):
        graph = random_graph(rng)
        larger = check_taskgraph(dequantise_again(graph))
        new = {v.id for v in larger.vertices} - {v.id for v in graph.vertices}
        copies += len(new)
        before, after = values_of(graph), values_of(larger)
        assert all(torch.equal(before[ref], after[ref]) for ref in before)
        behind = after_gate(larger.vertices)
        assert behind - new == after_gate(graph.vertices)
        for vertex in larger.vertices:
            read = {producer for producer, _ in vertex.inputs} & new
            assert all((vertex.id in behind) == (producer in behind) for producer in read)
        assert new <= {v.id for v in larger.vertices} - {v.id for v in without(larger, clones(larger)).vertices}
    assert copies > 100


@pytest.mark.parametrize("planner", ["build", "timed"])
def test_plans_of_graphs_without_clones_are_safe(planner: str) -> None:
    """To the judge that checks every pair by definition, and run in hostile orders."""
    rng = random.Random(3)
    planned = 0
    for seed in range(60):
        graph = random_graph(rng)
        if not (found := clones(graph)):
            continue
        smaller = without(graph, found[: rng.randint(1, len(found))])
        try:
            plan = make_plan(smaller, memory=rng.choice((96, 128, 256)), planner=planner, cyclic=True)
        except PlanError:
            continue
        planned += 1
        verify(smaller, plan)
        assert is_safe(smaller, plan)
        run_reference(smaller, plan, seed)
    assert planned > 10


def two_of(**more: object) -> tuple[Maker, Ref, Ref]:
    """Weights dequantised for the batch, and again for what arrives at the gate."""
    maker = Maker()
    codes, scale = maker.add_input(CODES, FROZEN), maker.add_input(ONE, FROZEN)
    batch, late = maker.add_input(WIDE, FOREIGN), maker.add_input(WIDE, LATE_FOREIGN)
    first = maker.dequantised(codes, scale)
    maker.sum(first, batch, out=True)
    second = maker.dequantised(codes, scale, after=(late[0],), **more)
    maker.sum(second, batch, keep=True)
    return maker, first, second


def test_readers_of_a_clone_wait_for_all_that_it_waited_for() -> None:
    maker, first, second = two_of()
    graph = maker.graph()
    (clone,) = clones(graph)
    assert (clone.vertex, clone.original, clone.nbytes) == (second[0], first[0], 16)
    last = without(graph, [clone]).vertices[-1]
    assert last.inputs == (first, (2, 0)) and last.after == (3,)
    assert kept(graph, [clone]) == {first: 16}


def test_what_may_not_be_merged_is_no_clone() -> None:
    """Values that the user gets, that are overwritten, or that are drawn at random; and numbers that are equal but not
    the same."""
    assert clones(two_of()[0].graph()) and not clones(two_of(keep=True)[0].graph())
    maker, _, second = two_of()
    maker.call("mul_", "Scalar", (second,), 2, over=True, after=(len(maker.vertices) - 1,))
    assert not clones(maker.graph())
    maker, _, second = two_of()
    maker.ops[second[0]] = replace(maker.ops[second[0]], rng=RngSite())
    assert not clones(maker.graph())
    maker, first, second = two_of()
    for one, other in ((1, 1.0), (1, True), (0.0, -0.0)):
        calls = {
            ref[0]: replace(maker.ops[ref[0]], args=(*maker.ops[ref[0]].args, number))
            for ref, number in ((first, one), (second, other))
        }
        assert not clones(replace(maker.graph(), ops={**maker.ops, **calls}))


def test_nothing_that_the_forward_needs_waits_for_the_gate() -> None:
    """The first of two equal kernels waits for the gate, the second does not: they stay two."""
    maker = Maker()
    codes, scale = maker.add_input(CODES, FROZEN), maker.add_input(ONE, FROZEN)
    late = maker.add_input(WIDE, LATE_FOREIGN)
    maker.sum(maker.dequantised(codes, scale, after=(late[0],)), late, keep=True)
    maker.call("mul", "Scalar", (maker.dequantised(codes, scale),), 2, out=True)
    graph = maker.graph()
    assert clones(graph) == ()
    twice = [graph.vertices[3], graph.vertices[5]]
    assert [v.op for v in twice] == ["div", "div"] and twice[0].after == (2,)


def _wrong(graph: TaskGraph, chosen: list[Clone]) -> bool:
    """Whether ``graph`` without ``chosen`` is none, computes otherwise, or has lost what the user gets or waits for."""
    try:
        smaller = check_taskgraph(without(graph, chosen))
    except (GraphFileError, KeyError):
        return True
    ids = {v.id for v in smaller.vertices}
    if not {v.id for v in graph.vertices if v.keep or v.out} <= ids:
        return True
    if {v.id for v in smaller.vertices if v.out} & after_gate(smaller.vertices):
        return True
    before, after = values_of(graph), values_of(smaller)
    if not all(torch.equal(before[ref], after[ref]) for ref in after):
        return True
    try:
        return not is_safe(smaller, make_plan(smaller, memory=4096, planner="timed", cyclic=True))
    except PlanError:
        return True


@pytest.mark.parametrize("fault", ["past an overwrite", "across the gate", "other numbers", "handed out"])
def test_planted_faults_of_the_numbering_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value kept past an overwrite, a duplicate merged across the gate, a random kernel merged with one that draws
    other numbers, and a value that the user gets from a kernel that is left out: on random graphs each one shows."""
    if fault == "past an overwrite":
        monkeypatch.setattr(value_numbering, "_over", lambda _: [])
    elif fault == "across the gate":
        monkeypatch.setattr(value_numbering, "after_gate", lambda _: set())
    elif fault == "other numbers":
        monkeypatch.setattr(value_numbering, "_repeatable", lambda vertex, _: vertex.kind is VertexKind.KERNEL)
    else:
        monkeypatch.setattr(value_numbering, "is_handed_out", lambda _: False)
    rng = random.Random(16)
    assert any(_wrong(graph, list(clones(graph))) for graph in (random_graph(rng) for _ in range(300)))


def test_without_a_planted_fault_nothing_shows() -> None:
    rng = random.Random(16)
    assert not any(_wrong(graph, list(clones(graph))) for graph in (random_graph(rng) for _ in range(300)))


def test_a_value_that_is_written_over_is_not_read_again_behind_the_gate() -> None:
    """A layer reads a value, writes over it, and its backward reads a result of what was there before: that result is
    kept, and what follows computed again from it. Without the write all is computed again."""
    for over in (False, True):
        maker = Maker()
        batch, late = maker.add_input(WIDE, FOREIGN), maker.add_input(WIDE, LATE_FOREIGN)
        first = maker.call("clone", "default", (batch,), None)
        read = maker.call("mul", "Scalar", (first,), 2)
        result = maker.call("mul", "Scalar", (read,), 3)
        maker.call("mul_" if over else "mul", "Scalar", (first,), 5, over=over, after=(read[0],), out=True)
        maker.sum(result, late, keep=True)
        maker.ops = {id_: replace(call, module="model.layers.0") for id_, call in maker.ops.items()}
        graph = maker.graph()
        larger = check_taskgraph(recompute_again(graph))
        assert len(larger.ops) - len(graph.ops) == (1 if over else 3)
        before, after = values_of(graph), values_of(larger)
        assert all(torch.equal(before[ref], after[ref]) for ref in before)


def test_activations_computed_again_are_the_same() -> None:
    """On random graphs, some of whose kernels belong to layers: nothing in front of the gate waits for more, and each
    new kernel is a clone."""
    rng = random.Random(18)
    copies = 0
    for _ in range(600):
        graph = random_graph(rng)
        ops = {
            id_: replace(call, module=rng.choice(("h.0", "h.0", "h.0", "h.0", "h.1")))
            for id_, call in graph.ops.items()
        }
        graph = replace(graph, ops=ops)
        larger = check_taskgraph(recompute_again(graph))
        new = {v.id for v in larger.vertices} - {v.id for v in graph.vertices}
        if not new:
            continue
        copies += len(new)
        before, after = values_of(graph), values_of(larger)
        assert all(torch.equal(before[ref], after[ref]) for ref in before)
        behind = after_gate(larger.vertices)
        assert new <= behind and behind - new == after_gate(graph.vertices)
        assert new <= {clone.vertex for clone in clones(larger)}
        assert is_safe(larger, make_plan(larger, memory=4096, planner="timed", cyclic=True))
    assert copies > 30
