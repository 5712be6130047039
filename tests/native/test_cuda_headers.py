"""The folders of CUDA's headers: in the layouts that packages and toolkits have, and for the real compiler."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from disco_accel.native import extension
from disco_accel.native.cuda_headers import INTERNAL, RUNTIME, TOOLKITS, cuda_folders
from disco_accel.native.plain_library import ExtensionError

SHIM = Path(extension.__file__).parents[2] / "runtime_ext" / "cuda" / "alloc_shim.cpp"


def headers(include: Path, version: int | None = 13000, *, internal: bool = True) -> Path:
    """A folder with headers that say ``version`` (None: no runtime header), with or without those they include."""
    include.mkdir(parents=True)
    if version is not None:
        lines = [f'#include "{name}"' for name in INTERNAL]
        (include / RUNTIME).write_text("\n".join([f"#define CUDART_VERSION  {version}", *lines, ""]))
    if internal:
        (include / "crt").mkdir()
        for name in INTERNAL:
            (include / name).write_text("")
    return include


def compiles(folders: Sequence[Path], tmp_path: Path) -> bool:
    """Whether the C++ compiler finds all that the runtime's header includes."""
    source = tmp_path / "asks.cpp"
    source.write_text(f"#include <{RUNTIME}>\n")
    command = ["c++", "-fsyntax-only", *(f"-I{folder}" for folder in folders), str(source)]
    return subprocess.run(command, capture_output=True, timeout=600).returncode == 0


def test_pytorchs_own_wheels_are_enough(tmp_path: Path) -> None:
    """PyTorch's runtime package lacks crt/: its folder comes first, Triton's adds what is missing."""
    site = tmp_path / "site"
    own = headers(site / "nvidia" / "cu13" / "include", internal=False)
    triton = headers(site / "triton" / "backends" / "nvidia" / "include", 13010)
    folders, ignored = cuda_folders("13.0", None, [site], [])
    assert folders == (own, triton) and not ignored
    assert compiles(folders, tmp_path) and not compiles(folders[:1], tmp_path)


def test_a_package_of_the_compilers_headers_comes_before_triton(tmp_path: Path) -> None:
    """CUDA 12 has a folder for each package, of which the compiler's says no version; Triton may lie elsewhere."""
    own = headers(tmp_path / "site" / "nvidia" / "cuda_runtime" / "include", 12080, internal=False)
    crt = headers(tmp_path / "site" / "nvidia" / "cuda_nvcc" / "include", None)
    headers(tmp_path / "other" / "triton" / "backends" / "nvidia" / "include", 12080)
    assert cuda_folders("12.8", None, [tmp_path / "site", tmp_path / "other"], [])[0] == (own, crt)


def test_a_toolkit_needs_no_variable(tmp_path: Path) -> None:
    toolkit = headers(tmp_path / "cuda" / "include")
    assert cuda_folders("13.0", None, [tmp_path / "site"], [tmp_path / "none", tmp_path / "cuda"])[0] == (toolkit,)
    # Also for what the packages lack, where Triton is not installed.
    own = headers(tmp_path / "site" / "nvidia" / "cu13" / "include", internal=False)
    assert cuda_folders("13.0", None, [tmp_path / "site"], [tmp_path / "cuda"])[0] == (own, toolkit)


@pytest.mark.parametrize("below", ["include", "targets/x86_64-linux/include"])
def test_cuda_home_comes_first(tmp_path: Path, below: str) -> None:
    """As toolkits lie, and as conda's do."""
    headers(tmp_path / "site" / "nvidia" / "cu13" / "include")
    mine = headers(tmp_path / "mine" / below, 13020)
    assert cuda_folders("13.0", str(tmp_path / "mine"), [tmp_path / "site"], []) == ((mine,), "")


@pytest.mark.parametrize(
    ("version", "internal", "why"),
    [
        (None, True, "has no include/cuda_runtime_api.h"),
        (13000, False, "lacks crt/host_config.h and crt/host_defines.h"),
        (12040, True, "is of CUDA 12, PyTorch of 13"),
    ],
    ids=["absent", "incomplete", "another-version"],
)
def test_a_cuda_home_that_will_not_do(tmp_path: Path, version: int | None, internal: bool, why: str) -> None:
    """Others are taken and the reason is told; with no others it is in the error."""
    headers(tmp_path / "mine" / "include", version, internal=internal)
    toolkit = headers(tmp_path / "cuda" / "include")
    found, ignored = cuda_folders("13.0", str(tmp_path / "mine"), [], [tmp_path / "cuda"])
    assert found == (toolkit,) and ignored == f"CUDA_HOME={tmp_path / 'mine'} {why}"
    with pytest.raises(ExtensionError) as caught:
        cuda_folders("13.0", str(tmp_path / "mine"), [], [])
    assert ignored in str(caught.value) and "pip install 'nvidia-cuda-crt==13.0.*'" in str(caught.value)


def test_the_runtimes_headers_are_never_of_another_version(tmp_path: Path) -> None:
    """The error says what lies where. What only completes them may be: PyTorch 2.11 for CUDA 13 has a Triton of 12."""
    triton = headers(tmp_path / "triton" / "backends" / "nvidia" / "include", 12080)
    with pytest.raises(ExtensionError) as caught:
        cuda_folders("13.0", None, [tmp_path], [])
    assert f"{triton} is of CUDA 12, PyTorch of 13" in str(caught.value)
    own = headers(tmp_path / "nvidia" / "cu13" / "include", internal=False)
    toolkit = headers(tmp_path / "cuda" / "include", 13020)
    assert cuda_folders("13.0", None, [tmp_path], [])[0] == (own, triton)
    assert cuda_folders("13.0", None, [tmp_path], [tmp_path / "cuda"])[0] == (own, toolkit), "the same version first"
    # A build of PyTorch for CPUs, as for checking that the source compiles, takes any.
    assert cuda_folders(None, None, [tmp_path], [])[0] == (own, triton)


def test_without_the_headers_that_they_include_the_error_names_a_package(tmp_path: Path) -> None:
    own = headers(tmp_path / "nvidia" / "cuda_runtime" / "include", 12080, internal=False)
    with pytest.raises(ExtensionError) as caught:
        cuda_folders("12.8", None, [tmp_path], [])
    assert f"{own} lacks crt/" in str(caught.value) and "nvidia-cuda-nvcc-cu12==12.8.*" in str(caught.value)


def test_a_variable_that_is_not_followed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    headers(tmp_path / "cuda" / "include", 13000)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "site" / "torch" / "__init__.py"))
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr(extension, "TOOLKITS", (tmp_path / "cuda",))
    assert extension.cuda_include() == (tmp_path / "cuda" / "include",)
    assert f"CUDA_HOME={tmp_path / 'gone'} has no include" in caplog.text
    monkeypatch.delenv("CUDA_HOME")
    caplog.clear()
    assert extension.cuda_include() and not caplog.text


@pytest.mark.parametrize("way", ["packages", "toolkit", "CUDA_HOME"])
def test_the_shim_compiles(way: str, tmp_path: Path) -> None:
    """Against this PyTorch's headers, with or without a CUDA build of it, and real headers of CUDA."""
    sites = [Path(torch.__file__).parents[1]]
    home = str(TOOLKITS[0]) if way == "CUDA_HOME" else None
    toolkits = () if way == "packages" else TOOLKITS
    try:
        folders, ignored = cuda_folders(torch.version.cuda, home, [] if way == "toolkit" else sites, toolkits)
    except ExtensionError as error:
        pytest.skip(f"no headers this way: {error}")
    if ignored:
        pytest.skip(ignored)
    paths = [f"-I{path}" for path in include_paths()]
    command = ["c++", "-fsyntax-only", *extension.cuda_flags(folders), *paths, str(SHIM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
