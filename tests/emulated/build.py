"""Compiles the emulated runtime, driver and ops for the PyTorch of this environment, once for each state of them.

Imports no torch: the libraries must be there before PyTorch loads.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.emulated.kept_compiler import COMPILER, compile_kept

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall")
# As PyTorch is built: its headers' checks for debugging are not meant to be mixed with a release library.
_OPS_FLAGS = (*_FLAGS, "-DNDEBUG")


@dataclass(frozen=True, slots=True)
class Libraries:
    """What a process needs to run on the emulated device."""

    runtime: Path  # libcudart.so.N, to be preloaded
    ops: Path  # to be loaded after PyTorch

    @property
    def folder(self) -> Path:
        """Where they and libcuda.so.1 lie."""
        return self.runtime.parent


def build() -> Libraries:
    """Compile whatever is not there. Raises SystemExit with the compiler's words, or what is missing."""
    site = _site_packages()
    real = _only(site.glob("nvidia/*/lib/libcudart.so.*"), "libcudart of a CUDA build of PyTorch")
    includes = _includes(site)
    sources = [p for pattern in ("*/*.cpp", "*/*.h") for p in sorted(HERE.glob(pattern))]
    words = [importlib.metadata.version("torch"), str(real), *_OPS_FLAGS, *map(str, includes), *_compiler("--version")]
    digest = hashlib.sha256("\0".join(words).encode())
    for path in [*sources, Path(__file__)]:
        digest.update(path.read_bytes())
    # EMULATED_OUT: parent of the build folders.
    parent = Path(os.environ.get("EMULATED_OUT") or ROOT / "out" / "emulated") / "build"
    folder = parent / digest.hexdigest()[:12]
    libraries = Libraries(folder / real.name, folder / "emulated_ops.so")
    if not folder.exists():
        print(f"emulated CUDA: compiling into {folder}, a minute on two cores", file=sys.stderr, flush=True)
        parent.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(dir=parent))
        try:
            _compile_all(working, real, site, includes)
            working.rename(folder)
        finally:
            shutil.rmtree(working, ignore_errors=True)
    return libraries


def _compile_all(out: Path, real: Path, site: Path, includes: Sequence[str]) -> None:
    flags = {"runtime": _FLAGS, "driver": _FLAGS, "ops": _OPS_FLAGS}
    files = [p for part in flags for p in sorted((HERE / part).glob("*.cpp"))]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:

        def compile_one(source: Path) -> None:
            part = source.parent.name
            target = out / f"{part}-{source.stem}.o"
            words = [*flags[part], *includes, "-c", str(source), "-o", str(target)]
            if compile_kept(words, out.parents[1] / "objects") != 0:
                raise SystemExit(f"emulated CUDA: {source.name} does not compile")

        list(pool.map(compile_one, files))
    _link_runtime(out, real)
    _link_driver(out, real, site)
    # No line of C is as long as all of them.
    names = "".join(f'"{name}\\n"\n' for name in _unchecked_ops(site))
    _compile_text(out / "ops-unchecked.o", f"const char* const emuUncheckedOps =\n{names};\n")
    torch = site / "torch" / "lib"
    libraries = ("-ltorch_cuda", "-lc10_cuda", "-ltorch_cpu", "-lc10", str(out / real.name))
    _link(out / "emulated_ops.so", out.glob("ops-*.o"), f"-L{torch}", *libraries)


def _unchecked_ops(site: Path) -> list[str]:
    """Ops for which PyTorch generates no comparison of devices, as ``add.Tensor``."""
    text = (site / "torchgen/packaged/ATen/native/native_functions.yaml").read_text()
    entries = re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]
    return [e.partition("(")[0] for e in entries if re.search(r"^ +device_check: NoCheck", e, re.MULTILINE)]


def _link_runtime(out: Path, real: Path) -> None:
    """With a function for each of the real library's that is not written here: it says that it is missing."""
    own = list(out.glob("runtime-*.o"))
    missing = sorted(_symbols(real, "--dynamic") - {name for path in own for name in _symbols(path)})
    stubs = [f'int {name}(void) {{ return emuMissing("{name}"); }}' for name in missing if "libcudart" not in name]
    _compile_text(out / "runtime-missing.o", "\n".join(["int emuMissing(const char*);", *stubs, ""]))
    versions = out / "versions"
    # PyTorch asks for the symbols by this version.
    versions.write_text(f"{real.name} {{ global: cuda*; __cuda*; emu*; local: *; }};\n")
    names = (f"-Wl,-soname,{real.name}", f"-Wl,--version-script={versions}")
    _link(out / real.name, [*own, out / "runtime-missing.o"], *names, "-lpthread", "-ldl")


def _link_driver(out: Path, real: Path, site: Path) -> None:
    """On the runtime; with a function for each that PyTorch links to and that is not written here: not supported."""
    own = list(out.glob("driver-*.o"))
    asked = {n for n in _symbols(site / "torch/lib/libcaffe2_nvrtc.so", "--dynamic", "--undefined-only")}
    missing = sorted(
        n for n in asked - {name for path in own for name in _symbols(path)} if n.startswith("cu") and n[2].isupper()
    )
    _compile_text(out / "driver-missing.o", "\n".join(f"int {name}(void) {{ return 801; }}" for name in missing))
    names = ("-Wl,-soname,libcuda.so.1", str(out / real.name))
    _link(out / "libcuda.so.1", [*own, out / "driver-missing.o"], *names, "-ldl")


def _symbols(library: Path, *options: str) -> set[str]:
    defined = () if "--undefined-only" in options else ("--defined-only",)
    command = ["nm", *options, *defined, str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {words[-1].split("@")[0] for line in lines if (words := line.split()) and words[-2] in "TUW"}


def _compile_text(target: Path, text: str) -> None:
    source = target.with_suffix(".c")
    source.write_text(text)
    # Some of them are the compiler's builtins by name alone.
    _run("cc", "-fPIC", "-w", "-c", str(source), "-o", str(target))


def _link(target: Path, objects: Iterable[Path], *options: str) -> None:
    _compiler("-shared", "-o", str(target), *map(str, sorted(objects)), *options)


def _compiler(*arguments: str) -> list[str]:
    return _run(COMPILER, *arguments)


def _run(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"emulated CUDA: {' '.join(command)}\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()


def _site_packages() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("emulated CUDA: there is no torch in this environment")
    return Path(found.origin).parents[1]


def _includes(site: Path) -> list[str]:
    """CUDA's headers, with those that the wheels lack, then PyTorch's."""
    # Triton has the headers in crt/, which PyTorch's own packages lack.
    folders = [*sorted(site.glob("nvidia/*/include")), site / "triton/backends/nvidia/include"]
    homes = [Path(home) / "include" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    cuda = [folder for folder in [*folders, *homes] if (folder / "cuda_runtime_api.h").exists()]
    if not any((folder / "crt" / "host_defines.h").exists() for folder in cuda):
        raise SystemExit(
            "emulated CUDA: no CUDA headers with crt/host_defines.h in the packages, CUDA_HOME, /usr/local"
        )
    torch = site / "torch" / "include"
    paths = [*cuda, torch, torch / "torch" / "csrc" / "api" / "include"]
    return [f"-I{HERE / 'runtime'}", *(word for path in paths for word in ("-isystem", str(path)))]


def _only(found: Iterable[Path], what: str) -> Path:
    paths = sorted(found)
    if len(paths) != 1:
        raise SystemExit(f"emulated CUDA: this environment has {len(paths)} of {what}, not one")
    return paths[0]
