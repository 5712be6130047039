"""A model far larger than memory is captured from its shapes alone."""

from __future__ import annotations

import resource

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from disco_accel.graph.values import host_copy_exists
from tests.capture.steps import assert_well_formed, capture
from tests.support.interpret import serial_peak
from tests.support.models import PROJECTIONS


def _on_meta(layers: int) -> torch.nn.Module:
    config = LlamaConfig(num_hidden_layers=layers, torch_dtype=torch.bfloat16, attention_dropout=0.0)
    with torch.device("meta"):
        base = LlamaForCausalLM(config).to(torch.bfloat16)
        model = get_peft_model(base, LoraConfig(r=16, target_modules=list(PROJECTIONS)), low_cpu_mem_usage=True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def test_seven_billion_shapes_need_no_memory() -> None:
    """Four layers at 7B width, batch 8 x 1024: gigabytes in the graph, almost none in the process."""
    model = _on_meta(4)
    ids = torch.zeros(8, 1024, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = capture(model, {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert_well_formed(step.graph)
    weights = sum(v.sizes[0] for v in step.graph.vertices if host_copy_exists(v))
    assert weights > 1.9 * 2**30 and serial_peak(step.graph) > 2**30
    assert grown < 2**28
    assert len(step.gradients) == 2 * len(PROJECTIONS) * 4
