"""A mask as programs on a GPU read it: for each block of queries the blocks of keys that it sees, and the reverse.

A block that is allowed in full is a number in a list; one that is allowed in part has a bit for each cell besides. If a
mask has a closed form, only blocks that it may allow in part are evaluated, all of them together, where the call is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.kernels.known import cached_by_mask
from regard.masks import Mask, Tile
from regard.masks.planning import visible
from regard.shapes import Grid

ROWS, COLUMNS = 128, 64
"""Queries and keys of a block, as programs have them."""

BLOCKS_TOGETHER = 1 << 12
"""Blocks that are evaluated at once: 32 MiB of bools, and eight times as much on the way to them."""


class Lists(NamedTuple):
    """For each block of queries (or keys) the blocks of keys (or queries), those allowed in full first.

    Attributes:
        begins: where in `others` each list begins, its partial blocks do, and the next list: int32, two of a list and
            the end. others: the numbers of blocks. cells: where the bits of partial ones are.
    """

    begins: Tensor
    others: Tensor
    cells: Tensor


@dataclass(frozen=True)
class Blocks:
    """The blocks of a mask.

    Attributes:
        by_query, by_key: lists, of all batch indices (or one for all), of all heads (or one for all).
        batch, heads: how many of these there are. bits: int32 [partial blocks, ROWS, COLUMNS / 32].
    """

    by_query: Lists
    by_key: Lists
    bits: Tensor
    batch: int
    heads: int

    others: ClassVar[tuple["Blocks", ...]] = ()
    is_kept: ClassVar[bool] = False
    """As of a `StripPlan`: no mask needs a second one, and a node of a graph asks anew."""


class Found(NamedTuple):
    """Blocks that are not empty: which of `batch * heads` they are of, their row and column, and whether in full."""

    of: Tensor
    row: Tensor
    column: Tensor
    full: Tensor


def _found(mask: Mask, grid: Grid) -> Blocks:
    one = range(1)
    batch, heads = mask.allowed(one, one).shape[:2]
    closed = _closed(mask, grid)
    full = closed[2]
    bits, found = [], [Found(*_of_each(batch * heads, (part[full] for part in closed), grid.device))]
    asked = _of_each(batch * heads, (part[~full] for part in closed[:2]), grid.device)
    for of, rows, columns in zip(*(part.split(BLOCKS_TOGETHER) for part in asked), strict=True):
        cells = _cells(mask, grid, of // heads, of % heads, rows, columns)
        some, every = cells.flatten(1).any(1), cells.flatten(1).all(1)
        bits.append(_packed(cells[some & ~every]))
        found.append(Found(of[some], rows[some], columns[some], every[some]))
    of_all = Found(*map(torch.cat, zip(*found, strict=True)))
    rows, columns = -(-grid.query_len // ROWS), -(-grid.key_len // COLUMNS)
    cells = (~of_all.full).cumsum(0) - 1
    by_query = _listed(of_all.of * rows + of_all.row, of_all.column, of_all.full, cells, batch * heads * rows)
    by_key = _listed(of_all.of * columns + of_all.column, of_all.row, of_all.full, cells, batch * heads * columns)
    packed = torch.cat(bits) if bits else torch.zeros(0, ROWS, COLUMNS // 32, dtype=torch.int32, device=grid.device)
    return Blocks(by_query, by_key, packed, batch, heads)


blocks_of = cached_by_mask(maxsize=32)(_found)
"""The blocks of a bound mask; kept, if it can be compared."""


def _of_each(times: int, blocks: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """The same blocks for so many batch indices and heads, which of them each is for in front."""
    parts = [part.to(device) for part in blocks]
    return [
        torch.arange(times, device=device).repeat_interleave(len(parts[0])),
        *(part.repeat(times) for part in parts),
    ]


def _closed(mask: Mask, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column of all blocks that may not be empty, and which of them are certainly allowed in full, for all
    batch indices and heads; as far as is known without evaluating a cell."""
    rows, columns = -(-grid.query_len // ROWS), -(-grid.key_len // COLUMNS)
    here = torch.device("cpu")  # where rectangles are judged, a number at a time
    if not mask.closed_form:
        row, column = (torch.arange(count, device=here) for count in (rows, columns))
        row, column = torch.cartesian_prod(row, column).unbind(1)
        return row, column, torch.zeros_like(row, dtype=torch.bool)
    judge = mask.to(here).bind(grid._replace(device=here))
    rectangles = [
        (range(row * ROWS, min((row + 1) * ROWS, grid.query_len)), range(grid.key_len)) for row in range(rows)
    ]
    parts = [
        (row, part.start // COLUMNS, -(-part.stop // COLUMNS), tile is Tile.FULL)
        for row, seen in enumerate(visible(judge, rectangles, COLUMNS))
        for part, tile in seen
    ]
    row, start, stop, full = torch.tensor(parts, dtype=torch.int64, device=here).view(-1, 4).unbind(1)
    sizes = stop - start
    row, full = row.repeat_interleave(sizes), full.repeat_interleave(sizes).bool()
    column = torch.arange(len(row), device=here) - (sizes.cumsum(0) - sizes - start).repeat_interleave(sizes)
    return row, column, full & ((column + 1) * COLUMNS <= grid.key_len)


def _cells(mask: Mask, grid: Grid, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Which cells of blocks are allowed, none beyond the last key: bool [blocks, ROWS, COLUMNS]."""
    query = row[:, None, None] * ROWS + torch.arange(ROWS, device=row.device)[:, None]
    key = column[:, None, None] * COLUMNS + torch.arange(COLUMNS, device=row.device)
    of = batch[:, None, None], head[:, None, None]
    said: Tensor = mask.rule(*of, query.clamp(max=grid.query_len - 1), key.clamp(max=grid.key_len - 1))
    return said.logical_and(key < grid.key_len).expand(-1, ROWS, COLUMNS)


def _packed(cells: Tensor) -> Tensor:
    """32 cells in each number, the first in its lowest bit."""
    places = torch.arange(8, dtype=torch.uint8, device=cells.device)
    eight: Tensor = cells.unflatten(2, (-1, 8)).to(torch.uint8) << places
    return eight.sum(-1, dtype=torch.uint8).view(torch.int32)


def _listed(of: Tensor, other: Tensor, full: Tensor, cells: Tensor, lists: int) -> Lists:
    """Lists of blocks, from the number of the list that each is in."""
    kind = 2 * of + ~full
    order = (kind * (1 + (int(other.max()) if len(other) else 0)) + other).argsort()
    begins = torch.searchsorted(kind[order], torch.arange(2 * lists + 1, device=of.device))
    return Lists(begins.int(), other[order].int(), cells[order].int())
