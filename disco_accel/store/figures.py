"""A store's figures: their names, and how a client asks for them."""

from __future__ import annotations

from typing import Any

from disco_accel.errors import StoreError
from disco_accel.store.connection import Channel
from disco_accel.store.messages import Opcode, Request

FIGURES: tuple[tuple[str, ...], ...] = (
    (
        *("host_bytes", "host_used", "device_bytes", "device_used", "device_idle"),
        *("first_class", "budgets", "waited_for"),
    ),
    ("gets", "hits", "fetched", "prefetched", "evicted", "dropped", "malformed", "clients"),
    ("saved_bytes", "loaded_bytes", "stalled_microseconds", "objects", "link_bandwidth", "jobs", "quota", ""),
    ("device_kind", "device_grain", "device_id_low", "device_id_high", "", "", "", ""),
)
"""Names of the figures on each page, in their order. ``quota``: of the client that asks; 0: none."""
CLIENT_FIGURES = ("pid", "objects", "bytes", "leases", "grant", "held", "first_class", "least")
"""Names of the figures on a client's page."""
STATS_PAGES = len(FIGURES)
"""Pages of figures about the store; one for each client follows."""


DEVICE_PAGE = 3
"""The page of figures about the device."""


def ask_page(channel: Channel, page: int) -> dict[str, int]:
    """The figures of one page about the store, by name. Raises StoreGone."""
    figures = channel.ask(Request(Opcode.STATS, amount=page))[0].figures
    return {name: value for name, value in zip(FIGURES[page], figures, strict=True) if name}


def ask_figures(channel: Channel) -> dict[str, Any]:
    """All figures of the store, and under ``clients`` those of each client. Raises StoreGone."""
    found: dict[str, Any] = {}
    pages = 0
    for page, names in enumerate(FIGURES):
        reply = channel.ask(Request(Opcode.STATS, amount=page))[0]
        pages = reply.amount
        found |= {name: value for name, value in zip(names, reply.figures, strict=True) if name}
    clients: list[dict[str, Any]] = []
    for page in range(STATS_PAGES, pages):
        try:
            reply = channel.ask(Request(Opcode.STATS, amount=page))[0]
        except StoreError:
            # One has ended meanwhile.
            channel.check()
            break
        named = {"label": reply.text} if reply.text else {}
        clients.append(dict(zip(CLIENT_FIGURES, reply.figures, strict=True)) | named)
    return found | {"clients": clients}
