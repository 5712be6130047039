"""A recipe's model and batches without its Trainer, for measurements of single steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import set_seed

from disco_accel.recipes.corpus import IGNORED, Blocks, build_blocks
from disco_accel.recipes.loading import load_model, load_tokenizer
from disco_accel.recipes.settings import LoraRecipe, read_recipe
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.session import current_step


@dataclass
class Workload:
    """A model and the batches of its recipe, in the order of the file."""

    recipe: LoraRecipe
    model: Any
    data: Blocks

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """What Trainer would pass to the model at step ``step``; wraps around at the end of the data."""
        rows = self.recipe.per_device_train_batch_size
        first = (step * rows) % (len(self.data) - rows + 1)
        batch = {name: column[first : first + rows].clone() for name, column in self.data.columns.items()}
        return {**batch, "num_items_in_batch": batch["labels"][:, 1:].ne(IGNORED).sum() / 1}

    def step(self, step: int) -> float:
        """Forward and backward of one batch; gradients stay on the parameters. Returns the loss."""
        loss = self.model(**self.batch(step)).loss
        loss.backward()
        return float(loss.detach())

    def timed_step(self, step: int) -> tuple[float, float]:
        """Loss and seconds of ``step``, the gradients dropped before and after."""
        self.model.zero_grad()
        began = time.perf_counter()
        loss = self.step(step)
        return loss, time.perf_counter() - began

    def compiled(self) -> CompiledStep:
        """The plan that the last step of a prepared model ran from."""
        step = current_step(self.model)
        assert step is not None, "the model is prepared and has run a step"
        return step


def load_workload(recipe_file: str) -> Workload:
    """Load model and data as the recipe says, with its threads and seed."""
    recipe = read_recipe(recipe_file)
    if recipe.num_threads is not None:
        torch.set_num_threads(recipe.num_threads)
    data = build_blocks(recipe.dataset, load_tokenizer(recipe), max_length=recipe.max_length, packing=recipe.packing)
    set_seed(recipe.seed)
    model = load_model(recipe)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A fresh adapter has B = 0, and with it zero gradients for A: nothing is measured on zeros.
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    model.train()
    return Workload(recipe, model, data)
