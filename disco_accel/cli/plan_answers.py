"""The figures of one step in any budget: planned, or kept from an equal question."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disco_accel.cli.recipe_commands import deadline, say
from disco_accel.cli.step_question import _Step, outlined
from disco_accel.errors import BudgetTooSmall, ConfigError
from disco_accel.graph.spaces import BETWEEN_DEVICES, TO_DEVICE, TO_HOST
from disco_accel.native.device_types import DEVICE_TYPES
from disco_accel.plan.answers import answer_key, load_answer, store_answer
from disco_accel.simulate.gpus import gpu_named, gpu_names
from disco_accel.sizes import MAX_SIZE

if TYPE_CHECKING:
    import torch

    from disco_accel.config.settings import DiscoConfig
    from disco_accel.measure.costs import Costs, GraphCosts
    from disco_accel.plan.bound.larger_memory import Joined
    from disco_accel.recipes.outline import Outline
    from disco_accel.simulate.machine import Machine
    from disco_accel.simulate.roofline import Speed
    from disco_accel.step.compile.stages import PlanRequest, StagedStep

_DRIVER = Path("/proc/driver/nvidia/version")
_AMPLE = MAX_SIZE >> 2
_SMALLER = 0.9
"""The next budget is tried while a step takes less than this part of the last one."""
_DIGITS = 3
"""Significant digits of the budgets between the ends of a curve."""


@dataclass(frozen=True)
class _Device:
    """The device that is asked about: its ``kind``, and for ``--gpu`` its ``name``, ``speed``, ``memory`` in bytes and
    ``unverified`` figures. ``here``: this machine's, which is measured."""

    kind: str
    name: str | None = None
    speed: Speed | None = None
    memory: int | None = None
    unverified: tuple[str, ...] = ()
    here: torch.device | None = None

    def machine(self, config: DiscoConfig) -> Machine:
        """Its links, or the throttled one that ``config`` asks for."""
        from disco_accel.native.backend import backend_of_kind
        from disco_accel.simulate.machine import Link, Machine

        if self.speed is not None:
            return self.speed.machine
        backend = backend_of_kind(self.kind)
        if backend.separate_memory or config.link_bandwidth is None:
            return backend.speed.machine
        throttled = Link(float(config.link_bandwidth), 0.0)
        return Machine(links=dict.fromkeys((TO_DEVICE, TO_HOST, BETWEEN_DEVICES), throttled))

    def costs(self, config: DiscoConfig) -> Costs:
        """The source of the costs of kernels: measured where it is here."""
        from disco_accel.measure.costs import Estimated, Measured

        if self.here is not None:
            return Measured(self.kind, compute_threads=config.compute_threads)
        return Estimated(self.kind, self.speed, compute_threads=config.compute_threads)


def device_of(options: argparse.Namespace) -> _Device:
    """The device of ``--gpu`` and ``--device``. Raises ConfigError."""
    kinds = tuple(DEVICE_TYPES)[::-1]
    if options.gpu is None:
        return _Device(options.device)
    if options.device != kinds[0]:
        raise ConfigError(f"--gpu: {options.gpu} is no device of --device {options.device}; give one of both")
    if options.gpu == "this":
        return _measured_here()
    gpu = gpu_named(options.gpu)
    return _Device(kinds[0], gpu.name, gpu.speed, gpu.memory, gpu.unverified)


def _measured_here() -> _Device:
    from disco_accel.native.backend import first_accelerator
    from disco_accel.selfcheck.link import link
    from disco_accel.selfcheck.self_check import LINK_BYTES
    from disco_accel.simulate.machine import Link, Machine

    backend = first_accelerator()
    if backend is None:
        raise ConfigError(f"--gpu: this: no GPU is here to be measured; give one of {', '.join(gpu_names())}")
    wrong, rates = link(backend.resolve(), LINK_BYTES)
    if wrong:
        raise ConfigError(f"--gpu: this: {wrong[0]}; see disco-accel doctor --selftest")
    latency = backend.speed.machine.link(TO_DEVICE).latency
    links = {TO_DEVICE: Link(rates["h2d"], latency), TO_HOST: Link(rates["d2h"], latency)}
    speed = replace(backend.speed, name=f"this {backend.hardware()}", machine=Machine(links=links))
    return _Device(backend.device.type, "this", speed, backend.memory_bytes(), here=backend.resolve())


def answers_about(step: _Step, device: _Device, options: argparse.Namespace) -> _StepAnswers:
    """Answers for any budget, with the ``options`` of ``plan``."""
    return _StepAnswers(step, device, options)


@dataclass
class _StepAnswers:
    """Answers about ``step`` on ``device``; it is captured once for all budgets."""

    step: _Step
    device: _Device
    options: argparse.Namespace
    _outlines: dict[Any, Outline] = field(default_factory=dict)
    _answers: dict[int, tuple[dict[str, Any], Exception | None]] = field(default_factory=dict)

    def own_budget(self) -> int:
        """That of the step's config, or of the device. A size is taken as it is: this machine need not be the one that
        trains. Raises ConfigError."""
        asked, memory, kind = self.step.config.memory_budget, self.device.memory, DEVICE_TYPES[self.device.kind]
        if isinstance(asked, int):
            return asked
        if memory is None and self.options.model is not None:
            memory = gpu_named("a100-40g").memory
        if memory is not None and asked != "shared":
            return int(memory * (kind.auto_share if asked == "auto" else float(asked.removesuffix("%")) / 100))
        try:
            return replace(self.step.config, device=self.device.kind, link_bandwidth=None).resolve().memory_budget
        except ConfigError:
            wrong = ConfigError(f"memory_budget: {asked} of a device that is not here; give --memory, or --gpu")

        def refuse() -> int:
            raise wrong

        # A fault of the recipe is told first.
        outlined(self.step, self.options.quant, refuse)
        raise wrong

    def curve(self, points: int) -> list[int]:
        """Budgets from the smallest that works to the smallest in which everything stays on the device."""
        _, error = self.answer(1)
        top = self._enough()
        least = error.needed if isinstance(error, BudgetTooSmall) else top
        if least >= top:
            return [top]
        ratio = (top / least) ** (1 / (points - 1))
        between = (int(float(f"{least * ratio**k:.{_DIGITS - 1}e}")) for k in range(1, points - 1))
        return sorted({least, *(size for size in between if least < size < top), top})

    def _enough(self) -> int:
        """About the smallest budget that loads no more than any larger one. Memory of launch graphs is a share of a
        budget, so that a small model takes less of a smaller one."""
        size = _AMPLE
        while True:
            figures, error = self.answer(size)
            if error is not None:
                raise error
            peak = figures["peak_bytes"]
            tried = [least for least in (peak, peak * 21 // 20) if least < _SMALLER * size]
            for least in tried:
                found, _ = self.answer(least)
                if found["fits"] and found["reload_bytes"] <= figures["reload_bytes"]:
                    break
            else:
                return tried[-1] if size == _AMPLE else size
            size = least

    def answer(self, total: int, folder: Path | None = None) -> tuple[dict[str, Any], Exception | None]:
        """The figures in a budget of ``total`` bytes, and an error where that is too small. With ``folder`` the plan
        is made in any case, and written there. Raises ConfigError, CaptureError."""
        config = self.step.config
        keeps = config.plan_cache is not None and self._repeatable
        if folder is None and total in self._answers:
            return self._answers[total]
        key = answer_key(self._question(total)) if keeps else ""
        figures = (
            load_answer(config.plan_cache, key) if config.plan_cache is not None and key and folder is None else None
        )
        if figures is None or self.options.passes:
            figures = self._planned(total, folder)
            if config.plan_cache is not None and key and not figures.get("cut_short"):
                store_answer(config.plan_cache, key, figures)
        self._answers[total] = figures, None if figures["fits"] else _error_of(figures)
        return self._answers[total]

    @property
    def _repeatable(self) -> bool:
        """Whether an equal question has an equal answer: nothing is measured, no other file is read."""
        separate = DEVICE_TYPES[self.device.kind].separate_memory
        adapter = getattr(self.step.recipe, "adapter_name_or_path", None)
        return separate and self.device.here is None and not _DRIVER.exists() and adapter is None

    def _question(self, total: int) -> Mapping[str, Any]:
        step, device = self.step, self.device
        return {
            "model": step.model.config,
            "source": step.model.source,
            "recipe": asdict(step.recipe),
            "task": [step.task, step.decoded],
            "config": step.config.as_dict(),
            "device": [device.kind, device.name, repr(device.speed), device.memory],
            "quant": self.options.quant,
            "seconds": deadline(self.options, step.config.deadline),
            "budget": total,
        }

    def _outlined(self, total: int) -> Outline:
        """The step as captured; where its optimizer updates may depend on the budget."""
        from disco_accel.step.optimizer_home import TrainedBytes, home_by_size

        for found in self._outlines.values():
            if home_by_size(self.step.config, TrainedBytes.of(found.model), total) is found.optimizer:
                return found
        found = outlined(self.step, self.options.quant, lambda: total, self.device.here)
        self._outlines[found.optimizer] = found
        return found

    def _planned(self, total: int, folder: Path | None) -> dict[str, Any]:
        """Plan the step within ``total`` bytes, and write the plan to ``folder``."""
        from disco_accel.observe.forecast import forecast, passes_text, write_forecast
        from disco_accel.plan.bound.larger_memory import larger_memory
        from disco_accel.step.compile.planned_step import plan_in_chunks
        from disco_accel.step.compile.stages import stages_text
        from disco_accel.step.compile.useful_budgets import gains_of_memory

        captured, config = self._outlined(total), self.step.config
        say(config.without_effect)
        heard: dict[str, Any] = {}
        asked = self._request(captured, total, heard)
        more = self.question | ({} if captured.packed is None else {"quant": captured.packed.as_dict()})
        if self.options.passes:
            print(stages_text(), file=sys.stderr)
        try:
            made = plan_in_chunks(captured.whole, asked)
        except BudgetTooSmall as error:
            refusal = {"what": error.what, "parts": error.parts, "devices": list(error.devices), "more": error.more}
            given = {"fits": False, "budget_bytes": error.given, "needed_bytes": error.needed}
            useful = {"useful_budgets": dict(error.useful_budgets)}
            return {**given, **useful, **more, **heard, "refusal": refusal}
        for note in made.planned.notes:
            say(note)
        made, joined = self._with_fused_kernels(made, asked, more)
        captured = replace(captured, captured=made.captured)
        more |= heard | _host_figures(captured, made, config)
        planned, copies = made.planned, made.captured.copies
        budget, name = planned.budget.as_dict(), more["estimated_for"]
        names, whole = captured.names, planned.whole
        result = forecast(planned.graph, planned.plan, asked.machine, budget, names, name, copies, whole, joined)
        larger = larger_memory(planned.graph, asked.machine, whole, config.recompute, joined)
        loads, seconds = result.figures["reload_bytes"], result.figures["step_seconds"]
        more |= gains_of_memory(larger, planned.budget, loads, seconds)
        figures = _as_rates({**result.figures, **more})
        if self.options.passes:
            figures["passes"] = [each.as_dict() for each in planned.applied]
            print("\n" + passes_text(planned.applied), end="", file=sys.stderr)
        if folder is not None:
            write_forecast(folder, replace(result, figures=figures))
        return figures

    def _with_fused_kernels(
        self, made: StagedStep, asked: PlanRequest, figures: dict[str, Any]
    ) -> tuple[StagedStep, Joined | None]:
        """``made`` with fused kernels, as a run has it in the end, where that is faster by estimate; and the function
        that gives a graph such kernels, None where steps have none. ``figures`` get those about them."""
        from disco_accel.measure.estimated_fusing import _EstimatedFusing
        from disco_accel.native.backend import backend_of_kind
        from disco_accel.simulate.simulator import simulate
        from disco_accel.step.compile.pipeline import with_fused_kernels

        figures["fused"] = 0
        # Where kernels are measured, the rate of the memory is not known.
        if self.step.config.fuse == "off" or self.device.here is not None:
            return made, None
        fusing = _EstimatedFusing(self.device.speed or backend_of_kind(self.device.kind).speed)
        planned = with_fused_kernels(made.captured, made.planned, asked.settings, estimated=fusing)
        if planned.fused:
            figures["fused"] = len(planned.fused)
            figures["step_seconds_without_fused"] = simulate(made.planned.plan, asked.machine).makespan
        return replace(made, found=planned), fusing.fused

    def _request(self, captured: Outline, total: int, heard: dict[str, Any]) -> PlanRequest:
        """``heard`` gets the kernels whose scratch nobody knows."""
        import torch

        from disco_accel.execute.engine_options import EngineOptions, makes_graphs
        from disco_accel.step.compile.pipeline import PlannerSettings
        from disco_accel.step.compile.stages import PlanRequest, Sharing
        from disco_accel.step.optimizer_home import TrainedBytes, keeps_masters

        config, kind = self.step.config, self.device.kind
        machine = self.device.machine(config)
        settings = PlannerSettings(config.planner, config.policy, machine, deadline(self.options, config.deadline))
        on_host = config.host_memory if isinstance(config.host_memory, int) else None
        rounded = TrainedBytes.of(captured.model, keeps_masters(config)).rounded
        settings = replace(settings, recompute=config.recompute, host_memory=on_host, rounded=rounded)
        engine = EngineOptions(kind, lookahead=config.lookahead, launch_graphs=config.launch_graphs == "auto")
        given = replace(captured.budget(total), has_graphs=makes_graphs(engine))

        def costed(known: GraphCosts) -> None:
            heard.update(without_scratch_of=known.without_scratch, not_counted=known.note)

        sharing, costs = Sharing(self.step.devices, self.step.parallel), self.device.costs(config)
        where = self.device.here or torch.device("cpu")
        return PlanRequest(sharing, costs, given, settings, config.chunks, where, costed=costed)

    @property
    def question(self) -> dict[str, Any]:
        """The question's part of the figures."""
        from disco_accel.native.backend import backend_of_kind

        step, speed = self.step, self.device.speed or backend_of_kind(self.device.kind).speed
        facts: dict[str, Any] = {
            "model": step.recipe.model_name_or_path,
            "config": step.model.source,
            "task": step.task,
            "batch": step.rows,
            "seq": step.recipe.max_length,
            "tokens": step.tokens,
            "estimated_for": speed.name,
            "unverified": list(self.device.unverified),
        }
        if self.device.here is not None:
            facts["measured"] = True
        if step.devices > 1:
            facts |= {"devices": step.devices, "parallel": step.parallel}
        return facts


def _error_of(figures: Mapping[str, Any]) -> BudgetTooSmall:
    """The refusal that ``figures`` are about."""
    needed, given, refusal = figures["needed_bytes"], figures["budget_bytes"], figures["refusal"]
    what, parts, devices, more = (refusal[key] for key in ("what", "parts", "devices", "more"))
    return BudgetTooSmall(needed, given, what, parts, tuple(devices), figures["useful_budgets"], more)


def _host_figures(captured: Outline, made: StagedStep, config: DiscoConfig) -> dict[str, Any]:
    """The figures of a plan beside its forecast. Raises ConfigError where the host memory of ``config`` is less than
    the plan takes."""
    from disco_accel.step.compile.budget_parts import bytes_on_host, host_memory_parts, require_host_memory
    from disco_accel.step.compile.compiled_step import shared_weights
    from disco_accel.step.optimizer_home import TrainedBytes, keeps_masters
    from disco_accel.step.placement.shard_memory import packed_bytes

    planned, copies = made.planned, made.captured.copies
    rounded = TrainedBytes.of(captured.model, keeps_masters(config)).rounded
    packed = packed_bytes(shared_weights(captured.captured), dict(captured.model.named_parameters()))
    if isinstance(config.host_memory, int):
        require_host_memory(config.host_memory, planned.graph, bytes_on_host(planned.plan), rounded, copies, packed)
    chunks = made.chunked
    return {
        **({} if chunks is None else {"chunks": {"kernels": chunks.kernels, "most": chunks.most, "sums": chunks.sums}}),
        "host_memory": host_memory_parts(planned.graph, bytes_on_host(planned.plan), rounded, copies, packed),
        "optimizer": captured.optimizer.value,
        "update": captured.update,
        "cut_short": planned.cut,
        "recomputation": None if planned.recomputation is None else asdict(planned.recomputation),
    }


def _as_rates(figures: dict[str, Any]) -> dict[str, Any]:
    """``figures`` with the rate of tokens, the limit of a step, and the tokens from which kernels hide the link: they
    grow with the tokens of a step, and the bytes of weights do not."""
    kernels, copies, tokens = figures["kernel_seconds"], figures["copy_seconds"], figures["tokens"]
    return figures | {
        "tokens_per_second": tokens / figures["step_seconds"] if figures["step_seconds"] else 0.0,
        "limit": "link" if copies > kernels else "kernels",
        "hidden_at_tokens": math.ceil(tokens * copies / kernels) if copies and kernels else None,
    }
