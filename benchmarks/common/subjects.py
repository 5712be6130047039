"""Pairs of equal LoRA models, one eager and one planned, whose steps are timed in turn."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.compare import same_bits
from benchmarks.common.resident_plan import resident_plan
from disco_accel import prepare
from disco_accel.config.settings import DiscoConfig
from disco_accel.execute.executor import Event, Executor
from disco_accel.graph.memgraph import MemGraph
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.session import current_step


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with LoRA and the batch that it trains on."""

    hidden: int
    layers: int
    tokens: int
    batch: int = 1
    vocabulary: int = 512
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"hidden {self.hidden}, {self.layers} layers, batch {self.batch} x {self.tokens}, {kind}"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of repeated steps."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4)
        return (high - low) / 2


def lora_llama(shape: Shape, seed: int = 0) -> Any:
    """A model in training mode with checkpointing on, random weights everywhere and its LoRA B matrices not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    heads = max(2, shape.hidden // 64)
    base = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.hidden * 11 // 4,
            num_hidden_layers=shape.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=shape.vocabulary,
            max_position_embeddings=max(128, shape.tokens),
            use_cache=False,
        )
    ).to(shape.dtype)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=list(shape.targets), lora_dropout=0.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


class Pair:
    """The same model twice. ``planned`` runs from the plan of ``config``, or on the executor of another plan."""

    def __init__(self, shape: Shape, config: DiscoConfig) -> None:
        self.shape, self.config = shape, config
        self.eager, self.planned = lora_llama(shape), lora_llama(shape)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens), generator=generator)
        self.batch = {"input_ids": ids, "labels": ids.clone()}
        prepare(self.planned, config)
        self.run(self.planned)
        step = current_step(self.planned)
        assert step is not None, "the model has run a planned step"
        self.step: CompiledStep = step
        self._parameters = {
            id(model): [p for p in model.parameters() if p.requires_grad] for model in (self.eager, self.planned)
        }

    def run(self, model: Any) -> tuple[float, float]:
        """Loss and seconds of forward and backward, from gradients that are None."""
        for parameter in model.parameters():
            parameter.grad = None
        began = time.perf_counter()
        loss = model(**self.batch).loss
        loss.backward()
        seconds = time.perf_counter() - began
        return float(loss.detach()), seconds

    def same_bits(self) -> bool:
        """Whether the last eager and the last planned step left gradients with the same bits."""
        pairs = zip(*(self._parameters[id(model)] for model in (self.eager, self.planned)), strict=True)
        return all(a.grad is not None and b.grad is not None and same_bits(a.grad, b.grad) for a, b in pairs)

    def resident_plan(self) -> MemGraph:
        """The plan of the same step with room for everything: no copies."""
        return resident_plan(self.step, self.config)

    @contextmanager
    def executors(self, variants: Sequence[Variant]) -> Iterator[dict[str, Executor]]:
        """An executor, in an arena of its own, for each variant; closed at the end."""
        step = self.step
        made: dict[str, Executor] = {}
        try:
            for variant in variants:
                options = dataclasses.replace(step.engine, **variant.options)
                made[variant.name] = step.make_executor(options, plan=variant.plan)
            yield made
        finally:
            for executor in made.values():
                executor.close()

    def run_on(self, executor: Executor) -> tuple[float, float]:
        """Loss and seconds of a planned step that ``executor`` runs."""
        usual = self.step.use(executor)
        assert usual is not None, "the pair has run a step"
        try:
            return self.run(self.planned)
        finally:
            self.step.use(usual)

    def kernel_seconds(self, executor: Executor) -> float:
        """Time inside the kernels of one step."""
        executor.set_tracing(True)
        self.run_on(executor)
        events: list[Event] = executor.events()
        executor.set_tracing(False)
        return sum(e.end - e.start for e in events if e.lane.startswith("compute"))


@dataclass(frozen=True)
class Variant:
    """A way to run a step: options of the engine that differ, or another plan."""

    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    plan: MemGraph | None = None
