"""Which versions of PyTorch the matrix compiles with, and what it reads from their wheels."""

from __future__ import annotations

from benchmarks.versions.matrix import OLDEST, newest_patches, requirement

METADATA = """Metadata-Version: 2.1
Name: torch
Requires-Dist: triton-kernels==1.0
Requires-Dist: cuda-toolkit[cublas,cudart]==13.0.2; platform_system == "Linux"
Requires-Dist: triton~=3.8.0; platform_system == "Linux" and python_version < "3.15"
Requires-Dist: nvidia-cuda-runtime (==13.0.96.*) ; extra == "cudart"

A text that says Requires-Dist: nothing
"""


def test_the_newest_patch_of_each_minor_version() -> None:
    """Numbers, not texts, decide; release candidates and local builds are none."""
    versions = ["2.15.0", "2.9.1", "2.14.10", "2.14.9", "2.11.0", "2.12.0rc1", "2.13.0+cpu", "2.10.0", "3.0.0"]
    assert newest_patches(versions) == ["2.11.0", "2.14.10", "2.15.0", "3.0.0"]
    assert newest_patches([]) == []


def test_the_oldest_is_the_packages_own(pytestconfig) -> None:  # type: ignore[no-untyped-def]
    text = (pytestconfig.rootpath / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={OLDEST[0]}.{OLDEST[1]}",' in text


def test_what_a_wheel_asks_for() -> None:
    assert requirement(METADATA, "triton") == "triton~=3.8.0"
    assert requirement(METADATA, "cuda-toolkit") == "cuda-toolkit==13.0.2"
    assert requirement(METADATA, "nvidia-cuda-runtime") == "nvidia-cuda-runtime==13.0.96.*"
    assert requirement(METADATA, "nvidia-nccl") is None
