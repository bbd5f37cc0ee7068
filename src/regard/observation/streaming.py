"""One pass over all tiles of a plan for some statistics, and once more in the backward pass.

The tiles are chosen in `tiling`; what is computed from them is up to the statistics.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.indexing import hull, overlap
from regard.observation.hiding import Hiding
from regard.observation.magnitude import UNKNOWN, magnitude_of
from regard.observation.observed import ObservedCall
from regard.observation.statistic import Statistic
from regard.observation.tile import BUFFERS, ScoreTile, TilePlace, TileWithoutLse, tile_of
from regard.observation.tiling import BatchPlan, TilePlan

Progress = Callable[[int, int], None]
"""Called with the number of queries done, and of all."""


def silent(done: int, all: int) -> None:
    """Reports no progress."""


def stream(
    call: ObservedCall,
    statistics: Sequence[Statistic[Any]],
    plan: TilePlan,
    progress: Progress = silent,
    lse: Tensor | None = None,
) -> None:
    """Passes the tiles to statistics that have been started, to each those that it needs: row by row, left to right.

    Args:
        call: tiles get its lse; None: they have none.
        lse: the tensor into which tiles that hold whole rows write theirs.
    """
    areas = [statistic.area() for statistic in statistics]
    others = (other for statistic in statistics for other in statistic.others())
    differentiable = call.wants_grad or any(other.wants_grad for other in others)
    memory = None
    if not differentiable and not any(statistic.keeps_tiles for statistic in statistics):
        memory = torch.empty(BUFFERS, plan.max_scores, dtype=call.dtype, device=call.grid.device)
    done, total = 0, sum(len(queries) for group in plan.batches for queries in group.queries)
    for group in plan.batches:
        parts = [_Part(call, group, heads) for heads in group.heads] if group.queries else []
        for number, queries in enumerate(group.queries):
            for keys, in_strips in plan.tiles_of(group, queries):
                wanting = [
                    statistic
                    for statistic, area in zip(statistics, areas, strict=True)
                    if overlap(queries, area[0]) and overlap(keys, area[1])
                ]
                hiding: dict[int, Hiding] = {}
                for part in parts:
                    tile = part.show(number, keys, in_strips, hiding, wanting, memory, differentiable)
                    if lse is not None and isinstance(tile, TileWithoutLse):
                        tile.rows_of(lse).copy_(tile.lse)
            done += len(queries)
            progress(done, total)


class _Part:
    """The batch indices and heads of a call that are in a tile together, split into the pieces of its tiles."""

    def __init__(self, call: ObservedCall, group: BatchPlan, heads: slice) -> None:
        part = call.select(range(group.batch.start, group.batch.stop), range(heads.start, heads.stop))
        queries, keys = hull(group.queries), group.keys
        query, key, lse = part.tensors(slice(queries.start, queries.stop), slice(keys.start, keys.stop))
        # split, not sliced: the gradient of a slice is as large as the whole tensor, that of a split only as its piece
        down = [len(queries) for queries in group.queries]
        self.query, self.key = query.split(down, dim=2), key.split(group.step, dim=2)
        if not key.requires_grad:  # copied once, since every tile of one head would copy its own for a product
            self.key = tuple(piece.contiguous() for piece in self.key)
        self.lse = None if lse is None else lse.split(down, dim=2)
        self.group = group
        self._packed: tuple[int, Tensor] = -1, query
        self.scoring, self.in_place = part.scoring, part.from_products
        known = self.in_place and not part.wants_grad
        self.magnitude = magnitude_of(query, key, part.scoring) if known else UNKNOWN
        self.place = part.place(group.batch, heads, queries, keys)

    def show(
        self, number: int, keys: range, in_strips: bool, hiding: dict[int, Hiding],
        statistics: list[Statistic[Any]], memory: Tensor | None, differentiable: bool,
    ) -> ScoreTile:  # fmt: skip
        """Passes one tile to some statistics; if gradients are recorded, so that the backward pass recomputes it.

        Args:
            hiding: what each mask hides in the tile, by its id, since parts share masks; filled in here.
        """
        place, inside = self.place._replace(queries=self.group.queries[number], keys=keys), slice(None)
        if in_strips:
            place, tensors = self._in_strips(place, number)
        else:
            piece, first = divmod(keys.start - self.group.keys.start, self.group.step)
            inside = slice(first, first + len(keys))
            tensors = self._queries(number), self.key[piece], None if self.lse is None else self.lse[number]

        how: dict[str, Any] = {"in_place": self.in_place, "magnitude": self.magnitude, "memory": memory}
        if not differentiable:  # which would keep what is hidden until the backward pass
            mask = self.scoring.mask
            if id(mask) not in hiding:
                hiding[id(mask)] = Hiding(mask, place.queries, keys)
            how["hiding"] = hiding[id(mask)]

        def made(query: Tensor, key: Tensor, lse: Tensor | None) -> ScoreTile:
            return tile_of(place, self.scoring, query, key[:, :, inside], lse, **how)

        def parts(query: Tensor, key: Tensor, lse: Tensor | None) -> tuple[Any, ...]:
            tile = made(query, key, lse)
            return tuple(statistic.of(tile) for statistic in statistics)

        tile = made(*tensors)
        if differentiable:
            found = checkpoint(parts, *tensors, use_reentrant=False, preserve_rng_state=False)
            for statistic, part in zip(statistics, found, strict=True):
                statistic.add(tile, part)
        else:
            for statistic in statistics:
                statistic.see(tile)
        return tile

    def _queries(self, number: int) -> Tensor:
        """The queries of a row of tiles: copied once if they do not lie together, as products need them, but
        one row at a time: the copies of all would be new memory in every pass, which takes longer than to fill it."""
        if self._packed[0] != number:
            query = self.query[number]
            self._packed = number, query if query.requires_grad else query.contiguous()
        return self._packed[1]

    def _in_strips(self, place: TilePlace, number: int) -> tuple[TilePlace, tuple[Tensor, Tensor, Tensor | None]]:
        """The place, query, key and lse of strips as one tile: views [strips, heads, ...], with keys that overlap."""
        assert self.group.strips is not None
        height, first = self.group.strips.height, place.keys.start - self.group.keys.start
        times = len(place.queries) // height
        key = self.key[0][0, :, first : first + (times - 1) * height + len(place.keys)]
        query, lse = (
            None if tensor is None else tensor[number][0].unflatten(1, (times, height)).transpose(0, 1)
            for tensor in (self.query, self.lse)
        )
        assert query is not None
        place = place._replace(queries=place.queries[:height], times=times)
        return place, (query, key.unfold(1, len(place.keys), height).permute(1, 0, 3, 2), lse)
