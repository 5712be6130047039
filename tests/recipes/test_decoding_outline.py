"""A token of decoding planned from a config alone is the token of a run: the same kernels, sizes and budget."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from disco_accel import DiscoConfig, prefill, stats
from disco_accel.capture.captured_step import CapturedStep
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.recipes.outline import outline
from disco_accel.recipes.settings import PrefillRecipe
from disco_accel.step.run.session import find_state
from tests.support.models import TEN_FAMILIES, family_full

CAPACITY, ROWS = 24, 2
"""``generate`` makes a cache for all tokens but the last."""
WITH_STATIC_CACHES = [family for family in TEN_FAMILIES if family != "phi3"]
"""phi3 asks for a token of another vocabulary when it generates."""


def shape_of(captured: CapturedStep) -> Counter[tuple[Any, ...]]:
    """Of the inputs their sizes, of the kernels their calls: a run has measured their scratch, too."""
    graph = captured.graph
    kernels = Counter((call.name, call.overload, call.args, call.results) for call in graph.ops.values())
    return kernels + Counter((v.op, v.sizes) for v in graph.vertices if v.kind is VertexKind.INPUT)


@pytest.mark.parametrize("family", WITH_STATIC_CACHES)
def test_the_outline_of_every_family_is_the_token_of_its_run(family: str, tmp_path: Path) -> None:
    """Where windows are smaller than the cache it is a token with full windows, as the last ones are."""
    model = family_full(family).eval().requires_grad_(False)
    model.save_pretrained(tmp_path)
    recipe = PrefillRecipe(
        model_name_or_path=str(tmp_path),
        prompts="-",
        max_length=CAPACITY,
        attn_implementation="eager" if family == "gemma2" else "sdpa",
        dtype="float32",
    )
    outlined = outline(recipe, task="decode", rows=ROWS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False)
    ids = torch.randint(3, 90, (ROWS, 8), generator=torch.Generator().manual_seed(0))
    prefill(model.eval(), ids, config=DiscoConfig("64MiB", device="cpu", plan_cache=None))
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=CAPACITY - 7,
        min_new_tokens=CAPACITY - 7,
        pad_token_id=0,
        do_sample=False,
        cache_implementation="static",
    )
    state = find_state(model)
    assert state is not None and not stats(model)["forwards_unplanned"], stats(model)["fallbacks"]
    *_, run = state.memory.plans.values()
    assert shape_of(outlined.captured) == shape_of(run.captured)
    given = outlined.budget(64 << 20)
    assert (given.batch, given.outputs) == (run.budget.batch, run.budget.outputs)
