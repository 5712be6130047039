"""A fake CUDA, compiled once for the tests of a file, and a machine of two devices for each test."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disco_accel.store.store_command import interposed_library
from tests.store.fake_cuda import HERE, TOTAL, FakeMachine, World


@pytest.fixture(scope="session")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake_cuda")
    compiler = [os.environ.get("CXX", "c++"), "-std=c++20", "-O0"]

    def library(source: str, name: str) -> None:
        command = [*compiler, "-shared", "-fPIC", str(HERE / source), f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run([*command, "-ldl", "-lstdc++"], check=True)

    with ThreadPoolExecutor() as pool:
        ready = pool.submit(interposed_library)
        both = [pool.submit(library, "fake_libcudart.cpp", "libcudart.so.12")]
        both += [pool.submit(library, "fake_libcuda.cpp", "libcuda.so.1")]
        both[0].result()
        program = [str(HERE / "cuda_program.cpp"), str(folder / "libcudart.so.12"), "-o", str(folder / "cuda_program")]
        subprocess.run([*compiler, *program, "-ldl", "-lpthread", "-lstdc++"], check=True)
        both[1].result()
        ready.result()
    return folder


@pytest.fixture
def world(binaries: Path, tmp_path: Path) -> World:
    return World(tmp_path, binaries, FakeMachine(tmp_path / "machine", TOTAL, TOTAL))
