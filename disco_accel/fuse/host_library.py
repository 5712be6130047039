"""A library of fused kernels for the host, from the C++ that Inductor writes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disco_accel.fuse.inductor import KernelSource

ANSWER = "disco_fused_answer"
"""The symbol of a text in the library, JSON: the number of calls, and those without a kernel, with the reasons."""


def symbol_of(number: int) -> str:
    """The function of a library's call ``number``: it gets the addresses of its operands."""
    return f"disco_fused_{number}"


def build_host_library(
    sources: Sequence[KernelSource | None], refused: Mapping[int, str], folder: Path, name: str
) -> Path:
    """Compile ``sources``, None where there is none, into ``folder``. Raises as Inductor's ``CppBuilder``."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    parts = [_function(number, source) for number, source in enumerate(sources) if source is not None]
    answer = {"calls": len(sources), "refused": {str(number): reason for number, reason in refused.items()}}
    text = json.dumps(json.dumps(answer))
    parts.append(f'extern "C" __attribute__((visibility("default"))) const char {ANSWER}[] = {text};\n')
    path = folder / f"{name}.cpp"
    path.write_text("\n".join(parts))
    builder = CppBuilder(name, str(path), CppTorchOptions(vec_isa=pick_vec_isa(), warning_all=False), str(folder))
    builder.build()
    return Path(builder.get_target_file_path())


def _function(number: int, source: KernelSource) -> str:
    source_text, arguments, _ = source
    types, text = _parsed(source_text)
    text, count = re.subn(r"\bkernel\(", f"kernel_{number}(", text)
    assert count == 1, "Inductor's C++ has one kernel"
    given = ", ".join(f"({kind})operands[{place}]" for kind, place in zip(types, arguments, strict=True))
    visible = '__attribute__((visibility("default")))'
    entry = f"void {symbol_of(number)}(void* const* operands) {{ kernel_{number}({given}); }}"
    return f'{text}\nextern "C" {visible} {entry}\n'


def _parsed(source: str) -> tuple[list[str], str]:
    """Types of the arguments, and the C++, from ``async_compile.cpp_pybinding(types, text)``."""
    call = ast.parse(source.strip(), mode="eval").body
    assert isinstance(call, ast.Call)
    types, text = (ast.literal_eval(argument) for argument in call.args[:2])
    return list(types), str(text)
