"""Numbers and names that the engine's C++ has too: compared when its library is loaded.

The C++ side is ``engine_numbers`` in ``runtime_ext/torch/engine_settings.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, IntFlag

from disco_accel.graph.taskgraph import VertexKind
from disco_accel.native.plain_library import ExtensionError

VERTEX_COLUMNS = ("kind", "device", "lane", "op", "dst", "src", "bytes", "ns", "flags")
"""Of the int64 table with a row for each vertex; ``lane``: of a copy, one of ``CopyLane``; ``ns``: of a kernel, its
time as far as the plan knows."""
EDGE_COLUMNS = ("from", "to")
COPIED_COLUMNS = ("storage", "vertex", "writes")
"""The storage of an external input and the position of a transfer that reads it."""
EVENT_COLUMNS = ("vertex", "device", "stream", "issue", "start", "end", "bytes", "ready")
"""Of a traced step; times in nanoseconds from its begin."""


class VertexFlag(IntFlag):
    """Bits of the column ``flags``."""

    LATE = 1
    OUT = 2
    CHANGES = 4
    """A kernel or a copy that changes a state."""


class ResultMode(IntEnum):
    """The place of the tensor that a call returns."""

    PLACED = 0
    """At its planned address."""
    COPIED = 1
    """Copied there after the call."""
    IGNORED = 2


class EngineStatus(IntEnum):
    """Why a wait for the engine ended."""

    DONE = 0
    TIMEOUT = 1
    FAILED = 2
    STALLED = 3
    ABORTED = 4
    IDLE = 5


DISPATCHES = ("priority", "random", "fixed", "synchronous")
"""Orders in which the ready vertices of a resource are launched."""


class CopyLane(IntEnum):
    """Streams of a device after its compute streams."""

    H2D = 0
    D2H = 1
    P2P = 2


PEER_PATHS = ("direct", "no_access", "wrong_bytes")
"""Ways of bytes from one GPU to another: straight; or through host memory, because one has no access to the other's
memory, or because other bytes arrived straight than were sent."""
OPTIONS = (
    *("dispatch", "seed", "lookahead", "copy_piece", "launch_graphs", "stall_timeout", "time_ops", "compute_threads"),
    *("compute_streams", "inline_compute", "host_threads", "link_jitter", "link_jitter_seed", "graph_bytes"),
)
"""Options of the engine, each a float: those of ``EngineOptions``."""


def expected_numbers() -> dict[str, int]:
    """All of the above by the names that the C++ side gives them."""
    columns = {"vertices": VERTEX_COLUMNS, "edges": EDGE_COLUMNS, "copied": COPIED_COLUMNS, "events": EVENT_COLUMNS}
    enums: dict[str, type[IntEnum] | type[IntFlag]] = {
        "kind": VertexKind,
        "flag": VertexFlag,
        "result": ResultMode,
        "status": EngineStatus,
        "lane": CopyLane,
    }
    return {
        **{f"columns.{name}": len(names) for name, names in columns.items()},
        **{f"{name}.{member.name}": int(member) for name, enum in enums.items() for member in enum},
        **{f"option.{name}": number for number, name in enumerate(OPTIONS)},
        **{f"dispatch.{name.upper()}": number for number, name in enumerate(DISPATCHES)},
        **{f"peer.{name.upper()}": number for number, name in enumerate(PEER_PATHS)},
    }


def check_numbers(engine: Mapping[str, int], library: object) -> None:
    """Compare with the numbers of the loaded ``library``, a path for the message. Raises ExtensionError: they differ;
    names the first that does."""
    ours = expected_numbers()
    differing = sorted(name for name in ours.keys() | engine.keys() if ours.get(name) != engine.get(name))
    if differing:
        first = differing[0]
        raise ExtensionError(
            f"the engine's library {library} is not of this version of disco_accel: {first} is "
            f"{engine.get(first, 'missing')} there and {ours.get(first, 'missing')} here; remove the library, so that "
            "it is built again (python -m disco_accel.native.extension)"
        )
