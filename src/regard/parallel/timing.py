"""How long a pass over many ranks takes: a model of `regard.parallel.passes`; nothing is computed.

All ranks exchange at distance 1, 2, 3, ... in turn; a rank begins to receive the next keys when it begins to compute
with the last ones, and an exchange begins when both ends have begun it:

    wait for keys at distance d  =  max(begun here, begun at both ends) + turns * latency + bytes / bytes per second
    done with distance d         =  max(keys are here, done with distance d - 1) + surplus * FLOPs / FLOPs per second

FLOPs are those of the scores that a mask allows. The surplus is what computing them takes over what as many scores of a
dense call take: for some ranks, strips are planned as the passes plan them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.call import Call
from regard.kernels.strips.partial import scores_in_time
from regard.masks import Mask
from regard.parallel.exchange import MIN_PARCEL_KEYS, PARCELS_PER_SHARD
from regard.parallel.moving import part_of
from regard.parallel.seen import trimmed
from regard.parallel.work import Work
from regard.scores import Scoring
from regard.shapes import Grid

MAX_SAMPLED_SETS = 16
"""Ranks whose strips are planned, and ranges of each."""

MAX_SAMPLED_KEYS = 1 << 16
"""Keys of a range whose strips are planned: the last that it sees."""

MAX_SAMPLED_SCORES = 1 << 25
"""Scores of a range whose strips are planned: those of the queries in its middle."""


class Speeds(NamedTuple):
    """What one rank does in a second; see `regard.parallel.plan`."""

    flops_per_second: float
    bytes_per_second: float
    latency: float
    pass_seconds: float


def surplus(mask: Mask, queries: Sequence[Sequence[range]], grid: Grid, head_dim: int, edge: int) -> Tensor:
    """For each set of queries, the time that its scores take over that of as many in a dense call; float64 [sets].

    Args:
        mask: bound to the grid. queries: for each set (a rank, say) its ranges.
        edge: as in `Work`.
    """
    found = torch.ones(len(queries), dtype=torch.float64)
    if not mask.closed_form:
        return found
    taken, allowed = torch.zeros(2, len(queries), dtype=torch.float64)
    sampled = _some_of(range(len(queries)))
    for number in sampled:
        for at in _some_of(range(len(queries[number]))):
            seen = _sampled(mask, queries[number][at], range(grid.key_len))
            if seen is not None:
                taken[number] += _scores_in_time(mask, *seen, grid, head_dim)
                allowed[number] += float(
                    Work(mask, [[seen[0]]], grid.key_len, edge).until(0, [seen[1].start, seen[1].stop]).diff()
                )
    if float(allowed.sum()):
        found.fill_(float(taken.sum() / allowed.sum()))
        known = [number for number in sampled if allowed[number]]
        found[known] = taken[known] / allowed[known]
    return found.clamp_(min=1.0)


def _sampled(mask: Mask, rows: range, keys: range) -> tuple[range, range] | None:
    """Some consecutive queries of a range and keys that they see; None if they see nothing."""
    for columns in (keys, keys):  # the queries in the middle may see other keys than all
        seen = trimmed(mask, rows, columns)
        if seen is None:
            return None
        rows, keys = seen[0], seen[1][-MAX_SAMPLED_KEYS:]
        left_out = max(0, len(rows) - MAX_SAMPLED_SCORES // len(keys)) // 2
        rows = rows[left_out : len(rows) - left_out]
    return trimmed(mask, rows, keys)


def _scores_in_time(mask: Mask, rows: range, columns: range, grid: Grid, head_dim: int) -> float:
    """The scores of a dense call of one head that takes as long as a rectangle of a call."""
    scoring = part_of(Scoring(grid, 1.0, mask=mask), rows, columns, {})
    query, key = (torch.zeros(1).expand(grid.batch, grid.heads, len(side), head_dim) for side in (rows, columns))
    return scores_in_time(Call(query, key, key, scoring, None, True)) / (grid.batch * grid.heads)


def _some_of(numbers: range) -> range:
    """At most about `MAX_SAMPLED_SETS` of them, evenly chosen."""
    return numbers[:: max(1, len(numbers) // MAX_SAMPLED_SETS)]


def seconds(moved: Tensor, keys: Tensor, flops: Tensor, speeds: Speeds, *, overlap: bool) -> float:
    """The time of the slowest rank in one pass (see the module).

    Args:
        moved, keys: bytes and keys that each rank receives from each distance. flops: with the surplus.
        overlap: whether ranks compute while keys travel.

    Shapes: [ranks, distances].
    """
    ranks = torch.arange(len(moved))
    out, turns = sent(moved), _turns(keys).maximum(_turns(sent(keys)))
    busy = flops / speeds.flops_per_second
    begun, done = torch.zeros(len(moved), dtype=torch.float64), busy[:, 0]
    for distance in range(1, len(moved)):
        source, target = (ranks - distance) % len(moved), (ranks + distance) % len(moved)
        receives, sends = moved[:, distance] > 0, out[:, distance] > 0
        start = begun if overlap else done
        both = torch.where(receives, start.maximum(start[source]), start)
        both = torch.where(sends, both.maximum(start[target]), both)
        took = moved[:, distance].maximum(out[:, distance]) / speeds.bytes_per_second
        here = torch.where(receives | sends, both + turns[:, distance] * speeds.latency + took, start)
        begun = here.maximum(done)
        done = begun + busy[:, distance]
    return float(done.max()) + speeds.pass_seconds


def sent(moved: Tensor) -> Tensor:
    """What each rank sends at each distance, from what each receives: [ranks, distances]."""
    ranks = len(moved)
    rank, distance = torch.arange(ranks)[:, None], torch.arange(ranks)
    return moved[(rank + distance) % ranks, distance]


def _turns(keys: Tensor) -> Tensor:
    return (keys / MIN_PARCEL_KEYS).ceil().clamp(max=PARCELS_PER_SHARD)
