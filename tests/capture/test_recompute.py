"""Activation checkpointing in a captured graph: recomputation is there, held back, and saves memory."""

from __future__ import annotations

import functools

import pytest
import torch

from disco_accel.errors import CaptureError
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.values import arrives_at_gate
from tests.capture.steps import assert_same_bits, capture, run_captured, run_eager
from tests.support.interpret import serial_peak
from tests.support.models import random_batch, tiny_lora

LAYERS = 4


@functools.cache
def _steps() -> tuple[TaskGraph, TaskGraph]:
    batch = random_batch(length=32)
    plain, saving = (tiny_lora(layers=LAYERS, hidden=32, checkpointing=c) for c in (False, True))
    return capture(plain, batch).graph, capture(saving, batch).graph


def _depends_on_tangent(graph: TaskGraph, *, control: bool) -> set[int]:
    held = {v.id for v in graph.vertices if arrives_at_gate(v)}
    for vertex in graph.vertices:
        before = [maker for maker, _ in vertex.inputs] + (list(vertex.after) if control else [])
        if any(v in held for v in before):
            held.add(vertex.id)
    return held


def _before_the_loss(graph: TaskGraph) -> set[int]:
    return {v.id for v in graph.vertices if v.id <= next(v.id for v in graph.vertices if v.out)}


def test_nothing_of_the_backward_can_start_in_the_forward() -> None:
    """By data alone, recomputation and a few backward kernels could: each is held back by an ``after`` edge."""
    plain, saving = _steps()
    for graph in (plain, saving):
        everything = {v.id for v in graph.vertices}
        early = everything - _before_the_loss(graph) - _depends_on_tangent(graph, control=False)
        assert early, "without the edges some vertices are free to start"
        assert not everything - _before_the_loss(graph) - _depends_on_tangent(graph, control=True)


def test_every_layer_is_recomputed() -> None:
    """The graph with checkpointing computes each layer's forward twice."""
    plain, saving = _steps()
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    counts = [sum(op.name == attention for op in graph.ops.values()) for graph in (plain, saving)]
    assert counts == [LAYERS, 2 * LAYERS]
    assert len(saving.ops) - len(plain.ops) > 20 * LAYERS


def test_gate_of_a_layer_is_the_gradient_of_that_layers_output() -> None:
    """One layer ahead would keep two layers' activations alive: gates come one per layer, last layer first."""
    _, saving = _steps()
    attention = [i for i, op in saving.ops.items() if op.name == "aten::_scaled_dot_product_flash_attention_for_cpu"]
    recomputed = attention[LAYERS:]
    gates = {v.id: v.after for v in saving.vertices if v.after}
    for index, layer in zip(recomputed, reversed(range(LAYERS)), strict=True):
        assert f".layers.{layer}." in saving.ops[index].module
        # The norm of the layer's input is the root of its recomputation.
        root = max(v for v in gates if v < index)
        assert saving.ops[root].module.endswith(f".layers.{layer}.input_layernorm")
        (gate,) = gates[root]
        following = f".layers.{layer + 1}" if layer + 1 < LAYERS else ".norm"
        assert following in saving.ops[gate].module


def test_checkpointing_lowers_the_live_peak() -> None:
    """In serial order, which is what the planner sees."""
    plain, saving = _steps()
    assert serial_peak(saving) < 0.6 * serial_peak(plain)


def test_every_nth_layer_follows_the_users_choice() -> None:
    """Layers that the user leaves alone keep their activations."""
    model = tiny_lora(layers=LAYERS, hidden=32)
    model.enable_input_require_grads()
    if not hasattr(model.base_model.model, "activation_checkpointing_enable"):
        pytest.skip("this transformers checkpoints every layer or none")
    model.base_model.model.activation_checkpointing_enable(every_n_layers=2)
    batch = random_batch()
    step = capture(model, batch)
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert sum(op.name == attention for op in step.graph.ops.values()) == LAYERS + LAYERS // 2
    assert_same_bits(run_captured(step, model, batch), run_eager(model, batch, torch.enable_grad()))


def test_the_users_checkpoint_function_is_back_after_a_capture() -> None:
    """Also after one that failed."""
    model = tiny_lora(hidden=32, checkpointing=True)
    before = [getattr(m, "_gradient_checkpointing_func", None) for m in model.modules()]
    use_cache = model.config.use_cache
    capture(model, random_batch())
    batch = random_batch()
    del batch["labels"]
    with pytest.raises(CaptureError, match="labels"):
        capture(model, batch)
    assert [getattr(m, "_gradient_checkpointing_func", None) for m in model.modules()] == before
    assert model.config.use_cache == use_cache
    assert not torch.nn.modules.module._global_forward_pre_hooks
