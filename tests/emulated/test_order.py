"""Training beside the host's and other streams' work, in every mode: the bits of eager whatever comes late."""

from __future__ import annotations

import copy
import signal
import threading
import time
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from disco_accel import restore, stats
from tests.emulated import device
from tests.emulated.models import CUDA, assert_same, assert_steady, least, step
from tests.support.models import random_batch, tiny_lora

HOST = torch.device("cpu")


def llama(**keys: Any) -> Any:
    base, _ = arena_llama(SMALL, dtype=torch.float32, attention="eager", source=CUDA)
    return with_adapter(base, rank=4, checkpointing=True, **keys)


def test_batches_that_a_side_stream_fetches_during_the_step_before() -> None:
    """The usual double buffer, with pinned batches, AdamW and losses that are read at the end."""
    hosts = [
        {name: tensor.pin_memory() for name, tensor in batch_for(SMALL["vocab_size"], 2, 16, HOST, seed=seed).items()}
        for seed in range(6)
    ]
    runs = []
    for planned in (False, True):
        model = llama().to(CUDA) if not planned else least(llama(), lambda m: step(m, hosts[0]))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        optimizer.zero_grad()
        side, losses = torch.cuda.Stream(), []

        def fetch(number: int, side: torch.cuda.Stream = side) -> dict[str, torch.Tensor]:
            with torch.cuda.stream(side):
                return {name: tensor.to(CUDA, non_blocking=True) for name, tensor in hosts[number].items()}

        following = fetch(0)
        for number in range(len(hosts)):
            torch.cuda.current_stream().wait_stream(side)
            batch = following
            for tensor in batch.values():
                tensor.record_stream(torch.cuda.current_stream())
            if number + 1 < len(hosts):
                following = fetch(number + 1)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        runs.append(torch.stack(losses).cpu())
    assert torch.equal(*runs)


def test_a_loop_on_a_side_stream() -> None:
    batch = batch_for(SMALL["vocab_size"], 2, 16, CUDA)
    model = llama()
    eager = copy.deepcopy(model).to(CUDA)
    planned = least(model, lambda m: step(m, batch))
    expected, side = step(eager, batch), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = [step(planned, batch) for _ in range(3)]
    torch.cuda.synchronize()
    for one in found:
        assert_same(
            {k: v for k, v in one.items() if k != "generator"}, {k: expected[k] for k in one if k != "generator"}
        )


def test_a_steady_step_takes_nothing_and_ends_within_what_the_driver_gave() -> None:
    batch = batch_for(SMALL["vocab_size"], 2, 16, CUDA)
    torch.cuda.empty_cache()
    before = device.live_bytes()
    model = least(llama(), lambda m: step(m, batch))
    step(model, batch)
    for _ in range(3):
        assert_steady(lambda: step(model, batch))
    # The batch, gradients, and what PyTorch rounds up: no weight of the model's is among it.
    assert device.live_bytes() - before <= stats(model)["budget_bytes"] + (4 << 20)


def test_an_interrupted_step_waits_for_its_copies_before_their_memory_goes() -> None:
    """Ctrl-C while an offload hangs; the model is restored right after it."""
    batch = {name: tensor.to(CUDA) for name, tensor in random_batch().items()}
    model = tiny_lora(layers=2, checkpointing=True, use_cache=False)
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    planned = least(model, lambda m: step(m, batch))
    step(planned, batch)
    interrupted = threading.Event()

    def handler(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def interrupt() -> None:
        while not device.hanging():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        interrupted.wait()
        # So long the step must wait for it.
        time.sleep(0.2)
        device.release()

    before = signal.signal(signal.SIGINT, handler)
    device.inject_hang("copy d2h", nth=2)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            step(planned, batch)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    restore(planned)
    named = dict(planned.named_parameters())
    assert all(torch.equal(named[name], weight) for name, weight in weights.items())
