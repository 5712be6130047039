"""How much host memory this process may still take: the rest of the machine's, its control groups' and its own limits.

The kernel ends a process that takes more than a control group allows, its own or one above it. So the rest of the
tightest limit counts. Page cache that can be dropped at once is left too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from disco_accel.errors import ExecutionError
from disco_accel.sizes import format_size

_NO_LIMIT = 1 << 60
"""Bytes. The first version of control groups writes a number as large where there is no limit."""
_MOST_DIGITS = 32
"""Of a number in a file of the kernel's."""
_MOST_NODES = 1 << 16
_CHECKED = 64 << 20
"""Bytes. Smaller requests are not worth a look, which takes some hundred microseconds."""
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class HostLimit:
    """One limit. ``name``: what sets it. ``left``: bytes of ``total`` that nobody uses, or that are page cache;
    ``swap``: more bytes that can make room there. ``own``: it holds for this process alone."""

    name: str
    total: int
    left: int
    swap: int = 0
    own: bool = False

    def share_of_total(self, processes: int) -> int:
        """Bytes of the limit for one of so many ``processes`` that have it in common."""
        return self.total if self.own else self.total // processes

    def share(self, processes: int, held: int) -> int:
        """As ``share_of_total``, of the bytes left, and the ``held`` bytes that this process has of it already."""
        left = self.left if self.own else self.left // processes
        return min(self.share_of_total(processes), left + held)

    def __str__(self) -> str:
        return f"{self.name} leaves {format_size(self.left)} of {format_size(self.total)}"


def host_limits(root: Path = _ROOT) -> list[HostLimit]:
    """All limits that this process has, the machine's memory first. ``root``: above ``proc`` and ``sys``."""
    machine = _kilobytes(root / "proc/meminfo")
    status = status_of_process(root)
    total = machine.get("MemTotal", _NO_LIMIT)
    swap = machine.get("SwapFree", 0)
    limits = [HostLimit("the machine's memory", total, machine.get("MemAvailable", total), swap)]
    limits += _memory_nodes(root, status.get("Mems_allowed_list", ""), swap)
    limits += _control_groups(root, swap)
    limits += _own_limits(root, status)
    return limits


def tightest(limits: list[HostLimit], processes: int = 1, held: int = 0) -> HostLimit:
    """The one of which a process may take the least, as ``HostLimit.share``."""
    return min(limits, key=lambda limit: limit.share(processes, held))


def own_bytes(root: Path = _ROOT) -> int:
    """Bytes of memory that this process has and that no file keeps: it gives them back when it frees them."""
    status = status_of_process(root)
    return sum(_size(status.get(key, "")) for key in ("RssAnon", "RssShmem"))


def require_left(nbytes: int, what: str, replaced: int = 0) -> None:
    """Raise ExecutionError if ``what``, which is about to take so many bytes, is more than is left, swap included.
    ``replaced``: bytes that are given back meanwhile."""
    nbytes -= replaced
    if nbytes < _CHECKED:
        return
    limit = min(host_limits(), key=lambda each: each.left + each.swap)
    if nbytes > limit.left + limit.swap:
        swap = f" and {format_size(limit.swap)} of swap" if limit.swap else ""
        raise ExecutionError(
            f"out of memory: {what} would take {format_size(nbytes)} of host memory, but {limit}{swap}, and the kernel "
            "would end the process; raise that limit, end what else is in it, or use a smaller model, batch or "
            "memory_budget"
        )


def _control_groups(root: Path, swap: int) -> Iterator[HostLimit]:
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        first = "memory" in controllers.split(",")
        if not first and (number, controllers) != ("0", ""):
            continue
        inside = True
        for group in dict.fromkeys(_groups(root, path, first)):
            limit = _first_version(root, group, swap) if first else _second_version(root, group, swap)
            # A group of the first version counts groups below it only if it says so.
            if limit is not None and (inside or not first or _line(group / "memory.use_hierarchy") != "0"):
                yield limit
            inside = False


def _groups(root: Path, path: str, first: bool) -> Iterator[Path]:
    """Folders of the group ``path`` and of all above it that can be seen here."""
    mounts = list(_mounts(root, first))
    # Where a container shows files of its own there instead of a mount.
    mounts.append(("/", root / ("sys/fs/cgroup/memory" if first else "sys/fs/cgroup")))
    for top, where in mounts:
        group = PurePosixPath(path)
        if ".." in group.parts or not group.is_relative_to(top):
            # Named from outside of what is mounted: its own folder cannot be told.
            group = PurePosixPath(top)
        inside = group.relative_to(top)
        yield from (where / part for part in (inside, *inside.parents))


def _mounts(root: Path, first: bool) -> Iterator[tuple[str, Path]]:
    """Of a hierarchy that counts memory: which of its groups is mounted, and where."""
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, behind = line.partition(" - ")
        kind, _, options = [*behind.split(" "), "", "", ""][:3]
        places = [_unescaped(field) for field in fields.split(" ")[3:5]]
        wanted = kind == "cgroup" and "memory" in options.split(",") if first else kind == "cgroup2"
        if wanted and len(places) == 2:
            yield places[0], root / places[1].lstrip("/")


def _unescaped(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def _second_version(root: Path, group: Path, swap: int) -> HostLimit | None:
    # Above memory.high the kernel does not end a process, it lets it crawl.
    files = {file: _bytes(group / file) for file in ("memory.max", "memory.high")}
    file = min(files, key=lambda each: files[each])
    if files[file] >= _NO_LIMIT:
        return None
    for_swap = _bytes(group / "memory.swap.max") - _bytes(group / "memory.swap.current", 0)
    cache = _cache(group, "inactive_file", "active_file", "file_dirty", "file_writeback")
    return _limit(root, group / file, files[file], _bytes(group / "memory.current", 0) - cache, min(swap, for_swap))


def _first_version(root: Path, group: Path, swap: int) -> HostLimit | None:
    total = _bytes(group / "memory.limit_in_bytes")
    if total >= _NO_LIMIT:
        return None
    used = _bytes(group / "memory.usage_in_bytes", 0)
    with_swap = _bytes(group / "memory.memsw.limit_in_bytes") - _bytes(group / "memory.memsw.usage_in_bytes", 0)
    names = ("inactive_file", "active_file", "dirty", "writeback")
    cache = _cache(group, *(f"total_{name}" for name in names))
    return _limit(root, group / "memory.limit_in_bytes", total, used - cache, min(swap, with_swap - total + used))


def _limit(root: Path, file: Path, total: int, used: int, swap: int) -> HostLimit:
    name = f"a control group (/{file.relative_to(root)})"
    return HostLimit(name, total, max(0, total - max(0, used)), max(0, swap))


def _cache(group: Path, *names: str) -> int:
    """Page cache that can be dropped at once: the first two of ``names``, less the bytes that must be written
    before."""
    counts = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    inactive, active, dirty, written = (int(text) if _is_number(text := counts.get(n, "0")) else 0 for n in names)
    return max(0, inactive + active - dirty - written)


def _memory_nodes(root: Path, allowed: str, swap: int) -> Iterator[HostLimit]:
    """The memory of the NUMA nodes that this process is bound to, where those are not all."""
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    numbers = numbers_in(allowed)
    mine = [node for node in nodes if node.name.removeprefix("node") in numbers]
    if not mine or len(mine) == len(nodes):
        return
    total = left = 0
    for node in mine:
        # Lines begin with the node's number here.
        counts = _kilobytes(node / "meminfo", skip=2)
        total += counts.get("MemTotal", 0)
        cache = sum(counts.get(f"{kind}(file)", 0) for kind in ("Active", "Inactive"))
        left += counts.get("MemFree", 0) + max(0, cache - counts.get("Dirty", 0) - counts.get("Writeback", 0))
    yield HostLimit(f"memory of NUMA nodes {allowed.strip()}, to which this process is bound,", total, left, swap)


def numbers_in(listed: str) -> set[str]:
    """Of a list as ``0-2,5``; none of a part that is damaged."""
    found: set[str] = set()
    for part in filter(None, listed.strip().split(",")):
        begin, _, end = part.partition("-")
        if _is_number(begin) and _is_number(end or begin) and int(end or begin) < _MOST_NODES:
            found |= {str(number) for number in range(int(begin), int(end or begin) + 1)}
    return found


def _own_limits(root: Path, status: dict[str, str]) -> Iterator[HostLimit]:
    for line in _lines(root / "proc/self/limits"):
        for title, name, used in (
            ("Max address space", "ulimit -v", "VmSize"),
            ("Max data size", "ulimit -d", "VmData"),
        ):
            value = line.removeprefix(title).split()
            if line.startswith(title) and value and _is_number(value[0]) and int(value[0]) < _NO_LIMIT:
                total = int(value[0])
                yield HostLimit(name, total, max(0, total - _size(status.get(used, ""))), own=True)


def status_of_process(root: Path = _ROOT) -> dict[str, str]:
    """What the kernel tells of this process, by the names of its lines; nothing where it does not tell."""
    pairs = (line.partition(":") for line in _lines(root / "proc/self/status"))
    return {name: value.strip() for name, _, value in pairs}


def _kilobytes(file: Path, skip: int = 0) -> dict[str, int]:
    """Bytes by name of a file of lines as ``Name: 5 kB``, without the first words of each."""
    found = {}
    for line in filter(str.strip, _lines(file)):
        name, _, value = line.split(maxsplit=skip)[-1].partition(":")
        found[name] = _size(value)
    return found


def _size(text: str) -> int:
    words = text.split()
    return int(words[0]) * 1024 if len(words) == 2 and _is_number(words[0]) else 0


def _bytes(file: Path, missing: int = _NO_LIMIT) -> int:
    text = _line(file)
    return int(text) if _is_number(text) else missing


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def _line(file: Path) -> str:
    return next(iter(_lines(file)), "").strip()


def _lines(file: Path) -> list[str]:
    """None of a file that is not there, or that this process may not read: it sets no limit that can be known."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        # A damaged path may have a zero byte.
        return []
