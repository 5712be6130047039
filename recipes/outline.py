"""A recipe's training step without its weights: the model on ``meta``, from the checkpoint's config alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from disco_accel.capture.captured_step import CapturedStep, InputSource
from disco_accel.capture.fake_inputs import batch_tensors
from disco_accel.capture.step import capture_forward, capture_step
from disco_accel.config.settings import DiscoConfig
from disco_accel.decompose.micro_batches import StepOnParts
from disco_accel.errors import ConfigError
from disco_accel.graph.traits import FOREIGN, HOST_UPDATED
from disco_accel.integrate.hf.batch_parts import in_parts
from disco_accel.integrate.hf.generation import generating_model
from disco_accel.integrate.hf.kv_cache import room_to_fill
from disco_accel.integrate.hf.planned_forward import traced_token
from disco_accel.integrate.hf.planned_prefill import prefill_batch, traced_forward
from disco_accel.integrate.hf.static_cache import ARGUMENT
from disco_accel.integrate.hf.tensor_plan import tensor_plan
from disco_accel.integrate.hf.tracing import hf_contexts
from disco_accel.quantised.forms import PackedForm
from disco_accel.recipes.corpus import IGNORED
from disco_accel.recipes.decoding_outline import decoding_batch
from disco_accel.recipes.loading import add_adapter, checkpoint_activations
from disco_accel.recipes.model_names import FoundModel, find_model
from disco_accel.recipes.preferences import LOG_PROBABILITIES
from disco_accel.recipes.quantised import PackedWeights, asked_form, packable, stored_form, with_packed_weights
from disco_accel.recipes.settings import PAIRED, LoraRecipe, PrefillRecipe
from disco_accel.step.compile.budget_parts import Budget, leaving_bytes
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.compile.stages import Sharing, whole_step
from disco_accel.step.optimizer_home import OptimizerHome, TrainedBytes, home_by_size, update_asked

_WEIGHTS = (InputSource.FROZEN, InputSource.BUFFER, InputSource.TRAINABLE)


@dataclass(frozen=True)
class Outline:
    """One step as captured, and what of a budget lies outside the arena. ``outputs``: bytes of results that leave it;
    ``packed``: frozen weights in a form that takes fewer bytes, if any are; ``update``: when weights are updated."""

    captured: CapturedStep
    model: torch.nn.Module
    batch: dict[str, torch.Tensor]
    outputs: int = 0
    packed: PackedWeights | None = None
    optimizer: OptimizerHome = OptimizerHome.DEVICE
    update: str = "step"
    part_of: Mapping[int, int] = field(default_factory=dict)
    """Vertex → the part of the batch, or the rank, that it works on, where there are several."""

    def budget(self, total: int) -> Budget:
        """What ``total`` bytes are made of, workspaces and the allocator's blocks aside."""
        on_device = self.optimizer is OptimizerHome.DEVICE
        trainable = [p for p in self.model.parameters() if on_device and p.requires_grad]
        return Budget.of(total, trainable, self.batch.values(), self.outputs)

    @property
    def whole(self) -> StepOnParts:
        """The step as ``step/compile/stages.py`` takes it."""
        return StepOnParts(self.captured, self.part_of)

    @property
    def names(self) -> dict[int, str]:
        """INPUT vertex → name of the parameter or buffer that it holds."""
        return {b.vertex: b.name for b in self.captured.bindings if b.source in _WEIGHTS}


def outline(
    recipe: LoraRecipe | PrefillRecipe,
    quant: str | None = None,
    *,
    config: DiscoConfig | None = None,
    budget: Callable[[], int] = lambda: 0,
    parts: int = 1,
    ranks: int = 1,
    task: str = "lora",
    rows: int = 1,
    device: torch.device | None = None,
) -> Outline:
    """Capture the step that ``recipe`` trains, or a prefill of ``max_length`` tokens: no weight is read, nothing runs.

    ``quant``: a ``PackedForm`` of the frozen weights, ``none``, or None for what the recipe's keys or the checkpoint
    say. It is estimated (``measure/quantised_estimate.py``): the library that packs need not be installed.
    ``config`` and ``budget`` (asked once the model is known) say where an optimizer updates; else it is the device.
    ``parts``: of the batch, each with kernels of its own. ``ranks``: how many devices share each large weight.
    ``task``: ``full`` trains all weights in the place of an adapter; ``decode``, of a prefill's recipe, is the last of
    ``max_length`` tokens of each of ``rows`` rows. ``device``: where the kernels are to run, if that is here.

    Raises:
        ConfigError: there is no config, or a key of the recipe does not fit it; the batch has no such parts.
        CaptureError: the model does something that cannot be planned.
    """
    base, device = meta_base(recipe), device or torch.device("cpu")
    form = _form(recipe, base, quant)
    if form is not None and task == "full":
        raise ConfigError(f"--quant: {form}: packed weights are not trained; give --task lora or prefill, or none")
    if form is not None and ranks > 1:
        raise ConfigError("parallel: tensor: packed weights are not cut; use parallel: layers or batch")
    shapes = packable(base) if form else {}
    if isinstance(recipe, PrefillRecipe):
        if parts > 1:
            raise ConfigError("parallel: batch, micro_batches: a prompt is one row; use parallel: layers")
        decodes = task == "decode"
        outlined = (
            _decoding_outline(recipe, base, rows, device) if decodes else _prefill_outline(recipe, base, ranks, device)
        )
    else:
        model = _whole(base, recipe) if task == "full" else _adapted(base, recipe)
        outlined = _step_outline(recipe, model, config, budget, parts, ranks, device)
    if form is None:
        return outlined
    captured, sizes = with_packed_weights(outlined.captured, outlined.model, shapes, form)
    return replace(outlined, captured=captured, packed=sizes)


def _form(recipe: LoraRecipe | PrefillRecipe, base: Any, quant: str | None) -> PackedForm | None:
    if quant is not None:
        return None if quant == "none" else PackedForm(quant)
    return asked_form(recipe) or stored_form(base.config)


def _step_outline(
    recipe: LoraRecipe,
    model: Any,
    config: DiscoConfig | None,
    budget: Callable[[], int],
    parts: int,
    ranks: int,
    device: torch.device,
) -> Outline:
    batch = meta_batch(recipe)
    sizes = TrainedBytes.of(model)
    home = OptimizerHome.DEVICE if config is None else home_by_size(config, sizes, budget())
    trained = HOST_UPDATED if home is OptimizerHome.HOST else FOREIGN
    contexts = hf_contexts(model, batch)
    fitted = in_parts(model, FittedBatch(batch), parts) if parts > 1 else FittedBatch(batch)
    if isinstance(fitted, str):
        raise ConfigError(f"per_device_train_batch_size: a batch is not divided in {parts}, as {fitted}")
    name = recipe.model_name_or_path
    sharing = _sharing(model, ranks, parts, fitted.divided)
    captured = capture_step(
        model,
        fitted.part(0),
        contexts=contexts,
        name=name,
        device=device,
        outputs=("loss",) if recipe.loss == "sft" else (LOG_PROBABILITIES,),
        trained=trained,
        rewrite=sharing.of_one,
    )
    whole = whole_step(captured, sharing)
    # Those are the updates that can be put off.
    fused = home is OptimizerHome.HOST and recipe.optim == "adamw_torch_fused"
    deferred = fused and config is not None and update_asked(config) != "step"
    update = "deferred" if deferred else "step"
    return Outline(whole.captured, model, batch, optimizer=home, update=update, part_of=whole.part_of)


def _sharing(model: torch.nn.Module, ranks: int, parts: int = 1, divided: Collection[str] = ()) -> Sharing:
    """``parts`` of a batch, and parts of weights for so many ``ranks``."""
    if ranks == 1:
        return Sharing(parts=parts, divided=divided)
    return Sharing(ranks, "tensor", parts, divided, tensor_plan(model, ranks))


def _prefill_outline(recipe: PrefillRecipe, model: Any, ranks: int, device: torch.device) -> Outline:
    if recipe.chunk is not None:
        raise ConfigError("chunk: only whole prompts are planned without running them; leave it out")
    if recipe.adapter_name_or_path is not None:
        try:
            with torch.device("meta"):
                model = get_peft_model(model, PeftConfig.from_pretrained(recipe.adapter_name_or_path))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"adapter_name_or_path: does not fit the model ({_first(error)})") from error
    inner: Any = generating_model(model.requires_grad_(False).eval())
    shape = (1, recipe.max_length)
    inputs = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "position_ids")}
    inputs["attention_mask"] = torch.ones(shape, dtype=torch.int64)
    batch = prefill_batch(inner.forward, {**inputs, "past_key_values": DynamicCache(config=inner.config)})
    forward, contexts = traced_forward(inner.forward), hf_contexts(model, batch)
    sharing = _sharing(model, ranks)
    captured = capture_forward(
        model,
        batch,
        forward=forward,
        contexts=contexts,
        name=recipe.model_name_or_path,
        device=device,
        outside=lambda _: True,
        rewrite=sharing.of_one,
    )
    sizes, whole = leaving_bytes(captured), whole_step(captured, sharing)
    outputs = sum(sizes.values()) + room_to_fill((), sizes)
    return Outline(whole.captured, model, inputs, outputs, part_of=whole.part_of)


def _decoding_outline(recipe: PrefillRecipe, model: Any, rows: int, device: torch.device) -> Outline:
    """The cache lies beside the arena, as the batch does."""
    batch = decoding_batch(model.requires_grad_(False).eval(), rows, recipe.max_length)
    captured = capture_forward(
        model,
        batch,
        forward=traced_token(model, model.forward),
        contexts=hf_contexts(model, batch),
        name=recipe.model_name_or_path,
        device=device,
        outside=lambda _: True,
        changed=lambda name: name.startswith(ARGUMENT),
    )
    return Outline(captured, model, batch_tensors(batch), sum(leaving_bytes(captured).values()))


def _adapted(base: Any, recipe: LoraRecipe) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = add_adapter(base, recipe)
    return model.train()


def _whole(base: Any, recipe: LoraRecipe) -> torch.nn.Module:
    """All weights trained."""
    base.config.use_cache = False
    if recipe.gradient_checkpointing:
        checkpoint_activations(base, recipe.gradient_checkpointing_kwargs)
    model: torch.nn.Module = base.train()
    return model


def meta_base(recipe: LoraRecipe | PrefillRecipe) -> Any:
    """The recipe's model without its adapter.

    Raises:
        ConfigError: there is no config, or a key of the recipe does not fit it.
    """
    name = recipe.model_name_or_path
    config = model_config(find_model(name))
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and recipe.max_length > longest:
        raise ConfigError(f"max_length: {recipe.max_length} is more than the {longest} positions of {name}")
    dtype = getattr(config, "dtype", None) if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype or torch.float32, attn_implementation=recipe.attn_implementation
            )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"model_name_or_path: {name}: cannot be built ({_first(error)})") from error


def model_config(found: FoundModel) -> Any:
    """The config of transformers with the values of ``found``. Raises ConfigError: it knows no such model."""
    try:
        if found.folder is not None:
            return AutoConfig.from_pretrained(str(found.folder))
        # transformers adds keys to what is in it.
        values = deepcopy(dict(found.config))
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except (OSError, ValueError, ImportError, TypeError) as error:
        name = found.name
        raise ConfigError(f"model_name_or_path: {name}: has no config that can be read ({_first(error)})") from error


def meta_batch(recipe: LoraRecipe) -> dict[str, Any]:
    """A batch as Trainer passes it: full rows, padded ones where the recipe does not pack; of pairs both rows."""
    preferences = recipe.loss != "sft"
    shape = (recipe.per_device_train_batch_size * (1 + (recipe.loss in PAIRED)), recipe.max_length)
    batch: dict[str, Any] = {"input_ids": torch.zeros(shape, dtype=torch.int64), "labels": torch.zeros(shape).long()}
    if preferences or not recipe.packing:
        mask = torch.ones(shape, dtype=torch.int64)
        mask[:, -1] = 0
        batch["labels"][:, -1] = IGNORED
        batch["attention_mask"] = mask
    if preferences:
        return batch
    return batch | {"num_items_in_batch": batch["labels"][:, 1:].ne(IGNORED).sum() / 1}


def _first(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return text if len(text) <= 200 else text[:197] + "..."
