"""The graph of one rank, and of all: where parts of tensors are, what is added up when, and in which order."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from disco_accel.capture.captured_step import CapturedStep, InputSource
from disco_accel.capture.step import capture_step
from disco_accel.decompose.tensor import ranks as all_ranks
from disco_accel.decompose.tensor.local_graph import ALL_REDUCE, Shard, local_shape, refactored
from disco_accel.decompose.tensor.propagate import of_one_rank
from disco_accel.errors import CaptureError
from disco_accel.graph.taskgraph import TensorArg
from disco_accel.graph.values import changes_over_steps
from disco_accel.integrate.hf.tensor_plan import tensor_plan
from disco_accel.integrate.hf.tracing import hf_contexts
from disco_accel.step.placement.shard_memory import part_of_weight
from tests.support.interpret import interpret, view
from tests.support.models import family_lora, random_batch

HIDDEN, TOKENS, RANK = 32, 32, 4


def itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def one_rank(model: torch.nn.Module, ranks: int, batch: dict[str, torch.Tensor]) -> tuple[CapturedStep, dict[str, int]]:
    shards = tensor_plan(model, ranks)
    contexts = hf_contexts(model, batch)
    return (
        capture_step(model, batch, contexts=contexts, rewrite=lambda t: of_one_rank(t, shards, ranks)),
        shards,
    )


def sums(captured: CapturedStep) -> Counter[tuple[int, ...]]:
    """How many sums over ranks there are of each shape."""
    found: Counter[tuple[int, ...]] = Counter()
    for call in captured.graph.ops.values():
        if call.name == ALL_REDUCE._schema.name:
            given = call.args[0]
            assert isinstance(given, TensorArg)
            found[given.spec.shape] += 1
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_adds_up_hidden_states_six_times_with_checkpointing(dtype: torch.dtype) -> None:
    """Twice forward, twice backward and once in the recomputation, which needs no more; the first layer's input has no
    gradient. All else is small: nothing is added up for an adapter but its gradients."""
    captured, _ = one_rank(family_lora("llama", dtype=dtype, checkpointing=True), 2, random_batch())
    found = sums(captured)
    hidden = found.pop((2, 16, HIDDEN)) + found.pop((TOKENS, HIDDEN), 0)
    # The embedding, two layers without the first one's input, and the head's input.
    assert hidden == 1 + 2 * (2 + 2 + 1) - 1 + 1
    assert found.pop((RANK, HIDDEN)) == 2 * 5 and found.pop((HIDDEN, RANK)) == 2 * 2
    # Of a row's logits: the largest, the sum of exponentials, that of gradients; the loss and the number of labels.
    assert found == {(TOKENS, 1): 3, (): 2}


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_in_slices_have_the_bits_of_sums_on_every_rank(ranks: int) -> None:
    """Each rank gets the same bits: those of a chain in the order of the ranks."""
    model = family_lora("llama", num_attention_heads=8, num_key_value_heads=8, checkpointing=True)
    batch = random_batch()
    captured, shards = one_rank(model, ranks, batch)
    made = []
    for limit in (1 << 40, 64):
        graphs = all_ranks._Ranks(captured, shards, ranks, itemsize, limit)
        graph = graphs.graph()
        values = interpret(graph, inputs_of(model, graphs.bindings, batch))
        there = {vertex.id for vertex in graph.vertices}
        for vertex in captured.graph.vertices:
            if vertex.op == ALL_REDUCE._schema.name:
                ids = [each[vertex.id] for each in graphs._ids if each[vertex.id] in there]
                assert all(torch.equal(values[one, 0], values[other, 0]) for one, other in itertools.pairwise(ids))
        got = graphs.handed_out((*captured.outputs, *captured.gradients))
        made.append({value.name: view(values[value.ref], value.spec).clone() for value in got})
    assert made[0].keys() == made[1].keys() and len(made[0]) == 29
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())


def inputs_of(model: torch.nn.Module, bindings: Any, batch: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {}
    for binding in bindings:
        if binding.source is InputSource.TANGENT:
            tensor = torch.ones((), dtype=torch.float32)
        elif binding.source is InputSource.BATCH:
            tensor = batch[binding.name]
        else:
            tensor = named[binding.name].detach()
            tensor = part_of_weight(binding, tensor).contiguous() if binding.parts > 1 else tensor
        found[binding.vertex] = tensor
    return found


def test_the_loss_waits_for_all_draws_of_the_forward() -> None:
    """Though it is a sum over ranks: the user's generator is where eager mode leaves it when the forward returns."""
    batch = random_batch() | {"num_items_in_batch": torch.tensor(30)}
    captured, shards = one_rank(family_lora("llama", lora_dropout=0.1), 2, batch)
    loss = captured.outputs[0].ref[0]
    assert captured.graph.ops[loss].name == ALL_REDUCE._schema.name
    made = all_ranks.on_ranks(captured, shards, 2, itemsize).captured
    by_id = {vertex.id: vertex for vertex in made.graph.vertices}
    draws = [vertex for vertex, call in made.graph.ops.items() if call.rng is not None]
    assert len(draws) == 14 and by_id[made.outputs[0].ref[0]].after == (max(draws),)


def test_work_of_other_ranks_that_nobody_reads_is_left_out() -> None:
    """Rank 0 alone joins gradients; inputs from the user are there once, parts of weights on each."""
    captured, shards = one_rank(family_lora("llama"), 2, random_batch())
    made = all_ranks.on_ranks(captured, shards, 2, itemsize)
    graph = made.captured.graph
    joined = [v for v in graph.vertices if v.op == "aten::cat" and v.keep]
    assert len(joined) == 14 and all(made.part_of[v.id] == 0 for v in joined)
    read = {producer for v in graph.vertices for producer, _ in (*v.inputs, *((other, 0) for other in v.after))}
    assert all(v.id in read or v.keep or v.out for v in graph.vertices)
    parts = Counter(b.name for b in made.captured.bindings)
    assert all(count == (2 if name in shards and "lora" not in name else 1) for name, count in parts.items())
    assert not any(changes_over_steps(v) for v in graph.vertices)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_part_is_where_its_view_says(ranks: int) -> None:
    """Whatever a view makes of a cut dimension, the ranks' parts of it are views of their parts."""
    sizes = (ranks, 2 * ranks, 2, 3)
    found = 0
    for before in itertools.permutations(sizes):
        for dim in range(4):
            whole = torch.arange(torch.Size(before).numel()).view(before)
            shard = Shard(dim)
            if before[dim] % ranks:
                continue
            for after in ((-1, before[3]), (before[0], -1), (before[0] * before[1], -1), (-1,), (before[0], -1, 1, 2)):
                if whole.numel() % abs(torch.Size(after).numel()):
                    continue
                seen = whole.view(after)
                there = refactored(before, seen.shape, shard, ranks)
                if there is None:
                    continue
                found += 1
                for rank in range(ranks):
                    part = cut(whole, shard, ranks, rank)
                    assert torch.equal(
                        part.reshape(local_shape(seen.shape, there, ranks)), cut(seen, there, ranks, rank)
                    )
    assert found > 100
    assert refactored((4, 6), (12, 2), Shard(1), 2) is None
    assert refactored((4, 6), (24,), Shard(1), 2) == Shard(0, 4)
    assert refactored((24,), (4, 6), Shard(0, 4), 2) == Shard(1)


def cut(tensor: torch.Tensor, shard: Shard, ranks: int, rank: int) -> torch.Tensor:
    """The part of ``rank``, from what ``Shard`` means."""
    outer = tensor.unflatten(shard.dim, (shard.outer, -1))
    return outer.chunk(ranks, shard.dim + 1)[rank].flatten(shard.dim, shard.dim + 1)


class Toy(torch.nn.Module):
    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.rule = rule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rule(x * self.scale, self.weight).square().mean()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda x, w: (x @ w.t()).sort(-1).values, "aten.sort.default .* has no rule for tensors that are cut"),
        (lambda x, w: (x @ w.t()).cumsum(-1), "aten.cumsum.default"),
        (lambda x, w: torch.softmax(x @ w.t(), -1), "goes along a dimension that is cut"),
        (lambda x, w: (x @ w.t())[:, 1:], "aten.slice.Tensor .* goes along the dimension that is cut"),
        (lambda x, w: (x @ w.t()) + (x @ w.t()).t(), "operands that are cut along different dimensions"),
        (lambda x, w: (x @ w.t()).mul_(2), "writes in place to a tensor of which each rank has another part"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(rule: Any, message: str) -> None:
    batch = {"x": torch.ones(4, 4)}
    with pytest.raises(CaptureError, match=message) as refused:
        capture_step(Toy(rule), batch, rewrite=lambda traced: of_one_rank(traced, {"weight": 0}, 2))
    assert "use parallel: layers or batch" in str(refused.value)


def test_sizes_that_ranks_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(CaptureError, match="weight has 4 rows or columns to cut, which 3 devices do not divide"):
        capture_step(
            Toy(lambda x, w: x @ w.t()),
            {"x": torch.ones(4, 4)},
            rewrite=lambda traced: of_one_rank(traced, {"weight": 0}, 3),
        )
