"""The part of a budget through which weights stream while a forward runs without a plan."""

from __future__ import annotations

from disco_accel.step.budget.engine_memory import EngineMemory


def unplanned_room(memory: EngineMemory, budget: int, trained: int, wanted: int) -> int:
    """Bytes for weights, of ``wanted`` ones: half of ``budget`` less ``trained`` bytes and the arenas of plans.

    The other half is for activations, which nobody knows beforehand. Arenas are freed if they take from those bytes and
    no step runs; the next planned step makes them anew.
    """
    left = max(0, budget - trained)
    held = max((arena.numel() for arena in memory.arenas.values()), default=0)
    if held and left - held < min(left, 2 * wanted) and memory.lock.acquire(blocking=False):
        try:
            if not memory.runs():
                memory.unload()
                held = 0
        finally:
            memory.lock.release()
    return max(0, left - held) // 2
