"""The log-sum-exp of a call's scores: by the compiled kernel, by tiles, or from one call of attention."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels import Call, choose
from regard.numerics import exp, finite_lse, upcast
from regard.observation import compiled
from regard.observation.observed import ObservedCall
from regard.observation.statistic import PerQuery, Result, Statistic
from regard.observation.streaming import stream
from regard.observation.tile import ScoreTile, TileWithoutLse
from regard.observation.tiling import plan_tiles


def settled(call: ObservedCall, entropy_alone: bool = False) -> tuple[ObservedCall, Tensor | None]:
    """A call with its lse; with its entropy too, if a fused call computed both.

    Without the compiled kernel, a fused call is faster if only the entropy is wanted, or if gradients are: attention's
    backward pass is cheaper.
    """
    if call.knows_lse:
        return call, None
    entropy = None
    if call.is_product and (entropy_alone or call.wants_grad):
        lse, entropy = fused_lse(call)
    else:
        lse = lse_of(call, range(call.grid.query_len))
    return replace(call, lse=lse), entropy


def fused_lse(call: ObservedCall) -> tuple[Tensor, Tensor]:
    """lse and entropy from one call of attention with the keys as values: H = lse - scale q . (sum_j w k_j)."""
    query, key = upcast(call.query), upcast(call.key)
    of_keys = Call(query, key, key, call.scoring, None, wants_lse=True)
    attended, lse = choose(of_keys).run(of_keys)
    assert lse is not None
    # a fully masked query may hold NaN, and 0 * NaN is NaN
    query = query.masked_fill((attended.detach() == 0).all(-1, keepdim=True), 0.0)
    entropy = finite_lse(lse) - call.scoring.scale * (query * attended).sum(-1)
    sink = call.sink
    if sink is not None:
        entropy = entropy - (sink - finite_lse(lse)).exp() * sink
    return lse, entropy.clamp(min=0.0)


def lse_of(call: ObservedCall, queries: range) -> Tensor:
    """lse of some queries, by the compiled kernel or by tiles: [batch, heads, len(queries)]."""
    if compiled.supports(call) and (found := compiled.lse_of(call, queries)) is not None:
        return found
    with torch.no_grad():
        lse = _one(replace(call, lse=None), _LogSumExp(queries))
    if not call.wants_grad:
        return lse
    # log of a sum that is 1 but carries the gradient: unlike a running maximum, sums save nothing for backward
    known = replace(call, lse=F.pad(lse, (queries.start, call.grid.query_len - queries.stop)))
    total = _one(known, _Total(queries))[:, :, queries.start : queries.stop]
    sink = call.sink
    if sink is not None:
        total = total + (sink - finite_lse(lse)).exp()
    return lse + total.masked_fill(lse == -math.inf, 1.0).log()


class _LogSumExp(Statistic[Tensor]):
    """lse of some queries, without a gradient."""

    keeps_tiles = False
    takes_strips = True

    def __init__(self, queries: range) -> None:
        self.queries = queries

    def start(self, call: ObservedCall) -> None:
        self.top = call.lse_of_empty
        self.total = (self.top != -math.inf).to(self.top.dtype)

    def area(self) -> tuple[range, range]:
        return self.queries, range(self.call.grid.key_len)

    def of(self, tile: ScoreTile) -> tuple[Tensor, Tensor]:
        assert isinstance(tile, TileWithoutLse)
        return tile.sums()

    def add(self, tile: ScoreTile, part: tuple[Tensor, Tensor]) -> None:
        (top, total), tops, totals = part, tile.rows_of(self.top), tile.rows_of(self.total)
        largest = torch.maximum(tops, top)
        shift = finite_lse(largest)
        totals.copy_(totals * exp(tops - shift) + total * exp(top - shift))
        tops.copy_(largest)

    def finish(self) -> Tensor:
        lse = (finite_lse(self.top) + self.total.log()).masked_fill(self.total == 0, -math.inf)
        return lse[:, :, self.queries.start : self.queries.stop]


class _Total(PerQuery):
    """The sum of each query's weights, for some queries: 1, carrying the gradient of lse."""

    def __init__(self, queries: range) -> None:
        self.queries = queries

    def area(self) -> tuple[range, range]:
        return self.queries, range(self.call.grid.key_len)

    def of(self, tile: ScoreTile) -> Tensor:
        return tile.weights.sum(-1)


def _one(call: ObservedCall, statistic: Statistic[Result]) -> Result:
    """A single statistic of a call."""
    begun = statistic.begun(call)
    stream(call, [begun], plan_tiles(call, *begun.area(), strips=begun.takes_strips))
    return begun.finish()
