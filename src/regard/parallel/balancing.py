"""Which rank gets which positions: several ways to deal them out, and the cheapest of them for a mask."""

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from regard.indexing import merged
from regard.masks import Mask
from regard.parallel.seen import seen_keys
from regard.parallel.work import Work, tile_edge

SCORES_PER_KEY = 1000.0
"""Scores that a rank computes while one key and value arrive: about 100 GFLOP/s and 1 GB/s in float32."""

BLOCKS_PER_RANK = 16
"""Blocks of queries for each rank whose work is counted."""

MAX_RUNS = 4096
"""Most documents that are dealt out one by one."""

AS_GOOD = 1.02
"""Times of two ways that differ by less are estimated to be equal."""

Ranges = list[list[range]]


def cheapest(mask: Mask, length: int, ranks: int, scores_per_key: float = SCORES_PER_KEY) -> Ranges:
    """The positions of each rank, by the way that is done first; of equals, by that which sends least.

        time of a rank = scores that its queries see + scores_per_key * keys that it receives

    Args:
        mask: bound to the whole sequence.
    """
    ways = list(_ways(mask, length, ranks))
    slowest, received = [], []
    for ranges in ways:
        work = Work(mask, ranges, length, tile_edge(length, ranks)).totals()
        ordered = [sorted(held, key=lambda part: part.start) for held in ranges]
        keys = [_received(mask, ordered, rank) for rank in range(ranks)]
        slowest.append(max(scores + scores_per_key * count for scores, count in zip(work, keys, strict=True)))
        received.append(max(keys))
    as_good = [number for number, cost in enumerate(slowest) if cost <= AS_GOOD * min(slowest)]
    return ways[min(as_good, key=lambda number: received[number])]


def even(length: int, parts: int) -> list[range]:
    """So many consecutive ranges, the first ones longer by one where the length does not divide."""
    ends = [n * (length // parts) + min(n, length % parts) for n in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


def zigzag(length: int, ranks: int) -> Ranges:
    """One piece from the start and one from the end for each rank."""
    pieces = even(length, 2 * ranks)
    return [[pieces[rank], pieces[-1 - rank]] for rank in range(ranks)]


def _ways(mask: Mask, length: int, ranks: int) -> Iterator[Ranges]:
    """Ways to deal out the positions, the simplest first."""
    yield [[part] for part in even(length, ranks)]
    yield zigzag(length, ranks)
    blocks = [block for block in even(length, ranks * BLOCKS_PER_RANK) if block]
    work = Work(mask, [[block] for block in blocks], length, tile_edge(length, ranks)).totals()
    yield _consecutive(blocks, work, ranks)
    ends = sorted({0, length, *(at for at in mask.breaks(length) if 0 < at < length)})
    if ranks <= len(ends) - 1 <= MAX_RUNS:
        runs = [range(start, stop) for start, stop in pairwise(ends)]
        work = Work(mask, [[run] for run in runs], length, tile_edge(length, ranks)).totals()
        yield _consecutive(runs, work, ranks)
        yield _dealt(runs, work, ranks)


def _consecutive(runs: Sequence[range], work: Sequence[float], ranks: int) -> Ranges:
    """Consecutive runs for each rank, as equal in work as they can be: cut where the work done passes each share."""
    done = list(accumulate(work, initial=0.0))
    cuts = [0]
    for rank in range(1, ranks):
        share = done[-1] * rank / ranks
        at = bisect_left(done, share)
        if at and share - done[at - 1] < done[min(at, len(runs))] - share:
            at -= 1
        cuts.append(max(cuts[-1], min(at, len(runs))))
    return [list(runs[start:stop]) for start, stop in pairwise([*cuts, len(runs)])]


def _dealt(runs: Sequence[range], work: Sequence[float], ranks: int) -> Ranges:
    """The run with the most work first, each to the rank that has least so far."""
    held: Ranges = [[] for _ in range(ranks)]
    least = [(0.0, rank) for rank in range(ranks)]
    for number in sorted(range(len(runs)), key=lambda n: -work[n]):
        done, rank = least[0]
        held[rank].append(runs[number])
        heapq.heapreplace(least, (done + work[number], rank))
    return held


def _received(mask: Mask, ranges: Ranges, rank: int) -> int:
    """How many keys a rank receives."""
    others = [part for other, held in enumerate(ranges) if other != rank for part in held]
    return sum(map(len, seen_keys(mask, ranges[rank], merged(others), len(ranges), looks=False)))
