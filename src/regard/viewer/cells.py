"""Cells of a map: squares of weights that are drawn as one number, the largest weight or the mass in them.

    max     the largest weight in the cell
    mean    the mass: the mean over the cell's queries of the weight on its keys, so that a row of cells sums to 1 (less
            the sink's mass)

Both are images as `regard.observation` draws them, with cells of a given size; cells of twice the size follow.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.observation import Image
from regard.observation.images import pooled
from regard.observation.observed import ObservedCall
from regard.observation.spans import Span
from regard.observation.tile import ScoreTile
from regard.viewer.codes import encode

Pool = Literal["max", "mean"]

SMALLEST_MASS = 2.0**-126
"""What a mass is taken for where weights are too small for a float32: its code is 1, and not 0, which is hidden."""


class Sums(Image):
    """The sum of the weights in every cell of `step` x `step`."""

    keeps_tiles = False
    pool: Pool = "mean"

    def __init__(self, step: int, queries: Span = None, keys: Span = None, into: Tensor | None = None) -> None:
        """Args: into: [1, 1, rows, columns], where the cells are written while the tiles come; None: a new tensor."""
        super().__init__(1, self.pool, queries, keys)
        self.step, self.into = step, into

    def step_of(self, length: int) -> int:
        return self.step

    def blank(self, call: ObservedCall, rows: int, columns: int) -> Tensor:
        return call.zeros(rows, columns) if self.into is None else self.into.zero_()

    def finish(self) -> Tensor:
        return self.pixels


class Peaks(Sums):
    """log2 of the largest weight in every cell; -inf where all are hidden, and not where they are merely small."""

    keeps_tiles = False
    pool: Pool = "max"

    def blank(self, call: ObservedCall, rows: int, columns: int) -> Tensor:
        return super().blank(call, rows, columns).fill_(-math.inf)

    def drawn(self, tile: ScoreTile) -> Tensor:
        return tile.log2.detach()


class Cells(NamedTuple):
    """A rectangle of cells: log2 of their largest weights and the sums of their weights, each [.., rows, columns].

    Attributes:
        step: queries and keys of a cell. queries: how many there are in the rectangle; the last row may have fewer.
    """

    peaks: Tensor
    sums: Tensor
    step: int
    queries: int

    def coarser(self) -> "Cells":
        """Cells of twice the size."""
        peaks, sums = (
            pooled(pooled(cells, 0, 2, -2, pool), 0, 2, -1, pool)
            for cells, pool in ((self.peaks, "max"), (self.sums, "mean"))
        )
        return Cells(peaks, sums, 2 * self.step, self.queries)

    def part(self, rows: slice, columns: slice) -> "Cells":
        """Some rows and columns of cells."""
        first, stop = rows.start * self.step, min(rows.stop * self.step, self.queries)
        return Cells(self.peaks[..., rows, columns], self.sums[..., rows, columns], self.step, stop - first)

    def codes(self, pool: Pool) -> Tensor:
        """What is sent of them: uint16 [.., rows, columns]."""
        if pool == "max" or self.step == 1:
            return encode(self.peaks)
        first = torch.arange(self.sums.shape[-2], device=self.sums.device) * self.step
        masses = self.sums / (self.queries - first).clamp(max=self.step)[:, None]
        return encode(masses.clamp(min=SMALLEST_MASS).log2().masked_fill(self.peaks == -math.inf, -math.inf))
