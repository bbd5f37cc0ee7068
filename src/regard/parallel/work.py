"""How many scores a mask allows for some queries, and with whose keys: for balancing and planning, at any length.

A rectangle that a mask calls FULL counts as a whole, an EMPTY one not at all; only PARTIAL ones are halved further,
down to a smallest tile. What share of such tiles is allowed is measured on a few of them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.masks import Mask, Tile

MAX_SAMPLED_TILES = 16
"""Partial tiles whose cells are looked at."""

MAX_SAMPLED_ROWS = 64
"""Rows and columns of such a tile that are looked at."""


MAX_TILES_ACROSS = 1 << 14
"""Smallest tiles along the whole sequence, for each rank at most 64: what counting takes grows with them."""


def tile_edge(length: int, ranks: int) -> int:
    """Rows and columns of the smallest tile for so many ranks."""
    return max(16, length // min(64 * ranks, MAX_TILES_ACROSS))


class Part(NamedTuple):
    """Keys that some consecutive queries see, all of them or in part."""

    rows: range
    columns: range
    tile: Tile


class Work:
    """How many scores are allowed between sets of queries and ranges of keys.

    Args:
        mask: bound to the whole call.
        queries: for each set (a rank, say) its ranges. key_len: keys of the call.
        edge: rows and columns of the smallest tile.
    """

    def __init__(self, mask: Mask, queries: Sequence[Sequence[range]], key_len: int, edge: int) -> None:
        self.key_len = key_len
        self._parts = [
            [part for rows in ranges for part in _parts(mask, rows, range(key_len), edge)] for ranges in queries
        ]
        partial = [part for parts in self._parts for part in parts if part.tile is Tile.PARTIAL]
        self.share = _share(mask, partial)

    def of(self, number: int) -> float:
        """All scores of a set of queries."""
        return sum(len(part.rows) * len(part.columns) * self._weight(part) for part in self._parts[number])

    def totals(self) -> list[float]:
        """The same for every set."""
        return [self.of(number) for number in range(len(self._parts))]

    def until(self, number: int, ends: Tensor) -> Tensor:
        """For a set of queries, its scores with all keys before each of these ends, float64 in their shape."""
        changes: dict[int, float] = {0: 0.0, self.key_len: 0.0}
        for part in self._parts[number]:
            height = len(part.rows) * self._weight(part)
            changes[part.columns.start] = changes.get(part.columns.start, 0.0) + height
            changes[part.columns.stop] = changes.get(part.columns.stop, 0.0) - height
        places = torch.tensor(sorted(changes), dtype=torch.int64)
        heights = torch.tensor([changes[place] for place in places.tolist()], dtype=torch.float64).cumsum(0)
        before = torch.cat([heights.new_zeros(1), (heights[:-1] * places.diff()).cumsum(0)])
        at = torch.searchsorted(places, ends, right=True) - 1
        return before[at] + heights[at] * (ends - places[at])

    def _weight(self, part: Part) -> float:
        return 1.0 if part.tile is Tile.FULL else self.share


def _parts(mask: Mask, rows: range, columns: range, edge: int) -> Iterator[Part]:
    """The rectangles that are not empty, halved until they are full or small."""
    todo = [(rows, columns)]
    while todo:
        rows, columns = todo.pop()
        tile = mask.tile(rows, columns)
        if tile is Tile.EMPTY:
            continue
        if tile is Tile.FULL or max(len(rows), len(columns)) <= edge:
            yield Part(rows, columns, tile)
        elif len(columns) >= len(rows):
            half = columns.start + -(-len(columns) // 2)
            todo += [(rows, range(columns.start, half)), (rows, range(half, columns.stop))]
        else:
            half = rows.start + -(-len(rows) // 2)
            todo += [(range(rows.start, half), columns), (range(half, rows.stop), columns)]


def _share(mask: Mask, partial: Sequence[Part]) -> float:
    """The share of the cells of partial tiles that is allowed, from a few of them, evenly chosen."""
    step = max(1, len(partial) // MAX_SAMPLED_TILES)
    allowed = cells = 0.0
    for part in partial[step // 2 :: step]:
        rows, columns = (_some_of(side) for side in (part.rows, part.columns))
        found = mask.allowed(rows, columns).double().mean()
        allowed += float(found) * len(part.rows) * len(part.columns)
        cells += len(part.rows) * len(part.columns)
    return allowed / cells if cells else 0.0


def _some_of(side: range) -> Tensor:
    """At most `MAX_SAMPLED_ROWS` places of a range, evenly chosen."""
    return torch.linspace(side.start, side.stop - 1, min(len(side), MAX_SAMPLED_ROWS), dtype=torch.float64).long()
