"""Statistics of the weights of a sequence that no single process holds.

The statistics are those of `regard.observe`, and see the same tiles with the same positions: each rank shows them its
own queries with its own keys, and then with those that arrive. What is counted per query is then whole on the rank that
holds the query; sums per key, and the pixels of images, are added up over the ranks. A statistic holds its numbers for
the whole length on every rank: a few per token and head, never one per pair.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from regard import hints
from regard.biases import Bias
from regard.graphs import uncompiled
from regard.hints import hinted
from regard.indexing import split_at
from regard.masks import Mask
from regard.numerics import finite_lse, without_autocast
from regard.observation import (
    Distance,
    Entropy,
    Image,
    Mass,
    MaxScore,
    ObservedCall,
    PerKey,
    PerQuery,
    Pyramid,
    Received,
    Spread,
    Statistic,
    Top,
    tuning,
)
from regard.observation.measures import Largest
from regard.observation.spans import Span
from regard.observation.statistic import check_statistics
from regard.observation.tile import TilePlace, tile_of
from regard.parallel import passes
from regard.parallel.channel import APART, DEFAULT_TIMEOUT
from regard.parallel.exchange import Rectangle, plan_exchange
from regard.parallel.functional import TAGS, AgreedCall, agree_on_call
from regard.parallel.passes import Arrivals, ShardedCall
from regard.parallel.shards import Shards
from regard.scores import Additive
from regard.shapes import check_kind, kind


class ShardedObservation:
    """The weights of an attention call over many ranks, to be asked about; made by `regard.parallel.observe`.

    Every rank asks the same questions in the same order. Answers per query and per key are those of the rank's own
    queries and keys; images are whole on every rank. Nothing is differentiable.
    """

    def __init__(self, query: Tensor, key: Tensor, agreed: AgreedCall, lse: Tensor | None) -> None:
        self.query, self.key = query.detach(), key.detach()
        self._agreed, self._lse = agreed, lse
        channel, _, call, queries, keys = agreed
        exchange = plan_exchange(call.scoring.mask_or_everything, queries, keys, channel.rank)
        self._call = ShardedCall(channel, 0, call.scoring, None, exchange, learns_keys=False)

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of each of the rank's queries: [batch, heads, query_len of this rank]; computed once."""
        if self._lse is None:
            with torch.no_grad(), without_autocast(self.query.device):
                one = self.key[..., :1]  # any value: only lse is kept
                _, self._lse = passes.forward(self._next(), self.query, self.key, one, self._call.scoring.sink)
        return self._lse

    @uncompiled(APART)
    def gather(self, *statistics: Statistic[Any]) -> tuple[Any, ...]:
        """Several statistics in one pass over the keys of all ranks.

        Args:
            statistics: those of `regard.observation` that are sums, largest values or images, or your own `PerQuery`
                or `PerKey`.
        Raises:
            TypeError: no statistic, or one of which it is not known how parts from several ranks are joined.
        """
        check_statistics(statistics)
        for statistic in statistics:
            if not isinstance(statistic, _KNOWN):
                raise TypeError(
                    f"parallel.observe: {type(statistic).__name__} derives from neither PerQuery nor PerKey, so it is "
                    "not known how the parts of several ranks are joined"
                )
        lse = self.lse
        with torch.no_grad(), without_autocast(self.query.device):
            whole = self._whole_call(lse)
            begun = [statistic.begun(whole) for statistic in statistics]
            self._stream(whole, begun, lse)
            return tuple(self._joined(statistic) for statistic in begun)

    def ask(self, statistic: Statistic[Any]) -> Any:
        """The answer of one statistic."""
        return self.gather(statistic)[0]

    def entropy(self) -> Tensor:
        """As `Observation.entropy`, of the rank's queries: [batch, heads, query_len of this rank]."""
        return cast(Tensor, self.ask(Entropy()))

    def top(self, count: int) -> Largest:
        """As `Observation.top`, of the rank's queries; keys are positions in the whole sequence."""
        return cast(Largest, self.ask(Top(count)))

    def received(self) -> Tensor:
        """As `Observation.received`, from the queries of all ranks: [batch, heads, key_len of this rank]."""
        return cast(Tensor, self.ask(Received()))

    def mass(self, groups: Tensor) -> Tensor:
        """As `Observation.mass`: groups int [key_len] or [batch, key_len] of the whole sequence."""
        return cast(Tensor, self.ask(Mass(groups)))

    def distance(self) -> Tensor:
        """As `Observation.distance`, of the rank's queries."""
        return cast(Tensor, self.ask(Distance()))

    def max_score(self) -> Tensor:
        """As `Observation.max_score`, of the rank's queries."""
        return cast(Tensor, self.ask(MaxScore()))

    def image(self, size: int = 512, pool: str = "max", queries: Span = None, keys: Span = None) -> Tensor:
        """As `Observation.image`: of the whole sequence, on every rank."""
        return cast(Tensor, self.ask(Image(size, pool, queries, keys)))  # type: ignore[arg-type]

    # --- one pass ---

    def _next(self) -> ShardedCall:
        """The call with tags that no pass before it had."""
        return replace(self._call, tag=TAGS * self._call.channel.count())

    def _whole_call(self, lse: Tensor) -> ObservedCall:
        """The call as statistics know it: its sizes, its scoring, and the lse of this rank's queries."""
        scoring, queries = self._call.scoring, self._agreed.queries
        every = torch.full((*lse.shape[:2], queries.length), -torch.inf, dtype=lse.dtype, device=lse.device)
        every[:, :, queries.positions(self._call.channel.rank, lse.device)] = lse
        return ObservedCall(self._agreed.call.query, self._agreed.call.key, scoring, every)

    def _stream(self, whole: ObservedCall, statistics: Sequence[Statistic[Any]], lse: Tensor) -> None:
        """Shows every tile of this rank's queries, parcel by parcel."""
        call, grid = self._next(), whole.grid
        numbers = torch.arange(grid.batch, device=grid.device), torch.arange(grid.heads, device=grid.device)
        wide = tuning.MAX_TILE_KEYS // 2
        high = max(1, tuning.MAX_TILE_SCORES // (wide * max(1, grid.batch * grid.heads)))
        finite = finite_lse(lse)

        def show(places: Iterable[Rectangle], key: Tensor) -> None:
            for rows, seen, row, column in places:
                for some in split_at(rows, rows.start, high):
                    at = slice(some.start - rows.start + row.start, some.stop - rows.start + row.start)
                    for few in split_at(seen, seen.start, wide):
                        to = slice(few.start - seen.start + column.start, few.stop - seen.start + column.start)
                        place = TilePlace(slice(0, grid.batch), slice(0, grid.heads), some, few, *numbers)
                        tile = tile_of(place, call.scoring, self.query[:, :, at], key[:, :, to], finite[:, :, at])
                        for statistic in statistics:
                            statistic.see(tile)

        arrivals = Arrivals(call, self.key, self.key[..., :0], call.tag)
        show(call.exchange.rectangles, self.key)
        for turn, parcel in arrivals:
            show(turn.rectangles, parcel.key)

    def _joined(self, statistic: Statistic[Any]) -> Any:
        """The answer of a statistic that every rank has shown its tiles: this rank's part of it."""
        channel, rank = self._call.channel, self._call.channel.rank
        if isinstance(statistic, PerKey):
            channel.reduce(statistic.total, dist.ReduceOp.SUM)
            return self._agreed.keys.take(statistic.finish(), rank)
        if isinstance(statistic, (Image, Pyramid)):
            image = statistic if isinstance(statistic, Image) else statistic.finest
            channel.reduce(image.pixels, dist.ReduceOp.MAX if image.pool == "max" else dist.ReduceOp.SUM)
            return statistic.finish()
        queries, found = self._agreed.queries, statistic.finish()
        if isinstance(found, Tensor):
            return queries.take(found, rank)
        return type(found)(*(queries.take(part, rank) if part.dim() > 2 else part for part in found))


_KNOWN = (PerQuery, PerKey, Top, MaxScore, Spread, Image, Pyramid)
"""Statistics of which it is known how parts of several ranks are joined."""


@hinted(hints.ATTENTION)
@uncompiled(APART)
def observe(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    additive: Additive | None = None,
    lse: Tensor | None = None,
    shards: Shards | None = None,
    key_shards: Shards | None = None,
    group: object = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> ShardedObservation:
    """`regard.observe` of a sequence that lies in shards on many ranks.

    Takes the arguments of `regard.parallel.attention` except value and dropout, and raises what it raises.

    Shapes:
        query [batch, heads, query_len of this rank, head_dim], key [batch, kv_heads, key_len of this rank, head_dim].
    Args:
        lse: [batch, heads, query_len of this rank] if `attention_with_lse` has given it already, on every rank; None:
            computed when needed.
    """
    if lse is not None:
        check_kind("parallel.observe", "lse", lse, Tensor)
    agreed = agree_on_call(
        "parallel.observe", query, key, key, mask, bias, scale, softcap, sink, additive, 0.0, None, shards, key_shards,
        group, timeout, more=f"lse {'computed' if lse is None else 'given'}",
    )  # fmt: skip
    if lse is not None and lse.shape != query.shape[:3]:
        raise ValueError(f"parallel.observe: lse must be {list(query.shape[:3])}, got {kind(lse)}")
    return ShardedObservation(query, key, agreed, None if lse is None else lse.detach())
