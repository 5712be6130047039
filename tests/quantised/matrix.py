"""Every form of quantisation in three families, with activation checkpointing and without: one table. Then the life of
a model of each form, and the changes of its layers, adapted by PEFT.

``python -m tests.quantised.matrix [FORM...]``; ``make quantised``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from tests.quantised.children import lines_of
from tests.quantised.edits import CHANGES
from tests.quantised.test_bits import check
from tests.support.quantised import FORMS

FAMILIES = ("llama", "qwen3", "gemma3_text")
EXPERTS = "bitsandbytes NF4 experts"


def fault(result: dict[str, Any]) -> str | None:
    """What is not right with a line of ``life.py``; None if all is."""
    seen: dict[str, Any] = result["seen"]
    if "error" in seen:
        return str(seen["error"])
    wrong = {what: how for what, how in seen.items() if how is not True}
    if result["form"].startswith("quanto") and str(wrong.get("copy")).startswith("not to be copied"):
        # Its weights have no deep copy.
        del wrong["copy"]
    return f"{wrong}" if wrong or len(seen) < 10 else None


def main(wanted: list[str]) -> int:
    """Prints a row for each form and family, and what is wrong elsewhere. 1 where something is, else 0."""
    forms = wanted or [*FORMS, EXPERTS]
    wrong = _bits(forms)
    for result in lines_of("life.py", *forms, seconds=3000):
        wrong += (found := fault(result)) is not None
        print(f"life of {result['form']}: {found or 'right'}", flush=True)
    for result in lines_of("changes.py", "--adapted", *(form for form in forms if form in CHANGES), seconds=3000):
        ends = result["verdict"], result.get("after")
        if not {*ends} <= {"followed", "no effect", "refused", "as eager"}:
            wrong += 1
            print(f"{result['form']}, {result['change']}, {result['moment']}: {ends} {result['detail']}", flush=True)
    print(f"{wrong} wrong")
    return min(wrong, 1)


def _bits(forms: list[str]) -> int:
    wrong = 0
    print("| form | family | checkpointing | packed KiB | least KiB | reloaded KiB | bits | s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for form in forms:
        for family in ("qwen3_moe",) if form == EXPERTS else FAMILIES:
            cases = [{"form": form, "family": family, "checkpointing": on} for on in (False, True)]
            began = time.perf_counter()
            for result in lines_of("steps.py", json.dumps(cases), seconds=3000):
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
    return wrong


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except pytest.skip.Exception as missing:
        sys.exit(str(missing))
