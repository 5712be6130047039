"""Steps for the capture tests: models, batches, eager runs, and the captured graph run by the plain interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from disco_accel.capture.captured_step import CapturedStep
from disco_accel.capture.fake_inputs import batch_tensors
from disco_accel.capture.step import capture_step
from disco_accel.graph.taskgraph import Ref, TaskGraph, VertexKind
from disco_accel.integrate.hf.tracing import hf_contexts
from tests.support.interpret import interpret, view
from tests.support.models import random_batch, tiny_lora

Values = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Loss, and the gradient of each trainable parameter by name."""


@dataclass(frozen=True)
class Case:
    """One combination of what a user may switch; ``adapters`` is the dtype of the LoRA weights."""

    family: str = "llama"
    checkpointing: bool = False
    base: torch.dtype = torch.float32
    adapters: torch.dtype = torch.float32
    autocast: bool = False
    padded: bool = False
    items: str = ""
    tied: bool = False
    attention: str = "sdpa"

    def __str__(self) -> str:
        dtypes = f"{self.base}-{self.adapters}".replace("torch.", "").replace("bfloat", "bf").replace("float", "f")
        switches = ("checkpointing", "autocast", "padded", "tied")
        words = [self.family, dtypes, *(s for s in switches if getattr(self, s)), self.items, self.attention]
        return "-".join(word for word in words if word)

    def model(self) -> torch.nn.Module:
        model = tiny_lora(
            self.family,
            dtype=self.base,
            checkpointing=self.checkpointing,
            hidden=32,
            tie_word_embeddings=self.tied,
            attn_implementation=self.attention,
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(self.adapters)
        return model

    def batch(self, seed: int = 0) -> dict[str, Any]:
        batch: dict[str, Any] = random_batch(seed=seed)
        if self.padded:
            batch["attention_mask"][0, 11:] = 0
            batch["attention_mask"][1, 14:] = 0
            batch["labels"][batch["attention_mask"] == 0] = -100
        if self.items:
            batch["num_items_in_batch"] = torch.tensor(23) if self.items == "tensor" else 23
        return batch

    def region(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else nullcontext()


def capture(model: torch.nn.Module, batch: Mapping[str, Any], **options: Any) -> CapturedStep:
    """Capture as the integration does."""
    return capture_step(model, batch, contexts=hf_contexts(model, batch), **options)


def run_eager(model: torch.nn.Module, batch: Mapping[str, Any], region: Any, tangent: float = 1.0) -> Values:
    """Forward and backward as a training loop does them."""
    model.zero_grad(set_to_none=True)
    with region:
        loss = model(**batch).loss
    loss.backward(torch.full_like(loss, tangent))
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def run_captured(step: CapturedStep, model: torch.nn.Module, batch: Mapping[str, Any], tangent: float = 1.0) -> Values:
    """Run the graph vertex by vertex on the model's tensors."""
    values = interpret(step.graph, feeds(step, model, batch, tangent))
    loss = step.outputs[0]
    grads = {g.name: view(values[g.ref], g.spec) for g in step.gradients}
    return view(values[loss.ref], loss.spec), grads


def feeds(
    step: CapturedStep, model: torch.nn.Module, batch: Mapping[str, Any], tangent: float = 1.0
) -> dict[int, torch.Tensor]:
    """INPUT id → tensor."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    by_source: dict[str, Mapping[str, torch.Tensor]] = {
        "frozen": named,
        "buffer": named,
        "trainable": named,
        "batch": batch_tensors(batch),
        "constant": step.constants,
    }
    found = {}
    for binding in step.bindings:
        if binding.source == "tangent":
            found[binding.vertex] = torch.tensor(tangent, dtype=getattr(torch, binding.spec.dtype))
        else:
            found[binding.vertex] = by_source[binding.source][binding.name].detach()
    return found


def assert_same_bits(got: Values, expected: Values) -> None:
    assert torch.equal(got[0], expected[0]) and got[0].dtype == expected[0].dtype
    assert got[1].keys() == expected[1].keys()
    different = [name for name, grad in expected[1].items() if not torch.equal(grad, got[1][name])]
    assert not different
    assert any(grad.abs().max() > 0 for grad in expected[1].values())


def assert_well_formed(graph: TaskGraph) -> None:
    """Topological, refs in range, no size negative, layouts inside their storages, one call per kernel."""
    sizes: dict[Ref, int] = {}
    for position, vertex in enumerate(graph.vertices):
        assert vertex.id == position
        assert (vertex.kind is VertexKind.KERNEL) == (vertex.id in graph.ops)
        assert all(size >= 0 for size in vertex.sizes)
        assert all(ref in sizes for ref in vertex.inputs), "reads a value before it is made"
        assert all(before < vertex.id for before in vertex.after)
        assert len(set(vertex.inputs)) == len(vertex.inputs)
        if vertex.kind is VertexKind.KERNEL:
            _assert_call_fits(graph, vertex.id, sizes)
        sizes |= {(vertex.id, output): size for output, size in enumerate(vertex.sizes)}


def _assert_call_fits(graph: TaskGraph, id_: int, sizes: Mapping[Ref, int]) -> None:
    vertex, call = graph.vertices[id_], graph.ops[id_]
    read = set()
    for arg in _tensor_args(call.args):
        read.add(arg.input)
        assert _end(arg.spec) <= sizes[vertex.inputs[arg.input]]
    assert read == set(range(len(vertex.inputs)))
    for result in call.results:
        assert result is None or _end(result.spec) <= vertex.sizes[result.output]
    written = {result.output for result in call.results if result is not None}
    if any(graph.vertices[producer].op == "outside" for producer, _ in vertex.inputs):
        assert written == set() and vertex.sizes == (1,), "it writes foreign memory, and a byte tells that it did"
    else:
        assert written == set(range(len(vertex.sizes)))


def _tensor_args(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [arg for item in value for arg in _tensor_args(item)]
    return [value] if hasattr(value, "spec") else []


def _end(spec: Any) -> int:
    last = spec.offset + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    return (last + 1) * int(torch.empty(0, dtype=getattr(torch, spec.dtype)).element_size())
