"""A prepared quantised model is placed, saved, copied, restored, shared and compared like one of plain weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.quantised.children import lines_of
from tests.quantised.matrix import fault


@pytest.mark.long
def test_the_life_of_a_prepared_quantised_model() -> None:
    """The script's own names say what each entry is about."""
    forms = ("bitsandbytes int8", "torchao int8")
    results = lines_of("life.py", *forms)
    assert [result["form"] for result in results] == list(forms)
    for result in results:
        assert fault(result) is None


def test_two_processes_train_quantised_models_together(tmp_path: Path) -> None:
    """In DDP over gloo: frozen packed weights are no collective's, gradients are eager's, and one scale that differs
    between the processes is named."""
    forms = ("bitsandbytes NF4, double", "bitsandbytes int8")
    with ThreadPoolExecutor(2) as pool:
        shared = str(tmp_path / "processes")
        running = [pool.submit(lines_of, "processes.py", str(rank), shared, *forms) for rank in range(2)]
        results = [line for one in running for line in one.result()]
    assert len(results) == 2 * len(forms)
    for result in results:
        assert set(result["seen"].values()) == {True} and len(result["seen"]) == 4, result
