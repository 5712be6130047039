"""Steps in chunks: what a chunk has of a value, in which order chunks run, and the numbers that come of it."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from disco_accel.capture.captured_step import CapturedStep, InputSource
from disco_accel.capture.step import capture_step
from disco_accel.decompose.chunks.cuts import Cut, Unaligned, cut_along, in_chunk, narrowed, ranges_in
from disco_accel.decompose.chunks.in_chunks import StepInChunks, in_chunks
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.taskgraph import TensorSpec, tensor_args
from disco_accel.integrate.hf.tracing import hf_contexts
from tests.support.interpret import interpret, view
from tests.support.models import family_lora, random_batch

CPU = torch.device("cpu")


def a_view(rng: random.Random, shape: list[int]) -> torch.Tensor:
    """Numbers from 0 on in memory order, seen in one of many ways."""
    seen = torch.arange(torch.Size(shape).numel()).view(shape)
    for _ in range(rng.randrange(4)):
        kind = rng.choice(["permute", "slice", "split", "flatten", "expand", "select"])
        dim = rng.randrange(seen.dim())
        if kind == "permute":
            seen = seen.permute(rng.sample(range(seen.dim()), seen.dim()))
        elif kind == "slice" and seen.shape[dim] > 1:
            begin = rng.randrange(seen.shape[dim])
            seen = seen.narrow(dim, begin, rng.randint(1, seen.shape[dim] - begin))
        elif kind == "split" and seen.shape[dim] % 2 == 0:
            seen = seen.unflatten(dim, (2, -1))
        elif (
            kind == "flatten" and dim + 1 < seen.dim() and seen.stride(dim) == seen.stride(dim + 1) * seen.size(dim + 1)
        ):
            seen = seen.flatten(dim, dim + 1)
        elif kind == "expand":
            seen = seen.unsqueeze(0).expand(3, *seen.shape)
        elif kind == "select" and seen.dim() > 1:
            seen = seen.select(dim, rng.randrange(seen.shape[dim]))
    return seen


def test_a_part_of_a_view_in_a_chunk_has_just_the_elements_that_lie_there() -> None:
    """Beside brute force over the memory of chunks; views that no ranges describe are refused, not guessed."""
    rng, parts, refused = random.Random(0), 0, 0
    for _ in range(3000):
        shape = [rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(rng.randint(1, 4))]
        count = torch.Size(shape).numel()
        period = rng.choice([n for n in range(1, count + 1) if count % n == 0])
        cut = Cut("int64", period, rng.randint(1, period))
        seen = a_view(rng, shape)
        spec = TensorSpec("int64", tuple(seen.shape), tuple(seen.stride()), int(seen.storage_offset()))
        blocks, elements = torch.arange(count).view(-1, period), 0
        for chunk in range(cut.count):
            memory = blocks[:, chunk * cut.piece : (chunk + 1) * cut.piece].flatten().clone()
            assert memory.numel() == count // period * cut.length(chunk)
            try:
                ranges, there = ranges_in(spec, cut, chunk), in_chunk(spec, cut, chunk)
            except Unaligned:
                refused += 1
                break
            present = torch.isin(seen, memory)
            assert (ranges is None) == (there is None) == (not present.any())
            if ranges is None or there is None:
                continue
            part = narrowed(spec, ranges)
            expected = torch.arange(count).as_strided(part.shape, part.stride, part.offset)
            assert torch.equal(memory.as_strided(there.shape, there.stride, there.offset), expected)
            elements += expected.numel()
            parts += 1
        else:
            assert elements == seen.numel()
    assert parts > 3000 and refused > 100


def test_a_view_in_another_data_type_has_no_part_in_a_chunk() -> None:
    """Its strides count other elements: 16 bfloat16 rows look like 16 rows of float32 of half the width."""
    with pytest.raises(Unaligned):
        ranges_in(TensorSpec("bfloat16", (16, 8), (8, 1)), Cut("float32", 64, 16), 0)


def test_heads_are_pieces_of_every_token() -> None:
    """Rows of 2 x 16 tokens cut by two of four heads, and seen as (batch, heads, tokens, size)."""
    spec = TensorSpec("float32", (2, 4, 16, 8), (512, 8, 32, 1))
    cut = cut_along(spec, [{1: (0, 2)}, {1: (2, 4)}])
    assert cut == Cut("float32", 32, 16)
    assert in_chunk(spec, cut, 1) == TensorSpec("float32", (2, 2, 16, 8), (256, 8, 16, 1))
    assert cut_along(spec, [{3: (0, 4)}, {3: (4, 8)}]) == Cut("float32", 8, 4)
    assert cut_along(spec, [{1: (0, 1)}, {1: (1, 4)}]) is None


def inputs_of(captured: CapturedStep, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[int, Any]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {}
    for binding in captured.bindings:
        if binding.source is InputSource.BATCH:
            values[binding.vertex] = batch[binding.name]
        elif binding.source is InputSource.TANGENT:
            values[binding.vertex] = torch.ones(binding.spec.shape)
        elif binding.source is InputSource.CONSTANT:
            values[binding.vertex] = captured.constants[binding.name]
        else:
            values[binding.vertex] = named[binding.name].detach()
    return values


@functools.cache
def captured_lora(family: str, rows: int = 3, length: int = 20) -> tuple[CapturedStep, dict[int, Any]]:
    model, batch = family_lora(family, checkpointing=True), random_batch(batch=rows, length=length)
    batch["labels"][0, :5] = -100
    captured = capture_step(model, batch, contexts=hf_contexts(model, batch))
    return captured, inputs_of(captured, model, batch)


def apart(one: CapturedStep, other: CapturedStep, inputs: dict[int, Any]) -> float:
    """The norm of the difference of all outputs and gradients as a part of theirs."""
    whole, chunked = interpret(one.graph, inputs), interpret(other.graph, inputs)
    values = zip((*one.outputs, *one.gradients), (*other.outputs, *other.gradients), strict=True)
    pairs = [(view(whole[a.ref], a.spec), view(chunked[b.ref], b.spec)) for a, b in values]
    assert all(a.norm() > 0 for a, _ in pairs)
    difference = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return float((difference / sum(a.double().square().sum() for a, _ in pairs)) ** 0.5)


@pytest.mark.parametrize(("family", "large"), [("llama", 8000), ("gpt2", 20000), ("gemma2", 20000), ("mixtral", 20000)])
def test_a_step_in_chunks_is_the_whole_one_but_for_the_order_of_sums(family: str, large: int) -> None:
    """Three rows of 20 tokens in up to eight chunks: rows, parts of rows, heads, with copies where these meet, and
    means of layer normalisation that its backward would read as if they were contiguous."""
    captured, inputs = captured_lora(family)
    step = in_chunks(captured, 8, large, CPU)
    check_taskgraph(step.captured.graph)
    assert step.most >= 6 and step.kernels > 100 and step.sums
    assert apart(captured, step.captured, inputs) <= 2e-6


def chunk_places(step: StepInChunks) -> dict[int, list[int]]:
    """Kernel of the whole step that runs in chunks → the places of its chunks in the order."""
    places: dict[int, list[int]] = {}
    for place, vertex in enumerate(step.captured.graph.vertices):
        call = step.captured.graph.ops.get(vertex.id)
        if call is not None and vertex.op not in ("aten::cat", "aten::clone", "aten::add"):
            places.setdefault(step.of[vertex.id], []).append(place)
    return {of: found for of, found in places.items() if len(found) > 1}


def halves_round_alike(captured: CapturedStep, step: StepInChunks) -> bool:
    """Whether products as large as those in two chunks have the same bits if both halves of their rows are multiplied
    apart: a library may have another kernel for fewer rows."""
    for call in (captured.graph.ops[vertex] for vertex in chunk_places(step)):
        if call.name == "aten::mm":
            specs = [arg.spec for arg in tensor_args(call.args)]
            one, other = (torch.empty_strided(spec.shape, spec.stride).normal_() for spec in specs)
            parts = [half @ other for half in one.chunk(2)]
            if not torch.equal(torch.cat(parts), one @ other):
                return False
    return True


def test_without_sums_the_bits_are_those_of_the_whole_step() -> None:
    """Only the loss of two rows adds up two halves, which may round it; no gradient is made of it. Those have the bits
    of the whole step where a library's kernel for half of the rows rounds as the one for all."""
    captured, inputs = captured_lora("llama", 2, 32)
    step = in_chunks(captured, 2, 20000, CPU)
    assert step.kernels > 100 and step.sums == 1
    assert apart(captured, step.captured, inputs) <= 2e-6
    gradients = (replace(each, outputs=()) for each in (captured, step.captured))
    assert apart(*gradients, inputs) <= (0.0 if halves_round_alike(captured, step) else 2e-6)


def test_a_chunk_goes_through_the_head_before_the_next_begins() -> None:
    """So that one chunk of logits is there at a time: the first chunk of the loss comes before the second's logits."""
    captured, _ = captured_lora("llama")
    step = in_chunks(captured, 6, 12000, CPU)
    places = chunk_places(step)
    loss = next(v.id for v in captured.graph.vertices if v.op == "aten::nll_loss_forward")
    head = next(v for v in captured.graph.vertices if v.id == loss).inputs[0][0]
    logits = next(v for v in captured.graph.vertices if v.id == head).inputs[0][0]
    assert places[loss][0] < places[logits][1] and places[loss][4] < places[logits][5]


def test_the_largest_kernel_needs_a_fraction() -> None:
    """The logits of 60 tokens and 96 words are 23 KiB; their log-probabilities come a sixth at a time."""
    captured, _ = captured_lora("llama")
    step = in_chunks(captured, 6, 12000, CPU)
    sizes = {(v.id, k): n for v in step.captured.graph.vertices for k, n in enumerate(v.sizes)}
    made = [sizes[v.id, 0] for v in step.captured.graph.vertices if v.op == "aten::_log_softmax"]
    assert made == [60 * 96 * 4 // 6] * 6


def test_what_is_small_stays_as_it_is() -> None:
    captured, _ = captured_lora("llama")
    step = in_chunks(captured, 4, 1 << 30, CPU)
    assert step.kernels == 0 and step.captured.graph.ops == captured.graph.ops
    assert step.captured.graph.vertices == captured.graph.vertices
