"""The report of ``doctor`` as checks in words, one line each, and a last line that counts problems.

A *problem* makes training fail or slow by much; a *note* is worth to know. Any part of a report may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from disco_accel.observe.package_versions import is_older
from disco_accel.sizes import format_size

OK, NOTE, PROBLEM = "ok", "note", "problem"
_ENOUGH_MEMORY = 1 << 30
"""Bytes of host memory. Python with PyTorch and its libraries takes as much by itself."""
_ENOUGH_DISK = 256 << 20
_ENOUGH_LOCKED = 1 << 30
"""Bytes of the pieces in which weights are locked."""
_SLOW_LINK = 4e9
"""Bytes a second, of page-locked copies: less than a PCIe 3 slot of 8 lanes gives."""
_OLDEST_GCC = "11"
_WATCHES = "6.7"
"""The first Linux that lists pages that are written to."""
_OF_THIS_PACKAGE = ("disco_accel", "sources")
Report = Mapping[str, Any]


class _Check(NamedTuple):
    """One line. ``remedy``: the way out, where ``status`` is not ok."""

    status: str
    check: str
    found: str
    remedy: str = ""


def checks_of(report: Report) -> list[dict[str, str]]:
    """All checks of a ``report``, each as ``status``, ``check``, ``found`` and ``remedy``."""
    found: list[_Check] = []
    for name, (key, part) in _PARTS.items():
        try:
            found += part(report) if key in report else ()
        except Exception as error:  # A part of the report that is not as it should be.
            found.append(_Check(NOTE, name, f"cannot be told: {type(error).__name__}: {error}"))
    return [check._asdict() for check in found]


def problems_of(checks: Sequence[Mapping[str, str]]) -> list[str]:
    """Each problem as one text."""
    return [f"{check['check']}: {_said(check)}" for check in checks if check["status"] == PROBLEM]


def lines_of(checks: Sequence[Mapping[str, str]]) -> list[str]:
    """For people."""
    width = max((len(check["check"]) for check in checks), default=0)
    lines = [f"{check['status']:<8} {check['check']:<{width}}  {_said(check)}" for check in checks]
    problems, notes = (sum(check["status"] == status for check in checks) for status in (PROBLEM, NOTE))
    return [*lines, f"{_counted(problems, 'problem')}, {_counted(notes, 'note')}"]


def _said(check: Mapping[str, str]) -> str:
    # A message of a compiler's, say, has several lines.
    return " ".join("; ".join(filter(None, (check["found"], check["remedy"]))).split())


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _fault(part: Any) -> str:
    return str(part["fault"]) if isinstance(part, Mapping) and "fault" in part else ""


def _unknown(name: str, part: Any) -> _Check:
    return _Check(NOTE, name, f"cannot be told: {_fault(part)}")


def _versions(report: Report) -> Iterator[_Check]:
    needed, optional = report["oldest"]["needed"], report["oldest"]["optional"]
    given = {"python": report["python"], **report["versions"]}
    if not needed:
        yield _Check(NOTE, "versions", "disco-accel is not installed, only importable", "pip install it")
    others = []
    for name, oldest in needed.items():
        version = given[name]
        wanted = f"{name}>={oldest}" if oldest else name
        if version is None:
            yield _Check(PROBLEM, name, "is not installed", f"pip install '{wanted}'")
        elif oldest and is_older(version, oldest):
            how = "use a newer interpreter" if name == "python" else f"pip install '{wanted}'"
            yield _Check(PROBLEM, name, f"{version} is older than {oldest}, the oldest that is tried", how)
        elif oldest:
            yield _Check(OK, name, f"{version} ({oldest} or newer)")
        else:
            others.append(f"{name} {version}")
    if others:
        yield _Check(OK, "packages", ", ".join(others))
    there, absent = [], []
    for name in given.keys() - needed.keys() - {"python"}:
        version, oldest = given[name], optional.get(name, "")
        if version is None:
            absent.append(name)
        elif oldest and is_older(version, oldest):
            yield _Check(
                NOTE,
                name,
                f"{version} is older than {oldest}, the oldest that is tried",
                f"pip install '{name}>={oldest}'",
            )
        else:
            there.append(f"{name} {version}" + (f" ({oldest} or newer)" if oldest else ""))
    parts = [", ".join(sorted(there)), f"not installed: {', '.join(sorted(absent))}" if absent else ""]
    yield _Check(OK, "optional", "; ".join(filter(None, parts)))


def _torch(report: Report) -> Iterator[_Check]:
    yield _Check(PROBLEM, "torch", f"cannot be imported: {_fault(report['torch'])}", "install it anew")


def _engine(report: Report) -> Iterator[_Check]:
    part = report["extension"]
    if _fault(part):
        yield _unknown("engine", part)
        return
    name, version = part["compiler"], part["compiler_version"]
    if part["built"]:
        yield _Check(OK, "engine", f"built: {part['library']}")
    elif "why" in part:
        yield _Check(PROBLEM, "engine", part["why"])
    elif lack := _lack(report.get("caches", {}).get("extension", {})):
        found = f"not built yet, and cannot be kept in {part['folder']}: {lack}"
        yield _Check(PROBLEM, "engine", found, "set TORCH_EXTENSIONS_DIR to a folder of your own, where there is room")
    else:
        now = "python -m disco_accel.native.extension does so now"
        yield _Check(
            NOTE, "engine", f"not built yet; its first use compiles it, in minutes, into {part['folder']}", now
        )
    if version is None:
        found = f"no C++ compiler '{name}' on PATH that answers, so no kernels are fused and no engine is built"
        yield _Check(NOTE, "compiler", found, "install g++ (11 or newer), or set CXX")
    elif is_older(version, _OLDEST_GCC) and "clang" not in name:
        yield _Check(
            NOTE, "compiler", f"{name} {version} is older than {_OLDEST_GCC}", "install g++ (11 or newer), or set CXX"
        )
    else:
        yield _Check(OK, "compiler", f"{name} {version}")


def _lack(cache: Report) -> str:
    """Why no files can be added to a cache."""
    if why := str(cache.get("why", "")):
        return why
    free = cache.get("free", _ENOUGH_DISK)
    return f"{format_size(free)} are left there" if free < _ENOUGH_DISK else ""


def _gpus(report: Report) -> Iterator[_Check]:
    part = report["gpus"]
    if _fault(part):
        yield _unknown("GPU", part)
        return
    checked = report.get("self_checks", [])
    for index, gpu in enumerate(part["seen"]):
        name = f"GPU {index}"
        if _fault(gpu):
            yield _Check(PROBLEM, name, f"cannot be used: {_fault(gpu)}", "see whether other programs can use it")
            continue
        yield from _gpu(name, gpu)
        answer = checked if _fault(checked) else checked[index] if index < len(checked) else None
        if answer is not None:
            yield _self_check(name, answer)
        yield from _node(name, gpu)
    if not part["seen"]:
        yield _no_gpu(part)
    elif fault := _fault(part["headers"]):
        yield _Check(PROBLEM, "CUDA headers", fault.removeprefix("ExtensionError: "))
    else:
        yield _Check(OK, "CUDA headers", ", ".join(part["headers"]))


def _gpu(name: str, gpu: Report) -> Iterator[_Check]:
    driver = re.search(r"\b\d{3,}(?:\.\d+)+\b", gpu["driver"])
    newest = re.search(r"CUDA (\d+)$", gpu["driver"])
    runs = f" for CUDA {int(newest[1]) // 1000}.{int(newest[1]) % 1000 // 10}" if newest else ""
    found = (
        f"{gpu['name']}, {format_size(gpu['memory'])}, {format_size(gpu['free'])} free, compute capability "
        f"{gpu['capability']}, driver {driver[0] if driver else 'unknown'}{runs}, PyTorch's CUDA {gpu['cuda_runtime']}"
    )
    if gpu["free"] < gpu["memory"] // 2:
        yield _Check(
            NOTE, name, found, "other programs hold most of it: end them, or set memory_budget to less than is free"
        )
    else:
        yield _Check(OK, name, found)
    if gpu["shares_host_memory"]:
        found = "its memory is the host's, so a weight that is streamed takes room twice and gains nothing"
        yield _Check(NOTE, f"{name} memory", found, "do not stream: train without a plan (enabled: false)")


def _no_gpu(part: Report) -> _Check:
    count, why, visible = part["driver_has"], part["why"], part["visible_devices"]
    if count and visible is not None:
        found = f"the driver has {count}, and CUDA_VISIBLE_DEVICES='{visible}' leaves none of them"
        return _Check(NOTE, "GPU", found, "unset it to train on one")
    if count:
        remedy = "install the PyTorch for this driver's CUDA" if "without CUDA" in why else "mend the driver or PyTorch"
        return _Check(PROBLEM, "GPU", f"the driver has {count}, and PyTorch sees none: {why}", remedy)
    return _Check(
        NOTE, "GPU", f"none ({why})", "plans run on the host device, a slice of host memory, to try things out"
    )


def _self_check(name: str, answer: Report) -> _Check:
    name = f"{name} self-check"
    if _fault(answer):
        return _unknown(name, answer)
    if "when" not in answer:
        return _Check(
            NOTE,
            name,
            "not checked yet; the first plan begins with it, in seconds",
            "disco-accel doctor --selftest checks now",
        )
    day = datetime.fromtimestamp(answer["when"]).strftime("%Y-%m-%d %H:%M")
    if answer["changed"]:
        names = dict.fromkeys("this package" if each in _OF_THIS_PACKAGE else each for each in answer["changed"])
        found = f"passed on {day}, and {', '.join(names)} changed since; the first plan checks again"
        return _Check(NOTE, name, found, "disco-accel doctor --selftest checks now")
    figures = answer["figures"] or {}
    compared = "bit for bit" if figures.get("compared") == "bits" else str(figures.get("compared"))
    rates = ", ".join(f"{way} {rate / 1e9:.3g} GB/s" for way, rate in figures.get("link", {}).items())
    return _Check(OK, name, f"passed on {day}: bits ({compared}), order, memory, link ({rates})")


def _node(name: str, gpu: Report) -> Iterator[_Check]:
    node, name = gpu["numa_node"], f"{name} node"
    if node is None:
        return
    bind = f"start with numactl --cpunodebind={node} --preferred={node}, or widen the binding of the job"
    if gpu["takes_from_node"] is False:
        found = (
            f"NUMA node {node}, whose memory this process may not take: copies cross sockets, at half the rate or less"
        )
        yield _Check(PROBLEM, name, found, bind)
    elif gpu["runs_on_node"] is False:
        yield _Check(NOTE, name, f"NUMA node {node}, on whose processors this process may not run", bind)
    else:
        yield _Check(OK, name, f"NUMA node {node}, where this process may run and take memory")


def _link(report: Report) -> Iterator[_Check]:
    part = report["link"]
    if _fault(part):
        yield _unknown("link", part)
    elif "h2d_bandwidth" in part:
        ways = (("to the GPU", "h2d"), ("from it", "d2h"), ("to it from pageable memory", "pageable_h2d"))
        found = ", ".join(f"{part[f'{key}_bandwidth'] / 1e9:.3g} GB/s {way}" for way, key in ways)
        slow = part["h2d_bandwidth"] < _SLOW_LINK
        yield _Check(NOTE if slow else OK, "link", found, "see whether the slot has all its lanes" if slow else "")
    else:
        yield _Check(OK, "link", f"copies in host memory at {part['copy_bandwidth'] / 1e9:.3g} GB/s")


def _host(report: Report) -> Iterator[_Check]:
    part = report["host"]
    if "limits" not in part:
        yield _unknown("host memory", part)
        return
    machine, *others = part["limits"]
    if machine["bytes"] >= 1 << 60:
        yield _Check(
            NOTE, "host memory", "the system does not tell how much there is", "set host_memory, such as 64GiB"
        )
    else:
        little = machine["left"] < _ENOUGH_MEMORY
        remedy = "end other programs, or use a machine with more" if little else ""
        found = f"{format_size(machine['bytes'])}, {format_size(machine['left'])} left"
        yield _Check(PROBLEM if little else OK, "host memory", found, remedy)
    below = sorted((each for each in others if each["bytes"] < machine["bytes"]), key=lambda each: each["left"])
    if not below:
        yield _Check(OK, "memory limits", "none below the machine's, of a control group or of this user")
    for limit in below:
        little = limit["left"] < _ENOUGH_MEMORY
        found = f"{limit['what']} leaves {format_size(limit['left'])} of {format_size(limit['bytes'])}"
        yield _Check(PROBLEM if little else NOTE, "memory limit", found, _limit_remedy(limit["what"]))


def _limit_remedy(what: str) -> str:
    if "control group" in what:
        return "raise it where it is set (docker run --memory, Slurm's --mem, systemd's MemoryMax)"
    return f"raise it ({what})" if what.startswith("ulimit") else "widen the binding of the job"


def _locked(report: Report) -> Iterator[_Check]:
    part = report["host"]
    if "limits" not in part:
        return
    most = part["most_locked"]
    limit = "no limit" if most is None else f"{format_size(most)} by ulimit -l"
    if most is not None and part["may_lock_more"]:
        limit += ", which does not hold for this process (CAP_IPC_LOCK)"
    tried = part["largest_lock"]
    raised = "raise it: ulimit -l, docker run --ulimit memlock=-1, or memory= in .wslconfig on WSL"
    if _fault(tried):
        yield _Check(NOTE, "locked memory", f"{limit}; what one call locks cannot be told: {_fault(tried)}")
    elif tried["tried"]:
        found = f"{limit}; one call locks {format_size(tried['bytes'])}"
        if tried["bytes"] < _ENOUGH_LOCKED and tried["refused"]:
            slow = f"{found} and not more ({tried['refused']}): copies are slower and keep others waiting"
            yield _Check(PROBLEM, "locked memory", slow, raised)
        else:
            yield _Check(OK, "locked memory", found + ("" if tried["refused"] else ", and more was not tried"))
    else:
        gpu = bool(report.get("gpus", {}).get("seen"))
        found = f"{limit}; one call could lock {format_size(tried['bytes'])}"
        yield _Check(
            OK,
            "locked memory",
            f"{found}; a driver may go by another limit" if gpu else f"{found}; only a GPU needs it",
        )


def _pages(report: Report) -> Iterator[_Check]:
    part = report["host"]
    if "limits" not in part:
        return
    setting = re.search(r"\[(\w+)\]", part["huge_pages"] or "")
    if setting is None:
        yield _Check(
            NOTE, "huge pages", "the system does not tell; without them the driver locks memory at a third of the rate"
        )
    elif setting[1] == "never":
        found = "never: memory is locked at a third of the rate, and the first touch of an arena takes longer"
        yield _Check(NOTE, "huge pages", found, "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
    else:
        yield _Check(OK, "huge pages", f"{setting[1]}: arenas ask for them")
    watched = part["write_watch"]
    if watched is True:
        yield _Check(OK, "write watch", "works: the kernel tells which weights were written to (userfaultfd)")
    elif watched is False:
        old = is_older(str(part["system"]), _WATCHES)
        found = "does not work: frozen weights are read twice a step, 0.1 to 0.2 s of a core for each GiB"
        allow = f"use Linux {_WATCHES} or newer" if old else "allow userfaultfd in the container's seccomp profile"
        yield _Check(NOTE, "write watch", found, allow)
    else:
        yield _Check(NOTE, "write watch", _fault(watched) or "known when the engine is built")
    if report.get("gpus", {}).get("seen"):
        return
    yield _Check(OK, "NUMA nodes", str(part["numa_nodes"]))


_CACHES = (
    ("plans", "plan cache", "each run plans again: set plan_cache to a folder of your own"),
    ("extension", "engine cache", "a changed engine is not compiled: set TORCH_EXTENSIONS_DIR to a folder of your own"),
    ("fused_kernels", "fused kernels", "kernels are not fused: set TORCH_EXTENSIONS_DIR to a folder of your own"),
)


def _caches(report: Report) -> Iterator[_Check]:
    parts = report["caches"]
    for key, name, remedy in _CACHES:
        part = parts.get(key, {"fault": _fault(parts)})
        if part is None:
            yield _Check(NOTE, name, "off (plan_cache is null)", "each run plans again")
        elif _fault(part).startswith("ConfigError"):
            # A variable has a value by which training is refused too.
            yield _Check(PROBLEM, "settings", _fault(part).partition(": ")[2])
        elif _fault(part):
            yield _unknown(name, part)
        else:
            yield _cache(name, part, remedy)


def _cache(name: str, part: Report, remedy: str) -> _Check:
    files = part["files"]
    counted = ", ".join(f"{number} {kind}" for kind, number in files.items()) if name == "plan cache" else ""
    counted = counted or _counted(sum(files.values()), "file")
    found = f"{part['folder']}: {'' if part['whole'] else 'more than '}{counted}, {format_size(part['bytes'])}"
    if lack := _lack(part):
        return _Check(NOTE, name, f"{found}; {lack}", remedy)
    return _Check(OK, name, found)


def _launch(report: Report) -> Iterator[_Check]:
    part = report["entry_points"]
    if _fault(part):
        yield _unknown("launch", part)
    elif part["accelerate_launch_config"]:
        yield _Check(OK, "launch", "accelerate launch --config reads disco_config")
    else:
        why, _, remedy = part["why"].rpartition("; ")
        yield _Check(NOTE, "launch", f"accelerate launch --config does not read disco_config: {why}", remedy)


def _selftest(report: Report) -> Iterator[_Check]:
    part = report["selftest"]
    if problem := part.get("problem") or _fault(part):
        yield _Check(PROBLEM, "self-test", problem)
    else:
        compared = part["figures"]["compared"]
        yield _Check(OK, "self-test", f"{part['identity']['device']} passed in {part['seconds']:.1f} s ({compared})")


_PARTS: Mapping[str, tuple[str, Callable[[Report], Iterator[_Check]]]] = {
    "versions": ("versions", _versions),
    "torch": ("torch", _torch),
    "engine": ("extension", _engine),
    "GPU": ("gpus", _gpus),
    "link": ("link", _link),
    "host memory": ("host", _host),
    "locked memory": ("host", _locked),
    "huge pages": ("host", _pages),
    "caches": ("caches", _caches),
    "launch": ("entry_points", _launch),
    "self-test": ("selftest", _selftest),
}
"""By the name that a check has where its function fails: the part of the report that it needs, and the function."""
