"""A statistic that compares the weights of two calls, query by query."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.numerics import LOG2_E
from regard.observation.observed import ObservedCall
from regard.observation.statistic import PerQuery, Statistic
from regard.observation.tile import HIDDEN, ScoreTile
from regard.shapes import ShapeError, kind


class Comparison(NamedTuple):
    """Distances between the weights of two heads, for each query: [batch, heads, query_len] each."""

    divergence: Tensor
    variation: Tensor
    cosine: Tensor


class Settled(Protocol):
    """What can be compared with: an `Observation`."""

    call: ObservedCall

    def settled(self) -> ObservedCall:
        """The call with its lse."""


class Compare(Statistic[Comparison]):
    """See `Observation.compare`."""

    keeps_tiles = False

    def __init__(self, other: Settled) -> None:
        if not hasattr(other, "settled"):
            raise TypeError(f"Observation.compare: other must be an Observation, got {kind(other)}")
        self.other = other

    def start(self, call: ObservedCall) -> None:
        if self.other.call.grid != call.grid:
            raise ShapeError(
                f"Observation.compare: both must have the same scores, got {call.grid} and {self.other.call.grid}; "
                "two heads of one call are seen[:, 3].compare(seen[:, 5])"
            )
        self.with_lse, self.parts = self.other.settled(), dict[tuple[int, int], ObservedCall]()
        self.sums = PerQuery()
        self.sums.extra = (5,)
        self.sums = self.sums.begun(call)

    def others(self) -> tuple[ObservedCall, ...]:
        return (self.other.call,)

    def of(self, tile: ScoreTile) -> Tensor:
        first = tile.batch.start, tile.heads.start
        if first not in self.parts:
            batch, heads = (range(part.start, part.stop) for part in (tile.batch, tile.heads))
            self.parts[first] = self.with_lse.select(batch, heads)
        there = self.parts[first].tile(tile.queries, tile.keys)
        p, q = tile.weights, there.weights
        middle = (p + q) / 2
        inside = p * tile.log2.clamp(min=HIDDEN) + q * there.log2.clamp(min=HIDDEN)
        # log2 of the smallest normal number and not of 0, which is slow, and has no gradient
        inside = inside / 2 - middle * middle.clamp(min=torch.finfo(p.dtype).tiny).log2()
        parts = (inside, (p - q).abs(), p * q, p * p, q * q)
        return torch.stack([part.sum(-1) for part in parts], dim=-1)

    def add(self, tile: ScoreTile, part: Tensor) -> None:
        self.sums.add(tile, part)

    def finish(self) -> Comparison:
        divergence, variation, product, left, right = self.sums.total.unbind(-1)
        divergence = divergence / LOG2_E
        if self.call.scoring.sink is not None or self.with_lse.scoring.sink is not None:
            p, q = self.call.sink_mass, self.with_lse.sink_mass
            middle, entr = (p + q) / 2, torch.special.entr
            divergence = divergence + entr(middle) - (entr(p) + entr(q)) / 2
            variation = variation + (p - q).abs()
            product, left, right = product + p * q, left + p * p, right + q * q
        size = (left * right).clamp(min=torch.finfo(left.dtype).tiny).sqrt()
        return Comparison(divergence.clamp(min=0.0), variation / 2, product / size)
