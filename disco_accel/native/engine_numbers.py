"""Numbers and names that the engine's C++ has too: compared when its library is loaded.

The C++ side is ``engine_numbers`` in ``runtime_ext/torch/engine_settings.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, IntFlag

from disco_accel.graph.taskgraph import VertexKind
from disco_accel.native.plain_library import ExtensionError

VERTEX_COLUMNS = ("kind", "device", "lane", "op", "dst", "src", "bytes", "flags")
"""Of the int64 table with a row for each vertex; ``lane``: of a copy, one of ``CopyLane``."""
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
    """Where the tensor that a call returns is to be."""

    PLACED = 0
    """At its planned address."""
    COPIED = 1
    """Copied there after the call."""
    IGNORED = 2


class EngineStatus(IntEnum):
    """What a wait for the engine ended with."""

    DONE = 0
    TIMEOUT = 1
    FAILED = 2
    STALLED = 3
    ABORTED = 4
    IDLE = 5


class Dispatch(IntEnum):
    """Which of the ready vertices of a resource is launched next; an option has the name in lower case."""

    PRIORITY = 0
    RANDOM = 1
    FIXED = 2
    SYNCHRONOUS = 3


class CopyLane(IntEnum):
    """Streams of a device after its compute streams."""

    H2D = 0
    D2H = 1
    P2P = 2


class PeerPath(IntEnum):
    """How bytes get from one GPU to another."""

    DIRECT = 0
    NO_ACCESS = 1
    """Through host memory: one has no access to the other's."""
    WRONG_BYTES = 2
    """Through host memory: straight, other bytes arrived than were sent."""


OPTIONS = (
    "dispatch",
    "seed",
    "lookahead",
    "copy_piece",
    "stall_timeout",
    "time_ops",
    "compute_threads",
    "compute_streams",
    "inline_compute",
    "host_threads",
    "link_jitter",
    "link_jitter_seed",
)
"""What the engine is told of ``EngineOptions``, each as a float."""


def expected_numbers() -> dict[str, int]:
    """All of the above by the names that the C++ side gives them."""
    columns = {"vertices": VERTEX_COLUMNS, "edges": EDGE_COLUMNS, "copied": COPIED_COLUMNS, "events": EVENT_COLUMNS}
    enums: dict[str, type[IntEnum] | type[IntFlag]] = {
        "kind": VertexKind,
        "flag": VertexFlag,
        "result": ResultMode,
        "status": EngineStatus,
        "dispatch": Dispatch,
        "lane": CopyLane,
        "peer": PeerPath,
    }
    return {
        **{f"columns.{name}": len(names) for name, names in columns.items()},
        **{f"{name}.{member.name}": int(member) for name, enum in enums.items() for member in enum},
        **{f"option.{name}": number for number, name in enumerate(OPTIONS)},
    }


def check_numbers(engine: Mapping[str, int], library: object) -> None:
    """Compare with the numbers of the loaded ``library``, a path for the message.

    Raises:
        ExtensionError: they differ; names the first that does.
    """
    ours = expected_numbers()
    differing = sorted(name for name in ours.keys() | engine.keys() if ours.get(name) != engine.get(name))
    if differing:
        first = differing[0]
        raise ExtensionError(
            f"the engine's library {library} is not of this version of disco_accel: {first} is "
            f"{engine.get(first, 'missing')} there and {ours.get(first, 'missing')} here; remove the library, so that "
            "it is built again (python -m disco_accel.native.extension)"
        )
