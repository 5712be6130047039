"""Reports about host memory, page-locking, forked workers, evaluation that is larger than training, and exits."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, restore, set_memory_budget, stats
from tests.public_reports.rig import PLENTY, Run, adamw, assert_same, batch, compare, least_budget, llama, lora, run

WORKERS = """
import torch
from torch.utils.data import DataLoader
from tests.public_reports.rig import Run, adamw, batch, llama, lora, PLENTY
torch.set_num_threads(1)
run = Run({"memory_budget": PLENTY})
model = run.prepare(lora(llama()))
optimizer = adamw(model)
rows = [{k: v[0] for k, v in batch(i, rows=1).items()} for i in range(64)]
loader = DataLoader(rows, batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
while True:
    for place, inputs in enumerate(loader):
        run.step(model, optimizer, **inputs)
        if place == 3:
            print("trained", flush=True)
        if place == 5 and ENDS:
            raise SystemExit(0)
"""

WEIGHTS = """
import gc
import torch
from disco_accel import DiscoConfig, prepare
from disco_accel.native.host_memory import give_back_freed
from tests.public_reports.rig import PLENTY, llama
from tests.public_reports.test_memory_and_system import resident
def made(**sizes):
    model = llama(**sizes).requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model
def prepared(model):
    return prepare(model, DiscoConfig(memory_budget=PLENTY, device="cpu", plan_cache=None, quiet=True))
small = prepared(made())
# From now on glibc keeps weights in its heap, and what is freed of it in memory.
torch.empty(24 << 20, dtype=torch.uint8)
model = made(hidden_size=1032, intermediate_size=4104, num_attention_heads=12, num_key_value_heads=12)
size = sum(p.nbytes for p in model.parameters())
gc.collect()
give_back_freed()
before = resident()
model = prepared(model)
gc.collect()
print(resident() - before, size)
"""


def resident() -> int:
    """Bytes of this process that are in memory, exactly: statm and status tell counts that lag behind."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


@pytest.mark.long
@pytest.mark.parametrize("ends", ["exit", "ctrl-c"])
def test_forked_workers_end_with_their_job(ends: str) -> None:
    """speculators #889, pytorch #130610, Megatron-Bridge #1656: forked workers abort at exit, and the job stays."""
    code = WORKERS.replace("ENDS", str(ends == "exit"))
    child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=-1, stderr=-1, text=True)
    assert child.stdout is not None and child.stdout.readline() == "trained\n"
    if ends == "ctrl-c":
        child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=600)
    assert child.returncode in ((0,) if ends == "exit" else (130, -signal.SIGINT, 1)), errors
    assert "terminate called" not in errors and "Aborted" not in errors, errors
    assert ends == "exit" or "KeyboardInterrupt" in errors


def test_evaluation_may_be_larger_than_training() -> None:
    """unsloth #5168, transformers #32282: evaluation with another batch size breaks what training fitted."""

    def script(run: Run) -> None:
        model = run.prepare(lora(llama()))
        optimizer = adamw(model)
        for seed in range(3):
            run.step(model, optimizer, **batch(seed))
            model.eval()
            with torch.no_grad():
                run.see("evaluation", model(**batch(seed, rows=16)).loss)
            model.train()
            if run.keys is not None:
                numbers = stats(model)
                assert numbers["peak_bytes"] <= numbers["budget_bytes"]
        run.end(model, optimizer)

    got = run(script, memory_budget=least_budget(script, optimizer="device"), optimizer="device")
    assert_same(got, run(script))


def test_weights_take_their_own_size_of_host_memory() -> None:
    """vllm #56410, vllm-backport #67, sglang #37285: blocks rounded up to powers of two took 1.8 times the weights.

    In a process of its own: threads and freed models of other tests take and return memory of their own."""
    made = subprocess.run([sys.executable, "-W", "ignore", "-c", WEIGHTS], capture_output=True, text=True, check=True)
    more, size = map(int, made.stdout.split())
    # A second copy, or blocks rounded up to powers of two, take 0.78 of the size and more.
    assert more <= 0.2 * size


@pytest.mark.long
def test_nothing_grows() -> None:
    """diffusers-workflow #98, prime-rl #3196, slime #205: memory was not given back, pools grew with each step."""

    def life(count: int) -> None:
        model = prepare(lora(llama()), DiscoConfig(**keys))
        optimizer = adamw(model)
        for step in range(count):
            length = (8, 12, 16)[step % 3]
            model(**batch(step, length=length)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                set_memory_budget(model, PLENTY if step % 2 else PLENTY // 2)
                model.eval()
                with torch.no_grad():
                    model(**batch(step, rows=4))
                model.train()
        restore(model)

    keys: dict[str, Any] = {
        "memory_budget": PLENTY,
        "device": "cpu",
        "plan_cache": None,
        "quiet": True,
        "buckets": "off",
    }
    life(3)
    gc.collect()
    before = resident(), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        life(15)
    gc.collect()
    after = resident(), len(os.listdir("/proc/self/fd")), threading.active_count()
    assert after[1:] == before[1:]
    assert after[0] - before[0] <= 24 << 20


def test_state_read_by_another_thread_during_a_step() -> None:
    """accelerate #4261, sglang #16737: a save in another thread reads placeholders of a running step."""

    def script(run: Run) -> None:
        model = run.prepare(lora(llama()))
        frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
        wrong: list[str] = []
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                state = model.state_dict()
                wrong.extend(n for n, value in frozen.items() if not torch.equal(state[n], value))

        reader = threading.Thread(target=read)
        reader.start()
        optimizer = adamw(model)
        try:
            for seed in range(3):
                run.step(model, optimizer, **batch(seed))
        finally:
            done.set()
            reader.join()
        assert not wrong
        run.end(model, optimizer)

    compare(script, "plenty", "device", planned=3)
