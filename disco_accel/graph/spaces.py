"""Spaces: the memories that values live in, and the copies between them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from disco_accel.sizes import MAX_SIZE


class SpaceKind(enum.StrEnum):
    """The kind of a memory. The kinds of its two ends name a copy's route, and with it its link."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


Route = tuple[SpaceKind, SpaceKind]
"""The kinds of the space that a copy reads and of the one that it writes."""

TO_DEVICE: Route = (SpaceKind.HOST, SpaceKind.DEVICE)
TO_HOST: Route = (SpaceKind.DEVICE, SpaceKind.HOST)
BETWEEN_DEVICES: Route = (SpaceKind.DEVICE, SpaceKind.DEVICE)

ROUTE_OF: dict[str, Route] = {
    "h2d": TO_DEVICE,
    "d2h": TO_HOST,
    "p2p": BETWEEN_DEVICES,
    "s2d": (SpaceKind.STORAGE, SpaceKind.DEVICE),
    "d2s": (SpaceKind.DEVICE, SpaceKind.STORAGE),
    "s2h": (SpaceKind.STORAGE, SpaceKind.HOST),
    "h2s": (SpaceKind.HOST, SpaceKind.STORAGE),
}
"""Route by the name that machine files and lanes have for it."""
NAME_OF = {route: name for name, route in ROUTE_OF.items()}
"""Such as ``h2d``, by route."""

HOST = -1
"""The id of the host's memory, which every graph has: inputs have their homes there, and offloaded values go there."""


@dataclass(frozen=True, slots=True)
class Space:
    """One memory. A plan may use ``memory`` bytes of it; offsets are multiples of ``alignment``.

    Kernels run in spaces whose id is 0 or more, the *devices*: one of kind DEVICE is a GPU's arena; one of kind HOST is
    a *host device*, whose kernels the machine's processors run. Those use each value that has a home at that home
    (``graph/home_uses.py``); the arena of a host device is for the rest. No kernel runs in a *backing space*, whose id
    is below 0: ``HOST``, or storage.
    """

    id: int
    memory: int = MAX_SIZE
    alignment: int = 256
    kind: SpaceKind = SpaceKind.DEVICE

    @property
    def is_host_device(self) -> bool:
        """Whether the machine's processors run kernels there."""
        return self.id >= 0 and self.kind is SpaceKind.HOST


HOST_SPACE = Space(HOST, MAX_SIZE, 1, SpaceKind.HOST)
"""The host's memory of a graph that does not limit it."""


def is_backing(space: int) -> bool:
    """Whether no kernel runs in the space of this id."""
    return space < 0


def devices_of(spaces: Iterable[Space]) -> tuple[Space, ...]:
    """Return the spaces in which kernels run, in their order."""
    return tuple(space for space in spaces if space.id >= 0)


def host_of(spaces: Iterable[Space]) -> Space:
    """Return the host's memory: its row in ``spaces``, or one without a limit."""
    return next((space for space in spaces if space.id == HOST), HOST_SPACE)


def with_devices(spaces: Iterable[Space], devices: Iterable[Space]) -> tuple[Space, ...]:
    """Return ``spaces`` with other ``devices``."""
    return (*devices, *(space for space in spaces if space.id < 0))


def routes(spaces: Iterable[Space]) -> Callable[[int, int], Route]:
    """The route of a copy by the ids of the two of ``spaces`` that it reads and writes. A backing space that is not
    there is the host's memory; from the host to the host is ``TO_HOST``."""
    kinds = {space.id: space.kind for space in spaces}

    def route(source: int, target: int) -> Route:
        ends = kinds.get(source, SpaceKind.HOST), kinds.get(target, SpaceKind.HOST)
        return TO_HOST if ends == (SpaceKind.HOST, SpaceKind.HOST) else ends

    return route
