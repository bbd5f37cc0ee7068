"""How many scores a mask allows for some queries, and with whose keys: for balancing and planning, at any length.

A rectangle that a mask calls FULL counts as a whole, an EMPTY one not at all; only PARTIAL ones are halved further,
the largest first, down to a smallest tile, or until asking tells nothing more. What share of the rest is
allowed is measured on a few cells.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from regard.masks import Mask, Tile

SAMPLED_TILES = 16, 4096
"""Partial tiles of which some cells are looked at: of a set at least, and of all sets together."""

MAX_SMALL_TILES = 256
"""The most for all smallest tiles together: they are of one size, and what they lack is little."""

MAX_SAMPLED_ROWS = 128
"""Rows and columns of such a tile that are looked at."""

MAX_TILES_ACROSS = 1 << 14
"""Smallest tiles along the whole sequence, for each rank at most 64: what counting takes grows with them."""

QUESTIONS = 32
"""Rectangles of a set about which a mask is asked at first, then four times as many, again and again, while that leaves
`MUCH_LEFT` of the cells undecided or less: a stride stays undecided everywhere, the edge of a window a quarter each
time. One without a closed form, which would have to look at all cells, is not asked: some cells are looked at."""

MUCH_LEFT = 0.75


def tile_edge(length: int, ranks: int) -> int:
    """Rows and columns of the smallest tile for so many ranks."""
    return max(16, length // min(64 * ranks, MAX_TILES_ACROSS))


class Part(NamedTuple):
    """Keys that some consecutive queries see: all of them, or this share."""

    rows: range
    columns: range
    share: float

    @property
    def scores(self) -> float:
        return len(self.rows) * len(self.columns) * self.share


class Work:
    """How many scores are allowed between sets of queries and ranges of keys.

    Args:
        mask: bound to the whole call.
        queries: for each set (a rank, say) its ranges. key_len: keys of the call.
        edge: rows and columns of the smallest tile.
    """

    def __init__(self, mask: Mask, queries: Sequence[Sequence[range]], key_len: int, edge: int) -> None:
        self.key_len = key_len
        fewest, sampled = SAMPLED_TILES
        samples = max(fewest, sampled // max(1, len(queries)))
        found = [list(_tiles(mask, ranges, range(key_len), edge)) for ranges in queries]
        small = [tile for tiles in found for tile in tiles if tile.kind is Tile.PARTIAL and not tile.larger_than(edge)]
        share = _share(mask, small, MAX_SMALL_TILES)
        self._parts = [list(_parts(mask, tiles, edge, share, samples)) for tiles in found]

    def of(self, number: int) -> float:
        """All scores of a set of queries."""
        return sum(part.scores for part in self._parts[number])

    def totals(self) -> list[float]:
        """The same for every set."""
        return [self.of(number) for number in range(len(self._parts))]

    def until(self, number: int, ends: Sequence[int]) -> Tensor:
        """For a set of queries, its scores with all keys before each of these ends: float64 [ends]."""
        changes: dict[int, float] = {0: 0.0, self.key_len: 0.0}
        for part in self._parts[number]:
            height = len(part.rows) * part.share
            changes[part.columns.start] = changes.get(part.columns.start, 0.0) + height
            changes[part.columns.stop] = changes.get(part.columns.stop, 0.0) - height
        places = sorted(changes)
        heights = list(accumulate(changes[place] for place in places))
        before = [0.0, *accumulate(h * (b - a) for h, (a, b) in zip(heights, pairwise(places), strict=False))]
        at = [bisect_right(places, end) - 1 for end in ends]
        scores = [before[n] + heights[n] * (end - places[n]) for n, end in zip(at, ends, strict=True)]
        return torch.tensor(scores, dtype=torch.float64)


class _Asked(NamedTuple):
    """A rectangle that is not empty, and what a mask said of it."""

    rows: range
    columns: range
    kind: Tile

    def larger_than(self, edge: int) -> bool:
        return max(len(self.rows), len(self.columns)) > edge


def _tiles(mask: Mask, queries: Sequence[range], keys: range, edge: int) -> Iterator[_Asked]:
    """The rectangles that are not empty, halved until they are full or small, or asking has told too little."""
    todo = [(-len(rows) * len(keys), number, rows, keys) for number, rows in enumerate(queries) if rows and keys]
    heapq.heapify(todo)
    number, asked, questions = len(todo), 0, QUESTIONS
    undecided = before = -sum(cells for cells, *_ in todo)
    while todo:
        cells, _, rows, columns = heapq.heappop(todo)
        asked += 1
        tile = _Asked(rows, columns, mask.tile(rows, columns) if mask.closed_form else Tile.PARTIAL)
        if tile.kind is not Tile.PARTIAL:
            undecided += cells
        if asked >= questions and mask.closed_form and undecided <= MUCH_LEFT * before:
            before, questions = undecided, 4 * questions
        if tile.kind is Tile.PARTIAL and tile.larger_than(edge) and asked < questions:
            for half in _halves(rows, columns):
                heapq.heappush(todo, (-len(half[0]) * len(half[1]), number, *half))
                number += 1
        elif tile.kind is not Tile.EMPTY:
            yield tile


def _halves(rows: range, columns: range) -> Iterator[tuple[range, range]]:
    """Both halves of a rectangle, cut across its longer side."""
    if len(columns) >= len(rows):
        half = columns.start + -(-len(columns) // 2)
        yield from ((rows, range(columns.start, half)), (rows, range(half, columns.stop)))
    else:
        half = rows.start + -(-len(rows) // 2)
        yield from ((range(rows.start, half), columns), (range(half, rows.stop), columns))


def _parts(mask: Mask, tiles: Sequence[_Asked], edge: int, share: float, samples: int) -> Iterator[Part]:
    """The same with what is allowed of them.

    Args:
        share: of the smallest partial tiles; that of larger ones is measured, of each where there are few.
    """
    large = [tile for tile in tiles if tile.kind is Tile.PARTIAL and tile.larger_than(edge)]
    of_all = _share(mask, large, samples) if len(large) > samples else None
    for rows, columns, kind in tiles:
        found = 1.0 if kind is Tile.FULL else share
        if kind is Tile.PARTIAL and max(len(rows), len(columns)) > edge:
            found = _share_of(mask, rows, columns) if of_all is None else of_all
        yield Part(rows, columns, found)


def _share(mask: Mask, partial: Sequence[_Asked], samples: int) -> float:
    """The share of the cells of partial tiles that is allowed, from a few of them, evenly chosen."""
    step = max(1, len(partial) // samples)
    allowed = cells = 0.0
    for rows, columns, _ in partial[step // 2 :: step]:
        allowed += _share_of(mask, rows, columns) * len(rows) * len(columns)
        cells += len(rows) * len(columns)
    return allowed / cells if cells else 0.0


def _share_of(mask: Mask, rows: range, columns: range) -> float:
    """The share of the cells of a tile that is allowed, from some of its rows and columns."""
    places = (_some_of(side, step) for side, step in zip((rows, columns), STEPS, strict=True))
    return float(mask.allowed(*places).double().mean())


STEPS = 0.7548776662466927, 0.5698402909980532
"""Rows and columns in steps of these parts of a whole are spread evenly, and in step neither with each other nor with
the period of a mask (Roberts 2018, "The unreasonable effectiveness of quasirandom sequences")."""


def _some_of(side: range, step: float) -> Tensor:
    """At most `MAX_SAMPLED_ROWS` places of a range; all of them, or spread."""
    if len(side) <= MAX_SAMPLED_ROWS:
        return torch.arange(side.start, side.stop)
    parts = torch.arange(1, MAX_SAMPLED_ROWS + 1, dtype=torch.float64) * step
    return side.start + (parts.frac() * len(side)).long()
