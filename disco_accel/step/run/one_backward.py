"""One backward of several outputs of a forward, or of several forwards inside one autocast region.

Such forwards share the casts that autocast keeps of trained weights, and these may be stale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from disco_accel.capture.autocast import cast_generation
from disco_accel.errors import CaptureError, ExecutionError
from disco_accel.native.host_memory import WatchedTensors
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.step_inputs import InputSnapshot

GradientsOf = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""From the gradients of outputs, by their paths, to those of the trainable parameters, by name."""

_STALE = (
    "autocast: the region spans an update: its casts are stale. Weights were changed since a forward in this region, "
    "and PyTorch goes on with casts of the old ones, where a plan has the new ones; open a region for each step, or "
    "pass cache_enabled=False to torch.autocast"
)


class _Together:
    """Nodes of autograd of which the last one that a backward runs acts for all. ``held``: sums of the others."""

    def __init__(self) -> None:
        self._nodes: list[weakref.ref[Any]] = []
        self._backward = -1
        self._ran: set[int] = set()
        self.held: dict[str, torch.Tensor] = {}

    def add(self, node: Any) -> None:
        self._nodes = [known for known in self._nodes if known() is not None]
        self._nodes.append(weakref.ref(node))

    def more(self, node: Any) -> bool:
        """``node`` runs: whether the same backward runs another one of these later."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            # One that an error has ended leaves nothing for the next.
            self._backward, self._ran, self.held = backward, set(), {}
        self._ran.add(id(node))
        waiting = [
            known for reference in self._nodes if id(known := reference()) not in self._ran and known is not None
        ]
        return any(map(torch._C._will_engine_execute_node, waiting))

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Add ``tensor`` to the sum under ``name``, as autograd would."""
        before = self.held.get(name)
        self.held[name] = tensor if before is None else before + tensor


class _CastRegion:
    """The forwards of one model between which PyTorch has kept its casts of weights, as ``cast_generation`` tells.

    In eager mode they share these casts: the gradients that one backward brings to a cast from several forwards are
    added up in the dtype of the cast, before they are the weight's gradient.
    """

    def __init__(self) -> None:
        self._nodes = _Together()

    def add(self, node: Any) -> None:
        """``node``: of one of the forwards."""
        self._nodes.add(node)

    def total(self, node: Any, gradients: Mapping[str, torch.Tensor], casts: Mapping[str, str]) -> dict[str, Any]:
        """``gradients`` that ``node`` has made, by parameter, with those of the region's other forwards; those of
        weights with ``casts`` (see ``CapturedStep.kept_casts``) are held back until the last node.

        Raises:
            ExecutionError: a weight is used several times in each forward, so that the order of the sum is not known.
        """
        more, total = self._nodes.more(node), dict(gradients)
        if not more and not self._nodes.held:
            return total
        for name in casts.keys() & gradients.keys():
            if not casts[name]:
                raise ExecutionError(
                    f"{name}: one backward() adds up its gradients of several forwards inside one autocast region, "
                    "which share its cast, and each forward uses it more than once; open a region for each forward, "
                    "call backward() for each, or pass cache_enabled=False to torch.autocast"
                )
            self._nodes.hold(name, total.pop(name).to(getattr(torch, casts[name])))
        if not more:
            held, self._nodes.held = self._nodes.held, {}
            # Where the step has left them there is room.
            total |= {n: gradients[n].copy_(t) if n in gradients else t.float() for n, t in held.items()}
        return total


class OneForward:
    """The outputs of one forward, inside ``region`` where that keeps casts. The gradients that a backward brings to
    several outputs are taken to the parameters in one run, when the last of their nodes is reached: sums are then made
    where eager mode makes them."""

    def __init__(self, region: _CastRegion | None, casts: Mapping[str, str]) -> None:
        """``casts``: see ``CapturedStep.kept_casts``."""
        self.region, self._casts = region if casts else None, casts
        self._nodes = _Together()
        self._jointly: GradientsOf | None = None

    def add(self, node: Any) -> None:
        """``node``: of one or more outputs."""
        self._nodes.add(node)
        if self.region is not None:
            self.region.add(node)

    def gradients(
        self, node: Any, tangents: Mapping[str, torch.Tensor], alone: GradientsOf, jointly: GradientsOf | None = None
    ) -> Mapping[str, torch.Tensor]:
        """The gradients of parameters, by name, that ``node`` returns for ``tangents`` of its outputs, by path.

        ``alone`` makes the gradients where these are all that come in this backward, ``jointly`` those of several
        nodes; of a node without it, another one has it.
        """
        more = self._nodes.more(node)
        if tangents and jointly is not None:
            self._jointly = jointly
        made: Mapping[str, torch.Tensor] = {}
        if not more and not self._nodes.held:
            made = alone(tangents) if tangents else {}
            self._jointly = None
        else:
            for path, tangent in tangents.items():
                self._nodes.hold(path, tangent)
            if not more:
                made = self._all(alone, set(tangents))
        return made if self.region is None else self.region.total(node, made, self._casts)

    def _all(self, alone: GradientsOf, own: set[str]) -> Mapping[str, torch.Tensor]:
        arrived, self._nodes.held = self._nodes.held, {}
        jointly, self._jointly = self._jointly, None
        if not arrived:
            return {}
        if arrived.keys() == own or jointly is None:
            return alone(arrived)
        return jointly(arrived)


class CastRegions:
    """The autocast regions of one prepared model, one after the other."""

    def __init__(
        self, model: torch.nn.Module, updating: Callable[[], bool], tell: Callable[[str], None] | None
    ) -> None:
        """``updating``: whether an update of the weights is to be done by the next step. ``tell`` hears of stale casts
        where the model's own forward may go on with others; without it that is an error too."""
        self._model = model
        self._updating, self._tell = updating, tell
        self._generation = -1
        self._region = _CastRegion()
        self._inputs: InputSnapshot | None = None
        """The weights as the first forward of the region that casts them has found them."""

    def forward_of(self, step: CompiledStep) -> OneForward:
        """The forward that ``step`` is about to run, in the region of this thread.

        Raises:
            CaptureError: weights were changed since the first forward of the region.
        """
        casts = step.captured.kept_casts
        return OneForward(self._enter() if casts else None, casts)

    def planned(self, forward: OneForward, inputs: InputSnapshot) -> None:
        """``forward`` has run, on ``inputs``."""
        if forward.region is not None and forward.region is self._region and self._inputs is None:
            self._inputs = inputs

    def own_forward(self) -> None:
        """The model's own forward is about to run. Raises as ``forward_of``."""
        try:
            region = self._enter()
        except CaptureError as error:
            if self._tell is None:
                raise
            self._tell(f"this forward casts the weights as they are now: {error}")
            return
        if region is not None and self._inputs is None:
            self._inputs = InputSnapshot(self._cast_weights(), {}, WatchedTensors([]))

    def _cast_weights(self) -> Mapping[str, torch.Tensor]:
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad and p.dtype is torch.float32}

    def _enter(self) -> _CastRegion | None:
        generation = cast_generation()
        if generation is None:
            return None
        if generation != self._generation:
            self._generation, self._region, self._inputs = generation, _CastRegion(), None
        elif self._inputs is not None and (self._updating() or self._inputs.weights_changed()):
            raise CaptureError(_STALE)
        return self._region
