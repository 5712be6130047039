"""Rows of large weights picked on the host: which kernels need few, and that results are the same to the bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from disco_accel import DiscoConfig, prepare, set_memory_budget, stats
from disco_accel.decompose.rows_at_home import choices_of_rows, row_readers, with_rows_at_home
from disco_accel.errors import ExecutionError
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.op_traits import OP_TRAITS
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import (
    EnumArg,
    OpCall,
    OpResult,
    TaskGraph,
    TensorArg,
    TensorSpec,
    Vertex,
    VertexKind,
)
from disco_accel.graph.traits import FOREIGN, FROZEN
from disco_accel.plan.summary import link_bytes
from tests.step.moving_budgets import plan_here, session_of, until
from tests.support.models import family_lora, random_batch

EXPERTS = {"num_experts": 32, "moe_intermediate_size": 64, "hidden_size": 64}
SLOW_LINK: dict[str, Any] = {"device": "cpu", "plan_cache": None, "link_bandwidth": 1e8}
"""Loads take much longer than kernels on any machine."""
ONE_LAYER = "1600KiB"
"""Room for the experts of one of the two layers, which a prompt needs."""


def experts_of(how: str, seed: int = 0) -> Any:
    model: Any = family_lora("qwen3_moe", **EXPERTS, seed=seed).eval()
    model.get_base_model().set_experts_implementation(how)
    return model


def generated(model: Any, ids: torch.Tensor, **more: Any) -> Any:
    keys = {"cache_implementation": "static", "do_sample": False, "pad_token_id": 0, "eos_token_id": 95} | more
    keys = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True} | keys
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **keys)


def assert_same(ours: Any, eagers: Any) -> None:
    assert torch.equal(ours.sequences, eagers.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, eagers.logits, strict=True))


def loads(model: Any) -> list[int]:
    """Bytes that each plan loads, in the order in which they were made."""
    return [link_bytes(step.plan)[0] for step in session_of(model).memory.plans.values()]


@pytest.mark.parametrize("alike", [False, True], ids=["rows differ", "rows share experts"])
def test_experts_without_tokens_are_not_loaded(random_order: None, alike: bool) -> None:
    """Equal rows choose the same experts: each expert gets two tokens, as in eager mode."""
    ids = random_batch(length=12)["input_ids"]
    if alike:
        ids[1] = ids[0]
    eager = experts_of("grouped_mm")
    planned = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget=ONE_LAYER, **SLOW_LINK))
    for _ in range(2):
        assert_same(generated(planned, ids), generated(eager, ids))
    assert stats(planned)["forwards_unplanned"] == 0
    prompt, token = loads(planned)
    weights = sum(p.nbytes for name, p in eager.named_parameters() if ".experts." in name)
    assert prompt > 0.4 * weights, "a prompt needs most of the experts"
    assert token < 0.2 * weights, "of 32 experts 4 were chosen at most"


class _Moves(BaseStreamer):
    """Sets another budget behind some tokens. ``ran``: what each token's step picked on the host, and loaded."""

    def __init__(self, model: Any, budgets: dict[int, str]) -> None:
        self.model, self.budgets, self.ran = model, budgets, list[tuple[bool, int]]()

    def put(self, value: torch.Tensor) -> None:
        until(lambda: session_of(self.model).budgets.plan_sets.maker.idle)
        step = session_of(self.model).memory.current
        if step is not None:
            picks = any(device.is_host_device for device in step.plan.devices)
            self.ran.append((picks, link_bytes(step.plan)[0]))
        if len(self.ran) in self.budgets:
            set_memory_budget(self.model, self.budgets[len(self.ran)])

    def end(self) -> None:
        pass


@pytest.mark.parametrize(("first", "second"), [(ONE_LAYER, "16MiB"), ("16MiB", "768KiB")], ids=["larger", "smaller"])
def test_rows_are_picked_anew_when_the_budget_moves_during_a_generation(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a small budget a token's experts are picked on the host, also where a layer's do not fit. In a large one all
    weights stay. Nothing is captured again."""
    plan_here(monkeypatch)
    ids = random_batch(length=12)["input_ids"]
    eager = experts_of("grouped_mm")
    planned = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget=first, **SLOW_LINK))
    keys = {"max_new_tokens": 12, "min_new_tokens": 12}
    moves = _Moves(planned, {4: second, 8: first})
    assert_same(generated(planned, ids, streamer=moves, **keys), generated(eager, ids, **keys))
    assert stats(planned)["forwards_unplanned"] == 0 and stats(planned)["budget_moves"] > 0
    assert len(session_of(planned).budgets.plan_sets.all()) == 2, "the prompt, and its tokens"
    # A plan for more memory is made beside the first token in it.
    large = slice(5, 8) if second == "16MiB" else slice(1, 4)
    small = slice(8, None) if second == "16MiB" else slice(4, 8)
    assert set(moves.ran[large]) == {(False, 0)}
    assert all(picks and 0 < loaded < 1 << 19 for picks, loaded in moves.ran[small])


def test_experts_picked_by_number_come_from_the_host(random_order: None) -> None:
    """As transformers picks them for a token on a GPU."""
    ids = random_batch(batch=1, length=12)["input_ids"]
    eager = experts_of("batched_mm")
    planned = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget="3MiB", **SLOW_LINK))
    assert_same(generated(planned, ids), generated(eager, ids))
    assert loads(planned)[1] < 1 << 18


def test_a_row_number_behind_the_table_is_named_before_anything_runs() -> None:
    """An embedding of 16,384 rows, of which a forward needs 4; the step after the error is right."""
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Embedding(1 << 14, 32), torch.nn.Linear(32, 32)).eval()
    eager[0].requires_grad_(False)
    model = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget="512KiB", **SLOW_LINK))
    ids = torch.tensor([3, 16383, 0, 3])
    with torch.no_grad():
        assert torch.equal(model(ids), eager(ids))
        assert stats(model)["forwards_planned"] == 1 and loads(model)[0] < 1 << 14
        with pytest.raises(ExecutionError, match=r"holds 16384, .* a table of 16384 rows"):
            model(torch.tensor([3, 1 << 14, 0, 3]))
        assert torch.equal(model(ids), eager(ids))


def test_a_refusal_names_a_budget_in_which_rows_are_picked() -> None:
    """The table alone has 2 MiB."""
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Embedding(1 << 14, 32), torch.nn.Linear(32, 32)).eval()
    eager[0].requires_grad_(False)
    model = prepare(copy.deepcopy(eager), DiscoConfig(memory_budget="1KiB", **SLOW_LINK))
    ids = torch.tensor([3, 0, 3])
    with torch.no_grad():
        assert torch.equal(model(ids), eager(ids)) and stats(model)["forwards_planned"] == 0
        ((_, refusal),) = session_of(model).calls.too_small.values()
        assert refusal.needed < 1 << 16
        set_memory_budget(model, refusal.needed)
        assert torch.equal(model(ids), eager(ids)) and stats(model)["forwards_planned"] == 1


def _vertex(number: int, kind: VertexKind, op: str, inputs: tuple[Any, ...], size: int, **keys: Any) -> Vertex:
    return Vertex(number, kind, 0, op, inputs, (size,), **keys)


def _embedding(rows: int, wanted: int, more: bool = False) -> TaskGraph:
    """A table of ``rows`` of 64 bytes, of which a kernel gathers ``wanted``; with ``more`` another reads all of it."""
    table, ids = TensorSpec("float32", (rows, 16), (16, 1)), TensorSpec("int64", (wanted,), (1,))
    found = TensorSpec("float32", (wanted, 16), (16, 1))
    gather = OpCall(
        "aten::embedding",
        "default",
        (TensorArg(0, table), TensorArg(1, ids), -1, False, False),
        (OpResult(0, found),),
    )
    vertices = [
        _vertex(0, VertexKind.INPUT, "table", (), 64 * rows, traits=FROZEN),
        _vertex(1, VertexKind.INPUT, "ids", (), 8 * wanted, traits=FOREIGN),
        _vertex(2, VertexKind.KERNEL, "aten::embedding", ((0, 0), (1, 0)), 64 * wanted),
        _vertex(3, VertexKind.KERNEL, "aten::neg", ((2, 0),), 64 * wanted, keep=True),
    ]
    calls = {2: gather, 3: OpCall("aten::neg", "default", (TensorArg(0, found),), (OpResult(0, found),))}
    if more:
        vertices.append(_vertex(4, VertexKind.KERNEL, "aten::neg", ((0, 0),), 64 * rows, keep=True))
        calls[4] = OpCall("aten::neg", "default", (TensorArg(0, table),), (OpResult(0, table),))
    return TaskGraph("g", (Space(0),), tuple(vertices), calls)


def test_only_tables_of_which_no_kernel_needs_more_are_left_on_the_host() -> None:
    (reader,) = row_readers(_embedding(100, 4))
    assert (reader.rows, reader.of, reader.nbytes, reader.saved) == (4, 100, 64, 96 * 64)
    assert row_readers(_embedding(100, 51)) == [], "most rows are needed"
    assert row_readers(_embedding(100, 4, more=True)) == [], "another kernel reads the table"


def _packed(block: int, more: bool = False) -> TaskGraph:
    """16 experts of 8 x 8 numbers in halves of bytes, unpacked for a product of two tokens; with ``more`` for another
    kernel too."""
    numbers, scales = TensorSpec("uint8", (512, 1), (1, 1)), TensorSpec("float32", (1024 // block,), (1,))
    whole, turned = TensorSpec("float32", (16, 8, 8), (64, 8, 1)), TensorSpec("float32", (16, 8, 8), (64, 1, 8))
    tokens, ends = TensorSpec("float32", (2, 8), (8, 1)), TensorSpec("int32", (16,), (1,))
    unpack = (TensorArg(0, numbers), TensorArg(1, scales), block, "nf4", (16, 8, 8), EnumArg("dtype", "float32"))
    product = (TensorArg(0, tokens), TensorArg(1, turned), TensorArg(2, ends), None, None)
    name = next(name for name, traits in OP_TRAITS.items() if traits.unpacks_blocks)
    vertices = [
        _vertex(0, VertexKind.INPUT, "numbers", (), 512, traits=FROZEN),
        _vertex(1, VertexKind.INPUT, "scales", (), 4096 // block, traits=FROZEN),
        _vertex(2, VertexKind.INPUT, "tokens", (), 64, traits=FOREIGN),
        _vertex(3, VertexKind.INPUT, "counts", (), 64, traits=FOREIGN),
        _vertex(4, VertexKind.KERNEL, "aten::cumsum", ((3, 0),), 64),
        _vertex(5, VertexKind.KERNEL, name, ((0, 0), (1, 0)), 4096),
        _vertex(6, VertexKind.KERNEL, "aten::_grouped_mm", ((2, 0), (5, 0), (4, 0)), 64),
        _vertex(7, VertexKind.KERNEL, "aten::neg", ((6, 0),), 64, keep=True),
    ]
    calls = {
        4: OpCall("aten::cumsum", "default", (TensorArg(0, ends), 0), (OpResult(0, ends),)),
        5: OpCall(name, "default", unpack, (OpResult(0, whole),)),
        6: OpCall("aten::_grouped_mm", "default", product, (OpResult(0, tokens),)),
        7: OpCall("aten::neg", "default", (TensorArg(0, tokens),), (OpResult(0, tokens),)),
    }
    if more:
        vertices.append(_vertex(8, VertexKind.KERNEL, "aten::neg", ((5, 0),), 4096, keep=True))
        calls[8] = OpCall("aten::neg", "default", (TensorArg(0, whole),), (OpResult(0, whole),))
    return TaskGraph("g", (Space(0),), tuple(vertices), calls)


def test_packed_experts_are_picked_where_each_has_whole_blocks_and_one_reader() -> None:
    (reader,) = row_readers(_packed(32))
    assert (reader.vertex, reader.weight, reader.unpacks) == (6, 0, 5)
    assert (reader.rows, reader.of, reader.nbytes, reader.beside) == (2, 16, 32, 8)
    picked = with_rows_at_home(_packed(32), [reader])
    check_taskgraph(picked)
    unpacks = next(vertex for vertex in picked.vertices if vertex.id == 5)
    assert unpacks.sizes == (512,) and picked.ops[5].args[4] == (2, 8, 8) and unpacks.space == 0
    assert row_readers(_packed(128)) == [], "a block goes over two experts"
    assert row_readers(_packed(32, more=True)) == [], "another kernel reads all of them"


def test_numbers_that_a_kernel_changes_in_the_users_memory_are_copied_for_each_reader() -> None:
    """One reader before the write, one behind it: the copy for the second waits for the write."""
    graph = _embedding(100, 4)
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    written = _vertex(5, VertexKind.KERNEL, "aten::add_", ((1, 0),), 1, after=(2,))
    again = replace(by_id[2], id=6, after=(5,), keep=False)
    kept = replace(by_id[3], id=7, inputs=((6, 0),))
    ids = TensorSpec("int64", (4,), (1,))
    add = OpCall("aten::add_", "Tensor", (TensorArg(0, ids), 1, 1), (None,))
    calls = {**graph.ops, 5: add, 6: graph.ops[2], 7: graph.ops[3]}
    graph = replace(graph, vertices=(*graph.vertices, written, again, kept), ops=calls)
    picked = with_rows_at_home(graph, row_readers(graph))
    check_taskgraph(picked)
    by_id = {vertex.id: vertex for vertex in picked.vertices}
    first, second = (by_id[by_id[gather].inputs[1][0]] for gather in (2, 6))
    assert first.id != second.id and first.after == () and second.after == (5,)


def test_nothing_is_picked_where_the_weights_fit() -> None:
    graph = _embedding(1000, 4)
    assert choices_of_rows(graph, 1 << 20) == []
    (readers,) = choices_of_rows(graph, 32 << 10)
    picked = with_rows_at_home(graph, readers)
    check_taskgraph(picked)
    by_id = {vertex.id: vertex for vertex in picked.vertices}
    assert [device.is_host_device for device in picked.devices] == [False, True]
    assert by_id[2].space == 1 and by_id[3].space == 0, "the gathering kernel has moved, its reader has not"
    assert by_id[by_id[3].inputs[0][0]].kind is VertexKind.COPY
    assert with_rows_at_home(graph, []) == graph
