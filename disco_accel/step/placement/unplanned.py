"""Device memory of forwards without a plan: how much of it weights may take, and how much was taken at most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from disco_accel.native.backend import backend_of
from disco_accel.native.loads import Loading
from disco_accel.sizes import format_size
from disco_accel.step.placement.weight_ring import WeightRing


class UnplannedMemory:
    """``peak``: bytes of tensors on the device, at most, while a forward without a plan ran or its backward read
    weights. Read whenever a weight is loaded, and exact where it is the most that the process has had at all."""

    def __init__(
        self,
        device: torch.device,
        room: Callable[[int], int],
        budget: Callable[[], int],
        say: Callable[[str], None],
        link_bandwidth: float | None = None,
    ) -> None:
        """``room``: bytes that weights may take now, of so many wanted ones. ``say``: tells the user something once.
        ``link_bandwidth``: of a throttled link, in bytes/s."""
        self._backend = backend_of(device)
        self._room, self._budget, self._say = room, budget, say
        self._load = self._backend.loads(link_bandwidth)
        self._process_peak = 0
        self._told = False
        self.peak = 0

    def ring(self, modules: Iterable[list[torch.Tensor]], seen: Callable[[torch.Tensor], torch.Tensor]) -> WeightRing:
        """Of a model of these ``modules``. ``seen``: gives the source of a copy of a tensor."""

        def load(source: torch.Tensor) -> Loading:
            self._look()
            return self._load(seen(source))

        return WeightRing(modules, load, self._room, self._say)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward without a plan."""
        self._tell()
        self._process_peak = self._backend.tensor_bytes()[1]
        try:
            yield
        finally:
            self._look()
            self._tell()

    def _look(self) -> None:
        now, most = self._backend.tensor_bytes()
        if most > self._process_peak:
            self._process_peak = now = most
        self.peak = max(self.peak, now)

    def _tell(self) -> None:
        budget = self._budget()
        if self.peak <= budget or self._told:
            return
        self._told = True
        self._say(
            f"a forward without a plan had {format_size(self.peak)} on the device, more than memory_budget "
            f"({format_size(budget)}): its weights are bounded, its activations are not; use smaller batches for it, "
            "or leave that much free"
        )
