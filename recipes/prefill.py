"""Prompts of a file through a model, each under a memory budget: first token, seconds, memory.

disco-accel prefill configs/prefill_demo.yaml
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from disco_accel import prefill, stats
from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import ConfigError
from disco_accel.recipes.corpus import read_prompts
from disco_accel.recipes.loading import load_adapter, load_base, load_tokenizer, meeting_place
from disco_accel.recipes.settings import PrefillRecipe
from disco_accel.sizes import parse_size
from disco_accel.step.run.session import find_state


def run(recipe: PrefillRecipe, memory: str | None = None) -> int:
    """Read the prompts of ``recipe``, within ``memory`` or its own budget; one JSON line each on stdout.

    Returns 0.

    Raises:
        ConfigError: something given is wrong; the prompts are checked before the first is read.
        DiscoError: a plan or its run failed.
    """
    config = DiscoConfig.from_env(DiscoConfig.from_dict(recipe.disco_config or {}))
    if memory is not None:
        config = replace(config, memory_budget=parse_size(memory))
    if recipe.num_threads is not None:
        torch.set_num_threads(recipe.num_threads)
    tokenizer = load_tokenizer(recipe)
    prompts = list(_tokenized(recipe, tokenizer))
    model = load_base(recipe, meeting_place(config))
    if recipe.adapter_name_or_path is not None:
        model = load_adapter(model, recipe.adapter_name_or_path)
    model.eval()
    for line, ids in prompts:
        print(json.dumps({"line": line, **_read(model, ids, recipe, config, tokenizer)}), flush=True)
    return 0


def _tokenized(recipe: PrefillRecipe, tokenizer: Any) -> Iterator[tuple[int, torch.Tensor]]:
    for line, text in read_prompts(recipe.prompts):
        ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"]], dtype=torch.int64)
        if ids.numel() > recipe.max_length:
            raise ConfigError(
                f"prompts: {recipe.prompts}: line {line} has {ids.numel()} tokens, more than max_length: "
                f"{recipe.max_length}; raise it or cut the prompt"
            )
        if ids.numel() == 0:
            raise ConfigError(f"prompts: {recipe.prompts}: line {line} has no token")
        yield line, ids


def _read(model: Any, ids: torch.Tensor, recipe: PrefillRecipe, config: DiscoConfig, tokenizer: Any) -> dict[str, Any]:
    """What one prompt gave. ``seconds`` is without ``plan_seconds``, which a plan that exists already takes none of."""
    planned = _plan_seconds(model)
    began = time.perf_counter()
    logits = prefill(model, ids, config=config, chunk=recipe.chunk).logits
    assert logits is not None
    token = int(logits[0, -1].argmax())
    seconds = time.perf_counter() - began
    planned = _plan_seconds(model) - planned
    figures = stats(model)
    return {
        "tokens": ids.numel(),
        "seconds": seconds - planned,
        "plan_seconds": planned,
        "first_token": token,
        "first_text": tokenizer.decode([token]),
        "budget_bytes": figures["budget_bytes"],
        "peak_bytes": figures["peak_bytes"],
        "reload_bytes": figures["reload_bytes"],
    }


def _plan_seconds(model: Any) -> float:
    state = find_state(model)
    return 0.0 if state is None else sum(sum(step.seconds.values()) for step in state.memory.plans.values())
