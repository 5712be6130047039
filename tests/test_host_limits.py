"""What host memory is left: the tightest of the machine, control groups of both versions, a process's own limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_accel.errors import ExecutionError
from disco_accel.host_limits import HostLimit, host_limits, own_bytes, require_left, tightest
from disco_accel.shortage import is_shortage

MIB = 1 << 20
MACHINE = {"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapFree: 0 kB\n"}
SECOND = "40 30 0:38 {root} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
FIRST = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
OTHER = "34 31 0:31 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"


def tree(folder: Path, group: str, mounts: str, files: dict[str, str]) -> Path:
    """A ``proc`` and a ``sys``: ``files`` by path below ``sys/fs/cgroup``."""
    own = {"proc/self/cgroup": group + "\n", "proc/self/mountinfo": f"{OTHER}\n{mounts}\n"}
    for path, text in (MACHINE | own | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="ascii")
    return folder


def second(path: str, limit: int | str, used: int = 0, cache: int = 0, dirty: int = 0) -> dict[str, str]:
    """Files of a group of the second version; figures in MiB, half of the cache is active."""
    half = cache * MIB // 2
    stat = f"anon 5\ninactive_file {half}\nactive_file {half}\nfile_dirty {dirty * MIB}\nfile_writeback 0\n"
    value = limit if isinstance(limit, str) else str(limit * MIB)
    return {f"{path}memory.max": value, f"{path}memory.current": str(used * MIB), f"{path}memory.stat": stat}


def first(path: str, limit: int, used: int = 0, cache: int = 0) -> dict[str, str]:
    """The same of the first version."""
    stat = f"inactive_file 1\ntotal_inactive_file {cache * MIB}\ntotal_active_file 0\ntotal_dirty 0\n"
    files = {"limit_in_bytes": str(limit * MIB), "usage_in_bytes": str(used * MIB), "stat": stat}
    return {f"memory{path}/memory.{name}": text for name, text in files.items()}


CASES: dict[str, tuple[str, str, dict[str, str], str, int, int]] = {
    "one group, seen as the root": (
        "0::/",
        SECOND.format(root="/"),
        second("", 600, 500),
        "cgroup/memory.max",
        600,
        100,
    ),
    "a job's group": ("0::/slurm/job", SECOND.format(root="/"), second("slurm/job/", 600, 9), "slurm/job/", 600, 591),
    "a group above is tighter": (
        *("0::/a/b/c", SECOND.format(root="/")),
        second("a/b/c/", 900, 10) | second("a/b/", "max", 10) | second("a/", 600, 590),
        *("cgroup/a/memory.max", 600, 10),
    ),
    "page cache is left, unless it must be written first": (
        *("0::/job", SECOND.format(root="/"), second("job/", 600, 600, cache=500, dirty=60), "job", 600, 440),
    ),
    "more is used than allowed": ("0::/j", SECOND.format(root="/"), second("j/", 600, 700), "j/", 600, 0),
    "above memory.high a process crawls": (
        *("0::/job", SECOND.format(root="/")),
        second("job/", 900, 100) | {"job/memory.high": str(600 * MIB)},
        *("job/memory.high", 600, 500),
    ),
    "a container's group is mounted": (
        *("0::/docker/abc/in", SECOND.format(root="/docker/abc")),
        second("in/", 900) | second("", 600, 100),
        *("cgroup/memory.max", 600, 500),
    ),
    "a process outside of what is mounted": (
        *("0::/../other", SECOND.format(root="/"), second("", 600, 100), "cgroup/memory.max", 600, 500),
    ),
    "files without a mount": ("0::/job", "", second("job/", 600, 100), "job/memory.max", 600, 500),
    "first version": ("4:memory:/job", FIRST.format(root="/"), first("/job", 600, 500, 300), "job", 600, 400),
    "first version, a group above": (
        *(
            "7:cpu,memory:/a/b",
            FIRST.format(root="/"),
            first("/a/b", 900) | first("/a", 600, 100),
            "a/memory",
            600,
            500,
        ),
    ),
    "first version, a group above that counts none below": (
        *("4:memory:/a/b", FIRST.format(root="/")),
        first("/a/b", 900, 100) | first("/a", 600, 100) | {"memory/a/memory.use_hierarchy": "0"},
        *("a/b/memory", 900, 800),
    ),
    "both versions, memory is with the first": (
        *("4:memory:/job\n1:name=systemd:/x\n0::/user", FIRST.format(root="/") + "\n" + SECOND.format(root="/")),
        first("/job", 600, 100),
        *("memory/job", 600, 500),
    ),
    "no limit anywhere": ("0::/a", SECOND.format(root="/"), second("a/", "max", 9), "the machine", 16384, 8192),
    "a limit that is none": ("4:memory:/a", FIRST.format(root="/"), first("/a", 1 << 43, 9), "machine", 16384, 8192),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tightest_limit_and_what_is_left_of_it(tmp_path: Path, case: str) -> None:
    group, mounts, files, name, total, left = CASES[case]
    found = tightest(host_limits(tree(tmp_path, group, mounts, files)))
    assert (found.total // MIB, found.left // MIB) == (total, left)
    assert name in found.name


def test_limits_of_the_process_and_of_its_memory_nodes(tmp_path: Path) -> None:
    """``ulimit -v`` and ``-d``, which processes do not share, and a binding to one of two NUMA nodes."""
    root = tree(tmp_path, "0::/", "", {})
    status = "VmSize:\t102400 kB\nVmData:\t51200 kB\nRssAnon:\t1024 kB\nRssShmem:\t1024 kB\nMems_allowed_list:\t1\n"
    (root / "proc/self/status").write_text(status)
    (root / "proc/self/limits").write_text("Max data size 209715200 unlimited bytes\nMax address space unlimited\n")
    for node in (0, 1):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        lines = (f"Node {node} {line}" for line in ("MemTotal: 2048 kB", "MemFree: 1024 kB", "Active(file): 512 kB"))
        (folder / "meminfo").write_text("\n".join(lines))
    found = {limit.name: limit for limit in host_limits(root)}
    assert found["ulimit -d"] == HostLimit("ulimit -d", 200 * MIB, 150 * MIB, own=True)
    assert found["ulimit -d"].share(4, MIB) == 151 * MIB
    assert "ulimit -v" not in found
    (bound,) = (limit for name, limit in found.items() if "NUMA nodes 1," in name)
    assert (bound.total, bound.left) == (2 * MIB, MIB * 3 // 2)
    assert own_bytes(root) == 2 * MIB


def test_swap_makes_room_but_is_not_left(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a", "", second("a/", 600, 100) | {"a/memory.swap.max": str(50 * MIB)})
    (root / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapFree: 1048576 kB\n")
    machine, group = host_limits(root)
    assert (machine.swap, group.swap, group.left) == (1024 * MIB, 50 * MIB, 500 * MIB)


def test_what_is_there_is_read() -> None:
    """Of this machine: no more than the kernel reports, and what is too much is refused with the limit that binds."""
    limits = host_limits()
    assert 64 * MIB < tightest(limits).left <= limits[0].total
    require_left(MIB, "something")
    with pytest.raises(
        ExecutionError, match=r"the arena would take 1024TiB of host memory, but .* leaves .* of "
    ) as raised:
        require_left(1 << 50, "the arena")
    assert is_shortage(raised.value)
    require_left(1 << 50, "the arena", replaced=1 << 50)


@pytest.mark.parametrize(
    "damage",
    [
        {"proc/self/cgroup": "\n:\nmemory\n4:memory\n0:\n"},
        {"proc/self/mountinfo": "35\n - \n - cgroup2\n35 31 0:32 / - cgroup2 cgroup2 rw\n"},
        {"sys/fs/cgroup/job/memory.max": "\udcff\udcfe", "sys/fs/cgroup/memory.max": ""},
        {"sys/fs/cgroup/job/memory.max": "-1", "sys/fs/cgroup/job/memory.stat": "inactive_file\nactive_file x\n"},
        {"proc/self/status": "VmSize\nMems_allowed_list: a-,3-x,-\n", "sys/devices/system/node/nodex/meminfo": ""},
        {"proc/meminfo": "MemTotal: many kB\nMemAvailable:\n"},
        {"proc/self/cgroup": "0::/job\0\n", "proc/self/mountinfo": "40 30 0:38 / /\0 rw - cgroup2 cgroup2 rw\n"},
        {"sys/fs/cgroup/job/memory.max": "9" * 5000, "proc/self/limits": f"Max data size {'9' * 5000} bytes\n"},
        {"proc/self/status": "Mems_allowed_list: 0-99999999999\n", "sys/devices/system/node/node0/meminfo": ""},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_what_cannot_be_read_sets_no_limit(tmp_path: Path, damage: dict[str, str]) -> None:
    root = tree(tmp_path, "0::/job", SECOND.format(root="/"), second("job/", 600, 100))
    for path, text in damage.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode("utf-8", errors="surrogateescape"))
    assert tightest(host_limits(root)).left in {8192 * MIB, 500 * MIB, 0, 1 << 60}


def test_no_files_at_all_are_no_limit(tmp_path: Path) -> None:
    (machine,) = host_limits(tmp_path)
    assert machine.left == 1 << 60
