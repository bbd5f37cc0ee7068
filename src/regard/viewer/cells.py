"""Cells of a map: squares of weights that are drawn as one number, the largest weight or the mass in them.

    max     the largest weight in the cell
    mean    the mass: the mean over the cell's queries of the weight on its keys, so that a row of cells sums to 1 (less
            the sink's mass)

Both come from one reading of each tile of weights, which gives what every key received as well; cells of twice the
size follow.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.observation import Statistic
from regard.observation.images import pooled
from regard.observation.observed import ObservedCall
from regard.observation.spans import refuse_many
from regard.observation.tile import ScoreTile
from regard.viewer.codes import encode

Pool = Literal["max", "mean"]

SMALLEST_MASS = 2.0**-126
"""What a mass is taken for where weights are too small for a float32: its code is 1, and not 0, which is hidden."""


class Cells(NamedTuple):
    """A rectangle of cells: log2 of their largest weights and the sums of their weights, each [.., rows, columns].

    Attributes:
        peaks: -inf where all weights of a cell are hidden, and not where they are merely small.
        sums: None where they are not asked for: the weights themselves are then never computed.
        step: queries and keys of a cell. queries: how many there are in the rectangle; the last row may have fewer.
    """

    peaks: Tensor
    sums: Tensor | None
    step: int
    queries: int

    @staticmethod
    def blank(call: ObservedCall, step: int, queries: range, keys: range, *, sums: bool) -> "Cells":
        """Cells of a rectangle in which nothing has been seen yet."""
        rows, columns = (-(-len(span) // step) for span in (queries, keys))
        refuse_many(rows * columns, "cells", "larger cells")
        peaks = call.zeros(0).new_full((call.grid.batch, call.grid.heads, rows, columns), -math.inf)
        return Cells(peaks, call.zeros(rows, columns) if sums else None, step, len(queries))

    def coarser(self) -> "Cells":
        """Cells of twice the size."""

        def twice(cells: Tensor, pool: Pool) -> Tensor:
            return pooled(pooled(cells, 0, 2, -2, pool), 0, 2, -1, pool)

        sums = None if self.sums is None else twice(self.sums, "mean")
        return Cells(twice(self.peaks, "max"), sums, 2 * self.step, self.queries)

    def part(self, rows: slice, columns: slice) -> "Cells":
        """Some rows and columns of cells."""
        first, stop = rows.start * self.step, min(rows.stop * self.step, self.queries)
        sums = None if self.sums is None else self.sums[..., rows, columns]
        return Cells(self.peaks[..., rows, columns], sums, self.step, stop - first)

    def codes(self, pool: Pool) -> Tensor:
        """What is sent of them: uint16 [.., rows, columns]."""
        if pool == "max" or self.step == 1:
            return encode(self.peaks)
        assert self.sums is not None
        first = torch.arange(self.sums.shape[-2], device=self.sums.device) * self.step
        masses = self.sums / (self.queries - first).clamp(max=self.step)[:, None]
        return encode(masses.clamp(min=SMALLEST_MASS).log2().masked_fill(self.peaks == -math.inf, -math.inf))


class Filling(Statistic[Tensor | None]):
    """Fills the blank cells of a rectangle; gives the weight that each of its keys received, where there are sums.

    Args:
        cells: what is filled, row by row of tiles.
        queries, keys: the rectangle.
    """

    keeps_tiles = False

    def __init__(self, cells: Cells, queries: range, keys: range) -> None:
        self.cells, self.queries, self.keys = cells, queries, keys

    def start(self, call: ObservedCall) -> None:
        self.received = None if self.cells.sums is None else call.zeros(len(self.keys))

    def area(self) -> tuple[range, range]:
        return self.queries, self.keys

    def of(self, tile: ScoreTile) -> tuple[Tensor, Tensor | None]:
        """Peaks of the tile's cells, and the sums of each key's weights over the queries of a row of cells."""
        ((down, _), (across, _)), step = self._inside(tile), self.cells.step
        peaks = pooled(pooled(tile.log2, down, step, -2, "max"), across, step, -1, "max")
        return peaks, None if self.cells.sums is None else pooled(tile.weights, down, step, -2, "mean")

    def add(self, tile: ScoreTile, part: tuple[Tensor, Tensor | None]) -> None:
        down, across = self._inside(tile)
        step, (peaks, sums) = self.cells.step, part
        rows, columns = (slice(first // step, (stop - 1) // step + 1) for first, stop in (down, across))
        at = ..., rows, columns
        into = self.cells.peaks[at]
        torch.maximum(into, peaks, out=into)
        if self.cells.sums is not None and self.received is not None and sums is not None:
            self.cells.sums[at] += pooled(sums, across[0], step, -1, "mean")
            self.received[..., slice(*across)] += sums.sum(-2)

    def finish(self) -> Tensor | None:
        return self.received

    def _inside(self, tile: ScoreTile) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and end of the tile's queries and keys, counted from those of the rectangle."""
        return (
            (tile.queries.start - self.queries.start, tile.queries.stop - self.queries.start),
            (tile.keys.start - self.keys.start, tile.keys.stop - self.keys.start),
        )
