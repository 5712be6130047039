"""By trying everything: the shortest repeating step of a chain of kernels over weights, on a link of a byte a second.

Every second each schedule goes every way that it can: a kernel starts or not, a weight is loaded or not, some weights
make room or not. A load takes all of its place from its start. Results stay until their reader has ended.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN


@dataclass(frozen=True, slots=True)
class Chain:
    """``weights`` in bytes; kernel i reads weight ``reads[i]`` and result i - 1, writes ``results[i]`` bytes and takes
    ``seconds[i]``."""

    memory: int
    weights: tuple[int, ...]
    reads: tuple[int, ...]
    results: tuple[int, ...]
    seconds: tuple[int, ...]

    @property
    def graph(self) -> TaskGraph:
        """The same as a task graph."""
        count = len(self.weights)
        vertices = [Vertex(i, VertexKind.INPUT, 0, "w", sizes=(s,), traits=FROZEN) for i, s in enumerate(self.weights)]
        for i, (weight, size, seconds) in enumerate(zip(self.reads, self.results, self.seconds, strict=True)):
            last = ((count + i - 1, 0),) if i else ()
            vertices.append(Vertex(count + i, VertexKind.KERNEL, 0, "k", ((weight, 0), *last), (size,), float(seconds)))
        return TaskGraph("chain", (Space(0, self.memory, 1),), tuple(vertices))

    def results_while(self, kernel: int, *, running: bool) -> int:
        """Bytes of results once ``kernel`` kernels have ended, the next one ``running`` or not."""
        before = self.results[kernel - 1] if 0 < kernel < len(self.reads) else 0
        return before + (self.results[kernel] if running else 0)


@dataclass(frozen=True, slots=True)
class _State:
    kernel: int
    left: int
    resident: frozenset[int]
    load: int
    load_left: int


def random_chain(rng: random.Random) -> Chain:
    """Return one of at most four weights and five kernels, in memory for the largest kernel and a little more."""
    weights = tuple(rng.randint(1, 2) for _ in range(rng.randint(2, 4)))
    reads = [*range(len(weights)), *(rng.randrange(len(weights)) for _ in range(rng.randint(0, 5 - len(weights))))]
    rng.shuffle(reads)
    results = tuple(rng.randint(0, 1) for _ in reads)
    need = max(weights[weight] + results[i] + (results[i - 1] if i else 0) for i, weight in enumerate(reads))
    most = need + sum(weights) // 2
    return Chain(rng.randint(need, most), weights, tuple(reads), results, tuple(rng.randint(0, 3) for _ in reads))


def shortest_step(chain: Chain) -> int:
    """Return the seconds of the shortest step that ends with the weights on the device with which it began."""
    every = range(len(chain.weights))
    starts = [frozenset(each) for n in range(len(chain.weights) + 1) for each in combinations(every, n)]
    fitting = [each for each in starts if sum(chain.weights[w] for w in each) <= chain.memory]
    return min(_seconds(chain, start) for start in fitting)


def _seconds(chain: Chain, start: frozenset[int]) -> int:
    states = {_State(0, 0, start, -1, 0)}
    for second in range(1000):
        states = {then for state in states for then in _at_once(chain, state)}
        if any(s.kernel == len(chain.reads) and not s.left and s.load < 0 and start <= s.resident for s in states):
            return second
        states = {_a_second_later(chain, state) for state in states}
    raise AssertionError("a chain that fits has a step")


def _at_once(chain: Chain, state: _State) -> Iterator[_State]:
    """Yield ``state`` and what it may become without time: kernels of no seconds run, loads and kernels begin."""
    found, open_ends = {state}, [state]
    while open_ends:
        for then in _starts(chain, open_ends.pop()):
            if then not in found:
                found.add(then)
                open_ends.append(then)
    yield from found


def _starts(chain: Chain, state: _State) -> Iterator[_State]:
    running = state.left > 0
    more = state.kernel < len(chain.reads)
    if more and not running and chain.reads[state.kernel] in state.resident:
        for kept in _rooms(chain, replace(state, left=1), {chain.reads[state.kernel]}):
            seconds = chain.seconds[state.kernel]
            yield replace(state, resident=kept, kernel=state.kernel + (not seconds), left=seconds)
    if state.load < 0:
        in_use = {chain.reads[state.kernel]} if running else set()
        for weight in set(range(len(chain.weights))) - state.resident:
            loading = replace(state, load=weight, load_left=chain.weights[weight])
            for kept in _rooms(chain, loading, in_use):
                yield replace(loading, resident=kept)


def _rooms(chain: Chain, state: _State, in_use: set[int]) -> Iterator[frozenset[int]]:
    """Yield what may stay of the residents, all of ``in_use`` in any case, beside what else takes memory; no more go
    than must."""
    other = chain.results_while(state.kernel, running=state.left > 0)
    other += chain.weights[state.load] if state.load >= 0 else 0
    free = sorted(state.resident - in_use)
    enough: list[set[int]] = []
    for n in range(len(free) + 1):
        for gone in map(set, combinations(free, n)):
            kept = state.resident - gone
            fits = other + sum(chain.weights[w] for w in kept) <= chain.memory
            if fits and not any(fewer <= gone for fewer in enough):
                enough.append(gone)
                yield kept


def _a_second_later(chain: Chain, state: _State) -> _State:
    if state.left:
        ended = state.left == 1
        state = replace(state, left=state.left - 1, kernel=state.kernel + ended)
    if state.load >= 0:
        came = state.load_left == 1
        resident = state.resident | {state.load} if came else state.resident
        state = replace(state, resident=resident, load=-1 if came else state.load, load_left=state.load_left - 1)
    return state
