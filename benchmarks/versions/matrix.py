"""``make matrix``: do the engine and CUDA's allocator decorator compile with every PyTorch that is to be had?

Takes the newest patch of each minor version from the package index, with the CUDA headers and the Triton that it asks
for, and unpacks their headers alone: about 1 GB to download and 150 MB to keep for each. Nothing is installed or run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib import util
from pathlib import Path

from disco_accel.native import extension
from disco_accel.native.cuda_headers import cuda_folders
from disco_accel.native.plain_library import ROOT, ExtensionError

OLDEST = (2, 11)
"""As in ``pyproject.toml``."""
_HEADERS = ("torch/include/", "torch/version.py", "nvidia/", "triton/backends/nvidia/include/")
_SHIM = ROOT / "cuda" / "alloc_shim.cpp"


def newest_patches(versions: Sequence[str], oldest: tuple[int, int] = OLDEST) -> list[str]:
    """Of each minor version from ``oldest`` on the newest release, in ascending order."""
    newest: dict[tuple[int, int], tuple[int, str]] = {}
    for version in versions:
        found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
        if found is None:
            continue
        major, minor, patch = map(int, found.groups())
        if (major, minor) >= oldest:
            newest[major, minor] = max(newest.get((major, minor), (-1, "")), (patch, version))
    return [version for _, (_, version) in sorted(newest.items())]


def requirement(metadata: str, package: str) -> str | None:
    """What ``metadata`` of a wheel asks for of ``package``, without extras and markers: ``triton==3.7.1``."""
    for line in HeaderParser().parsestr(metadata).get_all("Requires-Dist", []):
        found = re.match(rf"{re.escape(package)}\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)", line)
        if found is not None and not re.match(r"[\w.-]", line[len(package) :]):
            return f"{package}{found[1].strip()}"
    return None


@dataclass(frozen=True)
class Unpacked:
    """Headers of one PyTorch and of what it depends on, in ``site`` as if they were installed there."""

    version: str
    site: Path
    cuda: str | None
    triton: str


def _pip() -> list[str]:
    own = util.find_spec("pip") is not None
    return [sys.executable if own else sys._base_executable, "-m", "pip", "--disable-pip-version-check"]  # type: ignore[attr-defined]


def _download(wanted: str, site: Path) -> str:
    """Unpack the headers of one package into ``site``; its metadata."""
    command = [*_pip(), "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(site), wanted]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = site.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_HEADERS) and not name.endswith(".so") and "/lib/" not in name:
                archive.extract(name, site)
        (about,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = archive.read(about).decode()
    wheel.unlink()
    return metadata


def unpack(version: str, folder: Path) -> Unpacked:
    """Download PyTorch ``version`` and its headers' other packages."""
    site = folder / version
    site.mkdir(parents=True)
    metadata = _download(f"torch=={version}", site)
    triton = requirement(metadata, "triton")
    toolkit = requirement(metadata, "cuda-toolkit")
    wanted = [triton, toolkit and requirement(_download(toolkit, site), "nvidia-cuda-runtime")]
    got = [HeaderParser().parsestr(_download(one, site))["Version"] if one else "" for one in wanted]
    found = re.search(r"^cuda\b[^=]*= *'([^']+)'", (site / "torch" / "version.py").read_text(), re.MULTILINE)
    return Unpacked(version, site, None if found is None else found[1], got[0])


def compile_all(unpacked: Unpacked, jobs: int) -> dict[str, str]:
    """Source → the compiler's last lines, empty where it has nothing to say."""
    include = unpacked.site / "torch" / "include"
    paths = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include")), ROOT]
    common = ["-fsyntax-only", "-DTORCH_API_INCLUDE_EXTENSION_H", *(f"-isystem{path}" for path in paths)]
    # Of the default install: neither CUDA_HOME nor a toolkit of this machine.
    try:
        folders = cuda_folders(unpacked.cuda, None, [unpacked.site], [])
    except ExtensionError as error:
        return {_SHIM.name: str(error)}
    for_cuda = [f"-I{folder}" for folder in folders[0]]
    sources = [source for source in extension.sources() if source.parent.name == "torch"]
    commands = {source: [*extension._FLAGS, *common] for source in sources}
    commands[_SHIM] = [*extension._FLAGS, *common, *for_cuda]

    def compile_one(source: Path) -> str:
        command = [os.environ.get("CXX", "c++"), *commands[source], str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else "\n".join(done.stderr.splitlines()[:12]) or "failed"

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip((source.name for source in commands), pool.map(compile_one, commands), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; 1 if something does not compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the headers; must not be there yet")
    parser.add_argument("versions", nargs="*", help="of PyTorch; default: the newest patch of each minor version")
    options = parser.parse_args(argv)
    versions = options.versions
    if not versions:
        answer = subprocess.run([*_pip(), "index", "versions", "torch"], check=True, capture_output=True, text=True)
        found = re.search(r"Available versions: (.*)", answer.stdout)
        versions = newest_patches(found[1].split(", ") if found else [])
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    broken = not versions
    print("| PyTorch | its CUDA | its Triton | engine | allocator decorator |\n| --- | --- | --- | --- | --- |")
    for version in versions:
        unpacked = unpack(version, options.folder)
        said = compile_all(unpacked, jobs)
        wrong = {name: text for name, text in said.items() if text}
        shim = "no" if _SHIM.name in wrong else "compiles"
        engine = "no" if wrong.keys() - {_SHIM.name} else "compiles"
        print(f"| {version} | {unpacked.cuda} | {unpacked.triton} | {engine} | {shim} |", flush=True)
        for name, text in wrong.items():
            print(f"{name}:\n{text}", file=sys.stderr)
        broken |= bool(wrong)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
