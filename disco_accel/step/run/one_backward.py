"""What one backward brings to several outputs of a forward, or to several forwards of one autocast region."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from disco_accel.errors import ExecutionError

GradientsOf = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""From the gradients of outputs, by their paths, to those of the trainable parameters, by name."""


class _Together:
    """Nodes of autograd of which the last one that a backward runs acts for all. ``held``: what the others left."""

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
        """Add ``tensor`` to what is held under ``name``, as autograd would."""
        before = self.held.get(name)
        self.held[name] = tensor if before is None else before + tensor


class CastRegion:
    """The forwards of one model between which PyTorch has kept its casts of weights, as ``cast_generation`` tells.

    In eager mode they share these casts: what one backward brings to a cast from several forwards is added up in the
    dtype of the cast, before it is the weight's gradient.
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
    """The outputs of one forward. What a backward brings to several of them is taken to the parameters in one run, when
    the last of their nodes is reached: sums are then made where eager mode makes them."""

    def __init__(self, region: CastRegion | None, casts: Mapping[str, str]) -> None:
        """``casts``: see ``CapturedStep.kept_casts``."""
        self._region, self._casts = region if casts else None, casts
        self._nodes = _Together()
        self._jointly: GradientsOf | None = None

    def add(self, node: Any) -> None:
        """``node``: of one or more outputs."""
        self._nodes.add(node)
        if self._region is not None:
            self._region.add(node)

    def gradients(
        self, node: Any, tangents: Mapping[str, torch.Tensor], alone: GradientsOf, jointly: GradientsOf | None = None
    ) -> Mapping[str, torch.Tensor]:
        """What ``node`` gives to the parameters, by name, now that ``tangents`` have come to its outputs, by path.

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
        return made if self._region is None else self._region.total(node, made, self._casts)

    def _all(self, alone: GradientsOf, own: set[str]) -> Mapping[str, torch.Tensor]:
        arrived, self._nodes.held = self._nodes.held, {}
        jointly, self._jointly = self._jointly, None
        if not arrived:
            return {}
        if arrived.keys() == own or jointly is None:
            return alone(arrived)
        return jointly(arrived)
