"""The interposed library, which needs no headers of CUDA, declares its functions with the types of those headers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from disco_accel.native.plain_library import ROOT
from tests.store.fake_cuda import HERE

TOOLKITS = (Path("/usr/local/cuda/include"), Path(os.environ.get("CUDA_HOME", "/nowhere")) / "include")
NO_DECLARATION = {"cuGetProcAddress"}
"""Of which newer headers declare the newer form alone."""

HEADERS = next((folder for folder in TOOLKITS if (folder / "cudaTypedefs.h").is_file()), None)
needs_headers = pytest.mark.skipif(HEADERS is None, reason="no toolkit of CUDA is installed")


def calls(table: str) -> list[tuple[str, ...]]:
    """The rows of ``names.h`` in the macro ``table``, each as its words."""
    text = (ROOT / "interpose" / "names.h").read_text().split(f"#define {table}(NAME)")[1].split("\n\n")[0]
    return [tuple(word.strip(' "') for word in row.split(",")) for row in re.findall(r"NAME\(([^)]*)\)", text)]


@needs_headers
def test_functions_have_the_types_of_the_headers(tmp_path: Path) -> None:
    names = [row[0] for table in ("DISCO_RUNTIME_CALLS", "DISCO_DRIVER_CALLS") for row in calls(table)]
    names = [name for name in names if name not in NO_DECLARATION and not name.endswith("_ptsz")]
    assert len(names) > 40
    declared = "static_assert(Types<decltype(disco::interpose::{})>::value() == %luul);\\n"
    printing = [f'std::printf("{declared.format(n)}", Types<decltype(::{n})>::value());' for n in names]
    includes = ["<cuda.h>", "<cuda_runtime_api.h>", "<cstdio>", '"cuda_types.h"']
    source = "\n".join([*(f"#include {i}" for i in includes), "int main() {", *printing, "}"])
    theirs, ours, program = tmp_path / "theirs.cpp", tmp_path / "ours.cpp", tmp_path / "theirs"
    theirs.write_text(source)
    compiler = ["c++", "-std=c++20", "-w", f"-I{HERE}"]
    subprocess.run([*compiler, f"-I{HEADERS}", theirs, "-o", program], check=True)
    asserts = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    parts = {"runtime_calls.cpp": "cuda", "driver_calls.cpp": "cu"}
    for part, prefix in parts.items():
        chosen = [line for line in asserts.splitlines() if re.search(rf"::{prefix}[A-Z]", line)]
        assert len(chosen) > 20
        text = "\n".join([f'#include "interpose/{part}"', '#include "cuda_types.h"', *chosen])
        ours.write_text(text)
        subprocess.run([*compiler, f"-I{ROOT}", "-fsyntax-only", ours], check=True)
    ours.write_text(text.replace("== ", "== 1 + ", 1))
    wrong = subprocess.run([*compiler, f"-I{ROOT}", "-fsyntax-only", ours], capture_output=True, text=True)
    assert wrong.stderr.count("static assertion failed") == 1


@needs_headers
def test_names_for_cuGetProcAddress_have_their_versions() -> None:
    """The first version of each function's types, and no later one before the end that the table has."""
    assert HEADERS is not None
    text = (HEADERS / "cudaTypedefs.h").read_text()
    for name, symbol, first, end, per_thread in calls("DISCO_DRIVER_CALLS"):
        suffix = "_ptsz" if per_thread == "true" else ""
        versions = sorted(int(v) for v in set(re.findall(rf"PFN_{symbol}_v(\d+){suffix}\)", text)))
        last = 14000 if end == "kKnown" else int(end)
        assert [v for v in versions if int(first) <= v < last] == [int(first)], (name, versions)
