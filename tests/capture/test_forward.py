"""Capture of a forward alone: what leaves is named, nothing waits, and sizes that no machine here holds need none."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from disco_accel.capture.step import capture_forward
from disco_accel.errors import CaptureError
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.value_numbering import clones
from disco_accel.graph.values import arrives_at_gate, host_copy_exists, is_foreign
from disco_accel.integrate.hf.planned_prefill import prefill_batch, traced_forward
from disco_accel.integrate.hf.tracing import hf_contexts
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.capture.steps import assert_well_formed


class Affine(torch.nn.Module):
    """One product and one sum; the weight is trainable, the shift is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.shift = torch.nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.shift


def test_a_forward_has_no_gradients_and_nothing_late() -> None:
    """Trainable weights come from outside as in a training step, frozen ones are clean."""
    model = Affine()
    step = capture_forward(model, {"x": torch.randn(2, 4)}, forward=lambda x: {"y": model(x), "twice": 2 * model(x)})
    assert_well_formed(step.graph)
    assert [o.name for o in step.outputs] == ["y", "twice"] and step.gradients == ()
    assert not any(arrives_at_gate(v) for v in step.graph.vertices)
    flags = {b.name: step.graph.vertices[b.vertex] for b in step.bindings}
    assert is_foreign(flags["weight"]) and is_foreign(flags["x"]) and host_copy_exists(flags["shift"])
    assert all(step.graph.vertices[o.ref[0]].out and step.graph.vertices[o.ref[0]].keep for o in step.outputs)


def test_an_input_returned_as_it_is_is_refused() -> None:
    model = Affine()
    with pytest.raises(CaptureError, match="itself: is an input of the step"):
        capture_forward(model, {"x": torch.randn(2, 4)}, forward=lambda x: {"y": model(x), "itself": x})


def test_what_is_made_outside_is_made_for_good_before_the_step_is_out() -> None:
    """Its copy is an ``out`` vertex that reads the value, writes foreign memory, and keeps a byte in the arena."""
    model = Affine()

    def forward(x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = model(x)
        return {"y": y[:, 1:].clone(memory_format=torch.contiguous_format), "twice": 2 * y}

    step = capture_forward(model, {"x": torch.randn(2, 4)}, forward=forward, outside=lambda name: name == "y")
    assert_well_formed(step.graph)
    assert [o.name for o in step.outputs] == ["twice"]
    (place,) = (b for b in step.bindings if b.source == "outside")
    assert place.name == "y" and is_foreign(step.graph.vertices[place.vertex])
    (copy,) = (v for v in step.graph.vertices if (place.vertex, 0) in v.inputs)
    assert copy.op == "aten::copy_" and copy.sizes == (1,) and copy.out and copy.keep


def on_meta(layers: int, tokens: int) -> Any:
    config = LlamaConfig(num_hidden_layers=layers, num_key_value_heads=32, max_position_embeddings=tokens)
    with torch.device("meta"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).requires_grad_(False).eval()


def test_a_prompt_of_32768_tokens_at_seven_billion_shapes_needs_no_memory() -> None:
    """Five layers at 7B width: scores would be 64 GiB a layer, the cache is 2.5 GiB, the arena 2 GiB."""
    tokens = 32768
    model = on_meta(5, tokens)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    given = {"input_ids": ids, "past_key_values": DynamicCache(config=model.config)}
    batch = prefill_batch(model.forward, given)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forward, contexts = traced_forward(model.forward), hf_contexts(model, batch)
    step = capture_forward(model, batch, forward=forward, contexts=contexts, outside=lambda _: True)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**28
    assert_well_formed(step.graph)
    weights = sum(v.sizes[0] for v in step.graph.vertices if host_copy_exists(v))
    copies = [b for b in step.bindings if b.source == "outside"]
    outside = [step.graph.vertices[b.vertex] for b in copies if b.name != "logits"]
    assert len(copies) == len(outside) + 1
    assert all(is_foreign(v) for v in outside) and step.outputs == ()
    assert sum(v.sizes[0] for v in outside) == 5 * 2 * tokens * 32 * 128 * 2 > 2 * 2**30
    plan = make_plan(step.graph, memory=2 * 2**30, planner="build", cyclic=True)
    verify(step.graph, plan)
    assert weights > 2 * 2**30 and any(swaps_in(v) for v in plan.vertices)


class _Counting(torch.nn.Module):
    """Reads a state, adds to it where it lies, and reads it again; the same product twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before, product = state * 2.0, x @ self.weight
        state.add_(1.0)
        return before + state * 2.0 + product + x @ self.weight


def test_a_state_is_read_in_eagers_order_and_never_once_for_two() -> None:
    model, batch = _Counting(), {"state": torch.zeros(4, 4), "x": torch.randn(4, 4)}
    step = capture_forward(
        model, batch, forward=lambda **given: {"y": model(**given)}, changed=lambda name: name == "state"
    )
    state = next(b.vertex for b in step.bindings if b.name == "state")
    first, change, second = (v for v in step.graph.vertices if any(ref[0] == state for ref in v.inputs))
    assert (first.op, change.op, second.op) == ("aten::mul", "aten::add_", "aten::mul")
    assert change.after == (first.id,) and second.after == (change.id,) and change.keep
    assert [step.graph.ops[clone.vertex].name for clone in clones(step.graph)] == ["aten::mm"]


def test_a_state_that_may_not_change_is_refused_by_name() -> None:
    model, batch = _Counting(), {"state": torch.zeros(4, 4), "x": torch.randn(4, 4)}
    with pytest.raises(CaptureError, match="changes an input"):
        capture_forward(model, batch, forward=lambda **given: {"y": model(**given)})
