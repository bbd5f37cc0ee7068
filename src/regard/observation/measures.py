"""Statistics per query or per key. Each is described at the method of `Observation` that uses it.

A new one derives from `PerQuery`, `PerKey` or `Statistic`; it knows the call and its tiles, and no other statistic.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.numerics import LOG2_E, grouped_matmul, upcast, zero_unseen
from regard.observation.observed import ObservedCall
from regard.observation.products import largest
from regard.observation.selecting import kv_of_heads
from regard.observation.statistic import PerKey, PerQuery, Statistic
from regard.observation.tile import ScoreTile
from regard.shapes import INTEGER_DTYPES, ShapeError, check_whole, is_number, is_plain, kind


class Entropy(PerQuery):
    """See `Observation.entropy`."""

    takes_strips = True

    def of(self, tile: ScoreTile) -> Tensor:
        return tile.negentropy()

    def finish(self) -> Tensor:
        entropy = 0.0 - self.total / LOG2_E
        sink = self.call.sink
        if sink is not None:
            entropy = entropy + self.call.sink_mass * (self.call.finite_lse - sink)
        return entropy.clamp(min=0.0)


class Received(PerKey):
    """See `Observation.received`."""

    takes_strips = True

    def of(self, tile: ScoreTile) -> Tensor:
        powers = tile.powers
        if tile.total is None:
            return powers.sum(-2)
        return (tile.total.reciprocal()[..., None, :] @ powers)[..., 0, :]


class Attended(PerQuery):
    """The output of attention: the weighted sum of the values, [batch, heads, query_len, value_dim].

    Args:
        value: [batch, kv_heads, key_len, value_dim].
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def start(self, call: ObservedCall) -> None:
        self.extra = (self.value.shape[-1],)
        super().start(call)

    def of(self, tile: ScoreTile) -> Tensor:
        value = kv_of_heads(self.value, self.call.grid.heads, range(tile.heads.start, tile.heads.stop))
        value = upcast(value[tile.batch, :, tile.keys.start : tile.keys.stop])
        return tile.rescaled(grouped_matmul(tile.powers, zero_unseen(value, tile.allowed)))


class Visible(PerQuery):
    """See `Observation.visible`."""

    needs_weights = False
    dtype = torch.int64

    def of(self, tile: ScoreTile) -> Tensor:
        return tile.num_allowed(-1)


class Viewers(PerKey):
    """See `Observation.viewers`."""

    needs_weights = False
    dtype = torch.int64

    def of(self, tile: ScoreTile) -> Tensor:
        return tile.num_allowed(-2)


class Share(PerQuery):
    """See `Observation.share`."""

    def __init__(self, chosen: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.chosen = chosen

    def of(self, tile: ScoreTile) -> Tensor:
        _, _, query, key = tile.indices
        chosen = self.chosen(query, key[None])
        if chosen.dim() == 4:
            batch, heads = self.call.grid[:2]
            if chosen.shape[0] not in (1, batch) or chosen.shape[1] not in (1, heads):
                raise ShapeError(
                    f"Observation.share: chosen must broadcast to [{batch=}, {heads=}, rows={len(tile.queries)}, "
                    f"columns={len(tile.keys)}], got {list(chosen.shape)}"
                )
            chosen = chosen[tile.batch] if chosen.shape[0] > 1 else chosen
            chosen = chosen[:, tile.heads] if chosen.shape[1] > 1 else chosen
        return (tile.weights * chosen).sum(-1)


class Mass(PerQuery):
    """See `Observation.mass`."""

    def __init__(self, groups: Tensor) -> None:
        if not is_plain(groups) or groups.dtype not in INTEGER_DTYPES:
            raise TypeError(f"Observation.mass: groups must be an int tensor [batch, key_len], got {kind(groups)}")
        if groups.numel() and int(groups.min()) < 0:
            raise ValueError(f"Observation.mass: groups must be numbers from 0 on, got {int(groups.min())}")
        self.groups = groups

    def start(self, call: ObservedCall) -> None:
        batch, key_len = call.grid.batch, call.grid.key_len
        groups = self.groups.expand(batch, -1) if self.groups.dim() == 1 else self.groups
        if groups.shape != (batch, key_len):
            raise ShapeError(f"Observation.mass: groups must be [{batch=}, {key_len=}], got {list(groups.shape)}")
        self.member = F.one_hot(groups.long()).to(call.dtype)[:, None]
        self.extra = (self.member.shape[-1],)
        super().start(call)

    def of(self, tile: ScoreTile) -> Tensor:
        return tile.weights @ self.member[tile.batch, :, tile.keys.start : tile.keys.stop]


class Distance(PerQuery):
    """See `Observation.distance`."""

    def of(self, tile: ScoreTile) -> Tensor:
        _, _, query, key = tile.indices
        # the distances themselves, not a difference of means: float32 would lose it far into a text
        return (tile.weights * (query + self.call.behind - key)).sum(-1)


class Distances(NamedTuple):
    """Weight by distance: edges [bins + 1], mass [batch, heads, query_len, bins]."""

    edges: Tensor
    mass: Tensor


class Spread(Statistic[Distances]):
    """See `Observation.distances`."""

    keeps_tiles = False

    def __init__(self, edges: Sequence[int] | Tensor | None = None) -> None:
        self.given = edges

    def start(self, call: ObservedCall) -> None:
        edges = _doubling(call.grid.key_len, call.grid.query_len) if self.given is None else self.given
        if not (is_plain(edges) and not edges.is_complex()) and (
            not isinstance(edges, Sequence) or not all(map(is_number, edges))
        ):
            raise TypeError(f"Observation.distances: edges must be two or more rising numbers, got {kind(edges)}")
        self.edges = torch.as_tensor(edges, device=call.grid.device)
        if self.edges.dim() != 1 or len(self.edges) < 2 or not bool((self.edges.diff() > 0).all()):
            raise ValueError(f"Observation.distances: edges must be two or more rising numbers, got {edges}")
        self.mass = call.zero_sums(call.grid.query_len, len(self.edges) - 1)

    def of(self, tile: ScoreTile) -> Tensor:
        # shifts every row right by one column more than the row below it, so that each column holds one distance
        rows, columns = len(tile.queries), len(tile.keys)
        flat = F.pad(F.pad(tile.weights, (rows, 0)).flatten(-2), (0, rows))
        slanted = flat.unfold(-1, rows + columns, rows + columns + 1)
        first = tile.queries.start + self.call.behind - tile.keys.start + rows
        back = first - torch.arange(rows + columns, device=self.edges.device)
        bins = torch.bucketize(back, self.edges, right=True) - 1
        member = bins[:, None] == torch.arange(len(self.edges) - 1, device=bins.device)
        return slanted @ member.to(slanted.dtype)

    def add(self, tile: ScoreTile, part: Tensor) -> None:
        self.mass[tile.of_queries()] += part

    def finish(self) -> Distances:
        return Distances(self.edges, self.mass)


def _doubling(key_len: int, query_len: int) -> list[int]:
    """Edges: one bin for all keys ahead, then 0, 1, 2, 4, ... up to the farthest key."""
    edges = [-max(key_len, query_len), 0, 1]
    while edges[-1] < max(key_len, query_len):
        edges.append(2 * edges[-1])
    return edges


class MaxScore(PerQuery):
    """See `Observation.max_score`."""

    needs_weights = False
    keeps_tiles = False
    takes_strips = True

    def start(self, call: ObservedCall) -> None:
        self.total = call.zeros(call.grid.query_len) - torch.inf

    def of(self, tile: ScoreTile) -> Tensor:
        return tile.max_score.detach()

    def add(self, tile: ScoreTile, part: Tensor) -> None:
        rows = tile.rows_of(self.total)
        torch.maximum(rows, part, out=rows)


class Largest(NamedTuple):
    """The keys with the largest weights of each query, largest first: both [batch, heads, query_len, count]."""

    weights: Tensor
    keys: Tensor


class Top(Statistic[Largest]):
    """See `Observation.top`."""

    keeps_tiles = False
    takes_strips = True

    def __init__(self, count: int) -> None:
        self.count = count

    def start(self, call: ObservedCall) -> None:
        check_whole("Observation.top", "count", self.count, least=None)
        if not 1 <= self.count <= call.grid.key_len:
            raise ValueError(f"Observation.top: count must be 1 to key_len={call.grid.key_len}, got {self.count}")
        self.weights = call.zeros(call.grid.query_len, self.count)
        self.keys = call.zeros(call.grid.query_len, self.count, dtype=torch.int64)

    def of(self, tile: ScoreTile) -> Largest:
        return self._largest(tile, tile.weights.detach())

    def _largest(self, tile: ScoreTile, weights: Tensor, rows: Tensor | None = None) -> Largest:
        found = largest(weights, min(self.count, weights.shape[-1]))
        first = tile.first_keys if rows is None else tile.first_keys.expand(*rows.shape, 1)[rows]
        return Largest(found.values, found.columns + first)

    def add(self, tile: ScoreTile, part: Largest) -> None:
        weights, keys = tile.rows_of(self.weights), tile.rows_of(self.keys)
        for into, merged in zip((weights, keys), self._merged(weights, keys, part), strict=True):
            into.copy_(merged)

    def see(self, tile: ScoreTile) -> None:
        weights, keys = tile.rows_of(self.weights), tile.rows_of(self.keys)
        if not bool(weights.any()):  # there is nothing to merge with
            found = self._largest(tile, tile.powers)
            weights[..., : found.keys.shape[-1]] = tile.rescaled(found.weights)
            keys[..., : found.keys.shape[-1]] = found.keys
            return
        # top-k is the most expensive statistic: only for rows in which the tile has a larger weight than those found
        rows = tile.weights.amax(-1) > weights[..., -1]
        share = float(rows.float().mean())
        if share > 0.5:  # gathering them would cost more than it saves
            self.add(tile, self.of(tile))
        elif share:
            found = self._largest(tile, tile.weights[rows], rows)
            weights[rows], keys[rows] = self._merged(weights[rows], keys[rows], found)

    def _merged(self, weights: Tensor, keys: Tensor, part: Largest) -> Largest:
        top = largest(torch.cat([weights, part.weights], dim=-1), self.count)
        return Largest(top.values, torch.cat([keys, part.keys], dim=-1).gather(-1, top.columns))

    def finish(self) -> Largest:
        return Largest(self.weights, self.keys.masked_fill_(self.weights == 0, -1))
