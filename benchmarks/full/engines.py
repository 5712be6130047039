"""Ways to train all weights of one and the same model with AdamW: eager, ours, DeepSpeed's offloaded optimizer.

Every engine has the same weights, the same batch and the same settings of AdamW. The worker has given PyTorch one
thread: kernels compute on one, and updates beside them on another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from benchmarks.common.any_plan import any_plan_of, kernel_seconds
from benchmarks.gpu.models import draw_weights, meta_llama
from benchmarks.step.engines import LEARNING_RATE, Engine, Job
from benchmarks.step.peers import ZeroThree
from disco_accel import prepare, stats
from disco_accel.execute.engine_events import Event
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.native.extension import load_extension
from disco_accel.simulate.simulator import Link, Machine
from disco_accel.step.run.session import current_step, find_state
from disco_accel.step.update import update_choice
from disco_accel.step.update.update_choice import UpdateChoice, UpdatePlaces

TRACED = 3
"""Steps at the end whose kernels and copies are timed; the middle one counts."""


class Whole(Engine):
    """All weights are trained, without activation checkpointing; as it stands, eagerly and all in memory."""

    def __init__(self, job: Job) -> None:
        self.update_seconds: list[float] = []
        super().__init__(job)

    def random_model(self, home: Callable[[torch.Tensor], torch.Tensor], *, offload: bool = False) -> Any:
        job = self.job
        model = meta_llama(job.shape, dtype=job.torch_dtype, attention="sdpa", positions=max(2048, job.tokens))
        draw_weights(model, self.where, home)
        model.config.use_cache = False
        return model.requires_grad_(True).train()

    def adamw(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trainable.values(), lr=LEARNING_RATE, fused=True)

    def update(self) -> None:
        began = time.perf_counter()
        self.optimizer.step()
        self.update_seconds.append(time.perf_counter() - began)
        self.optimizer.zero_grad()

    def figures(self) -> dict[str, Any]:
        """As of every engine; ``update_seconds`` of each ``optimizer.step()``, and the ``digest`` of all weights."""
        return {"update_seconds": list(self.update_seconds), "digest": self._digest()}

    def _digest(self) -> str:
        made = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            made.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return made.hexdigest()


class BothThreads(Whole):
    """Eager with as many threads as ours have for kernels and updates together."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        torch.set_num_threads(2)


class Probe(Whole):
    """Eager, its allocations counted: how much it holds at most."""

    def build(self) -> Any:
        load_extension()
        torch.ops.disco_accel.set_live_tracking(True)
        return super().build()

    def figures(self) -> dict[str, Any]:
        return {"peak": int(torch.ops.disco_accel.peak_live_bytes())}


class Planned(Whole):
    """A step from a plan within the job's budget; ``changes`` are keys of ``DiscoConfig``."""

    changes: ClassVar[Mapping[str, Any]] = {"optimizer": "device"}

    def build(self) -> Any:
        model = prepare(super().build(), dataclasses.replace(self.job.config, **self.changes))
        self.left_behind = 0
        if self.job.bandwidth is not None:
            self._link_for_what_is_left(model, self.job.bandwidth)
        return model

    def _link_for_what_is_left(self, model: Any, bandwidth: float) -> None:
        """Gradients that are still on the device when a step ends cross the link then: it takes its time for them, too,
        which the host device does not ask. ``left_behind``: their bytes."""
        state = find_state(model)
        assert state is not None, "the model is prepared"
        fill = state.gradients.memory.fill

        def behind_link(copies: Sequence[tuple[torch.Tensor | None, torch.Tensor]]) -> list[torch.Tensor]:
            (arena,) = state.memory.arenas.values()
            first = arena.data_ptr()
            on_device = range(first, first + arena.numel())
            self.left_behind = sum(value.nbytes for _, value in copies if value.data_ptr() in on_device)
            began = time.perf_counter()
            found = fill(copies)
            time.sleep(max(0.0, began + self.left_behind / bandwidth - time.perf_counter()))
            return found

        state.gradients.memory.fill = behind_link  # type: ignore[method-assign]

    def figures(self) -> dict[str, Any]:
        found = stats(self.model)
        if found["steps_eager"]:
            raise RuntimeError(f"steps ran in eager mode: {found['fallbacks']}")
        outside = found["budget"]["total"] - found["budget"]["arena"]
        kept = ("budget", "kernels", "compile_seconds", "optimizer")
        return {
            **super().figures(),
            "used": found["peak_bytes"],
            "reserved": outside + found["arena_bytes"],
            "h2d": found["reload_bytes"],
            "d2h": found["offload_bytes"] + self.left_behind,
            "left_behind": self.left_behind,
            "updates_planned": found.get("updates_planned", 0),
            **{name: found[name] for name in kept},
            **self._traced(),
        }

    def _traced(self) -> dict[str, Any]:
        """``traced``: seconds of kernels, updates and copies each way in one step among its own copies. ``any_plan``:
        seconds that no plan of such a step beats."""
        # The first step after the weights were looked at begins with no update, and is no plan to be traced.
        for _ in range(2):
            self.backward()
            self.update()
        runs = sorted((self._trace() for _ in range(TRACED)), key=lambda found: found[0])
        _, lanes, seconds = runs[TRACED // 2]
        step, bandwidth = current_step(self.model), self.job.bandwidth
        assert step is not None, "a step has run"
        found: dict[str, Any] = {"traced": lanes}
        if bandwidth is not None:
            link = Link(bandwidth, 0.0)
            found["any_plan"] = any_plan_of(step, seconds, Machine(links={TO_DEVICE: link, TO_HOST: link}))
        return found

    def _trace(self) -> tuple[float, dict[str, float], dict[int, float]]:
        step = current_step(self.model)
        assert step is not None, "a step has run"
        executor = step.executor
        executor.set_tracing(True)
        began = time.perf_counter()
        self.backward()
        spent = time.perf_counter() - began
        events: list[Event] = executor.events()
        executor.set_tracing(False)
        self.update()
        hosts = host_devices(step.graph.devices)
        lanes: dict[str, float] = {"kernels": 0.0, "updates": 0.0, "h2d": 0.0, "d2h": 0.0}
        busy_until: dict[tuple[str, int], float] = {}
        for event in sorted(events, key=lambda event: event.start):
            lane, own = event.lane, (event.lane, event.device)
            if lane.startswith("compute"):
                lane = "updates" if event.device in hosts else "kernels"
            # A copy in pieces lasts through those of others between them.
            reach = max(event.start, busy_until.get(own, 0.0))
            lanes[lane] = lanes.get(lane, 0.0) + max(0.0, event.end - reach)
            busy_until[own] = max(reach, event.end)
        kernels = {e.vertex: e.end - e.start for e in events if e.lane.startswith("compute")}
        return spent, {"step": spent, **lanes}, kernels


class HostStep(Planned):
    """Trained weights, gradients, moments in host memory; ``optimizer.step()`` updates them while the device waits."""

    changes: ClassVar[Mapping[str, Any]] = {"optimizer": "host", "update": "step"}


class HostDeferred(Planned):
    """The same, updates at the head of the next step's plan."""

    changes: ClassVar[Mapping[str, Any]] = {"optimizer": "host", "update": "deferred"}

    def figures(self) -> dict[str, Any]:
        found = super().figures()
        if not found["updates_planned"]:
            raise RuntimeError("no update ran in a plan")
        return found


class HostAuto(HostDeferred):
    """The same; the device updates the weights for which the step is expected to be faster."""

    changes: ClassVar[Mapping[str, Any]] = {**HostDeferred.changes, "update_on": "auto"}


class HostHalf(HostDeferred):
    """The same; the device updates every second weight, whatever the machine is like."""

    changes: ClassVar[Mapping[str, Any]] = {**HostDeferred.changes, "update_on": "device"}

    def __init__(self, job: Job) -> None:
        # In this process alone.
        update_choice.UpdateChoice.choices = _every_second  # type: ignore[method-assign]
        super().__init__(job)


def _every_second(updates: UpdateChoice, update_on: str, machine: Machine) -> list[UpdatePlaces]:
    del update_on, machine
    return [(frozenset(range(0, len(updates.parts), 2)), updates.graph.devices[0].memory)]


class Resident(Planned):
    """Everything on the device: its kernels, timed in every step, are *compute alone*."""

    def __init__(self, job: Job) -> None:
        self.kernel_seconds: list[float] = []
        super().__init__(dataclasses.replace(job, budget=None))

    def backward(self) -> float:
        step = current_step(self.model)
        if step is None:
            return super().backward()
        losses: list[float] = []
        run = super().backward
        self.kernel_seconds.append(sum(kernel_seconds(step, lambda: losses.append(run())).values()))
        return losses[0]

    def figures(self) -> dict[str, Any]:
        seconds = list(self.kernel_seconds)
        found = super().figures()
        if found["h2d"] or found["d2h"]:
            raise RuntimeError("the device has no room for everything, so that nothing can be said of compute alone")
        return {**found, "kernel_seconds": seconds}


class ZeroTwo(Whole, ZeroThree):
    """DeepSpeed ZeRO stage 2 with ``offload_optimizer`` on the host and its own AdamW there; one process."""

    def zero(self, pinned: bool) -> dict[str, Any]:
        return {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": pinned}}

    def build(self) -> Any:
        return ZeroThree.build(self)

    def adamw(self) -> Any:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(list(self.trainable.values()), lr=LEARNING_RATE, weight_decay=0.01, adamw_mode=True)

    def update(self) -> None:
        began = time.perf_counter()
        self.engine.step()
        self.update_seconds.append(time.perf_counter() - began)


ENGINES: Mapping[str, type[Whole]] = {
    "in-memory": Whole,
    "in-memory-2": BothThreads,
    "resident": Resident,
    "device": Planned,
    "host-step": HostStep,
    "host-deferred": HostDeferred,
    "host-auto": HostAuto,
    "host-half": HostHalf,
    "zero2-offload": ZeroTwo,
    "probe": Probe,
}
