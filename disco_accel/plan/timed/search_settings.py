"""What the timed planner tries, and for how long: every move of its search is a field that can be switched off.

The values were tuned on captured LoRA steps and prefills of 400 to 9,600 vertices (docs/planner.md).
``python -m benchmarks.planner --ablate`` says what each move is worth, in simulated step time and in CPU seconds of
planning.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimedSettings:
    """Moves of the search first, then their limits. Plans are a function of graph, machine and these."""

    min_gap_ratios: tuple[float | None, ...] = (None, 10.0, 5.0, 2.0)
    """An activation is offloaded only if its idle gap is at least this many times its two copies; None: never. Each is
    drafted. Without offloads a large batch has no plan in little memory."""

    resident_shares: tuple[float, ...] = (0.0, 0.5, 0.9, 0.95, 0.3, 0.7)
    """Shares of the memory, beside pinned bytes at their peak, for weights that never leave; the first is drafted for
    every gap ratio, the others for the best. Where a step waits for the link, permanent weights save evictions that
    the nearest next use alone would choose badly."""

    share_step: float = 0.08
    """Fine search around the best resident share: both neighbours at this distance, which is halved where neither is
    faster, down to a fifth; 0: none."""

    outliers_permanent: bool = True
    """Draft with unusually large weights (embeddings, the head) permanent before others: bytes that have to be kept
    free for swaps depend on the largest buffer that swaps."""

    evict_outliers_at_boundary: bool = True
    """Draft without unusually large weights on the device at the step boundary, where memory is fullest: gaps as large
    as they are cannot be filled by others."""

    low_peak_order: bool = True
    """Draft in a serial order with a lower live peak, of graphs up to ``low_peak_order_up_to`` vertices. It counts
    where the given order is a bad one: a step in a random order takes up to 10 % less; eleven captures have no lower
    peak."""

    prefetch_horizons: tuple[float, ...] = (0.2, 0.05)
    """Shares of a step with memory for everything: nothing is evicted for a reader further ahead. Without such a limit
    an idle link trades what is on the device for what is needed little sooner, and is busy when it matters."""

    program_gaps_from: float = 1000
    """Vertices of a graph from which on it is drafted, too, with what the step program keeps between two uses
    (``kept_gaps.py``), if it has one device; infinity: never. Of smaller graphs chain8 and lora_small gain nothing."""

    pays_by_program: float = 0.995
    """Such a draft is made if the program's step takes less than so many times the best draft so far."""

    second_run: bool = True
    """Draft on where a draft was good enough but its offsets cost time."""

    prefetch_delays: tuple[float, ...] = (0.03, 0.12, 0.4)
    """Where offsets do not fit, reloads take their bytes later, by these shares of the time to their first reader; each
    is tried in turn. Empty: draft again with less memory instead."""

    redrafts: int = 8
    """How often a draft without offsets is drafted again with less memory where its packing was above it; 0: never."""

    several_redrafts_up_to: int = 1000
    """Positions of a step up to which such a draft is followed by three, two of them with less memory everywhere: of a
    small graph one weight may be a tenth of the memory. 0: always by one."""

    range_shares: tuple[float, ...] = (0.1, 0.05, 0.02)
    """Ranges of about this share of the memory in which weights are swapped. Empty: they are swapped as a whole. Tuned
    on chain8 and lora_small, some of whose steps take 4 to 6 % less with them; with 15, 10, 7, 5 and 3 % they take up
    to 4 % longer."""

    large_range_shares: tuple[float, ...] = (0.005,)
    """As ``range_shares``, of a graph that is larger than ``descend_in_ranges_up_to``."""

    descend_in_ranges_up_to: int = 2000
    """Vertices of a graph up to which all options are tried again with weights in ranges; of a larger one the best so
    far alone, in the finest ranges, since each option takes a second or more of such a graph."""

    pays_in_ranges: float = 0.995
    """A draft in ranges gets offsets if it takes less than so many times the plan so far, and of a graph too large for
    that descent more work."""

    work_in_ranges: float = 0.5
    """How much more, as a part of what is enough for the graph. Offsets of ranges take some redrafts: the step of a
    Qwen3-14B in 6 GiB goes from 1.055 to 1.041 of the bound, and from 1.055 to 1.055 without."""

    retry_bonus: float = 0.02
    """How much sooner, as a share of its seconds, a draft gets offsets for each redraft that it has been through."""

    cut_penalty: float = 0.25
    """How much longer a step becomes, as a share of itself, by giving up all of its memory: a guess by which drafts
    that did not fit are ranked. 0: by their seconds alone."""

    repacking_rounds: int = 60
    """Rounds in which buffers that lie above the memory are packed first, twice as many for a thousand buffers or
    fewer; 0: none. A captured LoRA step of 7B at 3 GiB takes 0.7 % less with them."""

    longest_first_from: float = 1000
    """Buffers of a step in ranges from which on they get rounds that begin with the longest lived first, too, instead
    of rounds once more from the best packing; infinity: never. Of Qwen3-30B-A3B in 44 GiB 96 MB lie above the memory
    then instead of 608, and the step takes 1.1 % less; lora_small in 109.6 MiB would take 5 % longer."""

    reserve: float = 0.0
    """Share of the memory that drafts do without, and offsets may take: large values leave gaps between them."""

    effort: int = 400_000
    """Vertices in all the drafts of one search; the first share of each gap ratio is drafted in any case."""

    drafting_share: float = 0.5
    """Share of the work, or of the user's time, after which no more options are drafted: drafts need offsets."""

    good: float = 1.003
    """A draft that takes at most so many times what a step with memory for everything takes is not bettered."""

    offsets: int = 4_000_000
    """Offsets that are tried in one search, after which the first plan found is the last."""

    drafts_packed: int = 6
    """Drafts that get offsets even if that takes more of them."""

    busy_link: float = 0.9
    """Share of a step that the link is busy from which on reloads are not delayed: a late one cannot be made up for."""

    late: float = 1.002
    """A plan that takes more than so many times its draft has lost time by delayed reloads: it is drafted again too."""

    least_cut: int = 256
    """A redraft gives up at least one part in so many of the memory, times the number of redrafts: buffers come and go
    as a whole, so less may change nothing."""

    low_peak_order_up_to: int = 12_000
    """Vertices of a graph for which ``low_peak_order`` is looked for."""
