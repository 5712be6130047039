"""Stage ``allocator``: does every op of a LoRA step allocate the same n-th block, of the same size, at every run?"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from benchmarks.gpu.stage import Run
from disco_accel.capture.step import capture_step
from disco_accel.errors import DiscoError
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.traits import FOREIGN
from disco_accel.integrate.hf.tracing import hf_contexts
from disco_accel.measure.record import record
from disco_accel.native.backend import prepare_device

_KINDS = ((torch.bfloat16, "sdpa"), (torch.float32, "sdpa"), (torch.float32, "eager"))


def measure(run: Run) -> dict[str, Any]:
    """Ops recorded one by one, so that one that cannot be planned hides no other; their names in ``wrong``."""
    where = run.where
    prepare_device(where)
    figures: dict[str, Any] = {"ops": 0, "allocations": 0, "with_scratch": 0, "native_out": 0, "wrong": []}
    for dtype, attention in _KINDS[: 1 if run.small else None]:
        base, _ = arena_llama(SMALL, dtype=dtype, attention=attention, source=where)
        model = with_adapter(base, rank=4, checkpointing=True)
        batch = batch_for(SMALL["vocab_size"], 2, 16, where)
        try:
            captured = capture_step(model, batch, contexts=hf_contexts(model, batch), device=where)
        except DiscoError as error:
            figures["wrong"].append(f"{dtype} {attention}: {error}")
            continue
        _record_each(captured.graph, run.device, f"{dtype} {attention}", figures)
        run.keep(figures)
    return figures


def _record_each(graph: TaskGraph, device: str, what: str, figures: dict[str, Any]) -> None:
    # A stand-in for every kernel but one: recording looks at the sizes of a vertex's inputs alone.
    stand_ins = {
        v.id: dataclasses.replace(v, kind=VertexKind.INPUT, inputs=(), traits=FOREIGN, inplace=(), may_inplace=())
        for v in graph.vertices
    }
    seen = set()
    for vertex in graph.vertices:
        call = graph.ops.get(vertex.id)
        if vertex.kind is not VertexKind.KERNEL or call is None:
            continue
        key = (call.name, call.overload, str(call.args), vertex.sizes)
        if key in seen:
            continue
        seen.add(key)
        inputs = {producer for producer, _ in vertex.inputs}
        one = dataclasses.replace(graph, vertices=(*(stand_ins[i] for i in sorted(inputs)), vertex))
        figures["ops"] += 1
        try:
            measured = record(one, device=device)[vertex.id]
        except (DiscoError, RuntimeError) as error:
            figures["wrong"].append(f"{what}: {error}")
            continue
        figures["allocations"] += len(measured.allocations)
        figures["with_scratch"] += bool(measured.scratch_bytes)
        figures["native_out"] += measured.native_out
