"""The folders of the CUDA headers that the allocator shim is compiled against.

PyTorch's CUDA wheels bring the runtime's headers without the folder ``crt`` that those include; Triton, which the same
wheels depend on, brings all of them. A toolkit has all in one folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from disco_accel.errors import ExtensionError

RUNTIME = "cuda_runtime_api.h"
INTERNAL = ("crt/host_config.h", "crt/host_defines.h")
TOOLKITS = (Path("/usr/local/cuda"),)
"""Where a toolkit lies that no variable names."""

_VERSION = re.compile(r"^\s*#\s*define\s+CUDART_VERSION\s+(\d+)", re.MULTILINE)


def cuda_folders(
    version: str | None, home: str | None, packages: Sequence[Path], toolkits: Sequence[Path] = TOOLKITS
) -> tuple[tuple[Path, ...], str]:
    """The include folders to compile with, in their order, and, where ``home`` cannot be used, why.

    ``version``: PyTorch's CUDA, such as 13.0; None (a build for CPUs) takes any. ``home``: the variable CUDA_HOME,
    which comes first. ``packages``: the folders that Python packages are installed in. Raises ExtensionError: no folder
    has the headers of that major version; names the fault of each.
    """
    major = None if version is None else int(version.split(".")[0])
    ignored = ""
    if home:
        include = _include_of(Path(home))
        fault = _fault(include, major) or _lack(include)
        if not fault:
            return (include,), ""
        ignored = f"CUDA_HOME={home} {fault}"
    # Triton last: it has all headers, perhaps of another version than the runtime that PyTorch loads.
    brought = [include for folder in packages for include in sorted(folder.glob("nvidia/*/include"))]
    brought += [folder / "triton" / "backends" / "nvidia" / "include" for folder in packages]
    folders = [*brought, *(_include_of(root) for root in toolkits)]
    reasons = [ignored] if ignored else []
    for include in folders:
        fault = _fault(include, major)
        if not fault:
            rest = _completing(include, sorted(folders, key=lambda other: not _goes_with(other, major)))
            if rest is not None:
                return (include, *rest), ignored
            fault = _lack(include)
        if (include / RUNTIME).is_file():
            reasons.append(f"{include} {fault}")
    raise ExtensionError(_advice(version, major) + "".join(f"; {reason}" for reason in reasons))


def _include_of(root: Path) -> Path:
    """The include folder of a toolkit; conda's lies below the name of the platform."""
    folders = (root / "include", *sorted(root.glob("targets/*/include")))
    return next((found for found in folders if not _fault(found, None)), folders[0])


def _fault(include: Path, major: int | None) -> str:
    """Why the runtime's headers in ``include`` will not do; empty if they will."""
    header = include / RUNTIME
    if not header.is_file():
        return f"has no include/{RUNTIME}"
    found = _VERSION.search(header.read_text(encoding="utf-8", errors="replace"))
    if found is None:
        return f"has a {RUNTIME} that says no version"
    theirs = int(found[1]) // 1000
    return "" if major in (None, theirs) else f"is of CUDA {theirs}, PyTorch of {major}"


def _lack(include: Path) -> str:
    """Which headers that the runtime's include are not in ``include``; empty if none."""
    missing = [name for name in INTERNAL if not (include / name).is_file()]
    return f"lacks {' and '.join(missing)}" if missing else ""


def _goes_with(include: Path, major: int | None) -> bool:
    """Whether ``include`` is of the runtime's major version, or a package of the compiler's headers alone, which says
    no version and is installed beside the runtime's.

    Others complete the runtime's headers too, after these, which include from them attributes for compilers alone.
    Functions and types, whose layouts count, are all the runtime's own.
    """
    return not (include / RUNTIME).exists() or not _fault(include, major)


def _completing(include: Path, others: Sequence[Path]) -> tuple[Path, ...] | None:
    """The folders after ``include`` with which nothing lacks: none, or one more; None if there is no such folder."""
    if not _lack(include):
        return ()
    return next(((other,) for other in others if not _lack(other)), None)


def _advice(version: str | None, major: int | None) -> str:
    which = "CUDA's headers" if major is None else f"the headers of CUDA {major}, which PyTorch was built for"
    package = "nvidia-cuda-crt" if major is None or major >= 13 else f"nvidia-cuda-nvcc-cu{major}"
    wanted = package if version is None else f"{package}=={version}.*"
    return (
        f"the CUDA allocator shim needs {which} ({RUNTIME}, {', '.join(INTERNAL)}): set CUDA_HOME to a toolkit that "
        f"has them, or pip install '{wanted}' beside PyTorch's own packages"
    )
