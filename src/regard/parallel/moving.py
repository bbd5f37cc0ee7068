"""A part of a call as a call of its own: mask, bias and dropout counted from its first query and key."""

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from regard.biases import Bias, Given, Sum
from regard.dropout import Cells
from regard.indexing import Indices, shifted
from regard.kernels.known import cached_by_mask
from regard.masks import EVERYTHING, Mask, Tile
from regard.scores import Scoring
from regard.shapes import Grid


class Origin(NamedTuple):
    """Where in a bias tensor of the whole call a part of it lies."""

    whole: Tensor
    rows: range
    columns: range


Origins = MutableMapping[int, Origin]
"""The origin of every part of a bias tensor, by the id of the part."""


def part_of(scoring: Scoring, queries: range, keys: range, origins: Origins) -> Scoring:
    """How scores are computed in a rectangle of a call, as in a call of these queries and keys alone.

    The sink is left out: it belongs to whole rows.
    """
    whole = scoring.grid
    bias = None if scoring.bias is None else moved_bias(scoring.bias, queries, keys, whole, origins)
    mask = moved_mask(scoring.mask_or_everything, queries, keys, whole)
    grid = whole._replace(query_len=len(queries), key_len=len(keys))
    return replace(scoring, grid=grid, bias=bias, mask=mask, sink=None)


@cached_by_mask(maxsize=256)
def moved_mask(mask: Mask, queries: range, keys: range, grid: Grid) -> Mask:
    """What a bound mask says of a rectangle that is not empty."""
    left = mask.restrict(queries, keys)
    assert left is not Tile.EMPTY
    return EVERYTHING if isinstance(left, Tile) else left.counted_from(queries.start, keys.start, grid)


def moved_bias(bias: Bias, queries: range, keys: range, grid: Grid, origins: Origins) -> Bias:
    """What a bound bias adds in a rectangle; a tensor's part is a view, noted in `origins`."""
    if isinstance(bias, Sum):
        return Sum(*(moved_bias(side, queries, keys, grid, origins) for side in (bias.left, bias.right)))
    if isinstance(bias, Given):
        rows, columns = (
            side if size > 1 else range(1) for side, size in zip((queries, keys), bias.numbers.shape[2:], strict=True)
        )
        part = Given(of_rectangle(bias.numbers.detach(), rows, columns))
        part.numbers.requires_grad_(bias.numbers.requires_grad)
        origins[id(part.numbers)] = Origin(bias.numbers, rows, columns)
        return part
    return MovedBias(bias, queries.start, keys.start, grid)


def of_rectangle(numbers: Tensor, rows: range, columns: range) -> Tensor:
    """Rows and columns of [..., query_len, key_len], as a view."""
    return numbers[..., rows.start : rows.stop, columns.start : columns.stop]


class MovedBias(Bias):
    """What a bound bias adds in a part of its call that begins at a query and key.

    Args:
        grid: the whole call.
    """

    def __init__(self, bias: Bias, query: int, key: int, grid: Grid) -> None:
        self.bias, self.query, self.key, self.grid = bias, query, key, grid
        self.of_distance = bias.of_distance

    def bind(self, grid: Grid) -> Bias:
        return self  # of a bias that is bound already

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        return self.bias.values(shifted(queries, self.query), shifted(keys, self.key))

    def for_batch(self, index: int) -> Bias:
        grid = self.grid._replace(batch=1)
        return MovedBias(self.bias.for_batch(index).bind(grid), self.query, self.key, grid)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.bias.rule(batch, head, query + self.query, key + self.key)

    def __repr__(self) -> str:
        return repr(self.bias)


@dataclass(frozen=True, slots=True)
class Within:
    """Where the cells of a part of a call lie in it.

    Attributes:
        grid: the whole call. query, key, head: the first of the part.
    """

    grid: Grid
    query: int = 0
    key: int = 0
    head: int = 0

    def __call__(self, cells: Cells) -> Cells:
        heads = range(cells.heads.start + self.head, cells.heads.stop + self.head)
        queries, keys = shifted(cells.queries, self.query), shifted(cells.keys, self.key)
        return Cells(self.grid, cells.batches, heads, queries, keys)
