"""Every form of quantisation in three families, with activation checkpointing and without: one table.

``python -m tests.quantised.matrix [FORM...]``, some minutes for each form; ``make quantised``.
"""

from __future__ import annotations

import json
import sys
import time

import pytest

from disco_accel.testing.quantised import FORMS
from tests.quantised.children import lines_of
from tests.quantised.test_bits import check

FAMILIES = ("llama", "qwen3", "gemma3_text")
EXPERTS = "bitsandbytes NF4 experts"


def main(wanted: list[str]) -> int:
    """Prints a row for each form and family. 1 where one is not right, else 0."""
    wrong = 0
    print("| form | family | checkpointing | packed KiB | least KiB | reloaded KiB | bits | s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for form in wanted or [*FORMS, EXPERTS]:
        for family in ("qwen3_moe",) if form == EXPERTS else FAMILIES:
            cases = [{"form": form, "family": family, "checkpointing": on} for on in (False, True)]
            began = time.perf_counter()
            for result in lines_of("steps.py", json.dumps(cases)):
                try:
                    check(result)
                except AssertionError as error:
                    wrong += 1
                    print(f"{form}, {family}: {error}", file=sys.stderr)
                least = result.get("budgets", {}).get("least", {"bytes": 0, "reloaded": 0, "equal": False})
                sizes = (result.get("packed", 0), least["bytes"], least["reloaded"])
                row = [form, family, "yes" if result["checkpointing"] else "no", *(f"{n / 1024:.0f}" for n in sizes)]
                seconds = (time.perf_counter() - began) / len(cases)
                print("|", " | ".join([*row, "equal" if least["equal"] else "NO", f"{seconds:.0f}"]), "|", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except pytest.skip.Exception as missing:
        sys.exit(str(missing))
