"""The wire between the store and its clients: one packed little-endian struct each way, over a Unix SOCK_SEQPACKET.

A message is exactly one struct, so a C program can speak it: ``REQUEST`` to the store, ``REPLY`` back, a descriptor
beside a reply (SCM_RIGHTS) where its opcode says so. Each field is checked before it is used; there is no text but a
short refusal. docs/store.md has the table of fields.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
import time
from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

from disco_accel.errors import StoreError
from disco_accel.native.shared_memory import NO_NEW_WRITERS, add_seals, create_file

VERSION = 1
"""Of both structs, their first byte. Another version is refused."""
REQUEST = struct.Struct("<BBHIqQqBB6x8q")
"""version, opcode, device, number, amount, object, max_useful, dtype, dimensions, 6 zero bytes, shape: 104 bytes."""
REPLY = struct.Struct("<BBHIqQBB6x8q192s")
"""version, status, device, number, amount, object, dtype, dimensions, 6 zero bytes, shape or figures, text: 288
bytes."""
MAX_DIMENSIONS = 8
_NO_SHAPE = (0,) * MAX_DIMENSIONS
MAX_TEXT = 192
"""Bytes of UTF-8 in a refusal; a longer one is cut."""
MAX_OBJECT = 1 << 45
"""Bytes of the largest object."""
MAX_AMOUNT = 1 << 62
MAX_DEVICES = 64
"""First-class memory is counted for devices of smaller numbers."""
NO_NEXT_USE = -1
"""As the amount of ``PUT``: nobody has said when the object is used next."""
MAX_NEXT_USE = 1 << 50
"""Microseconds: decades."""
GRANT, SEEN = range(2)
"""Places of the words of a ``GrantPage``."""
BEAT_SECONDS = 0.25
"""The store renews ``SEEN`` that often."""
SILENT_SECONDS = 2.0
"""A client that has seen no renewal for so long asks whether the store is there at all."""
HOST_MEMORY, GPU_MEMORY = range(2)
"""Kinds of memory behind descriptors of the device tier: its figure ``device_kind``."""


class Opcode(IntEnum):
    """The kind of a request, and the meaning of its ``amount``."""

    PING = 1
    CREATE = 2
    """An object of ``shape`` and ``dtype`` in the tier ``device``. The reply has its id as ``object``."""
    GET = 3
    """A lease on ``object``. The reply has its shape, dtype and bytes, a descriptor beside it, and as ``amount`` 1
    where the memory may be written to, 0 where it is final."""
    PUT = 4
    """``object`` is final; ``amount``: microseconds until it is used next, or ``NO_NEXT_USE``."""
    FREE = 5
    """``object`` is gone by name; its memory is once nobody has a lease."""
    RELEASE = 6
    """One lease on ``object`` ends. No reply."""
    PREFETCH = 7
    """Bring ``object`` back to its tier, if there is room. Replied at once."""
    STATS = 8
    """The page ``amount`` of figures. The reply's ``amount`` is the number of pages."""
    WANT = 9
    """A budget of ``amount`` to ``max_useful`` bytes of device memory; both 0: none any more. ``object``:
    a bit for each device, from the lowest on, that it is of, as much on each; 0 for the first one alone. ``shape``:
    one number, of the run of which this process is one, or none. A descriptor of the grant page comes beside the
    reply."""
    HELD = 10
    """The client now holds ``amount`` bytes of its grant. No reply."""
    LABEL = 11
    """The bytes of ``shape`` are the client's name from now on; before anything else that it owns."""
    FIRST_CLASS = 32
    """``amount`` bytes more (or, negative, less) of ``device`` are held by this process apart from the store. No
    reply."""


SILENT = (Opcode.RELEASE, Opcode.HELD, Opcode.FIRST_CLASS)
"""Opcodes that have no reply, unless they are malformed. Looked up by identity: hashing one takes a call of Python."""


class ReplyStatus(IntEnum):
    """How a request ended."""

    OK = 0
    MALFORMED = 1
    REFUSED = 2
    FULL = 3


class Tier(IntEnum):
    """Where an object is used from; as ``device`` of ``CREATE``."""

    HOST = 0
    DEVICE = 1


DTYPES: tuple[tuple[str, int], ...] = (
    *(("uint8", 1), ("int8", 1), ("int16", 2), ("int32", 4), ("int64", 8), ("bool", 1)),
    *(("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8), ("complex64", 8), ("complex128", 16)),
    *(("float8_e4m3fn", 1), ("float8_e5m2", 1), ("uint16", 2), ("uint32", 4), ("uint64", 8)),
)
"""Name in torch and bytes of each element type; its place is its number on the wire. New ones go to the end."""


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
CLIENT_FIGURES = ("pid", "objects", "bytes", "leases", "grant", "held", "first_class", "minimum")
"""Names of the figures on a client's page."""
STATS_PAGES = len(FIGURES)
"""Pages of figures about the store; one for each client follows."""
DEVICE_PAGE = 3
"""The page of figures about the device."""


class Malformed(StoreError):
    """A message that no client or store of this version sends. ``number``: of the request, 0 where it has none."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


class Request(NamedTuple):
    """One request; fields that its opcode does not use are 0. ``number`` comes back in the reply."""

    opcode: Opcode
    number: int = 0
    device: int = 0
    amount: int = 0
    object: int = 0
    max_useful: int = 0
    dtype: int = 0
    shape: tuple[int, ...] = ()

    def pack(self, number: int | None = None) -> bytes:
        """The bytes on the wire; with another ``number`` where one is given."""
        opcode, own, device, amount, name, max_useful, dtype, shape = self
        number = own if number is None else number
        sizes = shape + _NO_SHAPE[len(shape) :]
        return REQUEST.pack(VERSION, opcode, device, number, amount, name, max_useful, dtype, len(shape), *sizes)


class Reply(NamedTuple):
    """One reply. ``figures``: those of ``STATS``, or the shape of an object in its first ``dimensions`` places."""

    status: ReplyStatus
    number: int
    amount: int = 0
    object: int = 0
    device: int = 0
    dtype: int = 0
    dimensions: int = 0
    figures: tuple[int, ...] = (0,) * 8
    text: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the object that the reply is about."""
        return self.figures[: self.dimensions]

    def pack(self) -> bytes:
        """The bytes on the wire; a long text is cut between characters."""
        text = self.text.encode()[:MAX_TEXT].decode(errors="ignore").encode() if self.text else b""
        return REPLY.pack(
            *(VERSION, self.status, self.device, self.number, self.amount, self.object, self.dtype, self.dimensions),
            *(*self.figures, text),
        )


def parse_request(data: bytes) -> Request:
    """The request in ``data``, each field within its bounds. Raises Malformed, naming the field."""
    if len(data) != REQUEST.size:
        raise Malformed(f"a request has {REQUEST.size} bytes, not {len(data)}")
    version, opcode, device, number, amount, name, max_useful, dtype, dimensions, *sizes = REQUEST.unpack(data)
    if version != VERSION:
        raise Malformed(f"version {version} of messages: this store speaks {VERSION}", number)
    use = _USES.get(opcode)
    if use is None:
        raise Malformed(f"no opcode {opcode}", number)
    if data[_PADDING] != _NO_BYTES:
        raise Malformed("bytes 34 to 39 are not 0", number)
    if dimensions > MAX_DIMENSIONS:
        raise Malformed(f"{dimensions} dimensions: at most {MAX_DIMENSIONS}", number)
    if any(sizes[dimensions:]):
        raise Malformed("sizes behind the last dimension are not 0", number)
    request = Request(use.opcode, number, device, amount, name, max_useful, dtype, tuple(sizes[:dimensions]))
    _check(request, use)
    return request


_LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_PADDING, _NO_BYTES = slice(34, 40), b"\0" * 6
_STATUSES = tuple(ReplyStatus)


class _Use(NamedTuple):
    """The use of fields by ``opcode``; one that it does not use is 0. ``low``, ``high``: bounds of its amount.
    ``devices``: numbers of devices are smaller. ``has_max_useful``: it is at least the amount. ``has_label``: the
    place of the shape has text. ``names_devices``: the place of the object has bits of devices, that of
    the shape the number of a run or nothing."""

    opcode: Opcode
    low: int = 0
    high: int = 0
    names_object: bool = False
    devices: int = 1
    has_max_useful: bool = False
    has_shape: bool = False
    has_label: bool = False
    names_devices: bool = False


# By plain numbers: an enumeration's members take a call of Python to be hashed.
_USES = {
    int(use.opcode): use
    for use in (
        _Use(Opcode.PING),
        _Use(Opcode.CREATE, devices=len(Tier), has_shape=True),
        _Use(Opcode.GET, names_object=True),
        _Use(Opcode.PUT, NO_NEXT_USE, MAX_NEXT_USE, names_object=True),
        _Use(Opcode.FREE, names_object=True),
        _Use(Opcode.RELEASE, names_object=True),
        _Use(Opcode.PREFETCH, names_object=True),
        _Use(Opcode.STATS, 0, 1 << 20),
        _Use(Opcode.WANT, 0, MAX_AMOUNT, has_max_useful=True, names_devices=True),
        _Use(Opcode.HELD, 0, MAX_AMOUNT),
        _Use(Opcode.LABEL, has_label=True),
        _Use(Opcode.FIRST_CLASS, -MAX_AMOUNT, MAX_AMOUNT, devices=MAX_DEVICES),
    )
}


def _check(request: Request, use: _Use) -> None:
    """Raise Malformed where a field that the opcode uses is out of bounds, or one that it does not use is not 0."""
    opcode, number, device, amount, name, max_useful, dtype, shape = request
    _opcode, low, high, names_object, devices, has_max_useful, has_shape, has_label, names_devices = use
    if not low <= amount <= high:
        raise Malformed(f"{opcode.name}: amount {amount} is not in [{low}, {high}]", number)
    if not names_devices and names_object != (name != 0):
        raise Malformed(f"{opcode.name}: object {name}", number)
    if (max_useful and not has_max_useful) or (has_max_useful and not amount <= max_useful <= MAX_AMOUNT):
        raise Malformed(f"{opcode.name}: max_useful {max_useful} is less than the minimum, or too much", number)
    if device >= devices:
        raise Malformed(f"{opcode.name}: no device {device}", number)
    if has_shape:
        nbytes_of(shape, dtype, number)
    elif names_devices:
        if dtype or len(shape) > 1 or any(run <= 0 for run in shape):
            raise Malformed(f"{opcode.name}: element type {dtype}, run {shape}", number)
    elif has_label and not dtype:
        label_of(shape, number)
    elif dtype or shape:
        raise Malformed(f"{opcode.name} has no shape", number)


def mask_of(devices: Collection[int]) -> int:
    """``devices`` as the object of ``WANT``."""
    return sum(1 << device for device in set(devices))


def devices_in(mask: int) -> frozenset[int]:
    """The devices that the object of ``WANT`` names."""
    return frozenset(device for device in range(MAX_DEVICES) if mask >> device & 1) or frozenset({0})


def nbytes_of(shape: tuple[int, ...], dtype: int, number: int = 0) -> int:
    """Bytes of a contiguous tensor of ``shape`` and the element type of that number. Raises Malformed where there is
    no such tensor, or it is larger than ``MAX_OBJECT``."""
    if not 0 <= dtype < len(DTYPES):
        raise Malformed(f"no element type {dtype}", number)
    if len(shape) > MAX_DIMENSIONS:
        raise Malformed(f"{len(shape)} dimensions: at most {MAX_DIMENSIONS}", number)
    if any(not 0 <= size <= MAX_OBJECT for size in shape):
        raise Malformed(f"a size of {shape} is negative or more than {MAX_OBJECT}", number)
    nbytes = math.prod(shape) * DTYPES[dtype][1]
    if nbytes > MAX_OBJECT:
        raise Malformed(f"an object of {nbytes} bytes: at most {MAX_OBJECT}", number)
    return nbytes


def is_label(text: str) -> bool:
    """Whether a client may be called so: 1 to 64 letters, digits, dots, underscores and dashes of ASCII."""
    return _LABEL.fullmatch(text) is not None


def words_of(label: str) -> tuple[int, ...]:
    """``label`` as a shape: its bytes, 0 behind them, eight in a number."""
    data = label.encode("ascii")
    count = -(-len(data) // 8)
    return struct.unpack(f"<{count}q", data.ljust(8 * count, b"\0"))


def label_of(shape: tuple[int, ...], number: int = 0) -> str:
    """The label that ``shape`` is. Raises Malformed."""
    text = struct.pack(f"<{len(shape)}q", *shape).rstrip(b"\0").decode("ascii", errors="replace")
    if not is_label(text) or words_of(text) != shape:
        raise Malformed("LABEL: no name of 1 to 64 letters, digits, '.', '_' or '-'", number)
    return text


def parse_reply(data: bytes) -> Reply:
    """The reply in ``data``. Raises Malformed."""
    if len(data) != REPLY.size:
        raise Malformed(f"a reply has {REPLY.size} bytes, not {len(data)}")
    version, status, device, number, amount, name, dtype, dimensions, *figures, text = REPLY.unpack(data)
    if version != VERSION:
        raise Malformed(f"the store speaks version {version} of messages, this client {VERSION}: start it anew")
    if status >= len(ReplyStatus) or dtype >= len(DTYPES) or dimensions > MAX_DIMENSIONS:
        raise Malformed(f"a reply of status {status}, element type {dtype}, {dimensions} dimensions")
    words = text.rstrip(b"\0").decode(errors="replace") if text[0] else ""
    return Reply(_STATUSES[status], number, amount, name, device, dtype, dimensions, tuple(figures), words)


class GrantPage:
    """A page of memory that the store writes and one client reads without a message: two 8-byte words, each written
    whole. The first is the granted bytes, the second the time at which the store last looked, in nanoseconds of
    CLOCK_MONOTONIC. ``file``: a descriptor for the client, which can only be mapped to read."""

    def __init__(self) -> None:
        self.file = create_file("store-grant", mmap.PAGESIZE)
        self._memory = mmap.mmap(self.file, mmap.PAGESIZE)
        add_seals(self.file, NO_NEW_WRITERS)
        self._words = memoryview(self._memory).cast("q")
        self.beat()

    def write(self, grant: int) -> None:
        """The client has ``grant`` bytes from now on."""
        self._words[GRANT] = grant

    def beat(self) -> None:
        """The store is there."""
        self._words[SEEN] = time.monotonic_ns()

    def close(self) -> None:
        """Free the page; the client's mapping stays as it is."""
        self._words.release()
        self._memory.close()
        os.close(self.file)


def grant_words(file: int) -> memoryview[int]:
    """A client's view of the page behind ``file``, which is not needed any more."""
    return memoryview(mmap.mmap(file, mmap.PAGESIZE, prot=mmap.PROT_READ)).cast("q")


def is_silent(words: memoryview[int]) -> bool:
    """Whether the store has not looked for a while: it has ended, or is stopped."""
    return time.monotonic_ns() - words[SEEN] > SILENT_SECONDS * 1e9
